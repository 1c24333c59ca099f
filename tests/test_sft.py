"""Supervised fine-tuning: cross-entropy without logits in memory, and the scripts gkd/sft.py and sft_ddp.py."""

import copy
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_distillation
import torch
from bounds import assert_rounded, rounding
from comparing import TERMS, assert_close, comparable
from conftest import ROOT, assert_equal_weights, build_tokenizer, tiny_model, two_replicas
from test_distillation import MODELS, ROWS, assert_same_values, model_of, own_logits
from test_logprobs import COMPLETIONS, PROMPTS, ROUNDINGS, assert_same_gradients, gradients, pack
from transformers import AutoModelForCausalLM

from common.distill import distillation
from common.distill.distillation import CrossEntropy
from common.generation.batches import RolloutBatch
from common.loop import supervised
from common.loop.trainer import Counts
from common.maths import losses
from common.model import head, logprobs, lora, models
from common.tasks import demonstrations
from common.tasks.data import PromptStream

CPU = torch.device("cpu")
tensor_cores = test_distillation.tensor_cores  # a fixture
parity = functools.partial(pytest.param, marks=pytest.mark.parity)
LEARNED = torch.ones(4, 7, dtype=torch.bool)  # all but some in the middle, and the whole second completion
LEARNED[:, 2] = LEARNED[1] = False


def learned_of(batch) -> torch.Tensor:
    """[4, 7] bool: the tokens in the loss."""
    return LEARNED & batch.completion_mask


def trained(model, aggregation="token_mean", batch=None, weights=None) -> SimpleNamespace:
    """Loss, values and gradients of `CrossEntropy`, and the weights."""
    batch = batch or pack(PROMPTS, COMPLETIONS)
    if weights is None:
        learned = learned_of(batch)
        counts = Counts(int(learned.any(1).sum()), int(learned.sum()))
        weights = losses.weights(learned, aggregation, counts.of(aggregation))
    loss, values = CrossEntropy(model)(*batch.tokens, weights)
    assert loss.shape == (1,) and loss.dtype == values.dtype == torch.float32 and not values.requires_grad
    return SimpleNamespace(loss=loss.detach(), values=values, gradients=gradients(model, loss.sum()), weights=weights)


def dense(model, weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, and what is reported, of PyTorch's cross-entropy on whole logits."""
    values, loss = torch.zeros(*weights.shape, len(CrossEntropy.values), dtype=torch.float64), 0.0
    for i, (prompt, completion) in enumerate(ROWS):
        if not completion:
            continue
        logits, ids, n = own_logits(model, prompt, completion), torch.tensor(completion), len(completion)
        nll = torch.nn.functional.cross_entropy(logits, ids, reduction="none")
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        values[i, :n] = torch.stack([nll, entropy, (logits.argmax(-1) == ids).double()], -1).detach()
        loss = loss + (nll * weights[i, :n]).sum()
    return loss, values


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
@pytest.mark.parametrize(("kind", "chunk", "slices"), [
    *((kind, 1024, 16) for kind in MODELS), ("qwen2", 5, 2), ("phi", 1, 3), ("gemma2", 5, 1), ("wide_phi", 1, 16),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_whole_logits(kind, chunk, slices, aggregation, monkeypatch):
    model, exact = model_of(kind), copy.deepcopy(model_of(kind)).double()
    sizes, project = [], distillation.project
    monkeypatch.setattr(distillation, "project", lambda *args: sizes.append(len(args[0])) or project(*args))
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(distillation, "SLICES", slices)
    found = trained(model, aggregation)
    assert max(sizes) <= chunk and sum(sizes) == 13
    loss, values = dense(exact, found.weights.double())
    assert_same_values(found.loss, loss[None])
    assert_same_values(found.values, values)
    assert_same_gradients(found.gradients, gradients(exact, loss), terms=4 * ROUNDINGS)
    assert any(gradient.any() for name, gradient in found.gradients.items() if "head" in name or "embed" in name)


def test_what_is_not_learned_moves_nothing_but_is_read():
    model, batch = model_of("llama"), pack(PROMPTS, COMPLETIONS)
    expected = trained(model).gradients
    weights = trained(model).weights
    other = pack(PROMPTS, [list(c) for c in COMPLETIONS])
    row = next(i for i, c in enumerate(COMPLETIONS) if len(c) > 3 and i != 1)
    other.completion_ids[row, 2] = 40 if batch.completion_ids[row, 2] != 40 else 41
    changed = trained(model, batch=other, weights=weights)
    assert changed.values[row, 2, 0] != trained(model, weights=weights).values[row, 2, 0]
    assert (changed.values[row, 3:, 0] != trained(model, weights=weights).values[row, 3:, 0]).any()  # a context
    none = trained(model, weights=torch.zeros(4, 7))
    assert none.loss.item() == 0 and not any(gradient.any() for gradient in none.gradients.values())
    assert any((changed.gradients[name] != expected[name]).any() for name in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fixture", ["tokenizer", "tensor_cores"], ids=["as on a CPU", "as on a GPU"])
def test_in_half_precision_gradients_are_close_to_those_of_fp32(request, fixture, dtype):
    request.getfixturevalue(fixture)
    model = copy.deepcopy(model_of("phi")).to(dtype)
    found, other = trained(model), trained(copy.deepcopy(model).float())  # of rounded weights, too
    assert {gradient.dtype for gradient in found.gradients.values()} == {dtype}
    most = rounding(2 * 2 * 7, dtype=dtype)  # of each of seven products in two layers, forward and backward
    one, expected = (torch.cat([g.double().flatten() for g in x.gradients.values()]) for x in (found, other))
    assert (one - expected).norm() <= most * expected.norm()
    assert (found.loss - other.loss).abs() <= most * other.loss


def test_adapters_leave_the_head_without_a_gradient(model_folders, monkeypatch):
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32", False, lora.Options(4, 8.0))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    added, add = [], distillation.add_mm
    monkeypatch.setattr(distillation, "add_mm", lambda *args: added.append(1) or add(*args))
    found = trained(model)
    loss, values = dense(model, found.weights)
    assert_same_values(found.loss, loss[None])
    assert_same_values(found.values, values)
    assert_same_gradients(found.gradients, gradients(model, loss), terms=4 * ROUNDINGS)
    assert not added and all("lora" in name for name in found.gradients)


def test_without_gradients_the_values_are_the_same_and_none_is_made(monkeypatch):
    made, weighted = [], distillation._weighted
    monkeypatch.setattr(distillation, "_weighted", lambda *args: made.append(weighted(*args)) or made[-1])
    policy, batch = CrossEntropy(model_of("phi")), pack(PROMPTS, COMPLETIONS)
    loss, values = policy(*batch.tokens, torch.full((4, 7), 0.1))
    assert made and all(grad is not None for _, grad in made)
    made.clear()
    with torch.no_grad():
        other, other_values = policy(*batch.tokens, torch.full((4, 7), 0.1))
    assert made and all(grad is None for _, grad in made) and not other.requires_grad
    assert torch.equal(loss.detach(), other) and torch.equal(values, other_values)  # by the same operations


# Batches.


def batch_of(*rows: tuple[list[int], list[int], list[int]]) -> RolloutBatch:
    """A batch of prompts, completions, and what is learned."""
    made = [
        demonstrations.Demonstration(i, "", prompt, None, {}, completion_ids=completion, learned=learned)
        for i, (prompt, completion, learned) in enumerate(rows)
    ]
    return supervised.batch_of(made, 0, CPU)


THREE = (([4, 5], [7, 3, 4, 8, 3], [1, 1, 0, 1, 1]), ([5], [9, 3], [1, 1]), ([6, 6, 6], [9, 3, 4, 4, 9, 3],
                                                                             [1, 1, 0, 0, 1, 1]))  # fmt: skip


def test_a_batch_counts_what_is_learned():
    batch = batch_of(*THREE)
    assert batch.completion_mask.int().tolist() == [[1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 1, 1]]
    assert batch.lengths.tolist() == [5, 2, 6] and batch.prompt_lengths.tolist() == [2, 1, 3]
    assert batch.num_tokens == 10 and batch.num_trained == 3 and not batch.truncated.any()
    assert [row.tolist() for row in batch.completions] == [completion for _, completion, _ in THREE]
    assert batch.size == 5 + 2 + 6 + 2 + 1 + 3  # what is not learned is computed all the same
    part = batch.select(torch.tensor([2, 1]))
    assert part.num_tokens == 6 and part.not_learned.tolist() == [2, 0]
    one, other = batch.halves()
    assert [half.num_tokens for half in (one, other)] == [int(half.completion_mask.sum()) for half in (one, other)]
    assert one.num_tokens + other.num_tokens == 10
    new = batch.put(torch.tensor([1]), batch_of(THREE[0]))
    assert new.num_tokens == 12 and new.num_tokens == int(new.completion_mask.sum())
    saved = RolloutBatch.from_state_dict(batch.state_dict())
    assert saved.num_tokens == 10 and torch.equal(saved.not_learned, batch.not_learned)
    for size in (1, 9, 100):
        (micros,) = batch.minibatches(1, size, True)
        assert [micro.num_tokens for micro in micros] == [int(micro.completion_mask.sum()) for micro in micros]
        assert sum(micro.num_tokens for micro in micros) == 10
    batch.drop(torch.tensor([True, False, False]))
    assert batch.num_tokens == 6 == int(batch.completion_mask.sum())
    batch.not_learned = None  # as of a rollout
    assert batch.num_tokens == 8


# Runs.


@pytest.fixture(scope="module")
def turns(chats_file) -> dict:
    return dict(train_data=chats_file, eval_data=chats_file, micro_batch_tokens=100)


@pytest.fixture(scope="module")
def plain(launcher, turns):
    return launcher.trained("sft", **turns)


def test_the_comparisons_are_of_runs_that_learn(plain):
    assert [line["step"] for line in plain.lines] == [0, 1, 2, 2, 2, 3, 3, 3]  # evaluated, then saved
    assert all(0 < line["grad_norm"] < 100 for line in plain.steps)
    assert all(0 <= line["token_accuracy"] <= 1 and line["truncated"] == 0 for line in plain.steps)
    assert any((a != b).any() for a, b in zip(plain.weights(2).values(), plain.weights(3).values(), strict=True))


def test_a_step_writes_what_it_knows(plain):
    step = {"step", "completion_length", "completion_length_max", "truncated", "skipped_updates", "nll", "entropy",
            "token_accuracy", "loss", "grad_norm", "overflows", "learning_rate", "seconds", "seconds_data",
            "seconds_update", "tokens_per_second", "memory_gib", "host_memory_gib"}  # fmt: skip
    evaluation = {"step", "eval_reward", "eval_reward_low", "eval_reward_high", "eval_nll", "eval_token_accuracy",
                  "seconds_eval"}  # fmt: skip
    assert {frozenset(line) for line in plain.lines} == {
        frozenset(step), frozenset(evaluation), frozenset({"step", "seconds_save"})
    }  # fmt: skip
    section = (ROOT / "gkd" / "README.md").read_text().split("### Metrics of fine-tuning\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == step | evaluation | {"seconds_save"}
    for line in plain.steps:
        assert line["seconds"] == pytest.approx(line["seconds_data"] + line["seconds_update"])


def test_in_one_process_both_scripts_are_equal(launcher, turns, plain):
    other = launcher.trained("sft_ddp", **turns)
    assert comparable(other.lines) == comparable(plain.lines)
    assert_equal_weights(other.weights(), plain.weights())


@pytest.mark.parametrize("options", [
    dict(aggregation="token_mean"), parity(dict(aggregation="seq_mean")), parity(dict(fsdp=True)),
    parity(dict(turns="last")),
], ids=str)  # fmt: skip
def test_two_ranks_are_one_process(launcher, turns, options):
    alone = {name: value for name, value in options.items() if name != "fsdp"}
    assert_close(launcher.trained("sft_ddp", 2, **turns | options | {"micro_batch_tokens": 40}),
                 launcher.trained("sft", **turns | alone))  # fmt: skip


def unpacked(module) -> None:
    """`prepare`: rows are padded, as for models whose rows cannot be packed."""
    init = logprobs.LogProbs.__init__

    def __init__(self, *args, **options):
        init(self, *args, **options)
        self.packed = False

    logprobs.LogProbs.__init__ = __init__


@pytest.mark.parametrize("options", [
    pytest.param(dict(prepare=two_replicas), id="replicas"), pytest.param(dict(prepare=unpacked), id="padded"),
    pytest.param(dict(micro_batch_tokens=1), id="alone"), parity(dict(micro_batch_tokens=30), id="30"),
    parity(dict(micro_batch_tokens=1000), id="together"), parity(dict(gradient_checkpointing=True), id="recomputed"),
    parity(dict(rollout_batch=3), id="rollout"), parity(dict(optimizer_offload="rollout"), id="offloaded"),
])  # fmt: skip
def test_how_a_batch_is_cut_changes_nothing(launcher, tmp_path, turns, plain, options):
    assert_close(launcher.run("sft", tmp_path, **turns | options).succeeded(), plain)


def test_three_steps_and_three_are_six(launcher, tmp_path, turns):
    straight = launcher.trained("sft", **turns | dict(steps=6, lr_schedule="constant"))
    for steps in (3, 6):
        run = launcher.run("sft", tmp_path, **turns | dict(steps=steps, lr_schedule="constant")).succeeded()
    assert f"resuming from {tmp_path}/checkpoint-000003" in run.output
    later, expected = ([line for line in comparable(one.lines) if line["step"] > 3] for one in (run, straight))
    assert later == expected and len(later) == 5
    assert_equal_weights(run.weights(), straight.weights())


def test_replies_that_changed_since_the_checkpoint_are_said(launcher, chats_file, tmp_path, turns):
    data = turns | dict(train_data=tmp_path / "chats.jsonl", eval_data="")
    data["train_data"].write_text(chats_file.read_text())
    launcher.run("sft", tmp_path / "run", **data).succeeded()
    row, *others = chats_file.read_text().splitlines(keepends=True)
    data["train_data"].write_text(row.replace('"0"', '"5"') + "".join(others))
    assert data["train_data"].read_text() != chats_file.read_text()
    other = launcher.run("sft", tmp_path / "run", **data | dict(steps=4)).succeeded()
    assert "warning: the training data have changed since the checkpoint" in other.output


def examples_of(path: Path, **options) -> list:
    return demonstrations.load(str(path), build_tokenizer(), [3], 1024, **options)


def reference_losses(folder: str, rows: list) -> tuple[float, float, float]:
    """Mean negative log-likelihood of what is learned, over tokens and over rows first, and the largest logit."""
    model, sums, counts, most = AutoModelForCausalLM.from_pretrained(folder).eval().double(), [], [], 0.0
    for row in rows:
        ids = torch.tensor([*row.prompt_ids, *row.completion_ids])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1]
        nll = torch.nn.functional.cross_entropy(logits, torch.tensor(list(row.completion_ids)), reduction="none")
        learned = torch.tensor(list(row.learned), dtype=torch.bool)
        sums.append(nll[learned].sum().item())
        counts.append(int(learned.sum()))
        most = max(most, logits.abs().max().item())
    return sum(sums) / sum(counts), sum(s / c for s, c in zip(sums, counts, strict=True)) / len(rows), most


@pytest.mark.parametrize(("script", "ranks", "options"), [
    ("sft", 1, {}), ("sft", 1, dict(turns="last")), ("sft", 1, dict(aggregation="seq_mean", micro_batch_tokens=30)),
    ("sft_ddp", 2, {}), parity("sft_ddp", 2, dict(aggregation="seq_mean")), parity("sft", 1, dict(model="mistral")),
    parity("sft", 1, dict(model="gpt2")),
], ids=str)  # fmt: skip
def test_the_loss_is_the_mean_over_the_tokens_that_are_learned(
    launcher, model_folders, tmp_path, turns, chats_file, script, ranks, options
):
    """Ranks, rows and micro-batches have different numbers of learned tokens."""
    options = dict(options)
    folder = model_folders.get(kind := options.pop("model", "qwen2")) or tmp_path / kind
    if kind == "mistral":  # a window shorter than the conversations, so rows are padded
        tiny_model(kind, sliding_window=8).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    run = launcher.run(script, tmp_path / "run", ranks, policy_model=folder, steps=1, **turns | options).succeeded()
    train = examples_of(chats_file, last_turn_only=options.get("turns") == "last")
    batch = PromptStream(train, 4, 0).next()
    assert len({sum(row.learned) for row in batch}) > 1 or "turns" in options
    by_token, by_row, magnitude = reference_losses(folder, batch)
    [step] = run.steps
    assert_rounded(step["nll"], by_token, TERMS, magnitude=magnitude + by_token, dtype=torch.float32)
    expected = by_row if options.get("aggregation") == "seq_mean" else by_token
    assert_rounded(step["loss"], expected, TERMS, magnitude=magnitude + by_token, dtype=torch.float32)
    held_out = examples_of(chats_file, last_turn_only=True)[:8]
    by_token, _, magnitude = reference_losses(folder, held_out)
    assert_rounded(run.lines[0]["eval_nll"], by_token, TERMS, magnitude=magnitude + by_token, dtype=torch.float32)


def test_adapters_are_trained_alone_and_saved_merged_or_not(launcher, turns):
    run = launcher.trained("sft", **turns, lora_rank=2, steps=8, learning_rate=2e-2)
    assert run.steps[-1]["nll"] < run.steps[0]["nll"]
    folder = run.out_dir / run.checkpoints[-1]
    assert (folder / "adapter_model.safetensors").exists()


@pytest.mark.parity
def test_the_loss_falls_and_rl_starts_from_the_best_checkpoint(launcher, tmp_path):
    options = dict(steps=120, learning_rate=1e-2, batch_size=8, eval_every=40, best_by="eval_token_accuracy")
    tuned = launcher.run("sft", tmp_path / "sft", **options).succeeded()
    assert tuned.steps[-1]["nll"] < tuned.steps[0]["nll"] / 4
    evaluations = [line for line in tuned.lines if "eval_nll" in line]
    assert evaluations[-1]["eval_nll"] < evaluations[0]["eval_nll"] / 4
    assert evaluations[-1]["eval_token_accuracy"] > evaluations[0]["eval_token_accuracy"]
    folder = tuned.out_dir / "best"
    run = launcher.run("gspo", tmp_path / "gspo", policy_model=folder, steps=1, kl_coef=0.0).succeeded()
    before = launcher.trained("gspo", steps=1, kl_coef=0.0)
    assert run.steps[0]["entropy"] < before.steps[0]["entropy"]
    assert run.steps[0]["truncated"] < before.steps[0]["truncated"]  # it has learned to end


@pytest.mark.parity
def test_held_out_replies_need_no_answer_and_no_evaluation_none(launcher, tmp_path, turns):
    rows = [{"prompt": "1 + 2 = ?", "completion": str(i)} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    unanswered = turns | dict(eval_data=tmp_path / "rows.jsonl", steps=1)
    run = launcher.run("sft", tmp_path / "run", **unanswered).succeeded()
    assert {"step", "eval_nll", "eval_token_accuracy", "seconds_eval"} == set(run.lines[0])
    two = launcher.run("sft_ddp", tmp_path / "two", 2, **unanswered).succeeded()
    assert_close(two, run)
    none = launcher.run("sft", tmp_path / "none", **turns | dict(eval_data="", steps=1)).succeeded()
    assert not any(name.startswith("eval") for line in none.lines for name in line)


def test_samples_of_an_evaluation_are_counted(launcher, tmp_path, turns):
    run = launcher.run("sft", tmp_path / "run", **turns, eval_samples=2, steps=1).succeeded()
    assert {"eval_pass_at_1", "eval_pass_at_2", "eval_majority_of_2", "eval_nll", "eval_reward"} <= set(run.lines[0])


def test_what_cannot_be_learned_is_refused_before_the_first_step(launcher, tmp_path, turns):
    cases = [(dict(max_tokens=5), "max_tokens"), (dict(max_tokens=1), "max_tokens = 1"),
             (dict(batch_size=31), "30 rows"), (dict(max_prompt_tokens=3), "max_prompt_tokens")]  # fmt: skip
    for options, said in cases:
        run = launcher.run("sft", tmp_path / "run", **turns | options)
        assert run.codes != [0] and said in run.output and not run.lines
