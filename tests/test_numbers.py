"""Numbers that are not finite: no weight moves, the message names the cause, and the batch can be looked at."""

import functools
import itertools
import math
import re
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch
from conftest import ROOT, SCRIPTS, assert_equal_weights, build_model
from safetensors.torch import load_file, save_file
from test_rewards import save_reward_model

from common.base import distributed
from common.distill import distillation
from common.generation import batches
from common.loop import Counts
from common.loop.student import Student
from common.model import logprobs, lora, models, reward_models
from common.training import optim

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
MASTER = "master/model.embed_tokens.weight"
CFG = SimpleNamespace(clip_range=(0.2, 0.2), kl_coef=0.1, kl_estimator="k3", temperature=1.0)


def minibatches() -> list[list[batches.RolloutBatch]]:
    """Three of two sequences each, with all that a loss reads."""
    tokens = (torch.arange(30).view(6, 5) * 7) % 50 + 5
    batch = batches.assemble([[4, 5, 6]] * 6, 1, tokens, torch.zeros(tokens.shape), 0, [3])
    parts = batch.minibatches(3, 1000, True)
    for (micro,) in parts:
        micro.advantages = torch.tensor([1.0, -1.0])
        micro.old_logps = torch.full(micro.completion_ids.shape, -4.0)
        micro.ref_logps = micro.old_logps - 0.1
    return parts


functions_of = functools.cache(lambda script: runpy.run_path(str(SCRIPTS[script])))


class Trainer:
    """The update of a script: its own loss, a tiny model, an optimizer."""

    def __init__(self, offload: str = "none", dtype: torch.dtype = torch.float32):
        self.model = build_model("qwen2").to(dtype).train()
        self.policy = logprobs.LogProbs(self.model, 1.0)
        self.optimizer = optim.AdamW(self.model, 1e-3, offload=offload)

    def step(self, minibatch: list[batches.RolloutBatch], edit=lambda loss: loss) -> None:
        for micro in minibatch:
            loss, _ = functions_of("gspo")["gspo_loss"](self.forward, micro, CFG, Counts(len(micro), micro.num_tokens))
            self.optimizer.scale(edit(loss)).backward()
        self.optimizer.step(1.0)

    def forward(self, micro: batches.RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(*micro.tokens)

    def state(self) -> dict[str, torch.Tensor]:
        weights = {f"weight/{name}": p for name, p in self.model.named_parameters()}
        return {name: x.detach().clone() for name, x in (weights | self.optimizer.state_dict()).items()}


@pytest.mark.parametrize(("what", "value", "offload", "cause"), [
    (lambda loss: loss * NAN, None, "none", "loss is nan"),
    (lambda loss: loss + NAN, None, "always", "loss is nan"),  # its gradients are good
    (lambda loss: loss + INF, None, "none", "loss is inf"),
    ("advantages", INF, "none", "loss is -inf"), ("ref_logps", NAN, "none", "loss is nan"),
    ("gradient", NAN, "none", "gradient norm is nan"), ("gradient", -INF, "always", "gradient norm is inf"),
])  # fmt: skip
def test_after_a_bad_minibatch_nothing_moves_any_more(what, value, offload, cause):
    # bf16 weights have masters of their own; the minibatch after the bad one is good, and must not be taken either
    trainer, (first, second, third) = Trainer(offload, torch.bfloat16), minibatches()
    start = trainer.state()
    trainer.step(first)
    trainer.optimizer.check()
    before = trainer.state()
    assert not torch.equal(start[MASTER], before[MASTER])
    if callable(what):
        trainer.step(second, what)
    elif what == "gradient":
        weight = trainer.model.model.layers[1].mlp.up_proj.weight
        hook = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), value))
        trainer.step(second)
        hook.remove()
    else:
        getattr(second[0], what)[0] = value
        trainer.step(second)
    assert_equal_weights(trainer.state(), before)
    trainer.step(third)
    assert_equal_weights(trainer.state(), before)
    with pytest.raises(FloatingPointError, match=f"^{cause}, not finite: .*not taken"):
        trainer.optimizer.check()
    assert_equal_weights(trainer.state(), before)
    trainer.step(third)  # who catches the error can go on
    assert trainer.optimizer.check() == 0 and not torch.equal(trainer.state()[MASTER], before[MASTER])


def test_one_bad_micro_batch_spoils_its_minibatch_only():
    trainer, (first, second, third) = Trainer(), minibatches()
    trainer.step(first)
    before = trainer.state()
    second[0].advantages[1] = NAN
    trainer.step([*third, *second])  # the good one has already left its gradient
    assert_equal_weights(trainer.state(), before)


@pytest.mark.parametrize("value", [INF, -INF])
@pytest.mark.parametrize("field", ["old_logps", "ref_logps"])
def test_an_infinite_log_prob_is_held_at_a_finite_ratio(field, value):
    # a token that one of the models excludes: the log-ratio is cut off at 10 or 20 nats
    trainer, (first, *_) = Trainer(), minibatches()
    getattr(first[0], field)[0] = value
    trainer.step(first)
    trainer.optimizer.check()
    assert all(x.isfinite().all() for x in trainer.state().values())


@pytest.mark.parametrize(("field", "loss", "value"), [  # what a teacher said, and the losses that read it
    ("states", "jsd", -INF), ("logps", "forward_kl", INF), ("logps", "jsd", NAN), ("tail_logp", "reverse_kl", NAN),
    ("token_logps", "opd", -INF),
])  # fmt: skip
def test_what_a_teacher_said_cannot_move_a_weight_if_it_is_not_finite(field, loss, value):
    script, model = functions_of("gkd"), build_model("qwen2").train()
    cfg = SimpleNamespace(loss=loss, aggregation="token_mean")
    head = distillation.Head(build_model("teacher")) if field == "states" else None
    student = object.__new__(Student)
    student.wrapped = [logprobs.LogProbs(model, 1.0)]
    if loss != "opd":
        beta = script["Config"](loss=loss).beta_in_force
        student.wrapped = [distillation.Divergences(model, 1.0, False, beta, 64, head)]
    optimizer = optim.AdamW(model, 1e-3)
    for bad, (micro,) in zip((False, True), minibatches(), strict=False):
        shape = micro.completion_ids.shape
        top_k = batches.TeacherOutput(
            ids=torch.tensor([5, 9]).int().expand(*shape, 2).contiguous(), logps=torch.full((*shape, 2), -1.5),
            tail_logp=torch.full(shape, -0.6), token_logps=torch.full(shape, -2.0),
        )  # fmt: skip
        micro.teacher = batches.TeacherOutput(states=torch.ones(*shape, 32)) if field == "states" else top_k
        if bad:
            optimizer.check()
            before = [p.detach().clone() for p in model.parameters()]
            getattr(micro.teacher, field)[0, 2] = value
        share, _ = script["gkd_loss"](student, micro, cfg, Counts(2, micro.num_tokens))
        optimizer.scale(share).backward()
        optimizer.step(1.0)
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(FloatingPointError, match=r"^loss is (nan|-?inf), not finite"):
        optimizer.check()


def test_fp16_overflows_are_counted_and_a_loss_that_is_not_finite_stops_at_once():
    def step(gradient: float, loss: float = 1.0) -> None:
        optimizer.scale(torch.tensor(loss))
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step(1.0)

    model = torch.nn.Linear(2, 2, bias=False).half()
    optimizer = optim.AdamW(model, 1e-2)
    for gradient in (1.0, INF, 1.0, NAN):
        step(gradient)
    assert (optimizer.check(), optimizer.check(), optimizer.loss_scale) == (2, 0, 2.0**14)
    before = model.weight.detach().clone()
    step(1.0, loss=NAN)  # smaller scales cannot help a loss
    step(1.0)
    assert torch.equal(model.weight, before)
    with pytest.raises(FloatingPointError, match=r"^loss is nan, not finite"):
        optimizer.check()


def infinite_once(out_dir: Path, module) -> None:
    """The second loss of the second step is infinite on rank 1; every step's optimizer is saved as it is judged."""
    scale, check, losses, steps = optim.AdamW.scale, optim.AdamW.check, itertools.count(1), itertools.count(1)

    def spoiled(self, loss):  # four optimizer steps of one micro-batch each per step
        return scale(self, loss + (INF if next(losses) == 6 and distributed.rank() == 1 else 0.0))

    def noted(self):
        step, state = next(steps), self.state_dict()
        if state:
            path = out_dir / f"state-step{step}-rank{distributed.rank()}.safetensors"
            save_file({name: tensor.clone() for name, tensor in state.items()}, path)
        return check(self)

    optim.AdamW.scale, optim.AdamW.check = spoiled, noted


def nan_after_a_checkpoint(out_dir: Path, module) -> None:
    scale, wrong = optim.AdamW.scale, (out_dir / "checkpoint-000001").exists
    optim.AdamW.scale = lambda self, loss: scale(self, loss * (NAN if wrong() else 1.0))


def failed(run, *messages: str):
    assert all(run.codes) and all(message in run.output for message in messages), run.output
    return run


@pytest.mark.faults
@pytest.mark.parametrize("options", [dict(optimizer_offload="always"), dict(fsdp=True)], ids=["offload", "fsdp"])
def test_an_infinite_loss_on_one_rank_stops_both_before_a_weight_moves(launcher, tmp_path, options):
    # its gradient is good, and the other rank's loss, too; of four optimizer steps the second is bad
    options |= dict(save_every=1, epochs=2, eval_data="", steps=3, micro_batch_tokens=10**6)
    run = failed(launcher.run("grpo_ddp", tmp_path, 2, timeout=60, prepare=partial(infinite_once, tmp_path), **options))
    assert run.output.count("FloatingPointError: step 2: loss is inf, not finite") == 2
    assert run.checkpoints == ["checkpoint-000001"] and [line["step"] for line in run.steps] == [1]
    saved = load_file(tmp_path / "checkpoint-000001" / "optimizer.safetensors")
    judged = load_file(tmp_path / "state-step2-rank0.safetensors")
    count = next(name for name in judged if name.startswith("step/"))
    assert (saved[count].item(), judged[count].item()) == (4.0, 5.0)  # the one before the bad step counts
    if not options.get("fsdp"):
        assert_equal_weights(load_file(tmp_path / "state-step2-rank1.safetensors"), judged)
    assert len(list(tmp_path.glob("not_finite-step000002-rank?.safetensors"))) == 2


@pytest.mark.faults
def test_the_same_command_meets_the_same_failure_again(launcher, tmp_path):
    options = dict(save_every=1, eval_data="", steps=3, prepare=partial(nan_after_a_checkpoint, tmp_path))
    first = failed(launcher.run("gspo", tmp_path, **options), "FloatingPointError: step 2: loss is nan",
                   "resume from the last checkpoint with a lower learning_rate")  # fmt: skip
    (kept,) = tmp_path.glob("not_finite*")
    batch = load_file(kept)
    again = failed(launcher.run("gspo", tmp_path, **options), "FloatingPointError: step 2: loss is nan")
    assert "resuming from" in again.output and first.checkpoints == again.checkpoints == ["checkpoint-000001"]
    assert_equal_weights(load_file(kept), batch)

    # the lines that the page shows
    page = (ROOT / "gspo" / "README.md").read_text()
    shown = re.search(r"```python\n(from safetensors.*?)```", page, re.DOTALL)[1]
    shutil.copytree(tmp_path / "checkpoint-000001", tmp_path / "model")
    shown = shown.replace("runs/gspo/checkpoint-000001", str(tmp_path / "model"))
    shown = shown.replace("runs/gspo/not_finite-step000002-rank0.safetensors", str(kept))
    printed = []
    exec(shown, {"print": lambda *values: printed.append(" ".join(map(str, values)))})
    assert len(printed) >= 2 and all("=?" in line and " -> " in line for line in printed)  # prompts of the data


def spoiled(folder, name: str, value: float, source) -> str:
    """A saved model, one number of one weight of which is not finite."""
    shutil.copytree(source, folder)
    (path,) = folder.glob("*model.safetensors")
    weights = load_file(path)
    weights[name].view(-1)[-1] = value
    save_file(weights, path, {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(("value", "dtype", "shown"), [
    (NAN, "fp32", "nan in torch.float32"), (INF, "fp32", "inf in torch.float32"),
    (-INF, "bf16", "-inf in torch.bfloat16"), (1e5, "fp16", "inf in torch.float16"),  # too large for the dtype
])  # fmt: skip
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path, model_folders, value, dtype, shown):
    name = "model.layers.1.mlp.down_proj.weight"
    folder = spoiled(tmp_path / "m", name, value, model_folders["qwen2"])
    said = re.escape(f"'{folder}': weight {name} of model.safetensors holds {shown}: must be")
    for load, device in ((models.load_policy, CPU), (models.load_frozen, CPU), (models.load_spread, [CPU])):
        with pytest.raises(ValueError, match=f"{said}.*or dtype bf16 or fp32"):
            load(folder, device, dtype)


def test_adapters_that_are_not_finite_are_refused(tmp_path, model_folders):
    save_reward_model(tmp_path / "scorer", unk_token="<unk>")  # and so is a reward model
    folder = spoiled(tmp_path / "bad scorer", "score.weight", NAN, tmp_path / "scorer")
    with pytest.raises(ValueError, match=rf"'{folder}': weight score\.weight of model.safetensors holds nan"):
        reward_models.RewardModel(folder)
    options = lora.Options(4, 8.0, "all-linear", 0)
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32", lora=options)
    lora.save(model, tmp_path / "good")
    name = next(iter(load_file(tmp_path / "good" / "adapter_model.safetensors")))
    folder = spoiled(tmp_path / "bad", name, NAN, tmp_path / "good")
    for given in (options, None):  # without, they are merged
        with pytest.raises(ValueError, match=r"weight .* holds nan"):
            models.load_policy(folder, CPU, "fp32", lora=given)


FLOATS = {"learning_rate", "weight_decay", "temperature", "top_p", "min_p", "memory_limit", "lora_alpha"}
POSTER = ROOT / "grpo" / "poster"


@pytest.mark.parametrize("script", ["gspo", "grpo", "similarity_grpo", "gkd", "gkd_multigpu", "sft",
                                    pytest.param("poster_grpo", marks=pytest.mark.poster)])  # fmt: skip
def test_every_option_that_is_a_number_is_checked(script):
    settings = runpy.run_path(str(SCRIPTS.get(script, POSTER / f"{script}.py")))["Config"]
    kinds = get_type_hints(settings)
    assert {name for name, kind in kinds.items() if kind is float} > FLOATS
    for name, kind in kinds.items():
        for value in {float: (NAN, INF, -INF), int: (-1, 2**31)}.get(kind, ()):
            if value == INF and name in ("max_grad_norm", "similarity_kappa"):
                settings(**{name: value})
                continue
            with pytest.raises(ValueError, match=rf"^(.*, )?{name} = {value}: must "):
                settings(**{name: value})


@pytest.mark.parametrize("path", [
    pytest.param(ROOT / "gkd" / "teacher_server.py", marks=pytest.mark.services),
    *(pytest.param(POSTER / f"{name}.py", marks=pytest.mark.poster) for name in ("reward_server", "supervised")),
], ids=lambda path: path.stem)  # fmt: skip
def test_options_of_the_other_scripts_are_checked_on_the_command_line(path, monkeypatch, capsys):
    floats = set(re.findall(r"^    (\w+): float = ", path.read_text(), re.MULTILINE)) - {"max_grad_norm"}
    for name, value in itertools.product(floats, ("nan", "inf")):
        monkeypatch.setattr(sys, "argv", [str(path), f"--{name}", value])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        assert ended.value.code == 2
        assert f"{name} = {value}: must be a finite number" in " ".join(capsys.readouterr().err.split())
