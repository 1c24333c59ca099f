"""scripts/dev/benchmark_sft.py: both sides learn the same rows, and a side that fails leaves the others."""

import json
import sys

import pytest
from test_tools import load_script

pytestmark = pytest.mark.tools
benchmark = load_script("benchmark_sft")

# in place of recipe_trl.py: reads the rows that it is given, and fails where conversations are padded
FAKE = """
import json, sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if options["--packing"] == "false" and "--padding_free" not in options:
    raise SystemExit("CUDA out of memory")
rows = [json.loads(line) for line in open(options["--train_data"])]
samples = len(rows)
print("noise", json.dumps({"stage": sys.argv[1], "samples": samples, "seconds": 6.0, "memory_gib": 1.5}), flush=True)
"""


def test_ours_and_peers_learn_the_same_rows(tmp_path, monkeypatch, capsys):
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    run = benchmark.base.run

    def instead(command, *options):
        run([str(fake) if part.endswith("recipe_trl.py") else part for part in command], *options)

    monkeypatch.setattr(benchmark.base, "run", instead)
    out = tmp_path / "out.json"
    sizes = ["--steps", "3", "--warmup", "1", "--batch_size", "2", "--device", "cpu"]
    benchmark.main(["tiny", *sizes, "--peer", "packed", "padded", "liger", "--out", str(out)])
    results = json.loads(out.read_text())["results"]
    ours, packed = results["gkd/sft.py"], results["packed"]
    assert 0 < ours["step"] < ours["total"]
    assert packed["step"] == pytest.approx(2.0) and packed["total"] == 6.0  # 3 steps of 2 conversations
    tokens = ours["tokens_per_second"] * ours["step"]
    assert tokens == pytest.approx(packed["tokens_per_second"] * packed["step"]) and 2 * 103 <= tokens <= 2 * 383
    assert "out of memory" in results["padded"]["error"] and results["liger"]["memory_gib"] == 1.5
    table = capsys.readouterr().out
    assert [line.split(" | ")[0] for line in table.splitlines()[2:6]] == [
        "| gkd/sft.py", "| packed", "| padded", "| liger",
    ]  # fmt: skip
    assert sys.version.split()[0] in table
