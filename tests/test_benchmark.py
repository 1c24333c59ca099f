"""scripts/dev/benchmark.py: formulas against counting by hand, models and lengths, what it writes, how it fails."""

import dataclasses
import inspect
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from test_tools import load_script
from transformers import Qwen2Config

from common.base import devices
from common.model import models, sources
from common.run import metrics
from common.tasks import data
from common.training import optim

pytestmark = pytest.mark.tools
benchmark = load_script("benchmark")
base = sys.modules["benchmark_base"]
SMALL = base.Shape(layers=2, attention_width=6, kv_width=4, body=100, head=30)
TEACHER = base.Shape(layers=3, attention_width=8, kv_width=4, body=200, head=50)


def test_bytes_and_flops_count_what_every_step_reads_and_every_product():
    prompts, group, prompt_tokens, new_tokens, itemsize = 3, 2, 5, 7, 2
    per_token = 2 * 2 * 4 * itemsize  # key and value, layers, width
    shared = (100 + 30) * itemsize + prompts * prompt_tokens * per_token
    steps = [shared + prompts * group * t * per_token for t in range(new_tokens)]
    assert base.decode_bytes(SMALL, prompts, group, prompt_tokens, new_tokens, itemsize) == statistics.mean(steps)
    lengths, total = [3, 4, 8], 0
    for length in lengths:
        tokens = prompt_tokens + length
        attention = 2 * 2 * tokens**2 / 2 * 6 * 2  # Q K^T and P V, the causal half, width, layers
        total += 3 * (2 * 100 * tokens + 2 * 30 * length + attention)  # a backward pass is two forward passes
    mean, variance = statistics.mean(lengths), statistics.pvariance(lengths)
    assert benchmark.update_flops(SMALL, 3, prompt_tokens, mean, variance) == pytest.approx(total)
    idle, states = dataclasses.replace(SMALL, idle=SMALL.body // 2), dataclasses.replace(SMALL, state=10)
    saved = 6 * 3 * SMALL.body // 2 * (prompt_tokens + mean)
    assert benchmark.update_flops(idle, 3, prompt_tokens, mean, variance) == pytest.approx(total - saved)
    sizes = 2, 3, 5, 4, 2
    assert base.decode_bytes(states, *sizes) == base.decode_bytes(SMALL, *sizes) + 2 * 6 * 10
    # of the student weights, a master where they are in half precision, and two states; of the teacher weights
    for kinds, each in (((2, 4, 2), 2 + 4 + 8), ((4, 4, 4), 4 + 8), ((2, 2, 2), 2 + 4)):
        assert benchmark.resident_bytes(10, 7, *kinds) == 10 * each + 7 * kinds[2]


def test_shapes_are_those_of_the_models_they_are_named_after(tmp_path):
    base.config_of("qwen0.5b").save_pretrained(tmp_path)
    shape = base.shape_of(str(tmp_path))
    assert (shape.body + shape.head, shape.head) == (494_032_768, 151936 * 896)
    assert (shape.attention_width, shape.kv_width) == (896, 128)
    # a hybrid's state is held by 18 of 24 layers; a token goes through 8 of 128 experts in each of 6 layers
    base.config_of("qwen3.5-0.8b").save_pretrained(tmp_path / "hybrid")
    hybrid = base.shape_of(str(tmp_path / "hybrid"))
    assert (hybrid.layers, hybrid.parameters, hybrid.idle) == (6, 752_393_024, 0)
    assert hybrid.state == 18 * (6144 * 4 * 2 + 16 * 128 * 128 * 4)
    base.config_of("qwen3-30b-a3b-6").save_pretrained(tmp_path / "mixture")
    mixture = base.shape_of(str(tmp_path / "mixture"))
    assert (mixture.layers, mixture.state, mixture.idle) == (6, 0, 6 * 120 * 3 * 2048 * 768)
    # an untied embedding is neither body nor head
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1)  # fmt: skip
    shapes = []
    for tie in (True, False):
        Qwen2Config(**sizes, tie_word_embeddings=tie).save_pretrained(tmp_path)
        shapes.append(base.shape_of(str(tmp_path)))
    tied, untied = shapes
    assert untied == dataclasses.replace(tied, embedding=88) and (tied.head, tied.embedding) == (88, 0)
    assert (tied.parameters, untied.parameters) == (tied.body + 88, tied.body + 2 * 88)


def line(step: int, rollout: float, update: float, **others) -> dict:
    seconds = {"seconds_rollout": rollout, "seconds_update": update, "seconds": rollout + update}
    return {"step": step, "reward": 0.0, **seconds, "completion_length": 10.0, "memory_gib": [step / 2], **others}


CFG = {"batch_size": 2, "group_size": 4, "epochs": 1, "dtype": "bf16", "device": "cpu"}
GKD = {"batch_size": 6, "group_size": 1, "num_minibatches": 2, "micro_batch_tokens": 40, "dtype": "bf16",
       "device": "cpu"}  # fmt: skip


def test_numbers_are_medians_and_shares_of_what_the_card_can_do():
    lines = [line(1, 2.0, 4.0), line(2, 1.0, 8.0), line(3, 4.0, 2.0)]
    setting = benchmark.Setting("tiny", 2, 4, 5, 10)
    numbers = benchmark.summarise(lines, setting, CFG, SMALL, bandwidth=1e6, peak=1e6)
    assert (numbers["seconds_rollout"], numbers["seconds_update"], numbers["seconds"]) == (2.0, 4.0, 6.0)
    assert numbers["decode_tokens_per_second"] == 80 / 2 and numbers["tokens_per_second"] == 80 / 6
    assert numbers["memory_gib"] == 1.5 and numbers["completion_length"] == 10
    roofline = 8 / (base.decode_bytes(SMALL, 2, 4, 5, 10, 2) / 1e6)
    assert numbers["roofline_share"] == pytest.approx(40 / roofline)
    assert numbers["mfu"] == pytest.approx(benchmark.update_flops(SMALL, 8, 5, 10) / 4 / 1e6)

    # with ranks, each reads the weights, and has a peak of its own
    two = benchmark.summarise(lines, setting, CFG, SMALL, bandwidth=1e6, peak=1e6, ranks=2)
    roofline = 8 / (base.decode_bytes(SMALL, 1, 4, 5, 10, 2) / 1e6)
    assert two["mfu"] == numbers["mfu"] / 2 and two["roofline_share"] == pytest.approx(40 / roofline)

    # what cannot be known is none
    unknown = benchmark.summarise([line(1, 1.0, 1.0, memory_gib=[])], setting, CFG, SMALL, None, None)
    assert [unknown[name] for name in ("roofline_share", "mfu", "memory_gib")] == [None] * 3
    mixed = benchmark.Setting("tiny", 2, 4, 5, 10, "geometric")
    numbers = benchmark.summarise([line(1, 1.0, 1.0)], mixed, CFG, SMALL, 1e6, 1e6)
    assert numbers["roofline_share"] is None
    assert numbers["update_flops"] == benchmark.update_flops(SMALL, 8, 5, 10, variance=4.0)


def test_memory_above_what_is_resident_and_the_head_of_the_teacher():
    gib = 2**30
    lines = [line(1, 1.0, 1.0, memory_gib=[3.0], loss_memory_gib_max=0.5),
             line(2, 1.0, 1.0, memory_gib=[4.0], loss_memory_gib_max=0.25)]  # fmt: skip
    setting = benchmark.Setting("tiny", 6, 1, 5, 10, teacher="tiny-teacher")
    student, teacher = (dataclasses.replace(shape, body=gib // 14 * n) for shape, n in ((SMALL, 1), (TEACHER, 7)))
    numbers = benchmark.summarise(lines, setting, GKD, student, None, None, teacher)
    resident = 14 * (gib // 14 + 30) + 2 * (gib // 14 * 7 + 50)
    assert numbers["resident_gib"] == resident / gib and numbers["above_resident_gib"] == 4.0 - resident / gib
    assert numbers["loss_memory_gib"] == 0.5
    assert numbers["forward_tokens"] == 2 * 15  # of 40 that may be at once; a minibatch has 3
    spread = [line(1, 1.0, 2.0, memory_gib=[3.0, 4.0])]  # over two GPUs: one peak does not tell of the other
    numbers = benchmark.summarise(spread, setting, {**GKD, "micro_batch_tokens": 100}, SMALL, None, 1e6, TEACHER)
    assert numbers["above_resident_gib"] is None and numbers["loss_memory_gib"] is None
    assert numbers["forward_tokens"] == 3 * 15
    assert numbers["update_flops"] == benchmark.update_flops(SMALL, 6, 5, 10) + 2 * 50 * 60
    assert numbers["mfu"] == numbers["update_flops"] / 2.0 / 1e6


class FakeMemory:
    """Counts as torch.cuda does, in bytes."""

    def __init__(self):
        self.now = self.peak = 0
        self.memory_allocated, self.max_memory_allocated = (lambda: self.now), (lambda: self.peak)

    def use(self, *gibs: float) -> None:
        for gib in gibs:
            self.now = int(gib * 2**30)
            self.peak = max(self.peak, self.now)

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.now


def test_a_script_is_watched_from_the_teacher_to_the_optimizer(monkeypatch):
    fake, gpu = FakeMemory(), [torch.device("cuda", 0)]
    monkeypatch.setattr(devices, "synchronize", lambda gpus: None)
    monkeypatch.setattr(optim.AdamW, "step", lambda optimizer, norm: fake.use(20, 4) or norm)
    own = metrics.Log.time, optim.AdamW.step, devices.peak_memory_gib
    log, optimizer = object.__new__(metrics.Log), object.__new__(optim.AdamW)
    with benchmark.watching(benchmark.LossMemory(fake)):
        for log.gpus, found in ((gpu, {"loss_memory_gib_max": [9 - 4.0]}), ([torch.device("cpu")], {})):
            log._sums, log._weights, log._max = {}, {}, {}
            with log.time("rollout"):
                fake.use(30, 4)
            with log.time("teacher"):
                fake.use(7, 5)
            with log.time("update"):
                for peak in (9, 8):
                    fake.use(peak, 6)
                    assert optimizer.step(1.0) == 1.0
            timed = {f"seconds_{x}" for x in ("rollout", "teacher", "update")}
            assert log._max == found and {name for name, _ in log._sums} == timed
            assert devices.peak_memory_gib(log.gpus) == ([30.0] if found else [])
    assert own == (metrics.Log.time, optim.AdamW.step, devices.peak_memory_gib)
    # TRL is measured with the same code
    assert inspect.getsource(benchmark.LossMemory) in (ROOT / "scripts" / "dev" / "benchmark_trl_gkd.py").read_text()


def test_prompts_have_as_many_tokens_as_asked_for_and_end_tokens_make_geometric_lengths(tmp_path):
    num_ends = round(512 / (16 - 8))
    folder = base.make_model("tiny", num_ends, tmp_path)
    tokenizer, model = models.load_policy(str(folder), torch.device("cpu"), "fp32")
    assert len({tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id}) == 3
    assert len(tokenizer) == 512 and tokenizer.chat_template is None
    base.write_prompts(tmp_path / "prompts.jsonl", 20, 37, 512)
    examples = data.load_examples(str(tmp_path / "prompts.jsonl"), tokenizer, 100)
    assert [len(example.prompt_ids) for example in examples] == [37] * 20
    assert max(max(example.prompt_ids) for example in examples) < 509  # words only
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert base.make_model("tiny", num_ends, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    ends = sources.end_token_ids(tokenizer, model)
    assert len(ends) == num_ends and tokenizer.eos_token_id in ends and tokenizer.pad_token_id not in ends
    torch.manual_seed(0)
    prompts = torch.randint(0, 500, (1, 8)).expand(200, 8)
    ids = model.eval().generate(prompts, do_sample=True, top_k=0, min_new_tokens=8, max_new_tokens=60)[:, 8:]
    lengths = (torch.isin(ids, torch.tensor(ends)).cumsum(1) == 0).sum(1) + 1.0
    # one of 8 tokens ends: a standard deviation of 7.5, of which the mean of 200 has the 14th part
    assert lengths.min() == 9 and lengths.mean().item() == pytest.approx(16, abs=6 * 7.5 / 200**0.5)


# a script that is quick, and fails with the policy "toy"
STUB = """
import json, os, pathlib, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out_dir = pathlib.Path(options["--out_dir"])
out_dir.mkdir()
cfg = {name[2:]: options[name] for name in ("--policy_model", "--train_data", "--device", "--dtype")}
for name in ("batch_size", "group_size", "num_minibatches", "max_new_tokens"):
    cfg[name] = int(options["--" + name])
(out_dir / "config.json").write_text(json.dumps({**cfg, "kl_coef": 0.0, "epochs": 1}))
with open(out_dir / "metrics.jsonl", "w", buffering=1) as file:
    for step in range(int(options["--steps"])):
        time.sleep(0.05)
        print("at step", step, flush=True)
        if options["--policy_model"] == "toy" and step == 2:
            sys.exit("out of memory, say")
        line = {"step": step, "seconds": 3.0, "seconds_rollout": 1.0, "seconds_update": 2.0, "memory_gib": []}
        file.write(json.dumps({"step": step, "eval_reward": 0.5}) + "\\n")
        line["cache"] = os.environ.get("TRITON_CACHE_DIR")
        file.write(json.dumps({**line, "reward": 0.0, "completion_length": 8.0}) + "\\n")
time.sleep(60)  # it would save now
"""
# what TRL measures of the first cycles
PEER = """
import json, os, pathlib, sys
written = json.loads((pathlib.Path(__file__).parents[2] / "new" / "speed.json").read_text())["settings"]
assert "numbers" in written[-1], "a benchmark that is cut off now would lose our side"
if "--vllm" in sys.argv:
    assert os.environ["PYTHONPATH"].split(":")[0].endswith("site") and os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
if "--bf16_weights" in sys.argv:
    sys.exit("TRL takes parts of equal size only")
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
distils = "--teacher_model" in options
if distils:
    assert options["--beta"] == "0.25" and options["--sequences"] == "2", options
    assert "tiny-teacher" in options["--teacher_model"] and options.get("--trainer") == "distillation", options
cycles = ([9.0, 5.0, 7.0] if distils else [100.0, 100.0, 5.0, 9.0, 7.0])[: int(options["--cycles"])]
fields = {"model_init_kwargs": {"dtype": "float32"}, "teacher_model_init_kwargs": {"dtype": "bfloat16"},
          "per_device_train_batch_size": 2}
measured = {"seconds": cycles, "seconds_rollout": cycles, "completion_length": cycles, "memory_gib": 1.0}
measured |= {"memory_gib": cycles, "loss_memory_gib": cycles, "fields": fields} if distils else {}
(unfinished := pathlib.Path(options["--out"] + ".part")).write_text(json.dumps(measured))
unfinished.rename(options["--out"])
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the benchmark beside peers that are stubs; gives its exit code and the settings that it wrote."""
    (tmp_path / "scripts" / "dev").mkdir(parents=True)
    for name, text in (("scripts/dev/benchmark_trl", PEER), ("scripts/dev/benchmark_trl_gkd", PEER), ("stub", STUB)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(benchmark, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*argv, script=tmp_path / "stub.py", extra=()):
        if script:
            monkeypatch.setattr(benchmark, "ROOT", tmp_path)
            argv = (*argv, "--script", str(script))
        out = tmp_path / "new" / "speed.json"
        code = benchmark.main([*argv, "--device", "cpu", "--work_dir", str(tmp_path / "work"), "--out", str(out),
                               "--", *extra])  # fmt: skip
        written = json.loads(out.read_text())
        assert written["machine"]["torch"] == torch.__version__
        assert {"card", "gpu_memory_gib", "transformers", "python", "commit", "dirty"} <= written["machine"].keys()
        return code, written["settings"]

    return run


def test_a_tiny_run_from_end_to_end(command, capsys):
    argv = ["--setting", "tiny", "--steps", "3", "--warmup", "1", "--baseline", "generate", "--bandwidth", "1e10"]
    code, (result,) = command(*argv, "--flops", "1e11", script=None, extra=["--seed", "3"])
    assert code == 0 and result["name"] == "tiny" and result["setting"]["new_tokens"] == 8
    assert result["config"]["seed"] == 3 and result["config"]["min_new_tokens"] == 8 and "gspo.py" in result["command"]
    assert [(line["step"], line["completion_length"]) for line in result["lines"]] == [(1, 8.0), (2, 8.0), (3, 8.0)]
    numbers = result["numbers"]
    seconds = ("seconds", "seconds_rollout", "seconds_score", "seconds_update", "seconds_wall", "seconds_first_step")
    rest = ("seconds_start", "decode_tokens_per_second", "tokens_per_second", "roofline_share", "mfu")
    assert all(numbers[name] > 0 for name in (*seconds, *rest)) and result["generate"]["tokens_per_second"] > 0
    assert not list(Path(result["config"]["out_dir"]).glob("checkpoint-*"))
    assert "| tiny | generate | " in capsys.readouterr().out


def test_distillation_from_end_to_end_beside_a_peer(command, capsys, tmp_path):
    argv = ["--setting", "gkd-tiny", "--steps", "3", "--warmup", "1", "--peer", "trl_distillation", "--flops", "1e11"]
    code, (result,) = command(*argv, script=ROOT / "gkd" / "gkd.py", extra=["--beta", "0.25"])
    cfg = result["config"]
    assert code == 0 and "gkd.py" in result["command"]
    assert (cfg["loss"], cfg["beta"], cfg["lmbda"]) == ("jsd", 0.25, 1.0)
    assert "tiny-teacher" in cfg["teacher_model"] and "kl_coef" not in cfg
    assert [line["completion_length"] for line in result["lines"]] == [8.0] * 3
    numbers, peer = result["numbers"], result["trl_distillation"]
    assert all(numbers[f"seconds_{name}"] > 0 for name in ("rollout", "teacher", "update", "wall"))
    assert numbers["mfu"] > 0 and numbers["above_resident_gib"] is None and numbers["forward_tokens"] == 4 * 16
    assert peer["seconds"] == 6.0 and peer["loss_memory_gib"] == 7.0 and peer["forward_tokens"] == 32
    student, teacher = (sum(result[name][part] for part in ("body", "head")) for name in ("shape", "teacher_shape"))
    assert peer["above_resident_gib"] == pytest.approx(7 - (12 * student + 2 * teacher) / 2**30)
    assert "| gkd-tiny | trl_distillation | 6 | 6 | - | 6 | 7 | " in capsys.readouterr().out
    # a peer that cannot do the same is refused
    for other in ({"loss": "opd"}, {"lmbda": 0.5}, {"temperature": 0.9}, {"loss_temperature": 2.0}):
        with pytest.raises(ValueError, match="leave out --peer"):
            benchmark.run_peer("trl", benchmark.SETTINGS["gkd-tiny"], cfg | other, 8, None, tmp_path)


def test_the_table_says_how_much_less_memory_the_loss_takes():
    numbers = {"seconds_wall": 2.0, "memory_gib": 20.0, "loss_memory_gib": 4.0, "above_resident_gib": 8.0}
    peer = {"seconds": 6.0, "memory_gib": 50.0, "loss_memory_gib": 30.0, "above_resident_gib": 33.0}
    row = {"name": "gkd", "setting": {"teacher": "qwen1.5b"}, "numbers": numbers}
    printed = benchmark.report([row | {"trl": peer | {"forward_tokens": 3072}}])
    assert "| gkd | trl | 6 | - | - | - | 50 | 33 | 30 | 3,072 | 3.00 x (cycle, wall) | 7.50 x |" in printed


def test_what_fails_is_reported_and_the_others_run(command, capsys, tmp_path):
    code, (failed, done) = command("--setting", "cpu-toy", "tiny", "--steps", "5")
    for message in ("at step 2\nout of memory, say", "exit code 1", "log.txt", "--policy_model toy"):
        assert message in failed["error"]
    assert code == 1 and done["numbers"]["seconds"] == 3.0 and "error" not in done and len(done["lines"]) == 5
    printed = capsys.readouterr()
    assert "| cpu-toy | failed | " in printed.out and "| tiny | 3 | " in printed.out
    assert "out of memory, say" in printed.err
    # --cold starts with caches of its own
    code, (cold,) = command("--setting", "tiny", "--steps", "5", "--cold")
    assert code == 0 and cold["lines"][0]["cache"].startswith(str(tmp_path / "work" / "runs" / "tiny-"))
    assert done["lines"][0]["cache"] == os.environ.get("TRITON_CACHE_DIR")
    # peers are measured over the same cycles; here the second fails
    code, (result,) = command("--setting", "tiny", "--steps", "5", "--peer", "trl", "trl_bf16")
    assert code == 1 and result["trl"]["seconds"] == 7.0 and "--num_minibatches 2" in result["trl"]["command"]
    assert "parts of equal size" in result["trl_bf16"]["error"] and "error" not in result
    printed = capsys.readouterr().out
    assert "| tiny | trl | 7 | 7 | - | 7 | 1 | " in printed and "| tiny | trl_bf16 | - | - | - | - | - | fai" in printed
    # with vLLM, both ways; its folder is for its own process
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    argv = ["--setting", "tiny", "--steps", "5", "--vllm_path", str(tmp_path / "site")]
    code, (result,) = command(*argv, "--peer", "trl", "trl_vllm", "trl_vllm_sleep")
    commands = [result[name]["command"].partition(" --vllm ")[2] for name in ("trl", "trl_vllm", "trl_vllm_sleep")]
    assert code == 0 and commands == ["", "awake", "sleep"] and "site" not in os.environ.get("PYTHONPATH", "")
    assert "| tiny | trl_vllm_sleep | 7 | 7 | - | 7 | 1 | " in capsys.readouterr().out
    # an option of the benchmark behind the dashes, and a run without result
    code, (failed,) = command("--setting", "tiny", "--steps", "5", extra=["--batch-size=3"])
    assert code == 1 and "--batch-size=3 after --: benchmark.py sets it" in failed["error"]
    (tmp_path / "stub.py").write_text("import time\nprint('waiting', flush=True)\ntime.sleep(60)\n")
    code, (failed,) = command("--setting", "tiny", "--steps", "5", "--timeout", "0.5")
    assert code == 1 and "no result after 0.5 s" in failed["error"]


@pytest.mark.parametrize(("argv", "installed", "said"), [
    ("tiny --steps 2 --warmup 2", False, "warmup = 2, steps = 2: at least one"),
    ("tiny --peer trl", False, "pip install trl"), ("tiny --model huge", False, "model = 'huge': must be one of"),
    ("tiny --lengths geometric --new_tokens 2000", False, "new_tokens = 2000: is the mean of lengths from 8 to 1024"),
    ("tiny --teacher smollm2", False, "teacher = 'smollm2': must have the vocabulary of the student"),
    ("tiny gkd-tiny --peer trl_distillation", True, "needs a teacher, which ['tiny'] have not"),
    ("gkd-tiny --peer trl_vllm", True, "with vLLM for GRPOTrainer only, but one of ['gkd-tiny'] distils"),
    ("tiny --peer trl_vllm --vllm_path nowhere", True, "vllm_path = 'nowhere': needs the package vllm there"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_anything_runs(monkeypatch, capsys, argv, installed, said):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: name if installed else None)
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(["--setting", *argv.split()])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "expected"), [
    ("", {"generation_kwargs": {"min_new_tokens": 4}, "max_completion_length": 4}),
    ("--vllm awake", {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": False,
                      "vllm_max_model_length": 9, "generation_kwargs": {"ignore_eos": True}}),
    ("--vllm sleep --min_new_tokens 2", {"use_vllm": True, "vllm_enable_sleep_mode": True,
                                         "generation_kwargs": {"min_tokens": 2}}),
    ('--vllm awake --arguments {"vllm_max_model_length":7}', {"use_vllm": True, "vllm_max_model_length": 7}),
])  # fmt: skip
def test_trl_samples_completions_of_the_same_length(tmp_path, monkeypatch, argv, expected):
    class Trainer:
        def __init__(self, args, callbacks, **others):
            self.args, [self.clock] = args, callbacks

        def _generate_single_turn(self):
            return [[1, 2], [3, 4, 5, 6]], None

        def train(self):
            self.clock.on_train_begin(None, None, None)
            for step in range(1, self.args["max_steps"] + 1):
                if step % 2:
                    self._generate_single_turn()
                self.clock.on_step_end(None, SimpleNamespace(global_step=step), None)

    trl = SimpleNamespace(__version__="1.16.0", GRPOConfig=lambda **fields: fields, GRPOTrainer=Trainer)
    monkeypatch.setitem(sys.modules, "trl", trl)
    peer = load_script("benchmark_trl")
    monkeypatch.setattr(peer.importlib.metadata, "version", lambda name: "0.26.0")
    base.write_prompts(tmp_path / "prompts.jsonl", 4, 5, 512)
    model, out = base.make_model("tiny", 1, tmp_path), tmp_path / "out.json"
    given = ["--policy_model", model, "--train_data", tmp_path / "prompts.jsonl", "--out", out, "--cycles", 3]
    given += ["--batch_size", 2, "--group_size", 2, "--num_minibatches", 2, "--max_new_tokens", 4, "--device", "cpu"]
    peer.main([*map(str, given), "--min_new_tokens", "4", *argv.split()])
    measured = json.loads(out.read_text())
    assert expected.items() <= measured["fields"].items() and ("use_vllm" in measured["fields"]) == bool(argv)
    assert measured["vllm"] == ("0.26.0" if argv else None) and measured["completion_length"] == 3 * [3.0]
    assert len(measured["seconds"]) == len(measured["seconds_rollout"]) == 3


def test_a_peer_that_cannot_do_the_same_is_refused(tmp_path):
    cfg = {"loss": "jsd", "beta": 0.5, "lmbda": 1.0, "temperature": 1.0, "loss_temperature": 1.0}
    for other in ({"loss": "opd"}, {"lmbda": 0.5}, {"temperature": 0.9}, {"loss_temperature": 2.0}):
        with pytest.raises(ValueError, match="leave out --peer"):
            benchmark.run_peer("trl", benchmark.SETTINGS["gkd-tiny"], cfg | other, 8, None, tmp_path)
