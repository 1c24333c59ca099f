"""Nothing that is read can run code: a look at every call in the source, and files that would tell if they were run.

Images and paths that data or a request names are tested with the code that opens them: tests/test_poster_data.py and
tests/test_poster_server.py; links in the folder of a run in tests/test_checkpoint.py; embedders in
tests/test_embedder.py.
"""

import ast
import json
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT, build_tokenizer

from common.model import lora, models, reward_models, sources

CPU = torch.device("cpu")


IMPORTS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "multiprocessing"}
CALLS = {  # by any name in front
    "ProcessPoolExecutor", "import_module", "spec_from_file_location", "run_path", "run_module", "popen", "mktemp",
    "load_inline", "read_pickle", "unsafe_load", "full_load", "all_gather_object", "broadcast_object_list",
    "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip
CALLS_OF = {"os.system", "yaml.load", "yaml.load_all", "torch.load", "torch.hub.load", "hub.load", "dist.gather_object"}
BUILT_IN = {"eval", "exec", "compile", "__import__"}
OPTIONS = {"shell": True, "verify": False, "allow_pickle": True, "weights_only": False}
ALLOWED = {
    ("common/base/config.py", "exec"): "the Config of the script that the user has started, from its own text",
    ("common/base/config.py", "compile"): "the same",
    ("common/planning/layouts.py", "spec_from_file_location"): "a script that the user names, to read its constants",
    ("grpo/poster/assessors.py", "multiprocessing"): "a pipe between the server and a process that it started itself: "
    "what came over HTTP has been made into texts and numbers before it goes there",
    ("grpo/poster/scorers.py", "import_module"): "the scorer that the user names on the command line",
    ("grpo/poster/scorers.py", "spec_from_file_location"): "the same",
    ("scripts/evaluate.py", "spec_from_file_location"): "the script whose REWARDS the user names on the command line",
    ("scripts/dev/benchmark.py", "multiprocessing"): "a process that it starts itself, for a function of its own",
    ("scripts/dev/benchmark.py", "ProcessPoolExecutor"): "the same",
    ("scripts/dev/benchmark.py", "run_path"): "a script of this project",
}


def dotted(node: ast.expr) -> str:
    """A name as it is written; what is no name in it is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def asks_the_folder(name: str, options: dict[str | None, ast.expr]) -> bool:
    """Whether a call loads a class that the folder of a model may choose; LlamaForCausalLM is one of transformers."""
    loader, _, method = name.rpartition(".")
    loader = loader.rpartition(".")[2]
    if method in ("from_pretrained", "from_config"):
        return loader.startswith("Auto") or not loader[:1].isupper()
    return method == "SentenceTransformer" and "modules" not in options


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of everything in a Python file that can run what it reads, or that opens a door."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            yield node.lineno, node.value
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            origin = getattr(node, "module", None)
            for name in (f"{origin}.{part.name}" if origin else part.name for part in node.names):
                yield from ((node.lineno, top) for top in {name.partition(".")[0]} & IMPORTS)
                if name in CALLS_OF:  # another name may be called later
                    yield node.lineno, name
        elif isinstance(node, ast.Call):
            name, options = dotted(node.func), {option.arg: option.value for option in node.keywords}
            last = name.rpartition(".")[2]
            if last in CALLS or name in CALLS_OF or (isinstance(node.func, ast.Name) and name in BUILT_IN):
                yield node.lineno, last if last in CALLS else name
            for option, bad in OPTIONS.items():
                if getattr(options.get(option), "value", None) is bad:
                    yield node.lineno, option
            trust = options.get("trust_remote_code")
            if getattr(trust, "value", True) is not False and (trust is not None or asks_the_folder(name, options)):
                yield node.lineno, "trust_remote_code"


@pytest.mark.parametrize(("source", "found"), [
    ("import numpy, dill as d", "dill"), ("from joblib import load", "joblib"), ("eval('1')", "eval"),
    ("import multiprocessing.pool", "multiprocessing"), ("os.popen('ls')", "popen"),
    ("def f():\n    return exec(text)", "exec"), ("subprocess.run(text, shell=True)", "shell"),
    ("torch.load(path)", "torch.load"), ("from torch import load as read", "torch.load"),
    ("dist.all_gather_object(out, value)", "all_gather_object"), ("host: str = '0.0.0.0'", "0.0.0.0"),
    ("transformers.AutoTokenizer.from_pretrained(name, **options)", "trust_remote_code"),
    ("kind.from_pretrained(name, trust_remote_code=cfg.trust)", "trust_remote_code"),
    ("SentenceTransformer(name)", "trust_remote_code"),
    ("datasets.load_dataset(name, trust_remote_code=True)", "trust_remote_code"),
    ("model.eval(); re.compile(x); torch.compile(f); safetensors.torch.load(body); ast.literal_eval(x)", None),
    ("LlamaForCausalLM.from_pretrained(name); AutoModel.from_pretrained(name, trust_remote_code=False)", None),
    ("SentenceTransformer(modules=[own]); subprocess.run(['ls'], check=True)", None),
    ("import importlib.util\nfrom concurrent.futures import Future, ThreadPoolExecutor", None),
    ("# eval(text), '0.0.0.0'\nx = 'import pickle'", None),
])  # fmt: skip
def test_the_search_finds_what_it_should(source, found):
    assert [name for _, name in findings(source)] == ([found] if found else [])


def test_nothing_in_the_source_can_run_what_it_reads():
    files = [path for folder in ("common", "gspo", "grpo", "gkd", "scripts") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 80
    found = {}
    for path in files:
        for line, name in findings(path.read_text(encoding="utf-8")):
            found[path.relative_to(ROOT).as_posix(), name] = line
    assert {place: line for place, line in found.items() if place not in ALLOWED} == {}
    assert set(ALLOWED) <= set(found)  # no reason outlives its use


def test_every_version_is_pinned():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    names = [re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins]
    assert len(set(names)) == len(names)
    for file in ROOT.glob("requirements*.txt"):
        for line in filter(None, (line.partition("#")[0].strip() for line in file.read_text().splitlines())):
            package = re.match(r"[\w.-]+", line)[0]
            assert re.sub(r"[-_.]+", "-", package).lower() in names, f"{file.name}: {line}"


GOOD, SKIPPED = {"name": "a", "version": "1.0", "vulns": []}, {"name": "b", "skip_reason": "not found"}
VULNERABLE = {**GOOD, "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["1.1"]}]}


@pytest.mark.tools
@pytest.mark.parametrize(("found", "code", "said"), [
    ([GOOD], 0, "1 of 1 pins checked, 0 vulnerable"),
    ([VULNERABLE, SKIPPED], 1, "a 1.0: PYSEC-1, CVE-1; repaired in 1.1"),
    ([GOOD, SKIPPED], 2, "b: not checked: not found"),
    ([], 2, "0 of 0 pins checked"), (None, 2, "nothing was checked"),
])  # fmt: skip
def test_the_audit_passes_only_when_every_pin_was_checked(found, code, said, tmp_path):
    answer = "" if found is None else json.dumps({"dependencies": found})
    audit = f"while [ $# -gt 0 ]; do [ $1 = --output ] && printf '%s' '{answer}' > $2; shift; done"
    python = tmp_path / "python"  # makes an environment whose pip-audit gives the answer above
    python.write_text(
        f"#!/bin/sh\nmkdir -p $3/bin && cd $3/bin && ln -s {sys.executable} python && ln -s /bin/true pip\n"
        f"cat > pip-audit <<'END'\n#!/bin/sh\n{audit}\nEND\nchmod +x pip-audit\n"
    )
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    run = subprocess.run(["bash", ROOT / "scripts/dev/audit.sh"], env=environment, capture_output=True, text=True)
    assert (run.returncode, said in run.stdout + run.stderr) == (code, True), run.stdout + run.stderr


class Marker:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def marker(tmp_path):
    """Where a planted object leaves a folder; checked at the end: nothing was run, although it could have been."""
    marker = tmp_path / "it_ran"
    yield marker
    assert not marker.exists()
    pickle.loads(pickle.dumps(Marker(marker)))
    assert marker.exists()


LOADERS = {
    "policy": lambda folder: models.load_policy(str(folder), CPU, "fp32"),
    "policy with adapters": lambda folder: models.load_policy(str(folder), CPU, "fp32", lora=lora.Options(2, 4.0)),
    "frozen": lambda folder: models.load_frozen(str(folder), CPU, "fp32"),
    "reward model": lambda folder: reward_models.RewardModel(str(folder)),
}


@pytest.fixture(scope="module")
def folders(model_folders, tmp_path_factory) -> dict[str, Path]:
    """A policy; a reward model; adapters of rank 2, as a checkpoint holds them."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    config = Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, num_labels=1, pad_token_id=0)  # fmt: skip
    _, adapted = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32", lora=lora.Options(2, 4.0))
    made = {"policy": model_folders["qwen2"]}
    for kind, model in (("reward model", Qwen2ForSequenceClassification(config)), ("adapters", adapted)):
        made[kind] = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        lora.save(model, made[kind])
        build_tokenizer().save_pretrained(made[kind])
    return made


@pytest.mark.parametrize(("kind", "loader"), [
    ("policy", "policy"), ("reward model", "reward model"), ("adapters", "policy"), ("adapters", "policy with adapters")
])  # fmt: skip
def test_pickled_weights_are_not_run(kind, loader, folders, tmp_path, marker):
    folder = shutil.copytree(folders[kind], tmp_path / "copy")
    LOADERS[loader](folder)
    next(folder.glob("*model.safetensors")).unlink()
    name = "adapter_model.bin" if kind == "adapters" else "pytorch_model.bin"
    torch.save({"weight": Marker(marker)}, folder / name)
    with pytest.raises((pickle.UnpicklingError, ValueError), match="Weights only load failed"):
        LOADERS[loader](folder)


def test_a_pickle_is_no_gguf_file(tmp_path, marker):
    path = tmp_path / "model.gguf"
    path.write_bytes(pickle.dumps(Marker(marker)) + bytes(64))
    with pytest.raises(ValueError, match="GGUF"):
        runpy.run_path(str(ROOT / "scripts" / "gguf_to_hf.py"))["main"]([str(path), str(tmp_path / "out")])


def plant_code(folder: Path, file: str, marker: Path, mapping: dict, **changes) -> None:
    """Points an auto_map of a JSON file at a module that leaves a marker when it is imported."""
    (folder / "planted.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": mapping, **changes}))


OWN_MODEL = {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model",
             "AutoModelForSequenceClassification": "planted.Model"}  # fmt: skip
OWN_TOKENIZER = {"AutoTokenizer": [None, "planted.Tok"]}


@pytest.mark.parametrize(("kind", "loader"), [
    ("policy", "policy"), ("policy", "frozen"), ("reward model", "reward model"), ("adapters", "frozen")
])  # fmt: skip
def test_code_that_comes_with_a_model_is_refused_and_not_run(kind, loader, folders, tmp_path, marker):
    folder = own = shutil.copytree(folders[kind], tmp_path / "copy")
    if kind == "adapters":
        own = shutil.copytree(folders["policy"], tmp_path / "own")
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(own)}))
    plant_code(own, "tokenizer_config.json", marker, OWN_TOKENIZER)
    plant_code(own, "config.json", marker, OWN_MODEL)
    LOADERS[loader](folder)  # of a kind that transformers has, and loads by itself
    plant_code(own, "config.json", marker, OWN_MODEL, model_type="planted", architectures=["Model"])
    with pytest.raises(ValueError, match=rf"'{own}'.*(?i:code that comes with a model is never run)"):
        LOADERS[loader](folder)


def test_code_of_a_tokenizer_is_not_run(folders, tmp_path, marker):
    folder = shutil.copytree(folders["policy"], tmp_path / "copy")
    plant_code(folder, "tokenizer_config.json", marker, OWN_TOKENIZER, tokenizer_class="Tok")
    try:
        sources.load_tokenizer(str(folder))
    except ValueError as error:  # refusing and falling back on a class of transformers are both safe
        assert "trust_remote_code" in str(error) or "custom code" in str(error)


def test_code_of_a_processor_is_not_run(tmp_path, marker):
    from test_images import build_model as build_vlm
    from test_images import build_tokenizer as build_vlm_tokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from common.model import images

    tokenizer = build_vlm_tokenizer()
    build_vlm("qwen2_5_vl", tokenizer).config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    Qwen2VLImageProcessorPil().save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text("{}")
    mapping = {"AutoProcessor": "planted.P", "AutoImageProcessor": "planted.I", "AutoTokenizer": [None, "planted.T"]}
    for file in ("preprocessor_config.json", "processor_config.json", "config.json", "tokenizer_config.json"):
        plant_code(tmp_path, file, marker, mapping)
    images.load_processor(tmp_path)
    own = dict(processor_class="P", image_processor_type="I")
    plant_code(tmp_path, "preprocessor_config.json", marker, mapping, **own)
    images.load_processor(tmp_path)
