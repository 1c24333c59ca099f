"""Numbers that are not finite: no weight moves, the message names the cause, and the batch can be looked at."""

import itertools
import math
import re
import runpy
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPTS, assert_equal_weights, build_model, read_lines
from safetensors.torch import load_file, save_file

from common import checkpoint, distillation, logprobs, models, optim, rollout
from common.metrics import Log

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
MASTER = "master/model.embed_tokens.weight"
CFG = SimpleNamespace(clip_range=(0.2, 0.2), kl_coef=0.1, kl_estimator="k3", temperature=1.0)


def minibatches() -> list[list[rollout.RolloutBatch]]:
    """Three of two sequences each, with all that a loss reads."""
    tokens = (torch.arange(30).view(6, 5) * 7) % 50 + 5
    batch = rollout.assemble([[4, 5, 6]] * 6, 1, tokens, torch.zeros(tokens.shape), 0, [3])
    parts = batch.minibatches(3, 1000, True)
    for (micro,) in parts:
        micro.advantages = torch.tensor([1.0, -1.0])
        micro.old_logps = torch.full(micro.completion_ids.shape, -4.0)
        micro.ref_logps = micro.old_logps - 0.1
    return parts


class Trainer:
    """The update of a script: its own loss, a tiny model, an optimizer."""

    def __init__(self, offload: str = "none", dtype: torch.dtype = torch.float32):
        self.loss_of = runpy.run_path(str(SCRIPTS["gspo"]))["gspo_loss"]
        self.model = build_model("qwen2").to(dtype).train()
        self.policy = logprobs.LogProbs(self.model, 1.0)
        self.optimizer = optim.AdamW(self.model, 1e-3, offload=offload)

    def step(self, minibatch: list[rollout.RolloutBatch], edit=lambda loss: loss) -> None:
        for micro in minibatch:
            loss, _ = self.loss_of(self.policy, micro, CFG, len(micro))
            self.optimizer.scale(edit(loss)).backward()
        self.optimizer.step(1.0)

    def state(self) -> dict[str, torch.Tensor]:
        weights = {f"weight/{name}": p for name, p in self.model.named_parameters()}
        return {name: x.detach().clone() for name, x in (weights | self.optimizer.state_dict()).items()}


def with_field(name: str, value: float):
    def spoil(trainer: Trainer, minibatch: list[rollout.RolloutBatch]) -> None:
        getattr(minibatch[0], name)[0] = value
        trainer.step(minibatch)

    return spoil


def with_loss(edit):
    return lambda trainer, minibatch: trainer.step(minibatch, edit)


def with_gradient(value: float):
    def spoil(trainer: Trainer, minibatch: list[rollout.RolloutBatch]) -> None:
        weight = trainer.model.model.layers[1].mlp.up_proj.weight
        hook = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), value))
        trainer.step(minibatch)
        hook.remove()

    return spoil


SPOILED = {
    "a loss of NaN": (with_loss(lambda loss: loss * NAN), "loss is nan"),
    "NaN added to the loss, gradients good": (with_loss(lambda loss: loss + NAN), "loss is nan"),
    "an infinite loss, gradients good": (with_loss(lambda loss: loss + INF), "loss is inf"),
    "minus infinity, gradients zero": (with_loss(lambda loss: loss * 0.0 - INF), "loss is -inf"),
    "an advantage of NaN": (with_field("advantages", NAN), "loss is nan"),
    "an infinite advantage": (with_field("advantages", INF), "loss is -inf"),
    "old log-probs of NaN": (with_field("old_logps", NAN), "loss is nan"),
    "reference log-probs of NaN": (with_field("ref_logps", NAN), "loss is nan"),
    "a gradient of NaN": (with_gradient(NAN), "gradient norm is nan"),
    "a gradient of minus infinity": (with_gradient(-INF), "gradient norm is inf"),
}


@pytest.mark.parametrize("offload", ["none", "always"])
@pytest.mark.parametrize("what", SPOILED)
def test_after_a_bad_minibatch_nothing_moves_any_more(what, offload):
    # bf16 weights have masters of their own; the minibatch after the bad one is good, and must not be taken either
    spoil, cause = SPOILED[what]
    trainer, (first, second, third) = Trainer(offload, torch.bfloat16), minibatches()
    start = trainer.state()
    trainer.step(first)
    trainer.optimizer.check()
    before = trainer.state()
    assert not torch.equal(start[MASTER], before[MASTER])
    spoil(trainer, second)
    assert_equal_weights(trainer.state(), before)
    trainer.step(third)
    assert_equal_weights(trainer.state(), before)
    with pytest.raises(FloatingPointError, match=f"^{cause}, not finite: the step was not taken"):
        trainer.optimizer.check()
    assert_equal_weights(trainer.state(), before)
    trainer.step(third)  # who catches the error can go on
    assert trainer.optimizer.check() == 0 and not torch.equal(trainer.state()[MASTER], before[MASTER])


@pytest.mark.parametrize("value", [INF, -INF])
@pytest.mark.parametrize("field", ["old_logps", "ref_logps"])
def test_an_infinite_log_prob_is_held_at_a_finite_ratio(field, value):
    # a token that one of the models excludes: the log-ratio is cut off at 10 or 20 nats
    trainer, (first, *_) = Trainer(), minibatches()
    with_field(field, value)(trainer, first)
    trainer.optimizer.check()
    assert all(x.isfinite().all() for x in trainer.state().values())


def test_one_bad_micro_batch_spoils_its_minibatch_only():
    trainer, (first, second, third) = Trainer(), minibatches()
    trainer.step(first)
    before = trainer.state()
    second[0].advantages[1] = NAN
    trainer.step([*third, *second])  # the good one has already left its gradient
    assert_equal_weights(trainer.state(), before)


# what a teacher said, by field of a batch, and the losses that read it
SAID = [
    ("teacher_states", "reverse_kl", NAN), ("teacher_states", "forward_kl", INF), ("teacher_states", "jsd", -INF),
    ("teacher_logps", "reverse_kl", NAN), ("teacher_logps", "forward_kl", INF), ("teacher_logps", "jsd", NAN),
    ("teacher_tail_logp", "reverse_kl", NAN), ("teacher_tail_logp", "forward_kl", INF),
    ("teacher_tail_logp", "jsd", INF), ("teacher_token_logps", "opd", NAN), ("teacher_token_logps", "opd", -INF),
]  # fmt: skip


@pytest.mark.parametrize("field, loss, value", SAID)
def test_what_a_teacher_said_cannot_move_a_weight_if_it_is_not_finite(field, loss, value):
    script = runpy.run_path(str(SCRIPTS["gkd"]))
    model, teacher = build_model("qwen2").train(), build_model("teacher")
    cfg = SimpleNamespace(loss=loss, aggregation="token_mean")
    head = distillation.Head(teacher) if field == "teacher_states" else None
    beta = script["BETA"].get(loss, 0.5)
    if loss == "opd":
        student = logprobs.LogProbs(model, 1.0)
    else:
        student = distillation.Divergences(model, 1.0, False, beta, 64, head)
    optimizer = optim.AdamW(model, 1e-3)
    for number, (micro,) in enumerate(minibatches()[:2]):  # a good one, then a bad one
        shape = micro.completion_ids.shape
        if field == "teacher_states":
            micro.teacher_states = torch.ones(*shape, 32)
        elif loss != "opd":
            micro.teacher_ids = torch.tensor([5, 9]).int().expand(*shape, 2).contiguous()
            micro.teacher_logps, micro.teacher_tail_logp = torch.full((*shape, 2), -1.5), torch.full(shape, -0.6)
        micro.teacher_token_logps = torch.full(shape, -2.0)
        if number == 1:
            optimizer.check()
            before = [p.detach().clone() for p in model.parameters()]
            getattr(micro, field)[0, 2] = value
        share, _ = script["gkd_loss"](student, micro, cfg, 2, int(micro.num_tokens))
        optimizer.scale(share).backward()
        optimizer.step(1.0)
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(FloatingPointError, match=r"^loss is (nan|-?inf), not finite"):
        optimizer.check()


# ---- fp16 ----


def fp16_step(optimizer: optim.AdamW, weight: torch.nn.Parameter, gradient: float, loss: float = 1.0) -> None:
    optimizer.scale(torch.tensor(loss))
    weight.grad = torch.full_like(weight, gradient)
    optimizer.step(1.0)


def test_fp16_overflows_are_counted_and_a_loss_that_is_not_finite_stops_at_once():
    model = torch.nn.Linear(2, 2, bias=False).half()
    optimizer = optim.AdamW(model, 1e-2)
    for gradient in (1.0, INF, 1.0, NAN):
        fp16_step(optimizer, model.weight, gradient)
    assert (optimizer.check(), optimizer.check()) == (2, 0)
    assert optimizer.loss_scale == 2.0**14
    before = {name: x.clone() for name, x in optimizer.state_dict().items() if name != "loss_scale"}
    fp16_step(optimizer, model.weight, 1.0, loss=NAN)  # smaller scales cannot help a loss
    fp16_step(optimizer, model.weight, 1.0)
    after = {name: x for name, x in optimizer.state_dict().items() if name != "loss_scale"}
    assert_equal_weights(after, before)
    with pytest.raises(FloatingPointError, match=r"^loss is nan, not finite"):
        optimizer.check()


# ---- runs ----

CHECK = "log.add(overflows=optimizer.check())"
# The state of the optimizer when the step is judged
DUMP = (
    "state = optimizer.state_dict(); "
    "state and __import__('safetensors.torch').torch.save_file({k: v.clone() for k, v in state.items()}, "
    "f'{cfg.out_dir}/state-step{step}-rank{distributed.rank()}.safetensors'); "
)
LOSS = "optimizer.scale(loss)"


def failed(run, *messages: str):
    assert all(code not in (0, None) for code in run.codes), run.output
    assert all(message in run.output for message in messages), run.output
    return run


@pytest.mark.parametrize("options", [dict(optimizer_offload="always"), dict(fsdp=True)], ids=["offload", "fsdp"])
def test_an_infinite_loss_on_one_rank_stops_both_before_a_weight_moves(launcher, tmp_path, options):
    # its gradient is good, and the other rank's loss, too; of four optimizer steps the second is bad
    bad = "optimizer.scale(loss + (1e999 if (step, distributed.rank()) == (2, 1) and next(calls) == 1 else 0.0))"
    edits = {LOSS: bad, CHECK: DUMP + CHECK, "AGGREGATION =": "calls = __import__('itertools').count()\nAGGREGATION ="}
    script = launcher.copy("grpo_ddp", edits=edits)
    run = launcher.run(script, tmp_path, 2, timeout=60, save_every=1, grpo_epochs=2, eval_data="", steps=3,
                       micro_batch_tokens=10**6, **options)  # fmt: skip
    failed(run)
    assert run.output.count("FloatingPointError: step 2: loss is inf, not finite") == 2
    assert run.checkpoints == ["checkpoint-000001"] and [line["step"] for line in run.steps] == [1]
    saved = load_file(tmp_path / "checkpoint-000001" / "optimizer.safetensors")
    judged = load_file(tmp_path / "state-step2-rank0.safetensors")
    count = next(name for name in judged if name.startswith("step/"))
    assert (saved[count].item(), judged[count].item()) == (4.0, 5.0)  # the one before the bad step counts
    if not options.get("fsdp"):
        assert_equal_weights(load_file(tmp_path / "state-step2-rank1.safetensors"), judged)
    assert len(list(tmp_path.glob("not_finite-step000002-rank?.safetensors"))) == 2


def test_the_same_command_meets_the_same_failure_again(launcher, tmp_path):
    edits = {LOSS: "optimizer.scale(loss * (float('nan') if step == 2 else 1.0))"}
    script, options = launcher.copy(edits=edits), dict(save_every=1, eval_data="", steps=3)
    first = failed(launcher.run(script, tmp_path, **options), "FloatingPointError: step 2: loss is nan",
                   "resume from the last checkpoint with a lower learning_rate")  # fmt: skip
    (kept,) = tmp_path.glob("not_finite*")
    batch = load_file(kept)
    again = failed(launcher.run(script, tmp_path, **options), "FloatingPointError: step 2: loss is nan")
    assert "resuming from" in again.output and first.checkpoints == again.checkpoints == ["checkpoint-000001"]
    assert load_file(kept).keys() == batch.keys()
    assert all(torch.equal(x, y) for x, y in zip(load_file(kept).values(), batch.values(), strict=True))

    # the lines that the page shows
    page = (ROOT / "gspo" / "README.md").read_text()
    shown = re.search(r"```python\n(from safetensors.*?)```", page, re.DOTALL)[1]
    shutil.copytree(tmp_path / "checkpoint-000001", tmp_path / "model")
    shown = shown.replace("runs/gspo/checkpoint-000001", str(tmp_path / "model"))
    shown = shown.replace("runs/gspo/not_finite-step000002-rank0.safetensors", str(kept))
    printed = []
    exec(shown, {"print": lambda *values: printed.append(" ".join(map(str, values)))})
    assert len(printed) >= 2 and all("=?" in line and " -> " in line for line in printed)  # prompts of the data


# ---- loading ----


def spoiled(folder, name: str, value: float, source) -> str:
    """A saved model, one number of one weight of which is not finite."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[-1] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path, model_folders, value):
    name = "model.layers.1.mlp.down_proj.weight"
    folder = spoiled(tmp_path / "m", name, value, model_folders["qwen2"])
    said = re.escape(f"model '{folder}': weight {name} of model.safetensors holds {value} in torch.float32: must be")
    for load in (models.load_policy, models.load_frozen):
        with pytest.raises(ValueError, match=said):
            load(folder, CPU, "fp32")
    with pytest.raises(ValueError, match=said):
        models.load_spread(folder, [CPU], "fp32")


def test_a_weight_too_large_for_the_dtype_is_refused(tmp_path, model_folders):
    folder = spoiled(tmp_path / "m", "model.norm.weight", 1e5, model_folders["qwen2"])
    models.load_frozen(folder, CPU, "bf16")
    with pytest.raises(ValueError, match=r"model\.norm\.weight .*holds inf in torch\.float16: .*or dtype bf16 or fp32"):
        models.load_frozen(folder, CPU, "fp16")


def test_adapters_that_are_not_finite_are_refused(tmp_path, model_folders):
    from common import lora

    options = lora.Options(4, 8.0, "all-linear", 0)
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32", lora=options)
    lora.save(model, tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = next(iter(weights))
    weights[name][0, 0] = NAN
    save_file(weights, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"weight .*lora_A.* holds nan"):
        models.load_policy(str(tmp_path), CPU, "fp32", lora=options)
    with pytest.raises(ValueError, match="holds nan"):  # merged
        models.load_frozen(str(tmp_path), CPU, "fp32")


@pytest.mark.parametrize(
    "script, option", [("gkd", "teacher_model"), ("gspo", "policy_model"), ("gspo", "reward_model")]
)
def test_a_run_with_a_model_that_is_not_finite_does_not_start(
    launcher, tmp_path, model_folders, script, option, reward_folder
):
    source, name = (model_folders["teacher"], "model.norm.weight")
    if option == "reward_model":
        source, name = reward_folder, "score.weight"
    folder = spoiled(tmp_path / "m", name, NAN, source)
    run = launcher.run(SCRIPTS[script], tmp_path / "run", eval_data="", **{option: folder})
    failed(run, f"model '{folder}': weight {name} of model.safetensors holds nan")
    assert not (run.out_dir / "metrics.jsonl").exists()


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory):
    from test_rewards import save_reward_model

    folder = tmp_path_factory.mktemp("reward")
    save_reward_model(folder, unk_token="<unk>")
    return folder


# ---- options ----

FLOATS = ("learning_rate", "weight_decay", "temperature", "top_p", "min_p", "memory_limit", "lora_alpha")


@pytest.mark.parametrize("script", ["gspo", "grpo", "similarity_grpo", "gkd", "gkd_multigpu", "poster_grpo"])
def test_every_option_that_is_a_number_is_checked(script):
    path = SCRIPTS.get(script, ROOT / "grpo" / "poster" / f"{script}.py")
    settings = runpy.run_path(str(path))["Config"]
    floats = {name for name, kind in settings.__annotations__.items() if kind is float}
    whole = {name for name, kind in settings.__annotations__.items() if kind is int}
    assert floats > set(FLOATS)
    for name, value in itertools.product(floats, (NAN, INF, -INF)):
        if value == INF and name in ("max_grad_norm", "similarity_kappa"):
            settings(**{name: value})
        else:
            with pytest.raises(ValueError, match=f"^{name} = {value}: must be"):
                settings(**{name: value})
    for name, value in itertools.product(whole, (-1, 2**31)):
        with pytest.raises(ValueError, match=rf"^(.*, )?{name} = {value}: must "):
            settings(**{name: value})


@pytest.mark.parametrize("script", ["gkd/teacher_server", "grpo/poster/reward_server", "grpo/poster/supervised"])
def test_options_of_the_other_scripts_are_checked_on_the_command_line(script, monkeypatch, capsys):
    path = ROOT / f"{script}.py"
    text = path.read_text()
    floats = re.findall(r"^    (\w+): float = ", text, re.MULTILINE)
    for name, value in itertools.product(set(floats) - {"max_grad_norm"}, ("nan", "inf")):
        monkeypatch.setattr(sys, "argv", [str(path), f"--{name}", value])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        assert ended.value.code == 2
        assert f"{name} = {value}: must be a finite number" in " ".join(capsys.readouterr().err.split())


# ---- metrics ----


def test_a_metric_that_is_not_finite_is_null_and_spoils_no_other(tmp_path):
    log = Log(str(tmp_path), 0, 1, [CPU])
    log.add(grad_norm=torch.tensor(INF), entropy=1.0, kl_ref=NAN)
    log._tokens = 1.0
    with log.time("update"):
        pass
    log.end_step(1)
    log.close()
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert (line["grad_norm"], line["entropy"], line["kl_ref"]) == (None, 1.0, None)


def test_the_kept_batch_holds_every_field(tmp_path):
    micros = [micro for (micro,) in minibatches()]
    micros[1].advantages[0] = NAN
    with pytest.raises(FloatingPointError), checkpoint.keep_batch(str(tmp_path), 3, micros):
        raise FloatingPointError("loss is nan")
    tensors = load_file(tmp_path / "not_finite-step000003-rank0.safetensors")
    bad = [name for name, x in tensors.items() if x.is_floating_point() and not x.isfinite().all()]
    assert bad == ["micro1/advantages"]
    assert tensors["micro1/completion_ids"].tolist() == micros[1].completion_ids.tolist()
