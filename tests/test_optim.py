"""Tests of common/optim.py: small updates in low precision, clipping, failures, memory, and resuming."""

import copy
import math
import weakref
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
from torch import nn

from common import optim
from common.optim import AdamW, warmup

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 GPU")]
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
in_every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


class Weights(nn.Module):
    """Parameters of given values and dtypes, nothing else."""

    def __init__(self, **parameters):
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


def small_model(dtype=torch.float32, device="cpu") -> Weights:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 4, generator=generator), torch.randn(5, generator=generator)
    return Weights(a=a.to(device, dtype), b=b.to(device, dtype))


def give_gradients(model, seed, factor=1.0) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for p in model.parameters():
        p.grad = (factor * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype)


def snapshot(model, optimizer):
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}
    return {name: p.detach().clone() for name, p in model.named_parameters()}, state


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].cpu(), b[name].cpu()), name


# --- updates ---


@in_every_dtype
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


@on_every_device
@pytest.mark.parametrize("max_grad_norm", [0.5, 1e6, math.inf], ids=["clipped", "not clipped", "never clipped"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_in_fp32_it_is_torch_adamw(weight_decay, max_grad_norm, device):
    ours, theirs, fused = (small_model(device=device) for _ in range(3))
    options = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=weight_decay)
    optimizer = AdamW(ours, learning_rate=1e-2, betas=(0.9, 0.95), weight_decay=weight_decay)
    foreach_reference = torch.optim.AdamW(theirs.parameters(), foreach=True, **options)
    fused_reference = torch.optim.AdamW(fused.parameters(), fused=True, **options)
    for step in range(10):
        for model in (ours, theirs, fused):
            give_gradients(model, step)
        norm = optimizer.step(max_grad_norm)
        expected_norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm)
        assert torch.equal(norm, expected_norm)  # before clipping
        foreach_reference.step()
        fused_reference.grad_scale = (expected_norm / max_grad_norm).clamp(min=1.0)
        fused_reference.step()
        assert_equal(dict(ours.named_parameters()), dict(fused.named_parameters()))
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):  # clips by norm + 1e-6, rounds otherwise
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@on_every_device
def test_in_bf16_it_is_torch_adamw_on_the_masters(device):
    ours = small_model(torch.bfloat16, device)
    theirs = Weights(**{name: p.detach().float() for name, p in ours.named_parameters()})
    optimizer = AdamW(ours, 1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(5):
        give_gradients(ours, step)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.grad = p.grad.float()
        norm = optimizer.step(0.5)
        expected_norm = nn.utils.get_total_norm([q.grad for q in theirs.parameters()])
        torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0)
        reference.grad_scale = (norm / 0.5).clamp(min=1.0)
        reference.step()
    for p, master, q in zip(ours.parameters(), optimizer.masters, theirs.parameters(), strict=True):
        assert torch.equal(master, q)
        assert torch.equal(p, q.bfloat16())


@on_every_device
@in_every_dtype
def test_the_norm_is_a_tensor_summed_in_fp32(dtype, device):
    model = Weights(w=torch.zeros(50_000, dtype=dtype, device=device), v=torch.zeros(7, dtype=dtype, device=device))
    optimizer = AdamW(model, learning_rate=0.0)
    give_gradients(model, 0)
    expected = math.hypot(*(p.grad.double().norm().item() for p in model.parameters())) / optimizer.loss_scale
    norm = optimizer.step(max_grad_norm=1.0)
    assert norm.shape == () and norm.dtype == torch.float32 and norm.device == model.w.device
    assert norm.item() == pytest.approx(expected, rel=1e-5)  # in bf16 it would be 1e-3 off


def test_parameters_of_several_dtypes_can_be_mixed():
    model = small_model()
    mixed = Weights(a=model.a.detach(), b=model.b.detach().bfloat16())
    separate = [Weights(a=mixed.a.detach()), Weights(b=mixed.b.detach())]
    optimizers = [AdamW(m, 1e-2) for m in (mixed, *separate)]
    for step in range(3):
        give_gradients(mixed, step)
        separate[0].a.grad, separate[1].b.grad = mixed.a.grad.clone(), mixed.b.grad.clone()
        for optimizer in optimizers:
            optimizer.step(math.inf)
    assert torch.equal(mixed.a, separate[0].a) and torch.equal(mixed.b, separate[1].b)
    assert optimizers[0].masters[0].data_ptr() == mixed.a.data_ptr() and optimizers[0].masters[1].dtype == torch.float32


@on_every_device
def test_gradients_may_be_laid_out_in_any_way(device):
    model, other = small_model(device=device), small_model(device=device)
    give_gradients(model, 0)
    give_gradients(other, 0)
    model.a.grad = model.a.grad.t().contiguous().t()
    assert model.a.grad.stride() != model.a.stride()
    AdamW(model, 1e-2).step(1.0)
    AdamW(other, 1e-2).step(1.0)
    assert_equal(dict(model.named_parameters()), dict(other.named_parameters()))


@contextmanager
def nothing_read(monkeypatch):
    """Inside, no value of a tensor may reach Python: on a GPU it would wait for every kernel before."""

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor was read")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


@in_every_dtype
def test_a_step_reads_nothing_back(dtype, monkeypatch):
    model = small_model(dtype)
    optimizer = AdamW(model, 1e-2)
    for bad in (1.0, math.inf, 1.0):
        give_gradients(model, 0)
        model.a.grad[0, 0] = bad
        with nothing_read(monkeypatch):
            optimizer.scale(torch.ones(()))
            optimizer.step(1.0)
            optimizer.onload()


def test_gradients_are_cleared_and_the_norm_is_the_one_before_clipping():
    model = Weights(w=torch.zeros(2))
    optimizer = AdamW(model, learning_rate=0.1)
    model.w.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step(max_grad_norm=1.0).item() == pytest.approx(5.0)
    assert model.w.grad is None


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
    assert optimizer.step(max_grad_norm=10.0).item() == pytest.approx(5.0)
    assert torch.equal(model.unused, torch.ones(3, dtype=dtype))
    assert not torch.equal(model.used, torch.ones(2, dtype=dtype))
    assert optimizer.step(max_grad_norm=10.0).item() == 0.0  # nobody has one


def test_a_missing_gradient_is_a_zero_gradient():
    missing, zero = small_model(), small_model()
    optimizers = AdamW(missing, 1e-2, weight_decay=0.1), AdamW(zero, 1e-2, weight_decay=0.1)
    for step in range(4):
        give_gradients(missing, step)
        give_gradients(zero, step)
        if step % 2:
            missing.b.grad, zero.b.grad = None, torch.zeros(5)
        for optimizer in optimizers:
            optimizer.step(1.0)
    assert_equal(snapshot(missing, optimizers[0])[0], snapshot(zero, optimizers[1])[0])
    assert_equal(snapshot(missing, optimizers[0])[1], snapshot(zero, optimizers[1])[1])


def test_frozen_parameters_are_left_out():
    model = small_model()
    model.b.requires_grad_(False)
    optimizer = AdamW(model, learning_rate=0.1, weight_decay=0.5)
    before = model.b.clone()
    model.a.grad = torch.ones(3, 4)
    optimizer.step(1.0)
    assert optimizer.names == ["a"]
    assert torch.equal(model.b, before)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="0 parameters to train"):
        AdamW(small_model().requires_grad_(False), learning_rate=0.1)


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


@on_every_device
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_a_gradient_that_is_not_finite_nothing_changes_until_it_is_reported(dtype, bad, device):
    model = small_model(dtype, device)
    optimizer = AdamW(model, learning_rate=0.1)
    give_gradients(model, 0)
    assert optimizer.step(1.0).isfinite()
    optimizer.check()
    before = snapshot(model, optimizer)
    give_gradients(model, 1)
    model.b.grad[2] = bad
    norms = [optimizer.step(1.0)]
    give_gradients(model, 2)  # a good one
    norms.append(optimizer.step(1.0))
    assert not any(norm.isfinite() for norm in norms) and model.a.grad is None
    for _ in range(2):
        after = snapshot(model, optimizer)
        assert_equal(before[0], after[0])
        assert_equal(before[1], after[1])
        optimizer.offload()
    with pytest.raises(FloatingPointError, match=rf"gradient norm is {abs(bad)}.*the weights are unchanged since"):
        optimizer.check()
    # who catches it can go on, as if the steps had never been
    optimizer.check()
    other = small_model(dtype, device)
    unharmed = AdamW(other, learning_rate=0.1)
    for step in (0, 3):
        give_gradients(other, step)
        unharmed.step(1.0)
    give_gradients(model, 3)
    optimizer.step(1.0)
    assert_equal(snapshot(model, optimizer)[1], snapshot(other, unharmed)[1])


def test_a_gradient_that_is_not_finite_in_the_first_step_leaves_no_state():
    model = small_model()
    optimizer = AdamW(model, learning_rate=0.1)
    before = snapshot(model, optimizer)
    model.a.grad = torch.full((3, 4), math.nan)
    assert optimizer.step(1.0).isnan()
    assert_equal(before[1], snapshot(model, optimizer)[1])


def test_loading_a_state_ends_what_went_wrong_before():
    model = small_model()
    optimizer = AdamW(model, learning_rate=0.1)
    saved = copy.deepcopy(optimizer.state_dict())
    model.a.grad = torch.full((3, 4), math.nan)
    optimizer.step(1.0)
    optimizer.load_state_dict(saved)
    optimizer.check()
    give_gradients(model, 0)
    assert optimizer.step(1.0).isfinite()


@on_every_device
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])  # inf - inf in the backward pass is NaN
def test_an_fp16_overflow_skips_the_step_and_halves_the_scale(bad, device):
    model, reference = small_model(torch.float16, device), small_model(torch.float16, device).float()
    optimizer, plain = AdamW(model, 1e-2), AdamW(reference, 1e-2)
    assert optimizer.scale(torch.tensor(2.0, device=device)).item() == 2.0 * 65536
    before = snapshot(model, optimizer)
    give_gradients(model, 0)
    model.a.grad[1, 1] = bad
    assert optimizer.step(1.0).item() == float("inf")
    optimizer.check()  # it is no error
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
        assert optimizer.step(1.0).item() == pytest.approx(plain.step(1.0).item())
    for p, master, q in zip(model.parameters(), optimizer.masters, reference.parameters(), strict=True):
        torch.testing.assert_close(master, q, rtol=1e-6, atol=1e-7)
        assert torch.equal(p, master.half())
    state, expected = optimizer.state_dict(), plain.state_dict()
    for name in ("exp_avg/a", "exp_avg/b", "exp_avg_sq/a", "exp_avg_sq/b"):  # without the scale
        torch.testing.assert_close(state[name], expected[name], rtol=1e-5, atol=0)


def test_fp16_gradients_too_small_for_fp16_survive_through_the_loss_scale():
    model = Weights(w=torch.tensor([1.0], dtype=torch.float16))
    optimizer = AdamW(model, 1e-2)
    optimizer.scale((model.w.float() * 1e-8).sum()).backward()  # the loss is fp32; 1e-8 alone is 0 in fp16
    assert optimizer.step(1.0).item() == pytest.approx(1e-8, rel=1e-2)


def test_fp16_that_overflows_at_every_scale_stops():
    model = Weights(w=torch.ones(1, dtype=torch.float16))
    optimizer = AdamW(model, 1e-2)
    for _ in range(17):
        optimizer.check()
        model.w.grad = torch.full((1,), float("inf"), dtype=torch.float16)
        optimizer.step(1.0)
    with pytest.raises(FloatingPointError, match=r"loss scale 0\.5.*every loss scale"):
        optimizer.check()
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


# --- memory ---


@in_every_dtype
def test_gradients_are_cast_in_buckets_never_all_of_them(dtype, monkeypatch):
    sizes = dict(a=100, b=60, c=300, d=20, e=20, f=60)
    # at most 160 elements; what is larger is cut, at multiples of 64
    buckets = [[("a", 100), ("b", 60)], [("c", 128)], [("c", 128)], [("c", 44), ("d", 20), ("e", 20), ("f", 60)]]
    whole = Weights(**{name: torch.linspace(-1, 1, size).to(dtype) for name, size in sizes.items()})
    expected = AdamW(whole, 1e-2)
    monkeypatch.setattr(optim, "BUCKET_ELEMENTS", 160)
    model = copy.deepcopy(whole)
    optimizer = AdamW(model, 1e-2)
    fused, seen, casts = torch._fused_adamw_, [], []

    def spy(masters, grads, *args, **options):
        assert not any(cast() is not None for cast in casts)  # those of the bucket before are gone
        with_gradient = [name for name, p in model.named_parameters() if p.grad is not None]
        assert with_gradient == sorted({name for bucket in buckets[len(seen) :] for name, _ in bucket})
        casts.extend(weakref.ref(grad) for grad in grads)
        owner = {m.untyped_storage().data_ptr(): name for name, m in zip(sizes, optimizer.masters, strict=True)}
        seen.append([(owner[master.untyped_storage().data_ptr()], master.numel()) for master in masters])
        fused(masters, grads, *args, **options)

    for step in range(3):
        give_gradients(model, step)
        give_gradients(whole, step)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_fused_adamw_", spy)
            optimizer.step(1.0)
        assert seen == buckets
        seen.clear()
        expected.step(1.0)
    assert_equal(snapshot(model, optimizer)[0], snapshot(whole, expected)[0])
    assert_equal(snapshot(model, optimizer)[1], snapshot(whole, expected)[1])


@on_every_device
@in_every_dtype
def test_a_run_that_is_offloaded_between_steps_is_the_run_without(dtype, device):
    model, other = small_model(dtype, device), small_model(dtype, device)
    optimizer, plain = AdamW(model, 1e-2), AdamW(other, 1e-2)
    places = set()
    for step in range(4):
        optimizer.offload()
        places.add(tuple(t.data_ptr() for name, t in optimizer.state_dict().items() if name.startswith("exp_avg")))
        weights = [p.clone() for p in model.parameters()]
        if step % 2:
            optimizer.offload()
            optimizer.onload()
            optimizer.onload()
        assert optimizer.offloaded == (step % 2 == 0)  # then step() brings it back
        for p, weight in zip(model.parameters(), weights, strict=True):
            assert torch.equal(p, weight) and p.device.type == device
        give_gradients(model, step)
        give_gradients(other, step)
        assert torch.equal(optimizer.step(1.0), plain.step(1.0))
        assert_equal(snapshot(model, optimizer)[0], snapshot(other, plain)[0])
        assert not optimizer.offloaded and all(master.device.type == device for master in optimizer.masters)
    assert_equal(snapshot(model, optimizer)[1], snapshot(other, plain)[1])
    assert len(places) == 2  # none before the first step, then always the same memory


@on_every_device
@in_every_dtype
def test_an_offloaded_state_can_be_saved_and_loaded_into(dtype, device):
    model = small_model(dtype, device)
    optimizer = AdamW(model, 1e-2)
    give_gradients(model, 0)
    optimizer.step(1.0)
    expected = snapshot(model, optimizer)[1]
    optimizer.offload()
    state = optimizer.state_dict()
    for name, value in state.items():  # fp32 weights are parameters, and stay
        assert value.device.type == (device if name.startswith("master/") and dtype == torch.float32 else "cpu")
    saved = safetensors.torch.load(safetensors.torch.save({name: value.cpu() for name, value in state.items()}))
    assert_equal(saved, expected)

    other = small_model(dtype, device)
    nn.init.zeros_(other.a)
    resumed = AdamW(other, 1e-2)
    resumed.offload()
    resumed.load_state_dict(saved)
    assert resumed.offloaded
    for step in range(1, 4):
        for m, o in ((model, optimizer), (other, resumed)):
            give_gradients(m, step)
            o.step(1.0)
    assert_equal(snapshot(model, optimizer)[0], snapshot(other, resumed)[0])
    assert_equal(snapshot(model, optimizer)[1], snapshot(other, resumed)[1])


def test_on_the_cpu_too_the_state_moves_to_memory_of_its_own():
    model = small_model(torch.bfloat16)
    optimizer = AdamW(model, 1e-2)
    before = optimizer.masters[0]
    optimizer.offload()
    offloaded = optimizer.masters[0]
    assert torch.equal(before, offloaded) and before.data_ptr() != offloaded.data_ptr()
    optimizer.onload()
    assert optimizer.masters[0].data_ptr() != offloaded.data_ptr()


def test_parameters_in_another_memory_order_are_offloaded_as_they_are():
    model = Weights(w=torch.arange(12.0).view(3, 4).t().bfloat16(), v=torch.ones(2, dtype=torch.bfloat16))
    optimizer = AdamW(model, 1e-2)
    give_gradients(model, 0)
    optimizer.step(1.0)
    before = snapshot(model, optimizer)[1]
    assert optimizer.masters[0].stride() == (1, 4)
    optimizer.offload()
    assert optimizer.masters[0].stride() == (1, 4)
    assert_equal(snapshot(model, optimizer)[1], before)
    optimizer.onload()
    assert optimizer.masters[0].stride() == (1, 4)
    assert_equal(snapshot(model, optimizer)[1], before)


# --- on a GPU ---


@pytest.fixture
def no_waiting():
    """Whatever waits for the GPU raises inside."""

    @contextmanager
    def guard():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return guard


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 GPU")
@in_every_dtype
def test_steps_do_not_wait_for_the_gpu(dtype, no_waiting):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to("cuda", dtype)
    model.register_parameter("unused", nn.Parameter(torch.ones(3, device="cuda", dtype=dtype)))
    optimizer = AdamW(model, 1e-3)
    inputs = torch.randn(16, 64, device="cuda", dtype=dtype)
    norms = []
    with no_waiting():
        for step in range(6):
            optimizer.learning_rate = 1e-3 / (1 + step)
            for _ in range(2):
                loss = model(inputs).float().square().mean()
                optimizer.scale(loss * math.inf if step == 5 else loss).backward()
            norms.append(optimizer.step(0.1))
    optimizer.offload()
    with no_waiting():
        optimizer.onload()
    assert [math.isfinite(norm.item()) for norm in norms] == [True] * 5 + [False]
    assert optimizer.state_dict()["step/unused"] == 5
    if dtype == torch.float16:
        assert optimizer.loss_scale == 2.0**15
    else:
        with pytest.raises(FloatingPointError, match="loss is inf"):
            optimizer.check()


@in_every_dtype
@pytest.mark.parametrize("offload", ["rollout", "always"])
@on_every_device
def test_a_state_in_cpu_memory_takes_the_same_steps(dtype, offload, device, monkeypatch):
    monkeypatch.setattr(optim, "STREAM_ELEMENTS", 128)
    sizes = dict(a=(9, 50), b=(2,), c=(16, 16))
    values = {name: torch.linspace(-1, 1, math.prod(size)).reshape(size) for name, size in sizes.items()}
    plain = Weights(**{name: value.to(device, dtype) for name, value in values.items()})
    model = copy.deepcopy(plain)
    expected, optimizer = AdamW(plain, 1e-2), AdamW(model, 1e-2, offload=offload)
    assert optimizer.offloaded
    for step in range(4):
        give_gradients(model, step)
        give_gradients(plain, step)
        optimizer.step(1.0)
        expected.step(1.0)
        assert optimizer.offloaded == (offload == "always")
        moved = optimizer.make_room()
        assert optimizer.offloaded and (moved > 0) == (offload == "rollout")
        assert dtype == torch.float32 or all(master.device.type == "cpu" for master in optimizer.masters)
        assert_equal(snapshot(model, optimizer)[0], snapshot(plain, expected)[0])
        assert_equal(snapshot(model, optimizer)[1], snapshot(plain, expected)[1])
    again = AdamW(copy.deepcopy(model), 1e-2, offload="none")
    again.load_state_dict({key: value.clone() for key, value in optimizer.state_dict().items()})
    assert_equal(again.state_dict(), expected.state_dict())


def test_an_unknown_way_to_offload_is_refused():
    with pytest.raises(ValueError, match="offload = 'sometimes'"):
        AdamW(Weights(a=torch.ones(2)), 1e-2, offload="sometimes")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 GPU")
@in_every_dtype
def test_offloading_frees_gpu_memory_and_a_step_needs_little(dtype, monkeypatch):
    elements = 2**20
    monkeypatch.setattr(optim, "BUCKET_ELEMENTS", elements)
    weights = [torch.randn(1024, 1024, device="cuda").to(dtype) for _ in range(16)]
    model = Weights(**{f"w{i}": weight for i, weight in enumerate(weights)})
    del weights
    optimizer = AdamW(model, 1e-3)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step(1.0)
        assert torch.cuda.max_memory_allocated() - before < 2.5 * 4 * elements  # of 16; a bucket in fp32, some rounding
        held = torch.cuda.memory_allocated()
        expected = {name: value.cpu().clone() for name, value in optimizer.state_dict().items()}
        optimizer.offload()
        tensors = 2 if dtype == torch.float32 else 3  # an fp32 weight is the parameter
        assert held - torch.cuda.memory_allocated() == tensors * 16 * 4 * elements
        assert optimizer.state_dict()["exp_avg/w3"].is_pinned()
        assert_equal(optimizer.state_dict(), expected)
        optimizer.onload()
        assert torch.cuda.memory_allocated() == held


# --- resuming ---


@in_every_dtype
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


def test_the_state_of_torch_adamw_goes_on_with_counters_of_its_own():
    # the format of checkpoints whose counters were of each parameter and on the CPU, and never wrapped
    theirs, ours = small_model(), small_model()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(3):
        give_gradients(theirs, step)
        reference.step()
    state = {"loss_scale": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    for name, p in theirs.named_parameters():
        state |= {f"master/{name}": p.detach().clone(), **{f"{key}/{name}": reference.state[p][key].clone() for key in
                                                           ("step", "exp_avg", "exp_avg_sq")}}  # fmt: skip
    optimizer = AdamW(ours, 1e-2)
    optimizer.load_state_dict(state)
    assert_equal(optimizer.state_dict(), state)
    for step in range(3, 6):
        give_gradients(theirs, step)
        give_gradients(ours, step)
        reference.step()
        optimizer.step(math.inf)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

    half = AdamW(small_model(torch.float16), 1e-2)
    half.load_state_dict(state | {"loss_scale": torch.tensor([4096.0, 2999.0], dtype=torch.float64)})
    assert half.loss_scale == 4096.0
    half.step(1.0)  # the three thousandth
    assert half.loss_scale == 8192.0


def test_a_state_from_before_the_first_step_resets_everything():
    model = small_model(torch.bfloat16)
    optimizer = AdamW(model, 1e-2)
    saved = copy.deepcopy(optimizer.state_dict())
    first = snapshot(model, optimizer)
    give_gradients(model, 0)
    optimizer.step(1.0)
    after = snapshot(model, optimizer)
    optimizer.load_state_dict(saved)
    assert_equal(snapshot(model, optimizer)[0], first[0])
    assert_equal(optimizer.state_dict(), saved)
    give_gradients(model, 0)
    optimizer.step(1.0)
    assert_equal(snapshot(model, optimizer)[1], after[1])


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
    give_gradients(model, 0)
    optimizer.step(1.0)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="another model"):
        optimizer.load_state_dict(saved)
    after = snapshot(model, optimizer)
    assert_equal(before[0], after[0])
    assert_equal(before[1], after[1])


def test_fp16_keeps_its_fresh_loss_scale_after_a_checkpoint_without_one():
    saved = AdamW(small_model(), 1e-2).state_dict()
    half = AdamW(small_model().half(), 1e-2)
    half.load_state_dict(saved)
    assert half.loss_scale == 2.0**16
