"""Tests of common/base/console.py: no print ends a process, and no file is read in the encoding of the locale."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.base import console

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys, logging
sys.path.insert(0, {root!r})
from tqdm import tqdm
from common.base import console
console.protect()
bar = tqdm(total=2, mininterval=0)
for i in range(2):
    print("a prompt: ä \\u4e2d \\ud83d", {path!r}, flush=True)
    bar.write("a completion: ä \\u4e2d \\ud83d")
    bar.update()
    print("an error: ä \\ud83d", file=sys.stderr, flush=True)
    logging.warning("ä \\ud83d")
bar.close()
read = [console.text(sys.argv[1]), sys.stdin.readline().strip()]
open({path!r}, "w", encoding="utf-8").write(" ".join(read))
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
STREAMS = {  # what the shell does with standard output and error
    "ascii": ("> {0}/out 2> {0}/err", ASCII), "utf-8": ("> {0}/out 2> {0}/err", {"PYTHONUTF8": "1"}),
    "latin-1": ("> {0}/out 2> {0}/err", {"PYTHONIOENCODING": "latin-1"}), "closed": (">&- 2>&-", {}),
    "stdout closed": (">&- 2> {0}/err", {}), "nobody reads": ("2> {0}/err | true", {}),
    "nobody reads both": ("2>&1 | true", {}), "full": ("> /dev/full 2> {0}/err", {}),
    "both full": ("> /dev/full 2>&1", {}), "unbuffered": ("> /dev/full 2> {0}/err", {"PYTHONUNBUFFERED": "1"}),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_a_print_never_ends_a_process(tmp_path, name):
    how, environment = STREAMS[name]
    script, done = tmp_path / "script.py", tmp_path / "done"
    script.write_text(SCRIPT.format(root=str(ROOT), path=str(done)), encoding="utf-8")
    command = f"set -o pipefail; printf 'ö\\n' | {sys.executable} {script} 'ä' {how.format(tmp_path)}"
    code = subprocess.run(["bash", "-c", command], env=os.environ | environment, check=False).returncode
    assert code == 0 and done.read_text(encoding="utf-8") == ("ä Ã¶" if name == "latin-1" else "ä ö")
    out, err = (path.read_bytes() if (path := tmp_path / each).exists() else b"" for each in ("out", "err"))
    letters = {"ascii": rb"\xe4 \u4e2d", "utf-8": "ä 中".encode(), "latin-1": b"\xe4 \\u4e2d"}
    if name in letters:
        for what in (b"a prompt: ", b"a completion: "):
            assert out.count(what + letters[name] + rb" \ud83d") == 2
    if name in ("nobody reads", "full", "unbuffered"):
        assert err.count(b"warning: stdout cannot be written (") == 1  # once


def test_streams_of_a_test_or_notebook_are_left_alone(capsys):
    before = sys.stdout, sys.stderr
    console.protect()
    assert (sys.stdout, sys.stderr) == before


def names_encoding(call: ast.Call) -> bool:
    """Whether a call that opens a file as text names its encoding; others do not open one."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = {keyword.arg for keyword in call.keywords}
    if name in ("run", "Popen", "check_output"):
        return "text" not in given or "encoding" in given
    if name not in ("open", "read_text", "write_text", "NamedTemporaryFile") or {"encoding", None} & given:
        return True
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    binary = any("b" in mode and len(mode) <= 3 for mode in modes) or name == "NamedTemporaryFile"
    return name in ("open", "NamedTemporaryFile") and (binary or owner in ("os", "Image", "self", "memory"))


def test_no_file_is_opened_in_the_encoding_of_the_locale():
    files = [path for room in ("common", "scripts", "gspo", "grpo", "gkd") for path in (ROOT / room).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and not names_encoding(node)
    ]
    assert len(files) > 100 and not found, f"name the encoding, or open as bytes: {found}"
