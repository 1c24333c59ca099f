"""Self-distillation: a teacher that reads more than the student, and that may be the first or the present student."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bounds import rounding
from comparing import TERMS, assert_close, comparable
from conftest import ROOT, SCRIPTS, assert_equal_weights, build_tokenizer, load_script, read_lines, two_replicas
from safetensors.torch import load_file
from test_logprobs import ROUNDINGS
from test_plan import planned
from test_scripts import refused, stopped
from test_teacher_server import Server

from common.base import settings
from common.distill import distillation, teachers
from common.generation import batches
from common.model import logprobs, models
from common.tasks import data

parity = partial(pytest.param, marks=pytest.mark.parity)
CPU = torch.device("cpu")
PROMPT = "{prompt} what is {answer} - 0 = {answer} ?"
PRIVILEGED = dict(teacher_prompt=PROMPT)
ITSELF = dict(teacher_model="student")
FOLLOWING = dict(ITSELF, **PRIVILEGED, teacher_refresh=2)
COMPLETIONS = [[30, 31, 3], [32], [33, 34, 35, 36, 3], [37, 38], [10, 3], [11, 12, 13]]  # three of each prompt


def rows_file(folder: Path, rows: list[dict]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(folder: Path, rows: list[dict], template: str, most: int = 99, tokenizer=None, **options) -> list:
    tokenizer = tokenizer or build_tokenizer()
    return data.load_examples(str(rows_file(folder, rows)), tokenizer, 99, need_answer=False, teacher_prompt=template,
                              max_teacher_prompt_tokens=most, **options)  # fmt: skip


def texts(examples: list) -> list[str]:
    return [build_tokenizer().decode(example.teacher_ids) for example in examples]


# what the teacher reads


def test_columns_stand_in_the_users_turn_and_all_else_is_the_students(tmp_path):
    chat = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"},
            {"role": "user", "content": "what is 3"}]  # fmt: skip
    rows = [{"prompt": "1 + 2", "answer": 3, "hint": "4 - 1"}, {"prompt": chat, "answer": "3", "hint": 5}]
    examples = loaded(tmp_path, rows, "{hint} = {answer} {prompt} ? {answer}", system_prompt="user")
    assert texts(examples) == [
        "<im_start> system user <im_end> <im_start> user 4 - 1 = 3 1 + 2 ? 3 <im_end> <im_start> assistant".replace(
            "system", "<unk>"
        ),
        "<im_start> <unk> user <im_end> <im_start> user 1 + 1 <im_end> <im_start> assistant 2 <im_end> "
        "<im_start> user 5 = 3 what is 3 ? 3 <im_end> <im_start> assistant",
    ]
    plain = loaded(tmp_path, rows, "", system_prompt="user")
    assert [e.prompt_ids for e in plain] == [e.prompt_ids for e in examples]
    assert all(e.privileged_ids is None and e.teacher_ids is e.prompt_ids for e in plain)


def test_text_without_a_template_is_replaced_as_a_whole_and_braces_may_be_text(tmp_path):
    (example,) = loaded(
        tmp_path, [{"question": "1", "answer": "2"}], "{question} = {answer}", apply_chat_template=False
    )
    assert texts([example]) == ["1 = 2"]
    assert settings.prompt_parts("{{a}} {prompt} b") == [("{", None), ("a}", None), (" ", "prompt"), (" b", None)]


@pytest.mark.parametrize(("template", "row", "message"), [
    ("{prompt} {hunt}", {}, r"teacher_prompt names hunt: the columns of .* are prompt, hint, answer; correct the name"),
    ("{prompt} {hint}", {"hint": " "}, "row 1: teacher_prompt needs the column `hint`, which is missing or empty;"),
    ("{prompt} {answer}", {}, "row 1: teacher_prompt needs the column `answer`, which is missing or empty"),
    ("{prompt} {hint}", {"hint": [1]}, r"row 1: .* the column `hint`, which is \[1\], expected text or a number"),
    ("{prompt} {answer", {"answer": "1"}, "teacher_prompt = .*: expected '}' before end of string; write names"),
    ("{prompt!r}", {}, "must hold names of columns in braces, and nothing else in these"),
    ("now answer", {}, "must hold names of columns in braces"),
    ("{prompt} <think>", {}, "row 0: the prompt opens the reply with '', that of the teacher with '<think>'"),
])  # fmt: skip
def test_what_cannot_be_written_is_an_error_with_its_row(tmp_path, template, row, message):
    rows = [{"prompt": "1 + 2", "answer": "3", "hint": "3"}, {"prompt": "1 + 2", **row}]
    if "names hunt" in message:
        rows = [{"prompt": "1", "hint": "2", "answer": "3"}]
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path, rows, template, apply_chat_template="think" not in template)


def test_a_prompt_that_is_templated_already_has_no_place_for_columns(tmp_path):
    text = "<im_start> user 1 + 2 <im_end> <im_start> assistant "
    with pytest.raises(ValueError, match=r"row 0: .* this prompt is templated already; give prompts as text or chats"):
        loaded(tmp_path, [{"prompt": text, "answer": "3"}], PROMPT)
    with pytest.raises(ValueError, match="this prompt has none"):
        loaded(tmp_path, [{"prompt": [{"role": "tool", "content": "1"}], "answer": "3"}], PROMPT)


def test_rows_in_which_the_teacher_reads_too_much_are_dropped_and_counted(tmp_path, capsys):
    rows = [{"prompt": "1", "answer": "3 " * n} for n in (1, 20)]
    assert [e.index for e in loaded(tmp_path, rows, PROMPT, most=20)] == [0]
    assert "dropped 1 of 2 rows whose prompts for the teacher are longer than 20 tokens" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"so none is left; raise it to \d+, the shortest, or more"):
        loaded(tmp_path, rows, PROMPT, most=5)


# what it says


def examples_of(tmp_path: Path) -> list:
    rows = [{"prompt": "1 + 2", "answer": "3"}, {"prompt": "what is 5 + 6 = ?", "answer": "1 1 . . . ."}]
    return loaded(tmp_path, rows, PROMPT)


def batch_of(examples: list) -> batches.RolloutBatch:
    """Three completions of each prompt."""
    tokens = torch.full((6, 5), -1)
    for i, ids in enumerate(COMPLETIONS):
        tokens[i, : len(ids)] = torch.tensor(ids)
    return batches.assemble([e.prompt_ids for e in examples], 3, tokens, torch.zeros(tokens.shape), 0, [3])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("loss", ["opd", "reverse_kl"])
@pytest.mark.parametrize("cut", [1000, 30, 1])
def test_it_says_what_a_plain_forward_pass_says(tmp_path, model_folders, monkeypatch, loss, packed, cut):
    monkeypatch.setattr(logprobs.LogProbs, "packs", lambda self, longest: packed)
    examples = examples_of(tmp_path)
    teacher = teachers.LocalTeacher(str(model_folders["teacher"]), [CPU], "fp32", temperature=1.0, compile=False,
                                    tokens_only=loss == "opd")  # fmt: skip
    (micros,) = batch_of(examples).minibatches(1, cut, packed)
    teachers.fill(teacher, micros, examples, cut)
    student = models.load_frozen(str(model_folders["qwen2"]), CPU, "fp32")
    seen = 0
    for micro in micros:
        if loss == "opd":
            found_mC = micro.teacher.token_logps
        else:
            judge = distillation.Divergences(student, 1.0, False, 1.0, 64, teacher.head)
            values = judge(*micro.tokens[:4], micro.completion_mask.float(), *micro.teacher.tensors, group=micro.group)
            found_mC = values[1][..., judge.values.index("teacher_logps")]
        for row, completion, logps in zip(micro.rows.tolist(), micro.completions, found_mC, strict=True):
            prompt = examples[row // 3].privileged_ids
            with torch.no_grad():
                logits = teacher.model(torch.tensor([[*prompt, *completion]])).logits[0]
            expected = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, completion[:, None])[:, 0]
            assert completion.tolist() == COMPLETIONS[row]
            assert (logps[: len(completion)] - expected).abs().max() <= rounding(ROUNDINGS, 10.0)
            seen += 1
    assert seen == 6


def test_without_a_template_the_teacher_is_given_the_very_micro_batches(tmp_path):
    examples = [dataclasses.replace(e, privileged_ids=None) for e in examples_of(tmp_path)]
    (micros,) = batch_of(examples).minibatches(1, 30, True)
    given = []
    teachers.fill(SimpleNamespace(fill=lambda micros, tokens: given.extend(micros)), micros, examples, 30)
    assert all(one is other for one, other in zip(micros, given, strict=True))


@pytest.mark.services
def test_a_server_is_sent_what_the_teacher_reads(tmp_path, model_folders):
    examples, server = examples_of(tmp_path), Server(model_folders["teacher"])
    try:
        client = server.client(top_k=5, workers=1)
        (local,) = batch_of(examples).minibatches(1, 1000, True)
        (remote,) = batch_of(examples).minibatches(1, 1000, True)
        teacher = teachers.LocalTeacher(str(model_folders["teacher"]), [CPU], "fp32", temperature=client.temperature,
                                        compile=False, tokens_only=True)  # fmt: skip
        teachers.fill(teacher, local, examples, 1000)
        teachers.fill(client, remote, examples, 1000)
    finally:
        server.stop()
    difference = (remote[0].teacher.token_logps - local[0].teacher.token_logps) * local[0].completion_mask
    assert difference.abs().max() <= rounding(ROUNDINGS, 10.0)


def test_the_plan_counts_what_the_teacher_reads(model_folders):
    def bytes_of(**options):
        folder = model_folders["qwen2"]
        plan = planned("gkd/gkd.py", student_model=folder, max_prompt_tokens=64, compile=False, **options)
        return {phase: plan.gpus[0].parts(phase).total() for phase in ("teacher", "rollout")}, plan.gpus[0].always

    plain, same = bytes_of(teacher_model=model_folders["qwen2"]), bytes_of(**ITSELF)
    assert plain == same  # a teacher that begins as the student has its size
    longer = bytes_of(**ITSELF, **PRIVILEGED, max_teacher_prompt_tokens=4096)
    assert longer[0]["teacher"] > same[0]["teacher"] and longer[0]["rollout"] == same[0]["rollout"]
    assert bytes_of(**ITSELF, **PRIVILEGED, max_teacher_prompt_tokens=64) == same


# which weights it has


@pytest.mark.parametrize(("options", "message"), [
    (dict(teacher_refresh=2), "teacher_refresh = 2, teacher_model = 'toy-teacher': the student is copied into a"),
    (dict(ITSELF, teacher_refresh=2, lora_rank=4), "teacher_refresh = 2, lora_rank = 4: with adapters the teacher"),
    (dict(ITSELF, teacher_refresh=2, seq_kd=True, lmbda=0.5), "teacher_refresh = 2, seq_kd = True: the teacher's own"),
    (dict(ITSELF, teacher_url="http://127.0.0.1:1"), "a server has a model of its own"),
    (dict(teacher_prompt="no column"), "teacher_prompt = 'no column': must hold names of columns"),
    (dict(max_teacher_prompt_tokens=0), "max_teacher_prompt_tokens = 0: must be"),
], ids=str)  # fmt: skip
def test_what_cannot_be_is_refused(capsys, options, message):
    options = {"teacher_model": "toy-teacher"} | options
    assert message in refused(capsys, "gkd", **options)


def test_an_unknown_column_ends_the_run_before_its_first_step(launcher, tmp_path):
    said = stopped(launcher, "gkd", tmp_path, teacher_prompt="{prompt} {solution}")
    assert "teacher_prompt names solution: the columns of" in said and "are prompt, answer" in said


@pytest.mark.parametrize("loss", ["reverse_kl", parity("forward_kl"), parity("jsd"), "opd"])
def test_from_the_present_policy_there_is_nothing_to_learn_that_it_does_not_read(launcher, loss):
    run = launcher.trained("gkd", **ITSELF, teacher_refresh=1, loss=loss, steps=3, num_minibatches=1)
    for line in run.steps:
        assert abs(line["reverse_kl"]) < rounding(TERMS) and abs(line["loss"]) < rounding(TERMS)
        assert line["grad_norm"] < rounding(TERMS, magnitude=8)  # of the logits
    frozen = launcher.trained("gkd", **ITSELF, **PRIVILEGED, teacher_refresh=1, loss=loss, steps=3, num_minibatches=1)
    assert all(line["reverse_kl"] > 1e-3 and line["grad_norm"] > 1e-3 for line in frozen.steps)


def test_the_first_policy_stays_and_the_present_one_follows(launcher, tmp_path):
    """Of an example's completion, under the teacher: what a model with its weights says."""
    start = launcher.trained("gkd", **ITSELF, **PRIVILEGED, steps=5)
    assert not list(start.out_dir.glob("checkpoint-*/reference"))
    following = launcher.trained("gkd", **FOLLOWING, steps=5)
    # at step 4 the student was copied, at step 5 it moved on
    saved = load_file(following.out_dir / "checkpoint-000005" / "reference" / "model.safetensors")
    assert_equal_weights(saved, following.weights(4))
    assert any(not torch.equal(saved[name], weight) for name, weight in following.weights(5).items())
    assert comparable(start.lines)[:3] == comparable(following.lines)[:3]  # up to the first copy
    assert comparable(start.lines)[-1] != comparable(following.lines)[-1]


@pytest.mark.parametrize(("refresh", "loss"), [
    (3, "jsd"), parity(1, "reverse_kl"), parity(3, "opd"), parity(0, "forward_kl"),
])  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one(launcher, tmp_path, refresh, loss):
    options = dict(ITSELF, **PRIVILEGED, teacher_refresh=refresh, loss=loss, save_every=4)
    straight = launcher.trained("gkd", **options, steps=8)
    launcher.run("gkd", tmp_path, **options, steps=4).succeeded()
    run = launcher.run("gkd_multigpu", tmp_path, **options, steps=8).succeeded()
    assert "changed since the checkpoint" in run.output
    assert_equal_weights(run.weights(), straight.weights())
    left_out = [line for line in comparable(run.lines) if line not in comparable(straight.lines)]
    assert all(line["step"] == 4 and "eval_reward" in line for line in left_out)  # at its end the first run evaluates


@pytest.mark.parity
def test_a_run_that_begins_to_follow_or_stops_is_not_refused(launcher, tmp_path):
    for steps, refresh in ((2, 0), (4, 2), (6, 0)):
        options = dict(ITSELF, **PRIVILEGED, teacher_refresh=refresh)
        run = launcher.run("gkd", tmp_path, **options, steps=steps).succeeded()
    assert [path.parent.name for path in run.out_dir.glob("checkpoint-*/reference")] == ["checkpoint-000004"]


@pytest.mark.parity
@pytest.mark.parametrize("loss", ["reverse_kl", "opd"])
def test_ranks_replicas_and_offloading_make_no_difference(launcher, tmp_path, loss):
    options = dict(FOLLOWING, loss=loss, steps=4)
    one = launcher.trained("gkd", **options)
    assert_close(launcher.run("gkd_ddp", tmp_path / "ranks", 2, **options).succeeded(), one)
    assert_close(launcher.run("gkd_multigpu", tmp_path / "two", prepare=two_replicas, **options).succeeded(), one)
    offloaded = launcher.run("gkd", tmp_path / "offloaded", **options, param_offload=True).succeeded()
    assert_equal_weights(offloaded.weights(), one.weights())
    for step in (2, 4):
        assert_equal_weights(*(load_file(run.out_dir / f"checkpoint-{step:06}" / "reference" / "model.safetensors")
                               for run in (offloaded, one)))  # fmt: skip


@pytest.mark.parity
def test_shards_are_gathered_into_the_teacher(launcher, tmp_path):
    options = dict(FOLLOWING, steps=4, micro_batch_tokens=60)
    run = launcher.run("gkd_ddp", tmp_path, 2, **options, fsdp=True).succeeded()
    assert_close(run, launcher.trained("gkd", **options))


@pytest.mark.parity
def test_with_adapters_the_teacher_is_the_starting_model(launcher, tmp_path):
    options = dict(ITSELF, **PRIVILEGED, lora_rank=4)
    run = launcher.run("gkd", tmp_path, **options, steps=2).succeeded()
    assert run.steps[0]["reverse_kl"] > 1e-3
    launcher.run("gkd", tmp_path, **options, steps=3).succeeded()
    (plain,) = launcher.run("gkd", tmp_path / "plain", **ITSELF, lora_rank=4, steps=1).succeeded().steps
    assert abs(plain["reverse_kl"]) < rounding(TERMS)


@pytest.mark.parity
def test_its_own_answers_come_from_what_it_reads(launcher, tmp_path):
    options = dict(lmbda=0, seq_kd=True, steps=2)
    plain, told = (launcher.run("gkd", tmp_path / name, **options, **more).succeeded()
                   for name, more in (("plain", {}), ("told", PRIVILEGED)))  # fmt: skip
    one, other = (read_lines(run.out_dir / "teacher_answers-rank0.jsonl") for run in (plain, told))
    assert one[0]["prompts"] != other[0]["prompts"]
    assert [row["completion_ids"] for row in one[1:]] != [row["completion_ids"] for row in other[1:]]


def test_a_student_with_more_tokens_is_copied_as_far_as_the_teacher_goes(model_folders):
    teacher = teachers.LocalTeacher(str(model_folders["qwen2"]), [CPU], "fp32", temperature=1.0, compile=False,
                                    refresh_every=2)  # fmt: skip
    student = models.load_frozen(str(model_folders["teacher"]), CPU, "fp32")
    student.resize_token_embeddings(70)
    teacher.head.on(torch.device("meta"))
    teacher.refresh(student, 1)
    assert torch.device("meta") in teacher.head._copies
    teacher.refresh(student, 2)
    assert list(teacher.head._copies) == [CPU]
    for name, weight in teacher.model.named_parameters():
        assert torch.equal(weight, student.state_dict()[name][: len(weight)])
    assert torch.equal(teacher.head.on(CPU)[0], student.get_output_embeddings().weight[:64])
    assert teacher.weights == teachers.FOLLOWS and teacher.to_save is teacher.model


# whether it helps


@pytest.mark.parity  # the slowest
def test_a_policy_learns_from_what_it_would_do_with_the_answer(launcher, tmp_path):
    model = load_script(ROOT / "scripts/dev/hint_policy.py").write(tmp_path / "model")
    own = dict(train_data="toy", eval_data="toy", student_model=model, micro_batch_tokens=0, group_size=4,
               batch_size=16, num_minibatches=1, learning_rate=1e-3, eval_every=40, eval_examples=128, steps=40,
               save_every=40, sample_every=0, loss="forward_kl", **ITSELF)  # fmt: skip
    told = launcher.run(SCRIPTS["gkd"], tmp_path / "told", teacher_prompt="{prompt} = {answer}", **own).succeeded()
    before, after = (line["eval_reward"] for line in told.lines if "eval_reward" in line)
    assert before < 0.05 and after > 0.6
