"""Tests of common/optim.py: small updates in low precision, clipping, failures, and resuming."""

import copy

import pytest
import torch
from torch import nn

from common.optim import AdamW, warmup


class Weights(nn.Module):
    """Parameters of given values and dtypes, nothing else."""

    def __init__(self, **parameters):
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


def small_model(dtype=torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 4, generator=generator), torch.randn(5, generator=generator)
    return Weights(a=a.to(dtype), b=b.to(dtype))


def give_gradients(model, seed, factor=1.0) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for p in model.parameters():
        p.grad = (factor * torch.randn(p.shape, generator=generator)).to(p.dtype)


def snapshot(model, optimizer):
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}
    return {name: p.detach().clone() for name, p in model.named_parameters()}, state


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# --- updates ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_hundred_small_steps_add_up(dtype):
    model = Weights(w=torch.tensor([0.02], dtype=dtype))
    start = model.w.detach().float().clone()
    optimizer = AdamW(model, learning_rate=1e-6)
    for _ in range(100):
        model.w.grad = torch.full((1,), 0.5 * optimizer.loss_scale).to(dtype)
        optimizer.step(max_grad_norm=1.0)
    # Adam under a constant gradient moves by the learning rate: 100 * 1e-6
    moved = start - optimizer.masters[0].detach()
    assert moved.item() == pytest.approx(1e-4, rel=0.01)
    assert model.w.dtype == dtype
    assert torch.equal(model.w, optimizer.masters[0].to(dtype))
    if dtype != torch.float32:
        assert not torch.equal(model.w.float(), start)  # bf16 has steps of 1.2e-4 here, fp16 of 1.5e-5


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e6], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_in_fp32_it_is_torch_adamw_bit_for_bit(weight_decay, max_grad_norm):
    ours, theirs = small_model(), small_model()
    optimizer = AdamW(ours, learning_rate=1e-2, betas=(0.9, 0.95), weight_decay=weight_decay)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=weight_decay)
    for step in range(10):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        norm = optimizer.step(max_grad_norm)
        expected_norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm)
        reference.step()
        assert norm == expected_norm.item()  # before clipping
        assert_equal(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_in_bf16_it_is_torch_adamw_on_the_masters():
    ours = small_model(torch.bfloat16)
    theirs = Weights(**{name: p.detach().float() for name, p in ours.named_parameters()})
    optimizer, reference = AdamW(ours, 1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(5):
        give_gradients(ours, step)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.grad = p.grad.float()
        optimizer.step(0.5)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
    for p, master, q in zip(ours.parameters(), optimizer.masters, theirs.parameters(), strict=True):
        assert torch.equal(master, q)
        assert torch.equal(p, q.bfloat16())


def test_gradients_are_cleared_and_the_norm_is_the_one_before_clipping():
    model = Weights(w=torch.zeros(2))
    optimizer = AdamW(model, learning_rate=0.1)
    model.w.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step(max_grad_norm=1.0) == pytest.approx(5.0)
    assert model.w.grad is None and optimizer.masters[0].grad is None


def test_clipping_scales_the_gradient_down_to_the_norm():
    # after one step exp_avg = (1 - 0.9) * clipped gradient: (3, 4) / 5 * 0.1
    model = Weights(w=torch.zeros(2))
    optimizer = AdamW(model, learning_rate=0.1)
    model.w.grad = torch.tensor([3.0, 4.0])
    optimizer.step(max_grad_norm=1.0)
    torch.testing.assert_close(optimizer.state_dict()["exp_avg/w"], torch.tensor([0.06, 0.08]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_gradient_stays_and_counts_as_zero_in_the_norm(dtype):
    model = Weights(used=torch.ones(2, dtype=dtype), unused=torch.ones(3, dtype=dtype))
    optimizer = AdamW(model, learning_rate=0.1)
    model.used.grad = torch.tensor([3.0, 4.0], dtype=dtype)
    assert optimizer.step(max_grad_norm=10.0) == pytest.approx(5.0)
    assert torch.equal(model.unused, torch.ones(3, dtype=dtype))
    assert not torch.equal(model.used, torch.ones(2, dtype=dtype))
    assert optimizer.step(max_grad_norm=10.0) == 0.0  # nobody has one


def test_frozen_parameters_are_left_out():
    model = small_model()
    model.b.requires_grad_(False)
    optimizer = AdamW(model, learning_rate=0.1, weight_decay=0.5)
    before = model.b.clone()
    model.a.grad = torch.ones(3, 4)
    optimizer.step(1.0)
    assert optimizer.names == ["a"]
    assert torch.equal(model.b, before)


def test_the_learning_rate_can_change_between_steps():
    model = Weights(w=torch.zeros(1))
    optimizer = AdamW(model, learning_rate=1.0)
    positions = []
    for rate in (0.1, 0.02, 0.0):
        optimizer.learning_rate = rate
        model.w.grad = torch.ones(1)
        optimizer.step(10.0)
        positions.append(model.w.item())
    # a constant gradient moves by the learning rate: 0.1, 0.02, nothing
    assert positions == pytest.approx([-0.1, -0.12, -0.12], abs=1e-6)


@pytest.mark.parametrize(("step", "warmup_steps", "factor"), [
    (1, 5, 0.2), (4, 5, 0.8), (5, 5, 1.0), (6, 5, 1.0), (1, 0, 1.0), (1, 1, 1.0), (1000, 5, 1.0),
])  # fmt: skip
def test_warmup(step, warmup_steps, factor):
    assert warmup(step, warmup_steps) == pytest.approx(factor)


# --- gradients that are not finite ---


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_stops_and_changes_nothing(dtype, bad):
    model = small_model(dtype)
    optimizer = AdamW(model, learning_rate=0.1)
    give_gradients(model, 0)
    optimizer.step(1.0)
    before = snapshot(model, optimizer)
    give_gradients(model, 1)
    model.b.grad[2] = bad
    with pytest.raises(FloatingPointError, match="weights are unchanged"):
        optimizer.step(1.0)
    after = snapshot(model, optimizer)
    assert_equal(before[0], after[0])
    assert_equal(before[1], after[1])


def test_an_fp16_overflow_skips_the_step_and_halves_the_scale():
    model, reference = small_model(torch.float16), small_model(torch.float16).float()
    optimizer, plain = AdamW(model, 1e-2), AdamW(reference, 1e-2)
    assert optimizer.scale(torch.tensor(2.0)).item() == 2.0 * 65536
    before = snapshot(model, optimizer)
    give_gradients(model, 0)
    model.a.grad[1, 1] = float("inf")
    assert optimizer.step(1.0) == float("inf")
    after = snapshot(model, optimizer)
    assert_equal(before[0], after[0])
    assert optimizer.loss_scale == 32768
    assert not [name for name in after[1] if name.startswith("exp_avg")]  # Adam has not seen it
    assert model.a.grad is None

    for step in range(3):  # gradients of size 0.01, times the scale: they fit
        give_gradients(reference, step, 0.01)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.grad = (q.grad * optimizer.loss_scale).half()
            q.grad = p.grad.float() / optimizer.loss_scale
        assert optimizer.step(1.0) == pytest.approx(plain.step(1.0))
    for p, master, q in zip(model.parameters(), optimizer.masters, reference.parameters(), strict=True):
        torch.testing.assert_close(master, q, rtol=1e-6, atol=1e-7)
        assert torch.equal(p, master.half())


def test_fp16_gradients_too_small_for_fp16_survive_through_the_loss_scale():
    model = Weights(w=torch.tensor([1.0], dtype=torch.float16))
    optimizer = AdamW(model, 1e-2)
    optimizer.scale((model.w.float() * 1e-8).sum()).backward()  # the loss is fp32; 1e-8 alone is 0 in fp16
    assert optimizer.step(1.0) == pytest.approx(1e-8, rel=1e-2)


def test_fp16_that_overflows_at_every_scale_stops():
    model = Weights(w=torch.ones(1, dtype=torch.float16))
    optimizer = AdamW(model, 1e-2)
    with pytest.raises(FloatingPointError, match="every loss scale"):
        for _ in range(40):
            model.w.grad = torch.full((1,), float("inf"), dtype=torch.float16)
            optimizer.step(1.0)
    assert torch.equal(model.w, torch.ones(1, dtype=torch.float16))


def test_the_fp16_scale_grows_again_after_a_thousand_good_steps():
    model = Weights(w=torch.ones(1, dtype=torch.float16))
    optimizer = AdamW(model, 0.0)
    scales = []
    for _ in range(1000):
        scales.append(optimizer.loss_scale)
        model.w.grad = torch.zeros(1, dtype=torch.float16)
        optimizer.step(1.0)
    assert set(scales) == {65536.0} and optimizer.loss_scale == 131072.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_scaled_in_fp16_only(dtype):
    assert AdamW(small_model(dtype), 1e-2).scale(torch.tensor(0.3)).item() == pytest.approx(0.3)


# --- resuming ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_resumed_run_goes_on_identically(dtype, steps_before):
    model = small_model(dtype)
    optimizer = AdamW(model, 1e-2)
    for step in range(steps_before):
        give_gradients(model, step)
        optimizer.step(1.0)
    if dtype == torch.float16:  # so that there is a scale to restore
        model.a.grad = torch.full((3, 4), float("inf"), dtype=dtype)
        optimizer.step(1.0)
    saved = copy.deepcopy(optimizer.state_dict())

    other = small_model(dtype)
    nn.init.zeros_(other.a)
    resumed = AdamW(other, 1e-2)
    resumed.load_state_dict(copy.deepcopy(saved))
    assert_equal(resumed.state_dict(), saved)
    for step in range(10, 14):
        for m, o in ((model, optimizer), (other, resumed)):
            give_gradients(m, step)
            o.step(1.0)
    assert_equal(snapshot(model, optimizer)[0], snapshot(other, resumed)[0])
    assert_equal(optimizer.state_dict(), resumed.state_dict())


def test_loading_does_not_tie_the_optimizer_to_what_was_loaded():
    model, other = small_model(), small_model()
    optimizer, resumed = AdamW(model, 1e-2), AdamW(other, 1e-2)
    give_gradients(model, 0)
    optimizer.step(1.0)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    resumed.load_state_dict(saved)
    give_gradients(other, 1)
    resumed.step(1.0)
    assert_equal(saved, kept)


def test_a_bf16_run_resumes_from_its_masters_not_from_the_rounded_weights():
    model = Weights(w=torch.tensor([0.02], dtype=torch.bfloat16))
    optimizer = AdamW(model, 1e-6)
    for _ in range(20):  # 2e-5: not enough for a step of bf16
        model.w.grad = torch.ones(1, dtype=torch.bfloat16)
        optimizer.step(10.0)
    assert not torch.equal(optimizer.masters[0], model.w.float())
    other = Weights(w=model.w.detach())
    resumed = AdamW(other, 1e-6)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(resumed.masters[0], optimizer.masters[0])


def test_a_run_can_go_on_in_another_dtype():
    model = small_model()
    optimizer = AdamW(model, 1e-2)
    give_gradients(model, 0)
    optimizer.step(1.0)
    other = small_model(torch.bfloat16)
    resumed = AdamW(other, 1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, master, q in zip(other.parameters(), resumed.masters, model.parameters(), strict=True):
        assert torch.equal(master, q)
        assert torch.equal(p, q.bfloat16())
    give_gradients(other, 1)
    resumed.step(1.0)


def test_the_state_is_a_flat_dict_of_tensors_by_parameter_name():
    model = small_model(torch.bfloat16)
    optimizer = AdamW(model, 1e-2)
    give_gradients(model, 0)
    optimizer.step(1.0)
    state = optimizer.state_dict()
    assert set(state) == {"loss_scale", *(f"{kind}/{name}" for kind in ("master", "step", "exp_avg", "exp_avg_sq")
                                          for name in ("a", "b"))}  # fmt: skip
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert state["master/a"].dtype == torch.float32


@pytest.mark.parametrize("other", [
    {"a": torch.zeros(3, 4)},
    {"a": torch.zeros(3, 4), "b": torch.zeros(5), "c": torch.zeros(1)},
    {"a": torch.zeros(3, 4), "z": torch.zeros(5)},
    {"a": torch.zeros(3, 4), "b": torch.zeros(6)},
    {"a": torch.zeros(3, 4), "b": torch.zeros(1)},
], ids=["fewer", "more", "other names", "other shape", "shape that would broadcast"])  # fmt: skip
def test_the_state_of_another_model_is_refused_and_changes_nothing(other):
    saved = AdamW(Weights(**other), 1e-2).state_dict()
    model = small_model()
    optimizer = AdamW(model, 1e-2)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="another model"):
        optimizer.load_state_dict(saved)
    assert_equal(before[0], snapshot(model, optimizer)[0])


def test_fp16_keeps_its_fresh_loss_scale_after_a_checkpoint_without_one():
    saved = AdamW(small_model(), 1e-2).state_dict()
    half = AdamW(small_model().half(), 1e-2)
    half.load_state_dict(saved)
    assert half.loss_scale == 2.0**16
