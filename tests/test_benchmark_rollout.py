"""scripts/dev/benchmark_rollout.py and benchmark_vllm.py: the same work for both sides, the limit, how they fail."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest
from test_tools import load_script

pytestmark = pytest.mark.tools
rollouts = load_script("benchmark_rollout")
base = sys.modules["benchmark_base"]

# takes what vLLM takes, writes it down, and is faster with an engine in another process
FAKE = """
import json, os, time
from types import SimpleNamespace as Space

__version__ = "0.26.0"
MODE = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]


def note(**what):
    with open(os.path.join(os.path.dirname(__file__), f"calls{MODE}.jsonl"), "a") as file:
        file.write(json.dumps(what) + "\\n")


class SamplingParams:
    def __init__(self, *, max_tokens, n=1, **options):
        self.n, self.max_tokens, self.options = n, max_tokens, options


class LLM:
    def __init__(self, **options):
        note(engine=options, path=os.environ["PYTHONPATH"], sampler=os.environ["VLLM_USE_FLASHINFER_SAMPLER"])
        self.llm_engine = Space(vllm_config=Space(scheduler_config=Space(async_scheduling=True)))

    def reset_prefix_cache(self):
        note(reset=True)

    def generate(self, prompts, sampling_params, use_tqdm):
        note(prompts=[one["prompt_token_ids"] for one in prompts], n=[one.n for one in sampling_params],
             max_tokens=[one.max_tokens for one in sampling_params], options=[one.options for one in sampling_params])
        time.sleep({"0": 0.1, "1": 0.01}[MODE])
        return [Space(outputs=[self.complete(one)] * one.n) for one in sampling_params]

    def complete(self, one):
        logprobs = None if one.options["logprobs"] is None else [0.0] * one.max_tokens
        return Space(token_ids=[1] * one.max_tokens, logprobs=logprobs)
"""


def test_both_sides_decode_the_same_tokens_and_the_faster_mode_is_reported(tmp_path, monkeypatch, capsys):
    site, out = tmp_path / "site" / "vllm", tmp_path / "new" / "rollouts.json"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text(FAKE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    run = base.run

    def run_or_call(command, folder, *others, **environment):
        if folder.name in ("ours-8-8", "ours-12-12"):  # one process of our side is enough
            rollouts.main(command[2:])
        else:
            run(command, folder, *others, **environment)

    monkeypatch.setattr(base, "run", run_or_call)
    monkeypatch.setitem(rollouts.WORKS, "longer", rollouts.Work(2, 4, 8, 12))
    argv = ["tiny", "--works", "tiny", "longer", "tiny-mixed", "--peer", "vllm", "--vllm_path", str(site.parent)]
    argv += ["--device", "cpu", "--repetitions", "3", "--warmup", "1", "--bandwidth", "1e10"]
    assert rollouts.main([*argv, "--work_dir", str(tmp_path / "work"), "--out", str(out)]) == 0
    [result] = json.loads(out.read_text())["shapes"]
    our_sides = ["ours, 8 tokens", "ours, 12 tokens", "ours, 8 to 48 tokens"]
    assert [*result["sides"]] == [*our_sides, "vLLM (0)", "vLLM (1)"]
    ours = {name: work for side in our_sides for name, work in result["sides"][side]["works"].items()}
    fixed, longer, mixed = (ours[name]["lengths"] for name in ("tiny", "longer", "tiny-mixed"))
    assert fixed == 3 * [8 * [8]] and longer == 3 * [8 * [12]]
    assert all(8 <= length <= 48 for row in mixed for length in row) and mixed[0] != mixed[1] != mixed[2]

    lines = (site / "calls1.jsonl").read_text().splitlines()
    engine, *calls = map(json.loads, lines)
    assert engine["path"] == f"{site.parent}:elsewhere" and engine["sampler"] == "0"
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 8, "trust_remote_code": False}
    assert options.items() <= engine["engine"].items()
    assert engine["engine"]["max_model_len"] == 8 + max(max(row) for row in mixed)
    # for each work once without and once with log-probabilities; the prompts of a mixed work once per completion
    assert calls[::2] == 18 * [{"reset": True}]
    for i, call in enumerate(calls[1::2]):
        work, logprobs, repetition = i // 6, i // 3 % 2, i % 3
        prompts = rollouts.describe(("tiny", "longer", "tiny-mixed")[work], 512, 3)["prompts"][repetition]
        assert call["prompts"] == (prompts, prompts, [ids for ids in prompts for _ in range(4)])[work]
        assert call["n"] == (2 * [4], 2 * [4], 8 * [1])[work]
        assert call["max_tokens"] == (2 * [8], 2 * [12], mixed[repetition])[work]
        said = {"logprobs": 0 if logprobs else None, "flat_logprobs": bool(logprobs), "ignore_eos": True}
        assert all(said.items() <= one.items() and one["temperature"] == 1.0 for one in call["options"])

    figures = result["works"]["tiny-mixed"]
    seconds = ours["tiny-mixed"]["tokens_and_logprobs"]
    speeds = sorted(sum(row) / time for row, time in zip(mixed[1:], seconds[1:], strict=True))
    steps = sorted(1000 * time / max(row) for row, time in zip(mixed[1:], seconds[1:], strict=True))
    assert figures["ours tokens_and_logprobs"]["tokens_per_second"] == pytest.approx(sum(speeds) / 2)
    assert figures["ours tokens_and_logprobs"]["ms_per_step"] == pytest.approx(sum(steps) / 2)
    assert figures["ours tokens_and_logprobs"]["first"] == seconds[0] and figures["limit"] > 0
    assert {figures[f"vLLM {kind}"]["side"] for kind in ("tokens", "tokens_and_logprobs")} == {"vLLM (1)"}
    printed = capsys.readouterr().out
    assert "| tiny | 2 x 4, 8 + 16, mixed up to 48 | " in printed and " (1) | " in printed
    assert "| tiny | vLLM (0) | " in printed and "| tiny | ours, 8 to 48 tokens | " in printed


def test_a_work_whose_completions_have_other_lengths_is_refused(tmp_path):
    model, work = base.make_model("tiny", 1, tmp_path), rollouts.describe("tiny", 512, 1)
    spec = {"model": str(model), "device": "cpu", "dtype": "auto"}
    spec["works"] = [work, work | {"name": "longer", "min_new_tokens": 12, "max_new_tokens": 12}]
    (tmp_path / "work.json").write_text(json.dumps(spec))
    with pytest.raises(RuntimeError, match="longer: 8 to 8 tokens: another work"):
        rollouts.measure_ours(tmp_path / "work.json", tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_the_limit_counts_what_every_step_reads():
    shape = base.Shape(layers=2, attention_width=6, kv_width=4, body=100, head=30, state=10)
    equal = rollouts.rollout_bytes(shape, 5, 6 * [7], 2, 2)
    assert equal == pytest.approx(7 * base.decode_bytes(shape, 3, 2, 5, 7, 2))
    lengths, itemsize, total = [3, 1, 2, 6], 4, 0
    for t in range(6):
        live = [length > t for length in lengths]
        prompts = any(live[:2]) + any(live[2:])
        total += itemsize * (130 + (5 * prompts + t * sum(live)) * 2 * 2 * 4) + 2 * 10 * sum(live)
    assert rollouts.rollout_bytes(shape, 5, lengths, 2, itemsize) == total


def test_a_side_that_fails_is_reported_and_the_others_stay(tmp_path, monkeypatch, capsys):
    done = {"start": 4.0, "works": {"tiny": {"tokens_and_logprobs": [9.0, 2.0], "lengths": 2 * [8 * [8]]}}}

    def run(command, spec, folder, args, env=None):
        if env:
            raise RuntimeError("Free memory on device is less than desired")
        return done

    monkeypatch.setattr(rollouts, "run", run)
    (tmp_path / "vllm").mkdir()
    argv = ["tiny", "--works", "tiny", "--device", "cpu", "--repetitions", "2", "--warmup", "1", "--peer", "vllm"]
    argv += ["--vllm_path", str(tmp_path), "--vllm_multiprocessing", "0", "--work_dir", str(tmp_path / "work")]
    assert rollouts.main(argv) == 1
    printed = capsys.readouterr()
    assert "| tiny | 2 x 4, 8 + 8 | 32 | - | - | - | - | - | - | 250.00 | - |" in printed.out
    for row in ("| tiny | vLLM (0) | failed | - |", "| tiny | ours, 8 tokens | 4.0 | tiny 9.00 |"):
        assert row in printed.out
    assert "Free memory on device" in printed.err
    monkeypatch.setattr(rollouts, "run", lambda *a: run(*a[:4], env=True))
    assert rollouts.main(argv) == 1
    assert "| tiny | ours, 8 tokens | failed | - |" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "said"), [
    (lambda completion: completion.token_ids.pop(), "do not have the lengths"),
    (lambda completion: completion.logprobs.pop(), "without log-probabilities of all tokens"),
])  # fmt: skip
def test_a_peer_that_did_not_do_the_same_work_is_no_result(monkeypatch, change, said):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    fake = SimpleNamespace(__file__="/dev/null/x")
    exec(FAKE, fake.__dict__)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    peer, engine = load_script("benchmark_vllm"), object.__new__(fake.LLM)
    fake.__dict__["note"] = lambda **what: None
    assert peer.rollout(engine, [[1], [2]], [3, 3, 4, 5], 0) >= 0.01
    complete = fake.LLM.complete

    def other(engine, one):
        completion = complete(engine, one)
        change(completion)
        return completion

    monkeypatch.setattr(fake.LLM, "complete", other)
    with pytest.raises(RuntimeError, match=said):
        peer.rollout(engine, [[1], [2]], [3, 3, 4, 5], 0)


@pytest.mark.parametrize(("argv", "said"), [
    ("tiny --repetitions 2", "warmup = 2, repetitions = 2: at least one"),
    ("tiny --peer vllm --vllm_path nowhere", "vllm_path = 'nowhere': needs the package vllm there"),
    ("huge", "invalid choice: 'huge'"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_anything_runs(capsys, argv, said):
    with pytest.raises(SystemExit) as stopped:
        rollouts.main(argv.split())
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_prompts_and_ends_of_a_work_are_the_same_every_time():
    work = rollouts.describe("8x8-mixed", 512, 2)
    assert work == rollouts.describe("8x8-mixed", 512, 2)
    assert len(set(work["end_ids"])) == round(512 / (256 - 8)) and work["min_new_tokens"] == 8
    first, second = work["prompts"]
    assert first != second and [len(ids) for ids in first] == 8 * [128]
    fixed = rollouts.describe("32x8-p256", 512, 1)
    assert fixed["min_new_tokens"] == fixed["max_new_tokens"] == 256 and len(fixed["end_ids"]) == 1
    assert dataclasses.astuple(rollouts.WORKS["32x8-p256"]) == (32, 8, 256, 256, 0)
