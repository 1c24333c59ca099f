"""The command-line tools that stand beside training: model conversion, the made tasks, the evaluation, the plot."""

import copy
import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import build_model, build_tokenizer, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("script", "package"), [("gguf_to_hf", "gguf"), ("plot_run", "matplotlib")])
def test_a_missing_package_is_named(monkeypatch, script, package):
    monkeypatch.setitem(sys.modules, package, None)  # what Python does for a package that is not installed
    with pytest.raises(ImportError, match=f"pip install {package}"):
        load_script(script)


# --- make_arithmetic.py ---


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def problem(row):
    left, sign, right = row["prompt"].split("What is ")[1].split("?")[0].split()
    return int(left), sign, int(right)


@pytest.fixture(scope="module")
def arithmetic():
    return load_script("make_arithmetic")


def test_arithmetic_answers_are_right_and_problems_differ(arithmetic, tmp_path):
    arithmetic.main([str(tmp_path), "--train", "300", "--test", "100"])
    train, test = read_rows(tmp_path / "train.jsonl"), read_rows(tmp_path / "test.jsonl")
    assert (len(train), len(test)) == (300, 100)
    keys = set()
    for row in train + test:
        left, sign, right = problem(row)
        assert 10 <= left <= 99 and 10 <= right <= 99
        answer = left + right if sign == "+" else left - right
        assert row["answer"] == str(answer) and answer >= 0
        keys.add((sign, frozenset((left, right))))  # a + b and b + a count as one
    assert len(keys) == 400
    additions = sum(problem(row)[1] == "+" for row in train)
    assert 110 < additions < 190


def test_arithmetic_seed_decides_and_train_size_keeps_the_test_set(arithmetic, tmp_path):
    for name, arguments in {"a": [], "b": [], "c": ["--seed", "1"], "d": ["--train", "7000"]}.items():
        arithmetic.main([str(tmp_path / name), *arguments])
    files = {name: (tmp_path / name / "test.jsonl").read_text() for name in "abcd"}
    assert files["a"] == files["b"] == files["d"] != files["c"]
    assert (tmp_path / "a/train.jsonl").read_text() == (tmp_path / "b/train.jsonl").read_text()


@pytest.mark.parametrize(("option", "value"), [("--train", "9000"), ("--test", "0")])
def test_arithmetic_refuses_impossible_sizes(arithmetic, tmp_path, option, value):
    with pytest.raises(ValueError, match=option):
        arithmetic.main([str(tmp_path), option, value])


# --- make_numbers.py ---


@pytest.fixture(scope="module")
def numbers():
    return load_script("make_numbers")


def right_numbers(question):
    """The numbers from 10 to 99 that a question asks for, worked out from its words alone."""
    [what] = re.findall(r"^Name a two-digit (.*)\.$", question)
    tests = []
    for pattern, test in [
        (r"^multiple of (\d+)", lambda n, d: n % d == 0),
        (r"greater than (\d+)", lambda n, a: n > a),
        (r"(?<!to )less than (\d+)", lambda n, b: n < b),
        (r"ends in the digit (\d)$", lambda n, d: str(n)[-1] == str(d)),
        (r"digits add up to (\d+)$", lambda n, s: int(str(n)[0]) + int(str(n)[1]) == s),
        (r"digits add up to more than (\d+)$", lambda n, s: int(str(n)[0]) + int(str(n)[1]) > s),
        (r"digits add up to less than (\d+)$", lambda n, s: int(str(n)[0]) + int(str(n)[1]) < s),
    ]:
        if match := re.search(pattern, what):
            tests.append((test, int(match[1])))
            what = what[: match.start()] + what[match.end() :]
    words = re.sub(r"\b(number|that|and|whose)\b", "", what).split()
    parity = {(): (0, 1), ("even",): (0,), ("odd",): (1,)}[tuple(words)]  # KeyError: a word that was not understood
    assert tests
    return [str(n) for n in range(10, 100) if n % 2 in parity and all(test(n, value) for test, value in tests)]


@pytest.fixture(scope="module")
def numbers_files(numbers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    numbers.main([str(folder)])
    return [read_rows(folder / name) for name in ("train.jsonl", "test.jsonl")]


def test_numbers_accept_exactly_the_right_answers_and_no_problem_comes_twice(numbers_files):
    train, test = numbers_files
    assert (len(train), len(test)) == (512, 64)
    questions = [row["prompt"][-1]["content"] for row in train + test]
    for row, question in zip(train + test, questions, strict=True):
        assert row["accepted"] == right_numbers(question), question
        assert 4 <= len(row["accepted"]) <= 90 and row["answer"] in row["accepted"]
    # neither in the same words nor in others
    assert len(set(questions)) == len({tuple(row["accepted"]) for row in train + test}) == 576
    kinds = ["multiple", "ends in", "add up", "even|odd", "number greater than [0-9]+ and"]
    counts = [sum(bool(re.search(kind, question)) for question in questions[512:]) for kind in kinds]
    assert all(12 <= count <= 13 for count in counts[:4]) and counts[4] == 64 - sum(counts[:3])  # parities name ranges


def test_numbers_are_asked_after_examples_with_right_answers(numbers_files):
    rows = numbers_files[0] + numbers_files[1]
    *turns, question = rows[0]["prompt"]
    assert [turn["role"] for turn in [*turns, question]] == ["user", "assistant"] * 5 + ["user"]
    examples = {turn["content"]: reply["content"] for turn, reply in zip(turns[::2], turns[1::2], strict=True)}
    assert len(examples) == 5 and all(answer in right_numbers(asked) for asked, answer in examples.items())
    asked = {tuple(right_numbers(question)) for question in examples}
    assert asked.isdisjoint(tuple(row["accepted"]) for row in rows)
    assert all(row["prompt"][:-1] == turns for row in rows)


def test_numbers_seed_decides_and_train_size_keeps_the_test_set(numbers, numbers_files):
    train, test = numbers_files
    longer = numbers.make_rows(64 + 3000, seed=0)
    assert longer[: 64 + 512] == test + train
    assert numbers.make_rows(64, seed=1) != test


@pytest.mark.parametrize(("option", "value"), [("--train", "9000"), ("--train", "0"), ("--test", "-1")])
def test_numbers_refuse_impossible_sizes(numbers, tmp_path, option, value):
    with pytest.raises(ValueError, match=option):
        numbers.main([str(tmp_path), option, value])


# --- evaluate.py ---


@pytest.fixture(scope="module")
def evaluation():
    return load_script("evaluate")


def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(evaluation):
    assert evaluation.pass_at_k(6, 4, 2) == pytest.approx(14 / 15)  # 1 of 15 pairs has both wrong ones
    for right in range(6):
        for k in range(1, 6):
            draws = list(itertools.combinations([True] * right + [False] * (5 - right), k))
            share = sum(map(any, draws)) / len(draws)
            assert evaluation.pass_at_k(5, right, k) == pytest.approx(share, abs=1e-12)
    assert evaluation.pass_at_k(2000, 1, 1000) == pytest.approx(0.5)  # counts beyond floating point
    for bad in [(5, 6, 1), (5, -1, 1), (5, 2, 6), (5, 2, 0)]:
        with pytest.raises(ValueError, match="k is 1 to the number of samples"):
            evaluation.pass_at_k(*bad)


def test_effective_number_of_answers(evaluation):
    assert evaluation.effective_number(["14"] * 3) == 1
    assert evaluation.effective_number(["14", "21", "28"] * 2) == pytest.approx(3)
    # 3/4 and 1/4: (4/3)^(3/4) * 4^(1/4)
    assert evaluation.effective_number(["14", "14", "21", "14"]) == pytest.approx(1.7547654)
    with pytest.raises(ValueError, match="at least one"):
        evaluation.effective_number([])


def evaluate_texts(evaluation, monkeypatch, capsys, tmp_path, rows, texts, *options):
    """What evaluate.py prints, and its --out lines, for a model that says the given texts, one list per prompt."""

    class Sampler:
        def __init__(self, *args, **options):
            pass

        def generate(self, prompts, group_size, prompt_numbers, **options):
            said = [text for number in prompt_numbers for text in texts[number]]
            assert len(said) == len(prompts) * group_size
            return SimpleNamespace(
                texts=lambda tokenizer: said, truncated=torch.zeros(len(said)), lengths=torch.ones(len(said))
            )

    monkeypatch.setattr(evaluation.models, "load_policy", lambda *args: (build_tokenizer(), None))
    monkeypatch.setattr(evaluation.models, "end_token_ids", lambda *args: [3])
    monkeypatch.setattr(evaluation.rollout, "Sampler", Sampler)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    evaluation.main(["model", "--data", str(tmp_path / "rows.jsonl"), "--device", "cpu", "--out", str(out), *options])
    return json.loads(capsys.readouterr().out.splitlines()[-1]), read_rows(out)


ROWS = [
    {"prompt": "what is 1 ?", "answer": "14", "accepted": ["14", "21", "28"]},
    {"prompt": "what is 2 ?", "answer": "see figure"},
    {"prompt": "what is 3 ?", "answer": "7"},
]
TEXTS = [["14", "14.", "The number is 21", "15", "no idea", "14"], ["1", "2", "3", "4", "5", "6"], ["8"] * 6]


def test_evaluate_reports_pass_at_k_and_diversity(evaluation, monkeypatch, capsys, tmp_path):
    options = ["--samples", "6", "--batch_size", "12"]  # two prompts at a time
    result, lines = evaluate_texts(evaluation, monkeypatch, capsys, tmp_path, ROWS, TEXTS, *options)
    # 4 of 6 and 0 of 6 are right; the prompt in the middle has no score
    expected = {"accuracy": 1 / 3, "pass@1": 1 / 3, "pass@2": 7 / 15, "pass@4": 0.5, "pass@6": 0.5}
    expected |= {"examples": 2, "unscored": 1, "distinct": (5 + 1) / 2, "distinct_correct": (2 + 0) / 2}
    expected |= {"effective_correct": 1.7547654}  # of the one prompt with right answers: 14, 14, 21, 14
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    assert [name for name in result if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert [line["extracted"] for line in lines[:6]] == ["14", "14", "21", "15", None, "14"]
    assert [line["score"] for line in lines[:7]] == [1, 1, 1, 0, 0, 1, None]


def test_evaluate_says_null_where_nothing_counts(evaluation, monkeypatch, capsys, tmp_path):
    wrong = [["8", "9"]] * 3
    result, _ = evaluate_texts(evaluation, monkeypatch, capsys, tmp_path, ROWS, wrong, "--samples", "2")
    assert (result["pass@2"], result["distinct_correct"], result["effective_correct"]) == (0, 0, None)
    result, _ = evaluate_texts(evaluation, monkeypatch, capsys, tmp_path, ROWS[1:2], wrong, "--samples", "2")
    assert {name: result[name] for name in ("accuracy", "pass@1", "pass@2", "distinct", "distinct_correct")} == {
        name: None for name in ("accuracy", "pass@1", "pass@2", "distinct", "distinct_correct")
    }
    result, lines = evaluate_texts(evaluation, monkeypatch, capsys, tmp_path, ROWS, [["14"], ["1"], ["7."]])
    assert result["accuracy"] == 1 and not any(name.startswith(("pass@", "distinct")) for name in result)
    assert lines[2]["extracted"] == "7"


@pytest.mark.parametrize(
    "option", ["--examples=-1", "--samples=-1", "--max_new_tokens=0", "--batch_size=0", "--out=no/such/x", "--out=."]
)
def test_evaluate_refuses_impossible_options_before_it_loads_a_model(evaluation, capsys, option):
    with pytest.raises(SystemExit) as stopped:
        evaluation.main(["no/such/model", option])
    name, _, value = option.partition("=")
    assert stopped.value.code == 2 and f"{name} {value}: must be" in capsys.readouterr().err


def test_evaluate_leaves_an_earlier_file_until_the_new_one_is_whole(evaluation, monkeypatch, capsys, tmp_path):
    (out := tmp_path / "out.jsonl").write_text("earlier")
    monkeypatch.setattr(evaluation.json, "dumps", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate_texts(evaluation, monkeypatch, capsys, tmp_path, ROWS, [["14"], ["1"], ["7"]])
    assert out.read_text() == "earlier"


# --- plot_run.py ---


@pytest.fixture(scope="module")
def plot():
    pytest.importorskip("matplotlib")
    return load_script("plot_run")


def write_run(folder, steps=12, tail="", **extra):
    folder.mkdir(parents=True)
    rows = [
        {"step": step, "reward": step / 10, "seconds": 1.5, "memory_gib": [1.0, 2.0]} | extra for step in range(steps)
    ]
    rows[-1:] = [row | {"eval_reward": 0.5} for row in rows[-1:]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def test_plot_overlays_runs_that_logged_different_things(plot, tmp_path, capsys):
    first = write_run(tmp_path / "first", kl_ref=0.1)
    second = write_run(tmp_path / "second", steps=1, kl_old=0.2, memory_gib=[], host_memory_gib=3.0)
    plot.main([str(first), str(second), "--out", str(tmp_path / "new/plot.png")])
    width, height = (int.from_bytes((tmp_path / "new/plot.png").read_bytes()[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (1400, 700)
    assert "second: 1 steps, up to step 0" in capsys.readouterr().out


def test_plot_skips_a_cut_off_last_line_and_says_so(plot, tmp_path, capsys):
    rows = plot.read_metrics(write_run(tmp_path / "run", tail='{"step": 12, "rew'))
    assert len(rows) == 12
    assert "last line is cut off" in capsys.readouterr().out


def test_plot_keeps_the_later_row_of_a_step_written_twice(plot, tmp_path):
    rows = plot.read_metrics(write_run(tmp_path / "run", tail='{"step": 3, "reward": 7.0}\n'))
    assert len(rows) == 12 and rows[3]["reward"] == 7.0


def test_plot_joins_a_step_and_its_evaluation(plot, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 20, "reward": 0.5}\n{"step": 20, "eval_reward": 0.7}\n')
    assert plot.read_metrics(tmp_path) == [{"step": 20, "reward": 0.5, "eval_reward": 0.7}]


def test_plot_takes_the_time_of_a_checkpoint_for_no_step(plot, tmp_path, capsys):
    tail = '{"step": 3, "seconds_save": 0.5}\n{"step": 11, "seconds_save": 0.25}\n'
    rows = plot.read_metrics(write_run(tmp_path / "run", tail=tail))
    assert [row["step"] for row in rows] == list(range(12))
    assert rows[3] == {"step": 3, "reward": 0.3, "seconds": 1.5, "memory_gib": [1.0, 2.0], "seconds_save": 0.5}
    steps, values = plot.series(rows, "seconds")
    assert len(steps) == 12 and set(values) == {1.5}
    plot.main([str(tmp_path / "run"), "--out", str(tmp_path / "plot.png")])
    assert "run: 12 steps, up to step 11" in capsys.readouterr().out


def test_plot_reads_the_fullest_gpu_and_only_the_steps_that_logged(plot):
    rows = [{"step": 0, "memory_gib": [1.0, 3.0]}, {"step": 1, "memory_gib": []}, {"step": 2, "memory_gib": [2.0]}]
    steps, values = plot.series(rows, "memory_gib")
    assert steps.tolist() == [0, 2] and values.tolist() == [3.0, 2.0]
    assert len(plot.series(rows, "entropy")[0]) == 0


def test_plot_rolling_mean_looks_back_only(plot):
    values = torch.arange(1.0, 8.0).numpy()
    assert plot.rolling_mean(values).tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]


def test_plot_names_what_is_missing(plot, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl does not exist"):
        plot.main([str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no finished step"):
        plot.main([str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 0\n{"step": 1}\n')
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        plot.main([str(tmp_path)])
    for line in ('{"reward": 0}', '{"step": "a", "reward": 0}', "[1]"):
        (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n' + line + "\n")
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not an object with a step"):
            plot.main([str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n\xff\xfe\n{"step": 1}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        plot.main([str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "reward": "high"}\n')
    with pytest.raises(ValueError, match="reward = 'high' in step 7: metrics are numbers"):
        plot.main([str(tmp_path), "--out", str(tmp_path / "plot.png")])
    assert not (tmp_path / "plot.png").exists()


# --- gguf_to_hf.py ---

HEADS, KV_HEADS, CHATML = (
    4,
    2,
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}",
)


@pytest.fixture(scope="module")
def converter():
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    return load_script("gguf_to_hf")


@pytest.fixture(scope="module")
def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # values that bf16 holds exactly
    return model


@pytest.fixture(scope="module")
def tiny_gguf(converter, tiny_llama, tmp_path_factory):
    """The tiny llama in a GGUF file: rotary halves interleaved as that format wants, a byte-level vocabulary of 261."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = tiny_llama.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    newline, space = bytes_to_unicode()[ord("\n")], bytes_to_unicode()[ord(" ")]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*special, *bytes_to_unicode().values(), newline * 2, space * 2])
    writer.add_token_types([3] * 3 + [1] * 258)
    writer.add_token_merges([f"{newline} {newline}", f"{space} {space}"])  # two: some versions misread a list of one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)  # the trap: padding that is also the end of an answer
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers": "blk",
    }
    for name, tensor in tiny_llama.model.state_dict(prefix="model.").items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if heads:
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(converter, tiny_gguf):
    folder = tiny_gguf.parent / "converted"
    converter.main([str(tiny_gguf), str(folder)])
    return folder


def test_gguf_weights_config_and_logits_survive(converted, tiny_llama):
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(converted).dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(3, 23)[None]
    torch.testing.assert_close(model(ids).logits, tiny_llama(ids).logits, atol=0, rtol=1e-6)
    config = json.loads((converted / "config.json").read_text())
    generation = json.loads((converted / "generation_config.json").read_text())
    assert "quantization_config" not in config
    for saved in (config, generation):
        assert [saved[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")] == [1, 2, 0]
    assert {"temperature", "top_p", "top_k", "repetition_penalty", "do_sample"}.isdisjoint(generation)


def test_gguf_tokenizer_is_put_right(converted):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length) == ("<|im_end|>", "<|endoftext|>", 64)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "2+2=?"}], tokenize=False)
    assert text == "<|im_start|>user\n2+2=?<|im_end|>\n"
    assert tokenizer.encode("<|im_start|><|im_end|>", add_special_tokens=False) == [1, 2]
    # With the digits cut out first, the blank line is one token: the pair must not be split to join "\n4".
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("\n\n47", add_special_tokens=False)) == ["ĊĊ", "4", "7"]


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--eos", "<|eot_id|>"], "--eos '<|eot_id|>' must be one token"), (["--pad", "<|im_end|>"], "must differ")],
)
def test_gguf_refuses_tokens_that_would_break_training(converter, tiny_gguf, tmp_path, options, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        converter.main([str(tiny_gguf), str(tmp_path / "out"), *options])


def test_gguf_refuses_a_full_folder_and_an_unknown_source(converter, tiny_gguf, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="new or empty"):
        converter.main([str(tiny_gguf), str(tmp_path)])
    with pytest.raises(FileExistsError, match="new or empty"):
        converter.main([str(tiny_gguf), str(tmp_path / "precious.txt")])
    for content in (b"", b"<html>"):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.gguf starts with b'.*it is no GGUF file"):
            converter.main([str(tmp_path / "bad.gguf"), str(tmp_path / "out")])
    with pytest.raises(FileNotFoundError, match="neither a file nor an installed package"):
        converter.find_gguf("no-such-package-here")
    with pytest.raises(FileNotFoundError, match=r"holds 0 \.gguf files"):
        converter.find_gguf("pytest")
    with pytest.raises(FileNotFoundError, match="neither"):
        converter.find_gguf("models/missing.gguf")


# ---- plot_answers.py ----


def evaluated(model: str, accuracy: float, distinct: float | None, **passes: float) -> str:
    result = {"model": model, "accuracy": accuracy, "distinct_correct": distinct}
    return json.dumps(result | {name.replace("_", "@"): value for name, value in passes.items()}) + "\n"


def test_evaluations_are_drawn_by_method(tmp_path, capsys):
    tool, file = load_script("plot_answers"), tmp_path / "answers.jsonl"
    lines = [
        evaluated("models/smollm2", 0.2, 6.0, pass_1=0.2, pass_4=0.5),
        evaluated("runs/plain0/checkpoint-000120", 0.8, 2.0, pass_1=0.8, pass_4=0.9),
        evaluated("/tmp/runs/plain12/checkpoint-000120", 0.9, 3.0, pass_1=0.9, pass_4=0.9),
    ]
    file.write_text("".join(lines))
    found = tool.read([file])
    assert {name: len(results) for name, results in found.items()} == {"smollm2": 1, "plain": 2}
    assert tool.attempts(found["plain"][0]) == {1: 0.8, 4: 0.9}
    tool.main([str(file), "--out", str(tmp_path / "new" / "answers.png")])
    assert (tmp_path / "new" / "answers.png").stat().st_size > 10_000
    assert "written: smollm2, plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["{", '{"model": "a", "accuracy": 0.5}\n', evaluated("a", 0.5, None), "[1]\n"], ids=str
)
def test_other_lines_are_refused_by_number(tmp_path, line):
    file = tmp_path / "answers.jsonl"
    file.write_text(evaluated("a", 0.5, 1.0, pass_1=0.5) + line)
    with pytest.raises(ValueError, match=r"line 2.*expected a line of evaluate\.py"):
        load_script("plot_answers").read([file])


# --- drop_layers.py ---


@pytest.fixture(scope="module")
def dropping():
    return load_script("drop_layers")


@pytest.mark.parametrize(("total", "keep", "expected"), [
    (12, 6, [0, 2, 4, 7, 9, 11]), (5, 3, [0, 2, 4]), (30, 10, [0, 3, 6, 10, 13, 16, 19, 23, 26, 29]), (4, 2, [0, 3]),
])  # fmt: skip
def test_layers_that_stay_are_spread_evenly(dropping, total, keep, expected):
    assert dropping.kept_layers(total, keep) == expected


def test_layers_that_stay_are_different_and_hold_both_ends(dropping):
    for total in range(2, 41):
        for keep in range(2, total + 1):
            kept = dropping.kept_layers(total, keep)
            gaps = {b - a for a, b in itertools.pairwise(kept)}
            assert len(kept) == keep and kept[0] == 0 and kept[-1] == total - 1
            assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("keep", [1, 0, -3, 6])
def test_a_number_of_layers_that_cannot_stay_is_refused(dropping, keep):
    with pytest.raises(ValueError, match=rf"keep = {keep}: must be from 2 to 5"):
        dropping.kept_layers(5, keep)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_model_with_fewer_layers_is_the_same_before_and_after_saving(dropping, tmp_path, kind, capsys):
    options = dict(head_dim=8, sliding_window=4) if kind == "gemma2" else {}
    teacher, folder = tiny_model(kind, num_hidden_layers=5, **options), tmp_path / "student"
    teacher.save_pretrained(tmp_path / "teacher")
    build_tokenizer().save_pretrained(tmp_path / "teacher")
    dropping.main([str(tmp_path / "teacher"), str(folder)])
    assert re.match(r"3 of 5 layers \(0, 2, 4\), 0\.0 of 0\.\d M parameters: ", capsys.readouterr().out)
    student, ids = AutoModelForCausalLM.from_pretrained(folder).eval(), torch.arange(5, 17)[None]
    assert student.config.num_hidden_layers == len(student.model.layers) == 3
    for place, number in enumerate((0, 2, 4)):
        own, other = (
            model.state_dict(prefix="") for model in (student.model.layers[place], teacher.model.layers[number])
        )
        assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    if kind == "gemma2":  # every layer has the window it had
        kinds = teacher.config.layer_types
        assert student.config.layer_types == [kinds[i] for i in (0, 2, 4)] and len(set(kinds)) == 2
    with torch.no_grad():
        logits = student(input_ids=ids, use_cache=False).logits
        cut = copy.deepcopy(teacher)
        assert dropping.drop_layers(cut, 3) == [0, 2, 4]
        torch.testing.assert_close(cut(input_ids=ids, use_cache=False).logits, logits, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(teacher(input_ids=ids).logits, logits, atol=0.1)
        # over a cache, in which every layer has a place of its own
        tokens = [model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=cache, eos_token_id=None)
                  for model in (student, cut) for cache in (True, False)]  # fmt: skip
        assert all(torch.equal(row, tokens[0]) for row in tokens) and tokens[0].shape == (1, 18)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == build_tokenizer().get_vocab()


def test_dropping_layers_overwrites_nothing_and_takes_llamas_only(dropping, tmp_path, capsys):
    with pytest.raises(SystemExit):
        dropping.main(["nowhere", str(tmp_path)])
    assert "exists already: choose another folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no such folder"):
        dropping.main(["./nowhere", str(tmp_path / "student")])
    with pytest.MonkeyPatch.context() as patch:  # broken off between weights and tokenizer: no half of a model is left
        patch.setattr(dropping.Path, "replace", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dropping.main(["toy", str(tmp_path / "student")])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel: its decoder has no list `layers`"):
        dropping.drop_layers(build_model("gpt2"), 2)
