"""Tests of common/training/optim.py: small updates in low precision, clipping, failures, memory, and resuming.

Two optimizers are compared bit for bit where the same kernel reads the same numbers, whatever memory they lie in.
"""

import copy
import math
import weakref
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
from bounds import assert_rounded, rounding
from torch import nn

from common.training import optim
from common.training.optim import AdamW, schedule

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 GPU")]
on_a_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
in_every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
in_unscaled_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


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


def train(steps, *pairs, clip=1.0) -> None:
    """Takes the same steps with each model and its optimizer."""
    for step in steps:
        for model, optimizer in pairs:
            give_gradients(model, step)
            optimizer.step(clip)


def trained(dtype=torch.float32, device="cpu", steps=1, **options):
    model = small_model(dtype, device)
    optimizer = AdamW(model, 1e-2, **options)
    train(range(steps), (model, optimizer))
    return model, optimizer


def snapshot(model, optimizer) -> dict[str, torch.Tensor]:
    tensors = {f"weight/{name}": p for name, p in model.named_parameters()} | optimizer.state_dict()
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_equal(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].cpu(), b[name].cpu()), name


@in_every_dtype
def test_a_hundred_small_steps_add_up(dtype):
    model = Weights(w=torch.tensor([0.02], dtype=dtype))
    start = model.w.detach().float().clone()
    optimizer = AdamW(model, learning_rate=1e-6)
    for _ in range(100):
        model.w.grad = torch.full((1,), 0.5 * optimizer.loss_scale).to(dtype)
        optimizer.step(max_grad_norm=1.0)
    # Adam under a constant gradient moves by the learning rate; a hundred roundings of 0.02 are 0.1 % of the way
    moved = start - optimizer.masters[0].detach()
    assert moved.item() == pytest.approx(100 * 1e-6, rel=0.01)
    assert model.w.dtype == dtype and torch.equal(model.w, optimizer.masters[0].to(dtype))
    if dtype != torch.float32:
        assert not torch.equal(model.w.float(), start)  # bf16 has steps of 1.2e-4 here, fp16 of 1.5e-5


@on_every_device
@pytest.mark.parametrize(("max_grad_norm", "weight_decay"), [(0.5, 0.1), (0.5, 0.0), (1e6, 0.0), (math.inf, 0.1)])
@pytest.mark.parametrize("lower", ["", "b", "ab"])  # parameters in bf16
def test_it_is_torch_adamw_on_fp32_masters(lower, max_grad_norm, weight_decay, device):
    weights = {name: p.detach() for name, p in small_model(device=device).named_parameters()}
    ours, steps = Weights(**{name: p.bfloat16() if name in lower else p for name, p in weights.items()}), 10
    theirs = Weights(**{name: p.detach().float() for name, p in ours.named_parameters()})
    options = dict(betas=(0.9, 0.95), weight_decay=weight_decay)
    optimizer, reference = AdamW(ours, 1.0, **options), torch.optim.AdamW(theirs.parameters(), lr=1.0, **options)
    for step in range(steps):
        give_gradients(ours, step)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.grad = p.grad.float().clone()  # the kernel leaves the clipped gradient in its memory
        ours.a.grad = ours.a.grad.t().contiguous().t()  # gradients may be laid out in any way
        optimizer.learning_rate = reference.param_groups[0]["lr"] = 1e-2 / (1 + step % 3)
        norm = optimizer.step(max_grad_norm)
        assert_rounded(norm, nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm), terms=3 * 4 + 5)
        reference.step()
    state = optimizer.state_dict()
    assert len(state) == 1 + 2 * 4 and all(isinstance(value, torch.Tensor) for value in state.values())
    for name, q in theirs.named_parameters():
        # a step rounds a weight four times; roundings of the update, fewer than a hundred, count for a hundredth
        assert_rounded(state[f"master/{name}"], q, terms=steps * (4 + 1))
        assert state[f"master/{name}"].dtype == torch.float32
        p = ours.get_parameter(name)
        assert torch.equal(p, state[f"master/{name}"].to(p.dtype))
        for key, value in reference.state[q].items():  # in the format of torch
            assert_rounded(state[f"{key}/{name}"], value, terms=steps * 3)


@on_every_device
@in_every_dtype
def test_gradients_are_cleared_and_the_norm_is_the_one_before_clipping(dtype, device):
    model = Weights(w=torch.zeros(5000, dtype=dtype, device=device), v=torch.zeros(7, dtype=dtype, device=device))
    optimizer = AdamW(model, learning_rate=0.0)
    give_gradients(model, 0)
    gradient = model.w.grad.float() / optimizer.loss_scale
    expected = math.hypot(*(p.grad.double().norm().item() for p in model.parameters())) / optimizer.loss_scale
    norm = optimizer.step(max_grad_norm=expected / 3)
    assert norm.shape == () and norm.dtype == torch.float32 and norm.device == model.w.device
    assert norm.item() == pytest.approx(expected, rel=rounding(5000 + 7))  # in bf16 it would be 1e-3 off
    assert model.w.grad is None
    # after one step exp_avg is (1 - 0.9) times the clipped gradient
    assert_rounded(optimizer.state_dict()["exp_avg/w"], 0.1 * gradient / 3, terms=5000 + 7 + 8)


@in_every_dtype
def test_a_step_reads_nothing_back(dtype, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a tensor was read: on a GPU it would wait for every kernel before")

    model, optimizer = trained(dtype, steps=0)
    for bad in (1.0, math.inf, 1.0):
        give_gradients(model, 0)
        model.a.grad[0, 0] = bad
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
                patch.setattr(torch.Tensor, name, refuse)
            optimizer.scale(torch.ones(()))
            optimizer.step(1.0)
            optimizer.onload()


@in_unscaled_dtypes
def test_a_missing_gradient_is_a_zero_gradient(dtype):
    pairs = [trained(dtype, steps=0, weight_decay=0.1) for _ in range(2)]
    for step in range(4):
        for model, _ in pairs:
            give_gradients(model, step)
        if step % 2:
            pairs[0][0].b.grad, pairs[1][0].b.grad = None, torch.zeros(5, dtype=dtype)
        norms = [optimizer.step(math.inf) for _, optimizer in pairs]
        assert_rounded(*norms, terms=3 * 4 + 5)
    assert_equal(*(snapshot(*pair) for pair in pairs))
    assert pairs[0][1].step(1.0).item() == 0.0  # nobody has one


def test_frozen_parameters_are_left_out_and_the_rate_warms_up():
    given = ((1, 9, 5), (5, 9, 5), (6, 9, 5), (1, 9, 0), (9, 9, 20))
    assert [schedule(*args) for args in given] == [0.2, 1, 1, 1, 0.45]
    model = small_model()
    model.b.requires_grad_(False)
    optimizer = AdamW(model, learning_rate=0.1, weight_decay=0.5)
    before = model.b.clone()
    model.a.grad = torch.ones(3, 4)
    optimizer.step(1.0)
    assert optimizer.names == ["a"] and torch.equal(model.b, before)
    with pytest.raises(ValueError, match="offload = 'sometimes'"):
        AdamW(model, learning_rate=0.1, offload="sometimes")
    with pytest.raises(ValueError, match=r"0 parameters .*requires_grad"):
        AdamW(model.requires_grad_(False), learning_rate=0.1)


@on_every_device
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@in_unscaled_dtypes
def test_after_a_gradient_that_is_not_finite_nothing_changes_until_it_is_reported(dtype, bad, device):
    model, optimizer = trained(dtype, device)
    optimizer.check()
    before = snapshot(model, optimizer)
    give_gradients(model, 1)
    model.b.grad[2] = bad
    norms = [optimizer.step(1.0)]
    give_gradients(model, 2)  # a good one
    norms.append(optimizer.step(1.0))
    assert not any(norm.isfinite() for norm in norms) and model.a.grad is None
    for _ in range(2):
        assert_equal(before, snapshot(model, optimizer))
        optimizer.offload()
    with pytest.raises(FloatingPointError, match=rf"gradient norm is {abs(bad)}.*unchanged"):
        optimizer.check()
    # who catches it can go on, as if the steps had never been
    optimizer.check()
    unharmed = trained(dtype, device)
    train([3], (model, optimizer), unharmed)
    assert_equal(snapshot(model, optimizer), snapshot(*unharmed))


def test_loading_a_state_ends_what_went_wrong_before():
    model, optimizer = trained(torch.bfloat16, steps=0)
    saved, first = copy.deepcopy(optimizer.state_dict()), snapshot(model, optimizer)
    train([0], (model, optimizer))
    model.a.grad = torch.full((3, 4), math.nan, dtype=torch.bfloat16)
    assert optimizer.step(1.0).isnan()
    optimizer.load_state_dict(saved)
    assert_equal(first, snapshot(model, optimizer))  # of before the first step: all is reset
    optimizer.check()
    train([0], (model, optimizer))
    assert_equal(snapshot(model, optimizer), snapshot(*trained(torch.bfloat16)))


@on_every_device
@pytest.mark.parametrize("bad", [math.inf, math.nan])  # inf - inf in the backward pass is NaN
def test_an_fp16_overflow_skips_the_step_and_halves_the_scale(bad, device):
    (model, optimizer), reference = trained(torch.float16, device, steps=0), small_model(torch.float16, device).float()
    plain = AdamW(reference, 1e-2)
    assert optimizer.scale(torch.tensor(2.0, device=device)).item() == 2.0 * 65536
    before = dict(snapshot(model, optimizer), loss_scale=torch.tensor([32768.0, 0.0]).double())
    give_gradients(model, 0)
    model.a.grad[1, 1] = bad
    assert optimizer.step(1.0).item() == math.inf
    optimizer.check()  # it is no error
    assert_equal(before, snapshot(model, optimizer))  # Adam has not seen it
    assert model.a.grad is None

    for step in range(3):  # gradients of size 0.01, times the scale: they fit
        give_gradients(reference, step, 0.01)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.grad = (q.grad * optimizer.loss_scale).half()
            q.grad = p.grad.float() / optimizer.loss_scale
        assert_rounded(optimizer.step(1.0), plain.step(1.0), terms=3 * 4 + 5)
    state = dict(optimizer.state_dict(), loss_scale=plain.state_dict()["loss_scale"])
    assert_equal(state, plain.state_dict())  # exact: the scale is a power of two
    assert all(torch.equal(p, master.half()) for p, master in zip(model.parameters(), optimizer.masters, strict=True))


def test_the_fp16_scale_grows_after_a_thousand_good_steps_and_overflow_at_every_scale_stops():
    model, optimizer = trained(torch.float16, steps=0)
    optimizer.load_state_dict(dict(optimizer.state_dict(), loss_scale=torch.tensor([4096.0, 2997.0]).double()))
    scales = []
    for _ in range(4):
        train([0], (model, optimizer))
        scales.append(optimizer.loss_scale)
    assert scales == [4096.0, 4096.0, 8192.0, 8192.0]  # at the three thousandth
    before = model.a.clone()
    for _ in range(14):  # 8192 is 2**13
        optimizer.check()
        model.a.grad = torch.full_like(model.a, math.inf)
        optimizer.step(1.0)
    with pytest.raises(FloatingPointError, match=r"loss scale 0\.5.*every loss scale.*bf16"):
        optimizer.check()
    assert torch.equal(model.a, before)


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
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_fused_adamw_", spy)
            train([step], (model, optimizer))
        assert seen == buckets
        seen.clear()
        train([step], (whole, expected))
    assert_equal(snapshot(model, optimizer), snapshot(whole, expected))


@on_every_device
@in_every_dtype
def test_a_run_that_is_offloaded_between_steps_is_the_run_without(dtype, device):
    (model, optimizer), (other, plain) = (trained(dtype, device, steps=0) for _ in range(2))
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
        train([step], (model, optimizer), (other, plain))
        assert not optimizer.offloaded and all(master.device.type == device for master in optimizer.masters)
        assert_equal(snapshot(model, optimizer), snapshot(other, plain))
    assert len(places) == 2  # none before the first step, then always the same memory


def test_parameters_in_another_memory_order_are_offloaded_as_they_are():
    model = Weights(w=torch.arange(12.0).view(3, 4).t().bfloat16(), v=torch.ones(2, dtype=torch.bfloat16))
    train([0], (model, optimizer := AdamW(model, 1e-2)))
    before, masters = snapshot(model, optimizer), [optimizer.masters[0]]
    for move in (optimizer.offload, optimizer.onload):
        move()
        masters.append(optimizer.masters[0])
        assert_equal(snapshot(model, optimizer), before)
    assert [master.stride() for master in masters] == [(1, 4)] * 3
    assert masters[0].data_ptr() != masters[1].data_ptr() != masters[2].data_ptr()  # on a CPU, too, it is a move


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
        train([step], (model, optimizer), (plain, expected))
        assert optimizer.offloaded == (offload == "always")
        moved = optimizer.offload_for_rollout()
        assert optimizer.offloaded and (moved > 0) == (offload == "rollout")
        assert dtype == torch.float32 or all(master.device.type == "cpu" for master in optimizer.masters)
        assert_equal(snapshot(model, optimizer), snapshot(plain, expected))
    again = AdamW(copy.deepcopy(model), 1e-2, offload="none")
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_equal(again.state_dict(), expected.state_dict())


@on_a_gpu
@in_every_dtype
def test_steps_do_not_wait_for_the_gpu(dtype, device):
    @contextmanager
    def no_waiting():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to("cuda", dtype)
    model.register_parameter("unused", nn.Parameter(torch.ones(3, device="cuda", dtype=dtype)))
    optimizer = AdamW(model, 1e-3)
    inputs, norms = torch.randn(16, 64, device="cuda", dtype=dtype), []
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


@on_a_gpu
@in_every_dtype
def test_offloading_frees_gpu_memory_and_a_step_needs_little(dtype, device, monkeypatch):
    elements = 2**20
    monkeypatch.setattr(optim, "BUCKET_ELEMENTS", elements)
    model = Weights(**{f"w{i}": torch.randn(1024, 1024, device="cuda").to(dtype) for i in range(16)})
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


@on_every_device
@in_every_dtype
@pytest.mark.parametrize(("steps_before", "offloaded"), [(0, False), (3, False), (3, True)])
def test_a_resumed_run_goes_on_identically(dtype, steps_before, offloaded, device):
    model, optimizer = trained(dtype, device, steps=steps_before)
    if dtype == torch.float16:  # so that there is a scale to restore
        model.a.grad = torch.full((3, 4), math.inf, dtype=dtype, device=device)
        optimizer.step(1.0)
    expected = copy.deepcopy(optimizer.state_dict())
    other, resumed = trained(dtype, device, steps=0)
    nn.init.zeros_(other.a)
    if offloaded:
        optimizer.offload()
        resumed.offload()
        for name, value in optimizer.state_dict().items():  # fp32 weights are parameters, and stay
            assert value.device.type == (device if name.startswith("master/") and dtype == torch.float32 else "cpu")
    state = {name: value.cpu() for name, value in optimizer.state_dict().items()}
    saved = safetensors.torch.load(safetensors.torch.save(state))
    assert_equal(saved, expected)
    resumed.load_state_dict(saved)
    assert resumed.offloaded == offloaded
    assert_equal(resumed.state_dict(), expected)
    train(range(10, 14), (model, optimizer), (other, resumed))
    assert_equal(snapshot(model, optimizer), snapshot(other, resumed))
    assert_equal(saved, expected)  # what was loaded is not what is trained


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_run_can_go_on_in_another_dtype(dtype):
    (model, optimizer), (other, resumed) = trained(), trained(dtype, steps=0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, master, q in zip(other.parameters(), resumed.masters, model.parameters(), strict=True):
        assert torch.equal(master, q) and torch.equal(p, q.to(dtype))
    assert resumed.loss_scale == (2.0**16 if dtype == torch.float16 else 1.0)  # none was saved: it begins anew
    train([1], (other, resumed))
    resumed.check()


def test_the_state_of_another_model_is_refused_and_changes_nothing():
    model, optimizer = trained()
    before = snapshot(model, optimizer)
    for shapes in (dict(a=(3, 4)), dict(a=(3, 4), b=5, c=1), dict(a=(3, 4), b=1)):  # the last would broadcast
        saved = AdamW(Weights(**{name: torch.zeros(shape) for name, shape in shapes.items()}), 1e-2).state_dict()
        with pytest.raises(ValueError, match=r"another model.*policy_model"):
            optimizer.load_state_dict(saved)
        assert_equal(before, snapshot(model, optimizer))
