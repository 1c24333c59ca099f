"""scripts/benchmark.py: formulas against counting by hand, models and lengths, what it writes, how it fails."""

import dataclasses
import importlib.util
import inspect
import itertools
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config

from common import data, devices, metrics, models, optim


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)  # where the help of the options looks for the source
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


benchmark = load_script("benchmark")
SMALL = benchmark.Shape(layers=2, attention_width=6, kv_width=4, body=100, head=30)


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("benchmark")


# ---- formulas ----


def test_decode_bytes_count_what_every_step_reads():
    prompts, group, prompt_tokens, new_tokens, itemsize = 3, 2, 5, 7, 2
    per_token = 2 * 2 * 4 * itemsize  # key and value, layers, width
    steps = []
    for t in range(new_tokens):
        shared = prompts * prompt_tokens * per_token
        own = prompts * group * t * per_token
        steps.append((100 + 30) * itemsize + shared + own)
    assert benchmark.decode_bytes(SMALL, prompts, group, prompt_tokens, new_tokens, itemsize) == statistics.mean(steps)


def test_update_flops_count_every_product():
    lengths, prompt_tokens, total = [3, 4, 8], 5, 0
    for length in lengths:
        tokens = prompt_tokens + length
        attention = 2 * 2 * tokens**2 / 2 * 6 * 2  # Q K^T and P V, the causal half, width, layers
        total += 3 * (2 * 100 * tokens + 2 * 30 * length + attention)  # a backward pass is two forward passes
    mean, variance = statistics.mean(lengths), statistics.pvariance(lengths)
    assert benchmark.update_flops(SMALL, 3, prompt_tokens, mean, variance) == pytest.approx(total)


def test_update_flops_agree_with_those_that_torch_counts():
    torch.manual_seed(0)
    sequences, prompt_tokens, new_tokens = 2, 24, 40
    cfg = benchmark.config_of("tiny")
    model = AutoModelForCausalLM.from_config(cfg, attn_implementation="eager", dtype=torch.float32)
    ids = torch.randint(0, 500, (sequences, prompt_tokens + new_tokens))
    with FlopCounterMode(display=False) as counter:
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[:, -new_tokens:]
        (hidden @ model.get_output_embeddings().weight.T).sum().backward()
    shape = benchmark.Shape(2, 128, 64, model.num_parameters() - 512 * 128, 512 * 128)
    masked_half = 6 * sequences * 2 * 128 * (prompt_tokens + new_tokens) ** 2  # computed here, and not counted there
    counted = benchmark.update_flops(shape, sequences, prompt_tokens, new_tokens) + masked_half
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)  # biases and norms are no products


@pytest.mark.parametrize(
    ("name", "total", "head", "width", "kv_width"),
    [
        ("qwen0.5b", 494_032_768, 151936 * 896, 896, 128),  # the counts of the models they are the shapes of
        ("qwen1.5b", 1_543_714_304, 151936 * 1536, 1536, 256),
        ("smollm2", 134_515_008, 49152 * 576, 576, 192),
    ],
)
def test_shapes_are_those_of_the_models_they_are_named_after(tmp_path, name, total, head, width, kv_width):
    benchmark.config_of(name).save_pretrained(tmp_path)
    shape = benchmark.shape_of(str(tmp_path))
    assert (shape.body + shape.head, shape.head) == (total, head)
    assert (shape.attention_width, shape.kv_width) == (width, kv_width)


def test_an_untied_embedding_is_neither_body_nor_head(tmp_path):
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    bodies = []
    for tied in (True, False):
        Qwen2Config(**sizes, num_key_value_heads=1, tie_word_embeddings=tied).save_pretrained(tmp_path / str(tied))
        shape = benchmark.shape_of(str(tmp_path / str(tied)))
        bodies.append(shape.body)
        assert shape.head == 88 and shape.embedding == (0 if tied else 88)
        assert shape.parameters == shape.body + (1 if tied else 2) * 88
    assert bodies[0] == bodies[1]


def test_resident_bytes_count_what_stands_on_the_gpu_all_the_time():
    weights, master, states = 2, 4, 2 * 4
    assert benchmark.resident_bytes(10, 7, 2, 4, 2) == 10 * (weights + master + states) + 7 * 2  # gkd.py in bf16
    assert benchmark.resident_bytes(10, 7, 4, 4, 4) == 10 * (4 + states) + 7 * 4  # in fp32 the weights are the masters
    assert benchmark.resident_bytes(10, 7, 4, 4, 2) == 10 * (4 + states) + 7 * 2  # TRL
    assert benchmark.resident_bytes(10, 7, 2, 2, 2) == 10 * (2 + 2 * 2) + 7 * 2  # TRL with bf16 weights


# ---- numbers of a run ----


def line(step: int, rollout: float, update: float, **others) -> dict:
    seconds = {"seconds_rollout": rollout, "seconds_update": update, "seconds": rollout + update}
    return {"step": step, "reward": 0.0, **seconds, "completion_length": 10.0, "memory_gib": [step / 2], **others}


CFG = {"batch_size": 2, "group_size": 4, "gspo_epochs": 1, "dtype": "bf16", "device": "cpu"}


def test_numbers_are_medians_and_shares_of_what_the_card_can_do():
    lines = [line(1, 2.0, 4.0), line(2, 1.0, 8.0), line(3, 4.0, 2.0)]
    setting = benchmark.Setting("tiny", 2, 4, 5, 10)
    numbers = benchmark.summarise(lines, setting, CFG, SMALL, bandwidth=1e6, peak=1e6)
    assert (numbers["seconds_rollout"], numbers["seconds_update"], numbers["seconds"]) == (2.0, 4.0, 6.0)
    assert numbers["decode_tokens_per_second"] == 80 / 2 and numbers["tokens_per_second"] == 80 / 6
    assert numbers["memory_gib"] == 1.5 and numbers["completion_length"] == 10
    roofline = 8 / (benchmark.decode_bytes(SMALL, 2, 4, 5, 10, 2) / 1e6)
    assert numbers["roofline_share"] == pytest.approx(40 / roofline)
    assert numbers["mfu"] == pytest.approx(benchmark.update_flops(SMALL, 8, 5, 10) / 4 / 1e6)


def test_what_cannot_be_known_is_none():
    setting = benchmark.Setting("tiny", 2, 4, 5, 10)
    unknown = benchmark.summarise([line(1, 1.0, 1.0, memory_gib=[])], setting, CFG, SMALL, None, None)
    assert [unknown[name] for name in ("roofline_share", "mfu", "memory_gib")] == [None] * 3
    mixed = benchmark.Setting("tiny", 2, 4, 5, 10, "geometric")
    numbers = benchmark.summarise([line(1, 1.0, 1.0)], mixed, CFG, SMALL, 1e6, 1e6)
    assert numbers["roofline_share"] is None
    assert numbers["update_flops"] == benchmark.update_flops(SMALL, 8, 5, 10, variance=4.0)


GKD = {"batch_size": 6, "group_size": 1, "num_minibatches": 2, "micro_batch_tokens": 40, "dtype": "bf16",
       "device": "cpu"}  # fmt: skip
TEACHER = benchmark.Shape(layers=3, attention_width=8, kv_width=4, body=200, head=50)


def test_memory_above_what_is_resident():
    gib = 2**30
    lines = [line(1, 1.0, 1.0, memory_gib=[3.0], loss_memory_gib_max=0.5),
             line(2, 1.0, 1.0, memory_gib=[4.0], loss_memory_gib_max=0.25)]  # fmt: skip
    setting = benchmark.Setting("tiny", 6, 1, 5, 10, teacher="tiny-teacher")
    large = [dataclasses.replace(shape, body=gib // 14 * factor) for shape, factor in ((SMALL, 1), (TEACHER, 7))]
    numbers = benchmark.summarise(lines, setting, GKD, large[0], None, None, large[1])
    resident = 14 * (gib // 14 + 30) + 2 * (gib // 14 * 7 + 50)
    assert numbers["resident_gib"] == resident / gib == pytest.approx(2, abs=1e-6)
    assert numbers["above_resident_gib"] == 4.0 - resident / gib
    assert numbers["loss_memory_gib"] == 0.5
    assert numbers["forward_tokens"] == 2 * 15  # of 40 that may be at once; a minibatch has 3
    spread = [line(1, 1.0, 1.0, memory_gib=[3.0, 4.0])]  # over two GPUs: one peak does not tell of the other
    numbers = benchmark.summarise(spread, setting, {**GKD, "micro_batch_tokens": 100}, SMALL, None, None, TEACHER)
    assert numbers["above_resident_gib"] is None and numbers["loss_memory_gib"] is None
    assert numbers["forward_tokens"] == 3 * 15


def test_the_head_of_the_teacher_counts_in_the_update():
    setting = benchmark.Setting("tiny", 6, 1, 5, 10, teacher="tiny-teacher")
    numbers = benchmark.summarise([line(1, 1.0, 2.0)], setting, GKD, SMALL, None, 1e6, TEACHER)
    assert numbers["update_flops"] == benchmark.update_flops(SMALL, 6, 5, 10) + 2 * 50 * 60
    assert numbers["mfu"] == numbers["update_flops"] / 2.0 / 1e6


# ---- memory of the loss ----


class FakeMemory:
    """Counts as torch.cuda does, in bytes."""

    def __init__(self):
        self.now = self.peak = 0

    def use(self, gib: float) -> None:
        self.now = int(gib * 2**30)
        self.peak = max(self.peak, self.now)

    def memory_allocated(self) -> int:
        return self.now

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.now


def steps(fake: FakeMemory, *gibs: float) -> None:
    for gib in gibs:
        fake.use(gib)


def test_loss_memory_is_the_peak_of_the_passes_above_what_was_there_before():
    fake = FakeMemory()
    memory = benchmark.LossMemory(fake)
    steps(fake, 9, 2)  # generation
    memory.open()
    steps(fake, 5, 3)  # 1 of gradients stays
    memory.close()
    steps(fake, 8, 3)  # generation of the next part
    memory.open()
    steps(fake, 6, 3)
    memory.close()
    steps(fake, 10, 2)  # optimizer
    assert memory.take() == 6 - 2
    assert memory.overall() == 10 and memory.overall() == 2
    memory.open()
    steps(fake, 4, 2)
    memory.close()
    assert memory.take() == 2 and memory.overall() == 4


def test_a_script_is_watched_from_the_teacher_to_the_optimizer(monkeypatch):
    fake, gpu = FakeMemory(), [torch.device("cuda", 0)]
    monkeypatch.setattr(devices, "synchronize", lambda gpus: None)
    monkeypatch.setattr(optim.AdamW, "step", lambda optimizer, norm: steps(fake, 20, 4) or norm)
    own = metrics.Log.time, optim.AdamW.step, devices.peak_memory_gib
    log, optimizer = object.__new__(metrics.Log), object.__new__(optim.AdamW)
    with benchmark.watching(benchmark.LossMemory(fake)):
        for log.gpus, found in ((gpu, {"loss_memory_gib_max": [9 - 4.0]}), ([torch.device("cpu")], {})):
            log._sums, log._weights, log._max = {}, {}, {}
            with log.time("rollout"):
                steps(fake, 30, 4)
            with log.time("teacher"):
                steps(fake, 7, 5)
            with log.time("update"):
                for _ in range(2):
                    steps(fake, 9, 6)
                    assert optimizer.step(1.0) == 1.0
            timed = {f"seconds_{x}" for x in ("rollout", "teacher", "update")}
            assert log._max == found and {name for name, _ in log._sums} == timed
            assert devices.peak_memory_gib(log.gpus) == ([30.0] if found else [])
    assert own == (metrics.Log.time, optim.AdamW.step, devices.peak_memory_gib)


# ---- models and prompts ----


def test_a_prompt_is_as_many_tokens_as_asked_for(work_dir, tmp_path):
    folder = benchmark.make_model("tiny", 1, work_dir)
    tokenizer = models.load_tokenizer(str(folder))
    assert len({tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id}) == 3
    assert len(tokenizer) == 512 and tokenizer.chat_template is None
    benchmark.write_prompts(tmp_path / "prompts.jsonl", 20, 37, 512)
    examples = data.load_examples(str(tmp_path / "prompts.jsonl"), tokenizer, 100)
    assert [len(example.prompt_ids) for example in examples] == [37] * 20
    assert max(itertools.chain(*(example.prompt_ids for example in examples))) < 509  # words only
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert benchmark.make_model("tiny", 1, work_dir) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_end_tokens_make_geometric_lengths(work_dir):
    num_ends = round(512 / (16 - 8))
    folder = benchmark.make_model("tiny", num_ends, work_dir)
    tokenizer, model = models.load_policy(str(folder), torch.device("cpu"), "fp32")
    ends = models.end_token_ids(tokenizer, model)
    assert len(ends) == num_ends and tokenizer.eos_token_id in ends and tokenizer.pad_token_id not in ends
    torch.manual_seed(0)
    ids = model.eval().generate(
        torch.randint(0, 500, (1, 8)).expand(200, 8), do_sample=True, top_k=0, min_new_tokens=8, max_new_tokens=60
    )[:, 8:]
    lengths = (torch.isin(ids, torch.tensor(ends)).cumsum(1) == 0).sum(1) + 1.0
    assert lengths.min() == 9 and lengths.mean().item() == pytest.approx(16, abs=1.7)
    assert lengths.std().item() == pytest.approx(8, abs=2)


# ---- as a command ----


def test_a_tiny_run_from_end_to_end(work_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "new" / "speed.json"
    argv = ["--setting", "tiny", "--device", "cpu", "--steps", "3", "--warmup", "1", "--baseline", "generate"]
    rates = ["--bandwidth", "1e10", "--flops", "1e11"]
    assert benchmark.main([*argv, *rates, "--work_dir", str(work_dir), "--out", str(out), "--", "--seed", "3"]) == 0
    written = json.loads(out.read_text())
    assert written["command"].startswith("python scripts/benchmark.py --setting tiny --device cpu")
    assert written["machine"]["torch"] == torch.__version__
    assert {"card", "gpu_memory_gib", "transformers", "python", "commit", "dirty"} <= written["machine"].keys()
    (result,) = written["settings"]
    assert result["name"] == "tiny" and result["setting"]["new_tokens"] == 8
    assert result["config"]["seed"] == 3 and result["config"]["min_new_tokens"] == 8 and "gspo.py" in result["command"]
    assert [line["step"] for line in result["lines"]] == [1, 2, 3]
    assert [line["completion_length"] for line in result["lines"]] == [8.0] * 3
    numbers = result["numbers"]
    seconds = ("seconds", "seconds_rollout", "seconds_score", "seconds_update", "seconds_wall", "seconds_first_step")
    rest = ("seconds_start", "decode_tokens_per_second", "tokens_per_second", "roofline_share", "mfu")
    assert all(numbers[name] > 0 for name in (*seconds, *rest)) and numbers["memory_gib"] is None
    assert result["generate"]["tokens_per_second"] > 0
    assert not list(Path(result["config"]["out_dir"]).glob("checkpoint-*"))
    printed = capsys.readouterr().out
    assert "| tiny | " in printed and "| tiny | generate | " in printed


PEER_OF_GKD = """
import json, pathlib, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["--beta"] == "0.25" and options["--sequences"] == "2", options
assert "tiny-teacher" in options["--teacher_model"] and options.get("--trainer") == "distillation", options
cycles = [9.0, 5.0, 7.0][: int(options["--cycles"])]
fields = {"model_init_kwargs": {"dtype": "float32"}, "teacher_model_init_kwargs": {"dtype": "bfloat16"},
          "per_device_train_batch_size": 2}
measured = {"seconds": cycles, "seconds_rollout": cycles, "completion_length": cycles, "memory_gib": cycles,
            "loss_memory_gib": cycles, "fields": fields}
pathlib.Path(options["--out"]).write_text(json.dumps(measured))
"""


def test_distillation_from_end_to_end_beside_a_peer(work_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "benchmark_trl_gkd.py").write_text(PEER_OF_GKD)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    argv = ["--setting", "gkd-tiny", "--device", "cpu", "--steps", "3", "--warmup", "1", "--peer", "trl_distillation"]
    argv += ["--script", str(ROOT / "gkd" / "gkd.py"), "--out", str(tmp_path / "speed.json"), "--flops", "1e11"]
    assert benchmark.main([*argv, "--work_dir", str(work_dir), "--", "--beta", "0.25"]) == 0
    (result,) = json.loads((tmp_path / "speed.json").read_text())["settings"]
    cfg = result["config"]
    assert "gkd.py" in result["command"] and (cfg["loss"], cfg["beta"], cfg["lmbda"]) == ("jsd", 0.25, 1.0)
    assert "tiny-teacher" in cfg["teacher_model"] and "kl_coef" not in cfg
    assert [line["completion_length"] for line in result["lines"]] == [8.0] * 3
    numbers, peer = result["numbers"], result["trl_distillation"]
    assert all(numbers[f"seconds_{name}"] > 0 for name in ("rollout", "teacher", "update", "wall"))
    assert numbers["mfu"] > 0 and numbers["above_resident_gib"] is None and numbers["forward_tokens"] == 4 * 16
    assert peer["seconds"] == 6.0 and peer["loss_memory_gib"] == 7.0 and peer["forward_tokens"] == 32
    student, teacher = (sum(result[name][part] for part in ("body", "head")) for name in ("shape", "teacher_shape"))
    assert peer["above_resident_gib"] == pytest.approx(7 - (12 * student + 2 * teacher) / 2**30)
    printed = capsys.readouterr().out
    assert "| teacher |" in printed and "| gkd-tiny | trl_distillation | 6 | 6 | - | 6 | 7 | " in printed


def test_the_table_says_how_much_less_memory_the_loss_takes():
    numbers = {"seconds_wall": 2.0, "memory_gib": 20.0, "loss_memory_gib": 4.0, "above_resident_gib": 8.0}
    peer = {"seconds": 6.0, "memory_gib": 50.0, "loss_memory_gib": 30.0, "above_resident_gib": 33.0}
    peer["forward_tokens"] = 3072
    row = {"name": "gkd", "setting": {"teacher": "qwen1.5b"}, "numbers": numbers, "trl": peer}
    row["trl_bf16"] = {"error": "out of memory"}
    printed = benchmark.report([row])
    assert "| gkd | trl | 6 | - | - | - | 50 | 33 | 30 | 3,072 | 3.00 x (cycle, wall) | 7.50 x |" in printed
    assert "| gkd | trl_bf16 | - | - | - | - | - | - | - | - | failed | - |" in printed


STUB = """
import json, pathlib, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out_dir = pathlib.Path(options["--out_dir"])
out_dir.mkdir()
cfg = {name[2:]: options[name] for name in ("--policy_model", "--train_data", "--device", "--dtype")}
for name in ("batch_size", "group_size", "num_minibatches", "max_new_tokens"):
    cfg[name] = int(options["--" + name])
(out_dir / "config.json").write_text(json.dumps({**cfg, "kl_coef": 0.0, "gspo_epochs": 1}))
with open(out_dir / "metrics.jsonl", "w", buffering=1) as file:
    for step in range(int(options["--steps"])):
        time.sleep(0.05)
        print("at step", step, flush=True)
        if options["--policy_model"] == "toy" and step == 2:
            sys.exit("out of memory, say")
        line = {"step": step, "seconds": 3.0, "seconds_rollout": 1.0, "seconds_update": 2.0, "memory_gib": []}
        file.write(json.dumps({"step": step, "eval_reward": 0.5}) + "\\n")
        file.write(json.dumps({**line, "reward": 0.0, "completion_length": 8.0}) + "\\n")
time.sleep(60)  # it would save now
"""
PEER = """
import json, pathlib, sys
if "--bf16_weights" in sys.argv:
    sys.exit("TRL takes parts of equal size only")
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
cycles = [100.0, 100.0, 5.0, 9.0, 7.0][: int(options["--cycles"])]
measured = {"seconds": cycles, "seconds_rollout": cycles, "completion_length": cycles, "memory_gib": 1.0}
unfinished = pathlib.Path(options["--out"] + ".part")
unfinished.write_text(json.dumps(measured))
unfinished.rename(options["--out"])
"""


@pytest.fixture
def stub(tmp_path, monkeypatch) -> list[str]:
    """Options for a script that is quick, and fails for the policy "toy"; TRL is a stub as well."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "stub.py").write_text(STUB)
    (tmp_path / "scripts" / "benchmark_trl.py").write_text(PEER)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: name)
    return ["--script", str(tmp_path / "stub.py"), "--steps", "5", "--out", str(tmp_path / "speed.json")]


def test_a_setting_that_fails_is_reported_and_the_others_run(stub, work_dir, tmp_path, capsys):
    argv = ["--setting", "cpu-toy", "tiny", "--device", "cpu", "--work_dir", str(work_dir), *stub]
    assert benchmark.main(argv) == 1
    failed, done = json.loads((tmp_path / "speed.json").read_text())["settings"]
    for message in ("at step 2\nout of memory, say", "exit code 1", "log.txt", "--policy_model toy"):
        assert message in failed["error"]
    assert done["numbers"]["seconds"] == 3.0 and "error" not in done and len(done["lines"]) == 5
    printed = capsys.readouterr()
    assert "| cpu-toy | failed | " in printed.out and "| tiny | 3 | " in printed.out
    assert "out of memory, say" in printed.err


def test_a_run_without_result_is_ended_after_the_timeout(stub, work_dir, tmp_path):
    argv = ["--setting", "tiny", "--device", "cpu", "--work_dir", str(work_dir), *stub, "--timeout", "0.5"]
    Path(stub[1]).write_text("import time\nprint('waiting', flush=True)\ntime.sleep(60)\n")
    assert benchmark.main(argv) == 1
    (failed,) = json.loads((tmp_path / "speed.json").read_text())["settings"]
    assert "no result after 0.5 s" in failed["error"]


def test_peers_are_measured_over_the_same_cycles(stub, work_dir, tmp_path, capsys):
    argv = ["--setting", "tiny", "--device", "cpu", "--work_dir", str(work_dir), *stub, "--peer", "trl", "trl_bf16"]
    assert benchmark.main(argv) == 1  # the second peer fails
    (result,) = json.loads((tmp_path / "speed.json").read_text())["settings"]
    assert result["trl"]["seconds"] == 7.0 and "--num_minibatches 2" in result["trl"]["command"]
    assert "parts of equal size" in result["trl_bf16"]["error"] and "error" not in result
    printed = capsys.readouterr().out
    assert (
        "| tiny | trl | 7 | 7 | - | 7 | 1 | " in printed
        and "| tiny | trl_bf16 | - | - | - | - | - | failed |" in printed
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "2", "--warmup", "2"], "warmup = 2, steps = 2: at least one cycle is left out and one is counted"),
        (["--peer", "trl"], "needs the package trl; pip install trl"),
        (["--model", "huge"], "model = 'huge': must be one of"),
        (["--lengths", "natural"], "lengths = 'natural': must be one of ('fixed', 'geometric')"),
        (
            ["--lengths", "geometric", "--new_tokens", "2000"],
            "new_tokens = 2000: is the mean of lengths from 8 to 1024",
        ),
        (["--teacher", "smollm2"], "teacher = 'smollm2': must have the vocabulary of the student: one of ['tiny',"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(monkeypatch, capsys, argv, message):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(["--setting", "tiny", *argv])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_peer_that_distils_is_refused_without_a_teacher(monkeypatch, capsys):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(SystemExit):
        benchmark.main(["--setting", "tiny", "gkd-tiny", "--peer", "trl_distillation"])
    assert "trl_distillation needs a teacher, which ['tiny'] have not" in capsys.readouterr().err


@pytest.mark.parametrize("other", [{"loss": "opd"}, {"lmbda": 0.5}, {"temperature": 0.9}, {"loss_temperature": 2.0}])
def test_a_peer_that_cannot_do_the_same_is_refused(tmp_path, other):
    cfg = {"loss": "jsd", "beta": 0.5, "lmbda": 1.0, "temperature": 1.0, "loss_temperature": 1.0} | other
    with pytest.raises(ValueError, match="on-policy, at temperature 1; leave out --peer"):
        benchmark.run_peer("trl", benchmark.SETTINGS["gkd-tiny"], cfg, 8, None, tmp_path)


def test_an_option_that_the_benchmark_sets_is_refused_after_the_dashes(stub, work_dir, tmp_path):
    argv = ["--setting", "tiny", "--device", "cpu", "--work_dir", str(work_dir), *stub, "--", "--batch-size=3"]
    assert benchmark.main(argv) == 1
    (failed,) = json.loads((tmp_path / "speed.json").read_text())["settings"]
    assert "--batch-size=3 after --: benchmark.py sets it; use the options before --" in failed["error"]


# ---- benchmark_trl.py ----


def test_a_missing_trl_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)  # what Python does for a package that is not installed
    with pytest.raises(ImportError, match="pip install trl"):
        load_script("benchmark_trl")


def test_trl_cycles_are_timed(work_dir, tmp_path):
    pytest.importorskip("trl")
    benchmark_trl = load_script("benchmark_trl")
    folder = benchmark.make_model("tiny", 1, work_dir)
    benchmark.write_prompts(tmp_path / "prompts.jsonl", 8, 6, 512)
    options = dict(policy_model=folder, train_data=tmp_path / "prompts.jsonl", out=tmp_path / "trl.json", cycles=3,
                   batch_size=2, group_size=4, num_minibatches=2, sequences=2, max_new_tokens=5, min_new_tokens=5,
                   kl_coef=0.001, device="cpu")  # fmt: skip
    benchmark_trl.main(benchmark.as_options(options))
    measured = json.loads((tmp_path / "trl.json").read_text())
    assert len(measured["seconds"]) == len(measured["seconds_rollout"]) == 3
    assert all(0 < part < whole for part, whole in zip(measured["seconds_rollout"], measured["seconds"], strict=True))
    assert measured["completion_length"] == [5.0] * 3
    options["sequences"] = 3
    with pytest.raises(ValueError, match="divide one another"):
        benchmark_trl.main(benchmark.as_options(options))


# ---- benchmark_trl_gkd.py ----


def test_a_missing_trl_is_named_for_distillation_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"benchmark_trl_gkd\.py measures the package trl: pip install trl"):
        load_script("benchmark_trl_gkd")


def test_both_scripts_measure_memory_with_the_same_code():
    text = (ROOT / "scripts" / "benchmark_trl_gkd.py").read_text()
    assert inspect.getsource(benchmark.LossMemory) in text


@pytest.mark.parametrize("trainer", ["gkd", "distillation"])
def test_trl_distils_in_cycles_of_the_same_work(work_dir, tmp_path, monkeypatch, trainer):
    pytest.importorskip("trl")
    script = load_script("benchmark_trl_gkd")
    seen = []
    for name in ("open", "close", "take", "overall"):
        method = getattr(script.LossMemory, name)
        monkeypatch.setattr(script.LossMemory, name, lambda memory, name=name, method=method: (
            seen.append(name), method(memory))[1])  # fmt: skip
    student, teacher = (benchmark.make_model(name, 1, work_dir) for name in ("tiny", "tiny-teacher"))
    benchmark.write_prompts(tmp_path / "prompts.jsonl", 8, 6, 512)
    options = dict(student_model=student, teacher_model=teacher, train_data=tmp_path / "prompts.jsonl",
                   out=tmp_path / "trl.json", trainer=trainer, cycles=3, batch_size=4, group_size=2, num_minibatches=2,
                   sequences=2, max_new_tokens=5, min_new_tokens=5, device="cpu")  # fmt: skip
    script.main(benchmark.as_options(options))
    measured = json.loads((tmp_path / "trl.json").read_text())
    assert len(measured["seconds"]) == len(measured["seconds_rollout"]) == 3
    assert all(0 < part < whole for part, whole in zip(measured["seconds_rollout"], measured["seconds"], strict=True))
    assert measured["completion_length"] == [5.0] * 3 and measured["loss_memory_gib"] is None
    step = ["open", "close"] * 2 + ["take"]  # two forward passes in each of two optimizer steps
    assert seen == [*step, *step, "overall"] * 3
    options["sequences"] = 3
    with pytest.raises(ValueError, match="divide one another"):
        script.main(benchmark.as_options(options))
