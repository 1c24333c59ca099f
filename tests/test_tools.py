"""The command-line tools that stand beside training: model conversion, the made tasks, the evaluation, the plots."""

import copy
import importlib.util
import itertools
import json
import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from bounds import assert_rounded
from conftest import ROOT, assert_equal_weights, build_model, build_tokenizer, tiny_model
from conftest import read_lines as read_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from common.loop import run as loop_run
from common.tasks import accuracy, rewards

pytestmark = pytest.mark.tools


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, *(ROOT / "scripts").rglob(f"{name}.py"))  # also in dev/
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


arithmetic, numbers, evaluation = map(load_script, ("make_arithmetic", "make_numbers", "evaluate"))
converter, dropping, show_prompt = map(load_script, ("gguf_to_hf", "drop_layers", "show_prompt"))


@pytest.mark.parametrize(
    ("script", "package"),
    [
        ("gguf_to_hf", "gguf"),
        ("benchmark_trl_gkd", "trl"),
        ("recipe_trl", "trl"),
        ("benchmark_vllm", "vllm"),
        ("make_reasoning_gym", "reasoning-gym"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, script, package):
    # what Python does for a package that is not installed
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        load_script(script)


def test_arithmetic_answers_are_right_and_problems_differ(tmp_path):
    arithmetic.main([str(tmp_path), "--train", "300", "--test", "100"])
    train, test = read_rows(tmp_path / "train.jsonl"), read_rows(tmp_path / "test.jsonl")
    assert (len(train), len(test)) == (300, 100)
    problems = [re.search(r"What is (\d\d) ([-+]) (\d\d)\?", row["prompt"]).groups() for row in train + test]
    for row, (left, sign, right) in zip(train + test, problems, strict=True):
        answer = int(left) + int(right) * (1 if sign == "+" else -1)
        assert row["answer"] == str(answer) and answer >= 0 and min(int(left), int(right)) >= 10
    assert len({(sign, frozenset((left, right))) for left, sign, right in problems}) == 400  # a + b and b + a are one
    additions = sum(sign == "+" for _, sign, _ in problems[:300])
    assert abs(additions - 150) < 6 * 300**0.5 / 2  # standard deviations of 300 coins


def right_numbers(question):
    """The numbers from 10 to 99 that a question asks for, worked out from its words alone."""
    [what] = re.findall(r"^Name a two-digit (.*)\.$", question)
    tests = []
    for pattern, test in [
        (r"^multiple of (\d+)", lambda n, d: n % d == 0), (r"ends in the digit (\d)$", lambda n, d: n % 10 == d),
        (r"greater than (\d+)", lambda n, a: n > a), (r"(?<!to )less than (\d+)", lambda n, b: n < b),
        (r"digits add up to (\d+)$", lambda n, s: n // 10 + n % 10 == s),
        (r"digits add up to more than (\d+)$", lambda n, s: n // 10 + n % 10 > s),
        (r"digits add up to less than (\d+)$", lambda n, s: n // 10 + n % 10 < s),
    ]:  # fmt: skip
        if match := re.search(pattern, what):
            tests.append((test, int(match[1])))
            what = what[: match.start()] + what[match.end() :]
    words = re.sub(r"\b(number|that|and|whose)\b", "", what).split()
    parity = {(): (0, 1), ("even",): (0,), ("odd",): (1,)}[tuple(words)]  # KeyError: a word that was not understood
    assert tests
    return [str(n) for n in range(10, 100) if n % 2 in parity and all(test(n, value) for test, value in tests)]


def test_numbers_accept_exactly_the_right_answers_and_no_problem_comes_twice(tmp_path):
    numbers.main([str(tmp_path)])
    train, test = read_rows(tmp_path / "train.jsonl"), read_rows(tmp_path / "test.jsonl")
    assert (len(train), len(test)) == (512, 64)
    questions = [row["prompt"][-1]["content"] for row in train + test]
    for row, question in zip(train + test, questions, strict=True):
        assert row["accepted"] == right_numbers(question), question
        assert 4 <= len(row["accepted"]) <= 90 and row["answer"] in row["accepted"]
    # neither in the same words nor in others
    assert len(set(questions)) == len({tuple(row["accepted"]) for row in train + test}) == 576
    for kind in ("multiple", "ends in", "add up", "even|odd"):
        assert 12 <= sum(bool(re.search(kind, question)) for question in questions[512:]) <= 13
    # each is asked after the same examples with right answers
    turns = train[0]["prompt"][:-1]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 5
    assert all(row["prompt"][:-1] == turns for row in train + test)
    for asked, answer in zip(turns[::2], turns[1::2], strict=True):
        assert answer["content"] in (right := right_numbers(asked["content"]))
        assert right not in [row["accepted"] for row in train + test]


@pytest.mark.parametrize(("task", "size"), [(arithmetic, 7000), (numbers, 3000)], ids=["arithmetic", "numbers"])
def test_the_seed_decides_and_the_train_size_keeps_the_test_set(tmp_path, task, size):
    for name, arguments in {"a": [], "b": [], "c": ["--seed", "1"], "d": ["--train", str(size)]}.items():
        task.main([str(tmp_path / name), *arguments])
    test, train = ([read_rows(tmp_path / name / f"{part}.jsonl") for name in "abcd"] for part in ("test", "train"))
    assert test[0] == test[1] == test[3] != test[2]
    assert train[0] == train[1] == train[3][: len(train[0])] != train[2] and len(train[3]) == size
    for option, value in (("--train", "9000"), ("--train", "0"), ("--test", "-1")):
        with pytest.raises(ValueError, match=option):
            task.main([str(tmp_path), option, value])


def test_pass_at_k_is_the_share_of_draws_with_a_right_sample_and_frequent_answers_count_less():
    assert accuracy.pass_at_k(6, 4, 2) == pytest.approx(14 / 15)  # 1 of 15 pairs has both wrong ones
    for right, k in itertools.product(range(6), range(1, 6)):
        draws = list(itertools.combinations([True] * right + [False] * (5 - right), k))
        assert accuracy.pass_at_k(5, right, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)
    assert accuracy.pass_at_k(2000, 1, 1000) == pytest.approx(0.5)  # counts beyond floating point
    for bad in [(5, 6, 1), (5, 2, 6), (5, 2, 0)]:
        with pytest.raises(ValueError, match=f"pass@{bad[2]}.*k is 1 to"):
            accuracy.pass_at_k(*bad)
    # answers that are as good as so many equally frequent ones; of 3/4 and 1/4, (4/3)^(3/4) * 4^(1/4)
    effective = [["14"] * 3, ["14", "21", "28"] * 2, ["14", "14", "21", "14"]]
    assert [accuracy.effective_number(answers) for answers in effective] == pytest.approx([1, 3, 1.7547654])


class Said(list):
    """A batch of given texts, of one token each."""

    def texts(self, tokenizer, stops):
        return [text.partition(stops[0])[0] if stops else text for text in self]

    @property
    def lengths(self):
        return torch.ones(len(self))

    truncated = property(lambda self: self.lengths * 0)
    completions = property(lambda self: [torch.tensor([1])] * len(self))


@pytest.fixture
def asked():
    """Prompts that evaluate.py had completed."""
    return []


@pytest.fixture
def evaluate(monkeypatch, capsys, tmp_path, asked):
    """What evaluate.py prints, and its --out lines, for a model that says the given texts, one list per prompt."""

    def run(rows, texts, *options, model="model"):
        def generate(prompts, group_size, prompt_numbers, **options):
            said = [text for number in prompt_numbers for text in texts[number]]
            assert len(said) == len(prompts) * group_size
            asked.append(prompts)
            return Said(said)

        sampler = SimpleNamespace(generate=generate)
        monkeypatch.setattr(evaluation.models, "load_policy", lambda *args: (build_tokenizer(), None))
        monkeypatch.setattr(evaluation.sources, "end_token_ids", lambda *args: [3])
        monkeypatch.setattr(evaluation.rollout, "Sampler", lambda *args, **options: sampler)
        (data := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        out = tmp_path / "out.jsonl"
        evaluation.main([model, "--data", str(data), "--device", "cpu", "--out", str(out), *options])
        captured = capsys.readouterr()
        run.said = captured.err
        return json.loads(captured.out.splitlines()[-1]), read_rows(out)

    return run


ROWS = [
    {"prompt": "what is 1 ?", "answer": "14", "accepted": ["14", "21", "28"]},
    {"prompt": "what is 2 ?", "answer": "see figure"}, {"prompt": "what is 3 ?", "answer": "7"},
]  # fmt: skip


def test_evaluate_reports_pass_at_k_and_diversity(evaluate):
    texts = [["14", "14.", "The number is 21", "15", "no idea", "14"], list("123456"), ["8"] * 6]
    result, lines = evaluate(ROWS, texts, "--samples", "6", "--batch_size", "12")  # two prompts at a time
    # 4 of 6 and 0 of 6 are right; the prompt in the middle has no score
    expected = {"accuracy": 1 / 3, "pass@1": 1 / 3, "pass@2": 7 / 15, "pass@4": 0.5, "pass@6": 0.5}
    expected |= {"examples": 2, "unscored": 1, "distinct": (5 + 1) / 2, "distinct_correct": (2 + 0) / 2}
    expected |= {"majority": 0.5, "measure": "math_match"}
    expected |= {"effective_correct": 1.7547654}  # of the one prompt with right answers: 14, 14, 21, 14
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    ends = {"pass@6_low": accuracy.interval([1, 0])[0], "majority_high": accuracy.interval([1, 0])[1]}
    ends |= {"accuracy_low": accuracy.interval([2 / 3, 0])[0]}  # prompts are independent, not their samples
    assert {name: result[name] for name in ends} == pytest.approx(ends)
    assert "pass@3" not in result
    assert [line["extracted"] for line in lines[:6]] == ["14", "14", "21", "15", None, "14"]
    assert [line["score"] for line in lines[:7]] == [1, 1, 1, 0, 0, 1, None]


def test_evaluate_reports_accuracy_by_column(evaluate, capsys):
    rows = [{**row, "level": level} for row, level in zip(ROWS, (1, 1, 2), strict=True)]
    result, _ = evaluate(rows, [["14"], ["1"], ["8"]], "--by", "level")
    assert result["accuracy[level=1]"] == 1 and result["accuracy[level=2]"] == 0  # the second row has no score
    assert (result["accuracy_low"], result["accuracy_high"]) == accuracy.interval([1, 0])
    with pytest.raises(SystemExit):
        evaluate(rows, [["14"], ["1"], ["8"]], "--by", "levle")
    assert "--by = 'levle'" in capsys.readouterr().err


def test_evaluate_says_null_where_nothing_counts_and_writes_all_or_nothing(evaluate, monkeypatch, tmp_path):
    wrong = [["8", "9"]] * 3
    result, _ = evaluate(ROWS, wrong, "--samples", "2")
    assert (result["pass@2"], result["distinct_correct"], result["effective_correct"]) == (0, 0, None)
    result, _ = evaluate(ROWS[1:2], wrong, "--samples", "2")
    assert {result[name] for name in ("accuracy", "pass@1", "pass@2", "distinct", "distinct_correct")} == {None}
    result, lines = evaluate(ROWS, [["14"], ["1"], ["7."]])
    assert result["accuracy"] == 1 and not any(name.startswith(("pass@", "distinct")) for name in result)
    assert lines[2]["extracted"] == "7"
    before = (tmp_path / "out.jsonl").read_text()
    monkeypatch.setattr(evaluation, "json", SimpleNamespace(dumps=lambda *args, **options: 1 / 0, loads=json.loads))
    with pytest.raises(ZeroDivisionError):
        evaluate(ROWS, [["14"], ["1"], ["8"]])
    assert (tmp_path / "out.jsonl").read_text() == before


def test_a_checkpoint_is_asked_as_its_run_asked_and_rewards_are_those_of_a_script(evaluate, asked, tmp_path, capsys):
    options = {"system_prompt": "be kind", "stop_strings": '["\\nQ:"]', "max_new_tokens": 4, "eval_data": "nowhere"}
    checkpoint = tmp_path / "checkpoint-000003"
    checkpoint.mkdir()
    state = {"config": options, "notes": {"rewards": ["judge"]}, "files": {}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    script = tmp_path / "train.py"
    (tmp_path / "neighbour_of_train.py").write_text("half = 0.5\n")
    script.write_text(
        "from neighbour_of_train import half\n"
        "def judge(prompts, completions, **rest):\n"
        "    return [len(text) / 2 if 'is 2' not in prompt else None for prompt, text in zip(prompts, completions)]\n"
        "REWARDS = ((judge, 1.0), (lambda completions: [half] * len(completions), 2.0))\n"
    )
    texts = [["14\nQ: 2"], ["7"], ["7"]]
    result, lines = evaluate(ROWS, texts, "--rewards", str(script), model=str(checkpoint))
    measured = {"measure": f"REWARDS of {script}: judge, lambda", "accuracy": 1 / 3, "reward": (2 + 1 + 1.5) / 3}
    measured |= {"reward_judge": 0.75, "reward_lambda": 0.5}
    assert {name: result[name] for name in measured} == measured
    assert [line["reward_judge"] for line in lines] == [1, None, 0.5]
    evaluate(ROWS, texts, "--system_prompt", "", model=str(checkpoint))
    for part in ("rewards of the run: judge", "'system_prompt': ''", "'max_new_tokens': 4", "'eval_data': "):
        assert part in evaluate.said
    with_system, without = asked
    assert len(with_system[0]) > len(without[0])
    (tmp_path / "single.py").write_text("REWARDS = (print, 1.0)\n")
    for name, said in (("no/such/script.py", "no such file"), ("single.py", "expected pairs of function and weight")):
        with pytest.raises(SystemExit):
            evaluate(ROWS, texts, "--rewards", str(tmp_path / name))
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["evaluate", "sample", "show_prompt", "plan_memory", "check_gpus"])
def test_help_comes_before_torch_is_imported(tool, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would fail
    monkeypatch.setattr(sys, "argv", [tool, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / f"{tool}.py"), run_name="__main__")
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--samples=-1", "--batch_size=0", "--out=no/such/x", "--out=."])
def test_evaluate_refuses_impossible_options_before_it_loads_a_model(capsys, option):
    with pytest.raises(SystemExit) as stopped:
        evaluation.main(["no/such/model", option])
    assert stopped.value.code == 2 and f"{option.replace('=', ' ')}: must be" in capsys.readouterr().err


@pytest.fixture
def plot():
    pytest.importorskip("matplotlib")
    return load_script("plot_run")


def write_run(folder, steps=12, tail="", **extra):
    folder.mkdir(parents=True)
    rows = [{"step": step, "reward": step / 10, "seconds": 1.5, "memory_gib": [1.0, 2.0]} for step in range(steps)]
    rows[-1]["eval_reward"] = 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row | extra) + "\n" for row in rows) + tail)
    return folder


def test_plot_samples_counts_replaced_groups_and_joins_seeds(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    tool = load_script("plot_samples")
    for seed, (name, extra) in itertools.product((0, 1), (("even", {}), ("dynamic", {"resampled": 1.0}))):
        folder = tmp_path / f"{name}-{seed}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"batch_size": 4, "group_size": 2}))
        rows = [{"step": step, "zero_std": 0.5, **extra} for step in range(1, 5)]
        evaluated = [{"step": step, "eval_reward": (step + seed) / 10} for step in (0, 4)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + evaluated))
    runs = sorted(map(str, tmp_path.iterdir()))
    tool.main([*runs, "--out", str(tmp_path / "new/samples.png"), "--after", "2"])
    table = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    # of two groups sampled by dynamic sampling, one was replaced, and half of the others are equal
    assert table[1][:5] == ["dynamic", "2", "64", "0.750 ± 0.000", "0.500 ± 0.000"]
    assert table[2][:5] == ["even", "2", "32", "0.500 ± 0.000", "0.500 ± 0.000"]
    # after 32 completions the one is at its end, the other in the middle
    assert table[0][-1] == "at 32" and (table[1][-1], table[2][-1]) == ("0.250 ± 0.071", "0.450 ± 0.071")
    assert (tmp_path / "new/samples.png").stat().st_size > 0
    with pytest.raises(ValueError, match=r"--after 4: .* ends at step 4"):
        tool.main([*runs, "--after", "4"])


def test_plot_overlays_runs_that_logged_different_things_and_reads_steps_cut_off_repeated_or_saved(
    plot, tmp_path, capsys
):
    first = write_run(tmp_path / "first", kl_ref=0.1)
    second = write_run(tmp_path / "second", steps=1, kl_old=0.2, memory_gib=[], host_memory_gib=3.0)
    plot.main([str(first), str(second), "--out", str(tmp_path / "new/plot.png")])
    width, height = (int.from_bytes((tmp_path / "new/plot.png").read_bytes()[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (1400, 700)
    assert "second: 1 steps, up to step 0" in capsys.readouterr().out
    # of several GPUs the fullest; the rolling mean looks back only
    rows = [{"step": 0, "memory_gib": [1.0, 3.0]}, {"step": 1, "memory_gib": []}, {"step": 2, "memory_gib": [2.0]}]
    assert [x.tolist() for x in plot.series(rows, "memory_gib")] == [[0, 2], [3.0, 2.0]]
    assert len(plot.series(rows, "entropy")[0]) == 0
    assert plot.rolling_mean(torch.arange(1.0, 8.0).numpy()).tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]
    figure, axis = plot.plt.subplots()
    lines = [{"step": 1, "reward": 1.0, "reward_std": 0.1, "reward_a": 0.2, "reward_b": 0.8, "eval_reward_a": 0.3}]
    plot.draw_panel(axis, {"reward": "Reward"}, {"run": lines})
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b"]  # a curve for each function
    plot.plt.close(figure)
    ends = [{"eval_reward": 0.5, "eval_reward_low": 0.25, "eval_reward_high": high} for high in (0.75, 1.0, None)]
    figure, axis = plot.plt.subplots()
    plot.draw_panel(axis, {"reward": "R"}, {"run": [{"step": i, "reward": 0.5} | each for i, each in enumerate(ends)]})
    (band,) = axis.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices.tolist()} == {
        (0, 0.25),
        (0, 0.75),
        (1, 0.25),
        (1, 1),
    }
    plot.plt.close(figure)
    cut = plot.read_metrics(write_run(tmp_path / "cut", tail='{"step": 12, "rew'))
    assert len(cut) == 12 and "last line is cut off" in capsys.readouterr().out
    # a line of a checkpoint belongs to its step, and one of a repeated step takes the place of the first
    tail = '{"step": 3, "reward": 7.0}\n{"step": 4, "seconds_save": 0.5}\n{"step": 11, "eval_reward": 0.7}\n'
    rows = plot.read_metrics(write_run(tmp_path / "saved", tail=tail))
    assert [row["step"] for row in rows] == list(range(12)) and rows[3]["reward"] == 7.0
    assert rows[4] == {"step": 4, "reward": 0.4, "seconds": 1.5, "memory_gib": [1.0, 2.0], "seconds_save": 0.5}
    assert (rows[11]["reward"], rows[11]["eval_reward"]) == (1.1, 0.7)


@pytest.mark.parametrize(("text", "error", "said"), [
    (None, FileNotFoundError, "does not exist"), (b"", ValueError, "no finished step"),
    (b'{"step": 0}\n{"step": "a", "reward": 0}\n', ValueError, "line 2 is not an object with a step"),
    (b'{"step": 0}\n\xff\xfe\n{"step": 1}\n', ValueError, "line 2 is not JSON"),
    (b'{"step": 7, "reward": "high"}\n', ValueError, "reward = 'high' in step 7"),
])  # fmt: skip
def test_plot_names_what_is_missing(plot, tmp_path, text, error, said):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_bytes(text)
    with pytest.raises(error, match=said):
        plot.main([str(tmp_path), "--out", str(tmp_path / "plot.png")])
    assert not (tmp_path / "plot.png").exists()


def evaluated(model: str, accuracy: float, distinct: float | None, **passes: float) -> str:
    result = {"model": model, "accuracy": accuracy, "distinct_correct": distinct}
    return json.dumps(result | {name.replace("_", "@"): value for name, value in passes.items()}) + "\n"


def test_evaluations_are_drawn_by_method_and_other_lines_are_refused_by_number(tmp_path, capsys):
    tool, file = load_script("plot_answers"), tmp_path / "answers.jsonl"
    runs = {"models/smollm2": 0.2, "runs/plain0/checkpoint-000120": 0.8, "/tmp/runs/plain12/checkpoint-000120": 0.9}
    file.write_text("".join(evaluated(run, value, 6.0, pass_1=value, pass_4=0.9) for run, value in runs.items()))
    found = tool.read([file])
    assert {name: len(results) for name, results in found.items()} == {"smollm2": 1, "plain": 2}
    assert tool.attempts(found["plain"][0]) == {1: 0.8, 4: 0.9}
    tool.main([str(file), "--out", str(tmp_path / "new" / "answers.png")])
    assert (tmp_path / "new" / "answers.png").stat().st_size > 10_000
    assert "smollm2, plain" in capsys.readouterr().out
    for line in ("{", '{"model": "a", "accuracy": 0.5}\n', evaluated("a", 0.5, None), "[1]\n"):
        file.write_text(evaluated("a", 0.5, 1.0, pass_1=0.5) + line)
        with pytest.raises(ValueError, match=r"line 2.*evaluate\.py"):
            tool.read([file])


HEADS, KV_HEADS = 4, 2
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=261, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64,
                         tie_word_embeddings=True, initializer_range=0.3)  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # values that bf16 holds exactly
    return model


@pytest.fixture(scope="module")
def tiny_gguf(tiny_llama, tmp_path_factory):
    """The tiny llama in a GGUF file: rotary halves interleaved as that format wants, a byte-level vocabulary of 261."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path, config = tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama.config
    writer = gguf.GGUFWriter(str(path), "llama")
    signs = bytes_to_unicode()
    newline, space = signs[ord("\n")], signs[ord(" ")]
    fields = dict(
        name="tiny", block_count=config.num_hidden_layers, context_length=config.max_position_embeddings,
        embedding_length=config.hidden_size, feed_forward_length=config.intermediate_size, head_count=HEADS,
        head_count_kv=KV_HEADS, rope_freq_base=10000.0, rope_dimension_count=config.hidden_size // HEADS,
        layer_norm_rms_eps=config.rms_norm_eps, vocab_size=config.vocab_size, tokenizer_model="gpt2",
        tokenizer_pre="smollm", chat_template=CHATML, add_bos_token=False, bos_token_id=1, eos_token_id=2,
        pad_token_id=2,  # the trap: padding that is also the end of an answer
        unk_token_id=0, token_types=[3] * 3 + [1] * 258,
        token_list=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *signs.values(), newline * 2, space * 2],
        token_merges=[f"{newline} {newline}", f"{space} {space}"],  # two: some versions misread a list of one
    )  # fmt: skip
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    for name, tensor in tiny_llama.model.state_dict(prefix="model.").items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if heads:
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_weights_and_config_survive_and_the_tokenizer_is_put_right(tiny_gguf, tiny_llama, tmp_path):
    converted = tmp_path / "converted"
    converter.main([str(tiny_gguf), str(converted)])
    assert AutoModelForCausalLM.from_pretrained(converted).dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equal_weights(model.state_dict(), tiny_llama.state_dict())
    ids, logits = torch.arange(3, 23)[None], (tiny_llama(torch.arange(3, 23)[None])).logits
    assert_rounded(model(ids).logits, logits, terms=2 * (4 * 32 + 2 * 48 + 20))  # layers of products; 20 positions
    config, generation = (json.loads((converted / f"{x}config.json").read_text()) for x in ("", "generation_"))
    assert "quantization_config" not in config
    for saved in (config, generation):
        assert [saved[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")] == [1, 2, 0]
    assert {"temperature", "top_p", "top_k", "repetition_penalty", "do_sample"}.isdisjoint(generation)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length) == ("<|im_end|>", "<|endoftext|>", 64)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "2+2=?"}], tokenize=False)
    assert text == "<|im_start|>user\n2+2=?<|im_end|>\n"
    assert tokenizer.encode("<|im_start|><|im_end|>", add_special_tokens=False) == [1, 2]
    # With the digits cut out first, the blank line is one token: the pair must not be split to join "\n4".
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("\n\n47", add_special_tokens=False)) == ["ĊĊ", "4", "7"]


def test_gguf_refuses_what_would_break_training_and_what_it_cannot_read(tiny_gguf, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    out = tmp_path / "out"
    for source, folder, options, said in [
        (tiny_gguf, out, ["--eos", "<|eot_id|>"], r"'<\|eot_id\|>' must be one"),
        (tiny_gguf, out, ["--pad", "<|im_end|>"], "must differ"), (tiny_gguf, tmp_path, [], "new or empty"),
        (tmp_path / "precious.txt", out, [], "no GGUF file"), ("models/missing.gguf", out, [], "neither"),
        ("pytest", out, [], "holds 0"),
    ]:  # fmt: skip
        with pytest.raises((ValueError, OSError), match=said):
            converter.main([str(source), str(folder), *options])
        assert not out.exists()


def test_layers_that_stay_are_spread_evenly_and_hold_both_ends():
    for keep, total in itertools.combinations_with_replacement(range(2, 20), 2):
        kept = dropping.kept_layers(total, keep)
        gaps = {b - a for a, b in itertools.pairwise(kept)}
        assert len(kept) == keep and kept[0] == 0 and kept[-1] == total - 1
        assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1
    for keep in (1, 6):
        with pytest.raises(ValueError, match=rf"keep = {keep}: must be from 2 to 5"):
            dropping.kept_layers(5, keep)


def test_a_model_with_fewer_layers_is_the_same_before_and_after_saving(tmp_path, capsys):
    teacher, folder = tiny_model("gemma2", num_hidden_layers=5, head_dim=8, sliding_window=4), tmp_path / "student"
    teacher.save_pretrained(tmp_path / "teacher")
    build_tokenizer().save_pretrained(tmp_path / "teacher")
    dropping.main([str(tmp_path / "teacher"), str(folder)])
    assert re.match(r"3 of 5 layers \(0, 2, 4\), 0\.0 of 0\.\d M parameters: ", capsys.readouterr().out)
    student, ids = AutoModelForCausalLM.from_pretrained(folder).eval(), torch.arange(5, 17)[None]
    assert student.config.num_hidden_layers == len(student.model.layers) == 3
    for place, number in enumerate((0, 2, 4)):
        assert_equal_weights(*(m.model.layers[i].state_dict() for m, i in ((student, place), (teacher, number))))
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    kinds = teacher.config.layer_types  # every layer has the window it had
    assert student.config.layer_types == [kinds[i] for i in (0, 2, 4)] and len(set(kinds)) == 2
    cut = copy.deepcopy(teacher)
    assert dropping.drop_layers(cut, 3) == [0, 2, 4]
    with torch.no_grad():
        logits = student(input_ids=ids, use_cache=False).logits
        assert not torch.allclose(teacher(input_ids=ids).logits, logits, atol=0.1)
        for model in (student, cut):  # over a cache, in which every layer has a place of its own
            begun = model(input_ids=ids[:, :8])
            rest = model(input_ids=ids[:, 8:], past_key_values=begun.past_key_values)
            terms = 3 * (4 * 32 + 2 * 64 + 12)  # layers of products; 12 positions
            assert_rounded(torch.cat([begun.logits, rest.logits], 1), logits, terms)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == build_tokenizer().get_vocab()


@pytest.mark.parametrize(("kind", "options", "problem"), [
    ("smollm3", dict(no_rope_layers=[1, 0, 0, 1], layer_types=["full_attention"] * 4), ""),  # a list by layer
    ("falcon_h1", dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8), ""),  # its list is derived, and all are alike
    ("jamba", dict(attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4), "cannot be loaded"),
    ("qwen3_moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[2]),
     "cannot be loaded"),
    ("olmo2", {}, "logits differ by"),
])  # fmt: skip
def test_dropping_layers_leaves_what_the_config_describes_or_nothing(tmp_path, monkeypatch, kind, options, problem):
    if kind == "olmo2":  # a difference that no weight shows
        load = dropping.models.load_frozen

        def load_other(folder, *args):
            model = load(folder, *args)
            model.model.norm.weight.data *= 1 + 0.5 * (".drop-" in folder)
            return model

        monkeypatch.setattr(dropping.models, "load_frozen", load_other)
    teacher, student = tiny_model(kind, **{"num_hidden_layers": 4, **options}), tmp_path / "student"
    teacher.save_pretrained(tmp_path / "teacher")
    build_tokenizer().save_pretrained(tmp_path / "teacher")
    arguments = [str(tmp_path / "teacher"), str(student), "--keep", "3"]
    if problem:
        with pytest.raises(ValueError, match=f"ForCausalLM: without some of its layers .*{problem}"):
            dropping.main(arguments)
        assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
        return
    dropping.main(arguments)
    dropping.drop_layers(teacher, 3)
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(student).eval()
        assert_rounded(again(input_ids=ids).logits, teacher(input_ids=ids).logits, 3 * (4 * 32 + 2 * 64 + 12))


def test_dropping_layers_overwrites_nothing_and_takes_llamas_only(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        dropping.main(["nowhere", str(tmp_path)])
    assert f"{tmp_path} exists already" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # broken off between weights and tokenizer: no half of a model is left
        patch.setattr(dropping.Path, "replace", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dropping.main(["toy", str(tmp_path / "student")])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*no list `layers`"):
        dropping.drop_layers(build_model("gpt2"), 2)


def test_every_fault_has_its_place_and_its_tests(capsys, monkeypatch):
    mutate = load_script("mutate")
    assert mutate.main(["--list"]) == 0
    number = len({fault.name for fault in mutate.MUTATIONS})
    assert len(capsys.readouterr().out.splitlines()) == number == len(mutate.MUTATIONS)
    for path in ("scripts/dev/mutate.py", "scripts/dev/README.md", "tests/README.md"):  # they say how many
        assert f" {number} " in (ROOT / path).read_text(encoding="utf-8")
    fault = mutate.MUTATIONS[0]
    for change in (dict(old="return"), dict(file="losses.py"), dict(first="loss"), dict(new="(")):
        monkeypatch.setattr(mutate, "MUTATIONS", [fault._replace(**change)])
        with pytest.raises(SystemExit, match="2"):
            mutate.main(["--list"])
        assert "kl-sign" in capsys.readouterr().err.splitlines()[-1]


def test_show_prompt_prints_the_tokens_of_a_row_with_the_date_of_the_run(tmp_path, capsys, monkeypatch):
    tokenizer = build_tokenizer()
    parts = "{{ strftime_now('%d') | int }} ", tokenizer.chat_template, "{% if think %}what{% endif %}"
    tokenizer.chat_template = "".join(parts)
    monkeypatch.setattr(show_prompt.sources, "load_tokenizer", lambda name: tokenizer)
    monkeypatch.setattr(loop_run.checkpoint, "is_complete", lambda folder: True)
    monkeypatch.setattr(loop_run.checkpoint, "notes", lambda folder: {"date": "2024-03-17"})
    (data := tmp_path / "rows.jsonl").write_text('{"prompt": "1", "level": 3}\n{"prompt": "2 + 2", "answer": 4}\n')
    show_prompt.main([str(data), "run", "--row", "1", "--chat_template_kwargs", '{"think": true}'])
    out = capsys.readouterr().out
    assert "row 1: 10 prompt tokens\n17 <im_start> user 2 + 2 <im_end>" in out
    assert "answer: '4'\ncolumns: {'level': None}" in out
    ids = [int(line.split()[0]) for line in out.splitlines() if line.startswith("  ")]
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "17" and tokenizer.convert_ids_to_tokens(ids)[-1] == "what"
    with pytest.raises(SystemExit):
        show_prompt.main([str(data), "run", "--row", "2"])
    assert "rows 0 to 1" in capsys.readouterr().err


def test_an_update_computes_fewer_tokens_where_prompts_are_shared(capsys):
    argv = ["tiny", "--device", "cpu", "--prompts", "2", "--prompt_tokens", "10", "--new_tokens", "3"]
    argv += ["--profile", "500"]  # all kernels: which of them take longest depends on the machine
    load_script("benchmark_update").main([*argv, "--micro_batch_tokens", "64", "512", "--repetitions", "1"])
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| tiny")]
    # 2 groups of 8 in 4 minibatches: each has two completions of both prompts
    each, once = 16 * 13, 16 * 3 + 4 * 2 * 10
    assert [row[1:5] for row in rows] == [
        ["each", "64", str(each), "4"], ["each", "512", str(each), "4"],
        ["once", "64", str(once), "4"], ["once", "512", str(once), "4"],
    ]  # fmt: skip
    assert all(float(row[i]) > 0 for row in rows for i in (5, 6)) and "aten::mm" in out


class MadeUp:
    """A task as reasoning-gym has them: question i comes from the seed + i, and many are equal."""

    def __init__(self, name, seed, size, **options):
        self.name, self.seed, self.size, self.options = name, seed, size, options

    def __getitem__(self, i):
        assert 0 <= i < self.size
        number = (self.seed + i) % 150
        return {"question": f"{self.name} {sorted(self.options.items())} {number}?", "answer": str(number)}


@pytest.fixture
def reasoning(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=MadeUp))
    return load_script("make_reasoning_gym")


def test_files_of_reasoning_gym_alternate_between_levels_and_share_no_question(reasoning, tmp_path):
    for name, options in {"a": [], "b": ["--examples", "60"], "c": ["--seed", "1"], "d": []}.items():
        given = ["--tasks", "chain_sum, spell_backward", "--levels", "1,3", "--examples", "30", "--test", "10"]
        reasoning.main(["--out", str(tmp_path / name), *given, *options])
    test, train = ([read_rows(tmp_path / name / f"{part}.jsonl") for name in "abcd"] for part in ("test", "train"))
    assert test[0] == test[1] == test[3] != test[2] and train[0] == train[3] != train[2]
    assert len(test[0]) == 4 * 10 and len(train[0]) == 4 * 30 and train[1][: 4 * 30] == train[0]
    assert len({row["question"] for row in test[1] + train[1]}) == 4 * (10 + 60)
    for rows in (test[0], train[0]):
        kinds = [(row["task"], row["level"]) for row in rows]
        assert kinds == [(task, level) for task in ("chain_sum", "spell_backward") for level in (1, 3)] * (
            len(rows) // 4
        )
        assert [row["task_level"] for row in rows] == [f"{task} {level}" for task, level in kinds]
    for row in test[0]:
        asked, how = row["question"].split("\n")
        options = reasoning.TASKS[row["task"]][1][row["level"] - 1]
        assert asked == f"{row['task']} {sorted(options.items())} {row['answer']}?"
        assert how == f"Answer with the {'number' if row['task'] == 'chain_sum' else 'word'} only."


@pytest.mark.parametrize(("options", "message"), [
    (["--tasks", "sums"], "--tasks=sums: must be names of chain_sum, .*add it to TASKS"),
    (["--tasks", ","], "--tasks"), (["--levels", "1,9"], "--levels=1,9: must be of 1, 2, 3, 4"),
    (["--examples", "0"], "--examples=0 must be at least 1"), (["--test", "-1"], "--test=-1"),
    (["--examples", "200"], "--examples=200: level 1 of chain_sum has hardly more than 130 .*ask for fewer"),
])  # fmt: skip
def test_options_of_reasoning_gym_that_cannot_be_met_are_refused(reasoning, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        reasoning.main(["--out", str(tmp_path), *options])


def test_rewards_agree_with_the_scorers_of_reasoning_gym():
    package = pytest.importorskip("reasoning_gym")
    script = load_script("make_reasoning_gym")
    for task, (_, levels) in script.TASKS.items():
        scorer = package.create_dataset(task, size=1)
        rows = script.make_rows([task], range(1, len(levels) + 1), "train", 0, 100, set())
        golds = [row["answer"] for row in rows]
        others = golds[1:] + golds[:1]
        pairs = zip(others, golds, strict=True)
        theirs = [scorer.score_answer(other, {"answer": gold, "metadata": {}}) for other, gold in pairs]
        assert rewards.math_match(golds, golds) == [1.0] * len(golds)
        assert rewards.math_match(others, golds) == [float(score == 1) for score in theirs]
