"""Tests of what distillation computes: common/distillation.py, common/teachers.py and common/offload.py."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import build_model, build_tokenizer, tiny_model
from test_divergences import between, exact, exact_top
from test_logprobs import COMPLETIONS, PROMPTS, assert_same_gradients, gradients, pack
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from common import distillation, head, losses, offpolicy, optim, teachers
from common.distillation import VALUES, Divergences, Head, HiddenStates
from common.logprobs import LogProbs
from common.offload import Offload
from common.teachers import LocalTeacher

CPU = torch.device("cpu")
GIB = 2**30
BETAS = [0.0, 0.5, 1.0]
MODELS = {  # other sizes of the hidden states and of the vocabulary, biases, soft caps, tied and untied heads
    "qwen2": lambda: tiny_model("qwen2", tie_word_embeddings=True),
    "llama": lambda: tiny_model("llama", tie_word_embeddings=False),
    "phi": lambda: tiny_model("phi", num_key_value_heads=4),
    "gemma2": lambda: tiny_model("gemma2", head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=None),
    "wide": lambda: tiny_model("llama", hidden_size=48, vocab_size=72, num_hidden_layers=1),
    "wide_phi": lambda: tiny_model("phi", hidden_size=48, vocab_size=72, num_hidden_layers=1, num_key_value_heads=4),
}
K = 5


@functools.cache
def model_of(kind, seed=0) -> nn.Module:
    """Shared by the tests, which leave its weights alone; another seed moves them."""
    model = MODELS[kind]()
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * seed * torch.randn(p.shape)
    return model


def own_logits(model, prompt, completion) -> torch.Tensor:
    """What the model itself says before every token of a completion, one row, no padding."""
    return model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]


def said_of(kind, teacher, batch, prompts, completions, temperature, k=K) -> tuple[Head | None, tuple]:
    """Head and hidden states of a teacher, or no head and its top k of what it says itself."""
    with torch.no_grad():
        if kind == "states":
            return Head(teacher), HiddenStates(teacher, 1.0)(*batch.tokens)
        shape = batch.completion_ids.shape
        ids, logps = torch.zeros(*shape, k, dtype=torch.int32), torch.zeros(*shape, k)
        tail, tokens = torch.zeros(shape), torch.zeros(shape)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            logp, n = (own_logits(teacher, prompt, completion)[:, :64] / temperature).log_softmax(-1), len(completion)
            logps[i, :n], ids[i, :n] = logp.topk(k, dim=-1)
            tail[i, :n] = logp.scatter(-1, ids[i, :n].long(), -torch.inf).logsumexp(-1)
            tokens[i, :n] = logp[range(n), completion]
    return None, (ids, logps, tail, tokens)


def dense(student, teacher, kind, said, prompts, completions, weights, beta, temperature) -> tuple:
    """Loss and divergences [m, C] from whole logits in double precision, with the gradients of autograd."""
    values = torch.zeros(weights.shape, dtype=torch.float64)
    loss = 0.0
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        logits, n = own_logits(student, prompt, completion).double()[:, :64], len(completion)
        if kind == "states":
            with torch.no_grad():
                theirs = own_logits(teacher, prompt, completion)[:, :64]
            value = exact(logits, theirs, beta, temperature)
        else:
            ids, logps, tail, _ = (x[i, :n] for x in said)
            value = exact_top(logits, ids.long(), logps, tail, beta, temperature)
        loss = loss + (value * weights[i, :n]).sum()
        values[i, :n] = value.detach()
    return loss, values


def trained(student, teacher, kind="states", beta=0.5, temperature=0.7, prompts=PROMPTS, completions=COMPLETIONS,
            weights=None, aggregation="token_mean", batch=None, factor=1.0):  # fmt: skip
    """Loss, values and gradients of `Divergences`, and the head and what the teacher said."""
    batch = batch or pack(prompts, completions)
    teacher_head, said = said_of(kind, teacher, batch, prompts, completions, temperature)
    if weights is None:
        weights = losses.weights(batch.completion_mask, aggregation, batch.completion_mask.sum())
    policy = Divergences(student, temperature, False, beta, 64, teacher_head)
    loss, values = policy(*batch.tokens, weights, *said)
    assert loss.shape == (1,) and loss.dtype == values.dtype == torch.float32 and not values.requires_grad
    return loss.detach(), values, gradients(student, loss.sum() * factor), said, weights


def assert_gradients(found, expected, rtol=1e-5):
    """Relative to the largest entry of each parameter."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name].double() - gradient.double()).abs().max()
        assert error <= rtol * gradient.abs().max() + 1e-6, (name, error, gradient.abs().max())


# --- the loss, against whole logits ---


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", ["states", "top_k"])
@pytest.mark.parametrize(("student", "teacher"), [
    ("qwen2", "wide"), ("llama", "wide_phi"), ("phi", "gemma2"), ("gemma2", "wide"),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_whole_logits(student, teacher, kind, beta, aggregation):
    student, teacher = model_of(student), model_of(teacher, 1)
    loss, values, found, said, weights = trained(student, teacher, kind, beta, aggregation=aggregation)
    rows = PROMPTS, COMPLETIONS, weights, beta, 0.7
    expected, divergence = dense(student, teacher, kind, said, *rows)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(values[..., 0].double(), divergence, rtol=1e-4, atol=1e-5)
    assert_gradients(found, gradients(student, expected))
    assert not values[~pack(PROMPTS, COMPLETIONS).completion_mask].any()
    counts = torch.tensor([len(ids) for ids in COMPLETIONS])
    per_row = weights.sum(1) * counts.sum()
    assert torch.allclose(per_row, counts.float() if aggregation == "token_mean" else torch.ones(4))


@pytest.mark.parametrize("kind", ["states", "top_k"])
def test_what_is_reported(kind):
    student, teacher = model_of("phi"), model_of("wide", 1)
    _, values, _, said, _ = trained(student, teacher, kind, 0.5)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        n = len(completion)
        logits, theirs = (own_logits(x, prompt, completion).double()[:, :64] for x in (student, teacher))
        logq, logp = ((x / 0.7).log_softmax(-1) for x in (logits, theirs))
        ends = [exact(logits, theirs, beta, 0.7) for beta in (0.0, 1.0)]
        if kind == "top_k":
            ids, logps, tail, _ = (x[i, :n] for x in said)
            ends = [exact_top(logits, ids.long(), logps, tail, beta, 0.7) for beta in (0.0, 1.0)]
        expected = {"forward_kl": ends[0], "reverse_kl": ends[1], "entropy": -(logq.exp() * logq).sum(-1),
                    "student_logps": logq[range(n), completion],
                    "teacher_logps": logp[range(n), completion]}  # fmt: skip
        for name, value in expected.items():
            torch.testing.assert_close(values[i, :n, VALUES.index(name)].double(), value, rtol=1e-4, atol=1e-4)


def test_the_definition_that_is_compared_with_tells_the_sides_apart():
    p, q = torch.tensor([0.9, 0.1]).double().log(), torch.tensor([0.4, 0.6]).double().log()
    assert between(p, q, 0.0).item() == pytest.approx(0.5507, abs=5e-5)


def test_beta_and_temperature_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"beta = 1.5"):
        Divergences(model_of("qwen2"), 1.0, False, 1.5, 64, None)
    with pytest.raises(ValueError, match=r"temperature = 0"):
        Divergences(model_of("qwen2"), 0.0, False, 0.5, 64, None)


@pytest.mark.parametrize(("beta", "said"), [
    (1e-6, "is the forward KL times 1e-06, a loss of nearly 0; set loss to forward_kl"),
    (1 - 1e-6, "is the reverse KL times 1e-06, a loss of nearly 0; set loss to reverse_kl"),
    (0.0, ""), (1.0, ""), (0.01, ""), (0.99, ""),
])  # fmt: skip
def test_a_beta_that_all_but_switches_the_loss_off_is_warned_of(beta, said, capsys):
    Divergences(model_of("qwen2"), 1.0, False, beta, 64, None)
    out = capsys.readouterr().out
    assert f"warning: beta = {beta}: " in out and said in out if said else out == ""


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", ["states", "top_k"])
@pytest.mark.parametrize("student", ["qwen2", "phi", "gemma2"])
def test_a_student_that_is_its_teacher_diverges_nowhere(student, kind, beta):
    model = model_of(student)
    _, values, found, _, _ = trained(model, copy.deepcopy(model), kind, beta)
    assert values[..., :3].abs().max() <= 1e-5
    assert max(gradient.abs().max() for gradient in found.values()) <= 1e-5
    assert values[..., 5].max() > 0.5  # the entropy: there was something to compare


# --- what must not matter ---


@pytest.mark.parametrize("kind", ["states", "top_k"])
@pytest.mark.parametrize("student", ["phi", "gemma2"])
def test_chunks_and_slices_change_nothing(student, kind, monkeypatch):
    student, teacher, results, sizes = model_of(student), model_of("wide", 1), [], []
    project = distillation.project
    monkeypatch.setattr(distillation, "project", lambda *args: sizes.append(len(args[0])) or project(*args))
    for chunk, slices in ((1024, 16), (1024, 1), (5, 16), (5, 2), (1, 3)):
        monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
        monkeypatch.setattr(distillation, "SLICES", slices)
        sizes.clear()
        results.append(trained(student, teacher, kind)[:3])
        assert max(sizes) <= chunk and sum(sizes) == 13 * (2 if kind == "states" else 1)
    for loss, values, found in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(values, results[0][1], rtol=1e-5, atol=1e-6)
        assert_same_gradients(found, results[0][2], atol=1e-6)


@pytest.mark.parametrize("kind", ["states", "top_k"])
def test_a_row_counts_the_same_alone_padded_and_among_others(kind):
    student, teacher = model_of("qwen2"), model_of("wide", 1)
    weights = torch.rand(4, 7, generator=torch.Generator().manual_seed(0))
    loss, values, found, _, _ = trained(student, teacher, kind, weights=weights)
    padded = pack(PROMPTS, COMPLETIONS, left=3, right=2, garbage=41)
    wide = nn.functional.pad(weights, (0, 2), value=9.0)  # of no token
    other, wide_values, other_found, _, _ = trained(student, teacher, kind, weights=wide, batch=padded)
    assert other.item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(wide_values[:, :7], values, rtol=1e-4, atol=1e-5)
    assert_same_gradients(other_found, found, atol=1e-5)
    apart = []
    for i in range(4):
        n = len(COMPLETIONS[i])
        row = dict(prompts=PROMPTS[i : i + 1], completions=COMPLETIONS[i : i + 1], weights=weights[i : i + 1, :n])
        apart.append(trained(student, teacher, kind, **row))
        torch.testing.assert_close(apart[-1][1][0], values[i, :n], rtol=1e-4, atol=1e-5)
    assert sum(part[0] for part in apart).item() == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradients({name: sum(part[2][name] for part in apart) for name in found}, found, atol=1e-5)


@pytest.mark.parametrize("kind", ["states", "top_k"])
def test_what_stands_outside_the_completions_has_no_influence(kind):
    student, teacher, batch = model_of("llama"), model_of("wide", 1), pack(PROMPTS, COMPLETIONS)
    teacher_head, said = said_of(kind, teacher, batch, PROMPTS, COMPLETIONS, 1.0)
    policy = Divergences(student, 1.0, False, 0.5, 64, teacher_head)
    weights = torch.ones(4, 7)
    results = []
    for garbage in (False, True):
        if garbage:  # after the end token, and before the prompt
            batch.completion_ids[~batch.completion_mask] = 61
            batch.prompt_ids[~batch.prompt_mask] = 62
            weights[~batch.completion_mask] = torch.nan
            for x in said:
                x[~batch.completion_mask] = torch.nan if x.is_floating_point() else 10**6
        loss, values = policy(*batch.tokens, weights, *said)
        results.append((loss.detach(), values, gradients(student, loss.sum())))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert_same_gradients(results[1][2], results[0][2], atol=0)


def test_a_weight_of_zero_takes_a_token_out():
    student, teacher, weights = model_of("phi"), model_of("wide", 1), torch.zeros(4, 7)
    loss, values, found, _, _ = trained(student, teacher, weights=weights)
    assert loss.item() == 0.0 and values[..., 0].max() > 0.1
    assert all(gradient.isfinite().all() and not gradient.any() for gradient in found.values())
    weights[1:3] = 0.3
    some = trained(student, teacher, weights=weights)
    only = trained(student, teacher, prompts=PROMPTS[1:3], completions=COMPLETIONS[1:3], weights=weights[1:3])
    assert some[0].item() == pytest.approx(only[0].item(), rel=1e-5) and some[0] > 0
    assert_same_gradients(some[2], only[2], atol=1e-5)


def test_gradients_grow_with_the_loss_and_add_up_over_micro_batches():
    student, teacher = model_of("qwen2"), model_of("wide", 1)
    loss, _, found, _, weights = trained(student, teacher)
    same, _, larger, _, _ = trained(student, teacher, factor=3.0)
    assert torch.equal(same, loss)
    assert_same_gradients(larger, {name: 3 * gradient for name, gradient in found.items()}, atol=1e-6)
    student.zero_grad()
    for rows in (slice(0, 1), slice(1, 4)):
        batch = pack(PROMPTS[rows], COMPLETIONS[rows])
        teacher_head, said = said_of("states", teacher, batch, PROMPTS[rows], COMPLETIONS[rows], 0.7)
        part = weights[rows, : batch.completion_ids.shape[1]]
        Divergences(student, 0.7, False, 0.5, 64, teacher_head)(*batch.tokens, part, *said)[0].sum().backward()
    summed = {name: p.grad.clone() for name, p in student.named_parameters()}
    student.zero_grad()
    assert_same_gradients(summed, found, atol=1e-5)


def test_a_frozen_head_or_body_leaves_the_gradients_of_the_rest():
    teacher, student = model_of("wide", 1), copy.deepcopy(model_of("phi"))
    whole = trained(student, teacher)[2]
    for frozen in ("lm_head.weight", "lm_head.bias"):
        student.get_parameter(frozen).requires_grad_(False)
        part = trained(student, teacher)[2]
        assert frozen not in part
        assert_same_gradients(part, {name: whole[name] for name in part}, atol=1e-6)
    student.requires_grad_(False)
    student.lm_head.requires_grad_(True)
    part = trained(student, teacher)[2]
    assert part.keys() == {"lm_head.weight", "lm_head.bias"}
    assert_same_gradients(part, {name: whole[name] for name in part}, atol=1e-6)


@pytest.mark.parametrize("shared", [64, 50])
def test_of_ids_that_one_side_lacks_nothing_is_learned(shared):
    # the student has 64 ids, of which the first 50 count; its tokens are among them
    student, teacher = model_of("phi"), model_of("wide", 1)
    batch = pack(PROMPTS, COMPLETIONS)
    teacher_head, said = said_of("states", teacher, batch, PROMPTS, COMPLETIONS, 1.0)
    weights = torch.full((4, 7), 0.1)
    loss, _ = Divergences(student, 1.0, False, 0.5, shared, teacher_head)(*batch.tokens, weights, *said)
    found = gradients(student, loss.sum())
    expected = sum(
        0.1 * exact(own_logits(student, p, c)[:, :shared], own_logits(teacher, p, c)[:, :shared].detach(), 0.5).sum()
        for p, c in zip(PROMPTS, COMPLETIONS, strict=True)
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_gradients(found, gradients(student, expected))
    assert not found["lm_head.weight"][shared:].any() and not found["lm_head.bias"][shared:].any()


def test_without_gradients_the_values_are_the_same_and_none_is_made(monkeypatch):
    student, teacher, made = model_of("phi"), model_of("wide", 1), []
    batch = pack(PROMPTS, COMPLETIONS)
    teacher_head, said = said_of("states", teacher, batch, PROMPTS, COMPLETIONS, 1.0)
    policy = Divergences(student, 1.0, False, 0.5, 64, teacher_head)
    weighted = distillation._weighted

    def watched(*args):
        values, grad = weighted(*args)
        made.append(grad is not None)
        return values, grad

    monkeypatch.setattr(distillation, "_weighted", watched)
    weights = torch.full((4, 7), 0.1)
    loss, values = policy(*batch.tokens, weights, *said)
    assert all(made) and made
    made.clear()
    with torch.no_grad():
        other, other_values = policy(*batch.tokens, weights, *said)
    assert made and not any(made) and not other.requires_grad
    assert torch.equal(loss.detach(), other) and torch.equal(values, other_values)


def test_a_batch_without_tokens_has_no_loss_and_zero_gradients():
    student, teacher, batch = model_of("phi"), model_of("wide", 1), pack(PROMPTS, COMPLETIONS)
    batch.completion_mask[:] = False
    teacher_head, said = said_of("states", teacher, batch, PROMPTS, COMPLETIONS, 1.0)
    assert not said[0].any()
    loss, values = Divergences(student, 1.0, False, 0.5, 64, teacher_head)(*batch.tokens, torch.ones(4, 7), *said)
    assert loss.item() == 0.0 and not values.any()
    assert not any(gradient.any() for gradient in gradients(student, loss.sum()).values())


# --- half precision ---


def compare(found, expected, most):
    """The error of a whole gradient, relative to its norm."""
    error = sum((found[name].double() - expected[name].double()).square().sum() for name in expected).sqrt()
    assert error <= most * sum(gradient.double().square().sum() for gradient in expected.values()).sqrt()


@pytest.mark.parametrize("kind", ["states", "top_k"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.05), (torch.float16, 0.006)])
def test_in_half_precision_gradients_are_close_to_those_of_fp32(dtype, most, kind):
    student = copy.deepcopy(model_of("phi")).to(dtype)  # rounded weights, on both sides
    teacher = copy.deepcopy(model_of("wide", 1)).to(dtype)
    loss, _, found, _, _ = trained(student, teacher, kind)
    other, _, expected, _, _ = trained(copy.deepcopy(student).float(), copy.deepcopy(teacher).float(), kind)
    assert loss.item() == pytest.approx(other.item(), rel=most)
    assert all(gradient.dtype == dtype for gradient in found.values())
    compare(found, expected, most)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_small_weights_lose_nothing(dtype, scale):
    """Hidden states in, gradients out: exact but for the rounding of the result, also where a step has many tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, theirs, states = (torch.randn(*shape, generator=generator).to(dtype)
                                      for shape in ((40, 8), (30, 8), (30, 6), (40, 6)))  # fmt: skip
    hidden.requires_grad_()
    weight.requires_grad_()
    ids, weights = torch.zeros(40, dtype=torch.int64), torch.rand(40, generator=generator) * 1e-7
    target = distillation.Full((theirs, None, None), 30, 0.5, 1.0, False)
    loss, _ = distillation._Divergence.apply(hidden, weight, None, weights, None, 30, target, ids, states)
    exact_loss = (exact(hidden.double() @ weight.double().t(), states.double() @ theirs.double().t(), 0.5)
                  * weights).sum()  # fmt: skip
    found = torch.autograd.grad(loss.sum() * scale, (hidden, weight))
    expected = torch.autograd.grad(exact_loss * scale, (hidden, weight))
    smallest = 6e-8 if dtype == torch.float16 else 0.0  # of the result: what the scale of the loss is for
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype] * other.abs()
        assert ((one.double() - other.double()).abs() <= rounding + smallest + 1e-5 * other.abs().max()).all()


# --- memory ---


class Live(TorchDispatchMode):
    """Follows the memory of all tensors that operations return, and of those only: bytes alive, and their peak."""

    def __init__(self, known):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            del storage
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def loss_memory(kind, dtype, chunk, monkeypatch, N=96, V=3000, H=8) -> float:
    """Peak of forward and backward, beyond what has to be there, in chunks of fp32 logits."""
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, theirs, states = (torch.randn(*shape, generator=generator).to(dtype)
                                      for shape in ((N, H), (V, H), (V, H), (N, H)))  # fmt: skip
    hidden.requires_grad_()
    weight.requires_grad_()
    weights, ids = torch.full((N,), 1.0 / N), torch.zeros(N, dtype=torch.int64)
    if kind == "states":
        said, casts = (states,), 2
    else:
        logps, top_ids = (states.float() @ theirs.float().t()).log_softmax(-1).topk(K)
        said, casts = (top_ids.int(), logps, torch.full((N,), -2.0), torch.zeros(N)), 1
    with Live([hidden, weight, theirs, weights, ids, *said]) as live:
        if kind == "states":
            target = distillation.Full((theirs, None, None), V, 0.5, 1.0, False)
        else:
            target = distillation.TopK(0.5, 1.0, False)
        loss, values = distillation._Divergence.apply(hidden, weight, None, weights, None, V, target, ids, *said)
        loss.sum().backward()
    gradients_in_fp32 = 4 * (hidden.numel() + weight.numel())
    outputs = hidden.grad.nbytes + weight.grad.nbytes + 2 * values.nbytes  # of the chunks, and together
    in_fp32 = casts * 4 * V * H if dtype != torch.float32 else 0  # where half precision cannot be multiplied into fp32
    return (live.peak - gradients_in_fp32 - outputs - in_fp32) / (4 * chunk * V)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "most"), [("states", 2.75), ("top_k", 1.5)])  # of student and teacher, and slices
def test_no_more_than_three_chunks_of_logits_are_alive(kind, most, dtype, monkeypatch):
    small, large = (loss_memory(kind, dtype, chunk, monkeypatch) for chunk in (16, 48))
    assert 0.8 < large <= most and small <= most
    assert 48 * large > 2 * 16 * small  # it is the chunk that counts
    monkeypatch.setattr(distillation, "SLICES", 1)
    assert loss_memory(kind, dtype, 48, monkeypatch) > 4  # what is measured are tensors of that size


# --- a teacher in this process ---


def rows(prompts=PROMPTS, completions=COMPLETIONS, tokens=20):
    """Micro-batches, as the update sees them."""
    batch = offpolicy.batch(prompts, completions, 0, [3], CPU)
    return batch.minibatches(1, tokens, True)[0]


@pytest.fixture(scope="module", params=["qwen2", "gpt2"])
def teacher(request, model_folders):
    torch.set_num_threads(1)
    return LocalTeacher(str(model_folders[request.param]), [CPU], "fp32", temperature=0.7, compile=True)


@pytest.mark.parametrize("micro_batch_tokens", [0, 20])
def test_the_states_of_a_teacher_are_its_logits(teacher, micro_batch_tokens):
    micros = rows()
    assert len(micros) > 1
    teacher.fill(micros, micro_batch_tokens)
    weight, bias, softcap = teacher.head.on(CPU)
    for micro in micros:
        assert micro.teacher_states.shape == (*micro.completion_ids.shape, 32) and micro.said == (micro.teacher_states,)
        for i, row in enumerate(micro.rows.tolist()):
            logits = own_logits(teacher.model, PROMPTS[row], COMPLETIONS[row])
            n = len(COMPLETIONS[row])
            found = head.project(micro.teacher_states[i, :n], weight, bias, softcap)
            torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
            assert not micro.teacher_states[i, n:].any()
    assert not any(p.requires_grad for p in teacher.model.parameters())
    assert teacher.vocabulary_size == teacher.shared == 64


def test_a_teacher_of_tokens_says_how_likely_they_are(model_folders):
    teacher = LocalTeacher(str(model_folders["qwen2"]), [CPU], "fp32", temperature=0.7, compile=True, tokens_only=True)
    micros = rows()
    teacher.fill(micros, 20)
    assert teacher.head is None
    for micro in micros:
        assert micro.teacher_states is None
        for i, row in enumerate(micro.rows.tolist()):
            completion = COMPLETIONS[row]
            logps = (own_logits(teacher.model, PROMPTS[row], completion) / 0.7).log_softmax(-1)
            expected = logps[range(len(completion)), completion]
            torch.testing.assert_close(micro.teacher_token_logps[i, : len(completion)], expected, rtol=0, atol=1e-5)
    assert len(teacher.memory.params) == len(list(teacher.model.parameters()))  # no part of it is at work elsewhere


@pytest.mark.parametrize("tokens_only", [False, True])
def test_a_teacher_that_overflows_is_named(tokens_only, model_folders):
    name, options = str(model_folders["qwen2"]), dict(temperature=0.7, compile=True)
    teacher = LocalTeacher(name, [CPU], "fp32", tokens_only=tokens_only, **options)
    teacher.fill(rows(), 20)
    with torch.no_grad():  # in one layer, for some token
        teacher.model.model.layers[0].mlp.down_proj.weight.mul_(torch.finfo(torch.float32).max)
    what = "token_logps" if tokens_only else "states"
    with pytest.raises(FloatingPointError, match=f"teacher '{name}': its {what} are not all finite.*large for float32"):
        teacher.fill(rows(), 20)


@pytest.mark.parametrize("beta", BETAS)
def test_rows_of_different_lengths_do_not_diverge_from_a_teacher_that_is_the_student(teacher, beta):
    student = Divergences(teacher.model, 0.7, False, beta, 64, teacher.head)
    some = PROMPTS[:3], [[5, 6], [7, 8, 9, 10, 11], [12]]
    for tokens in (1, 12, 1000):  # one row in each micro-batch, some, and all
        micros = rows(*some, tokens)
        teacher.fill(micros, tokens)
        for micro in micros:
            _, values = student(*micro.tokens, micro.completion_mask.float(), *micro.said)
            assert values[..., :3].abs().max() <= 1e-5 and values[..., 5].max() > 0.5


def test_an_offloaded_teacher_comes_back_bit_for_bit(teacher):
    before = {name: value.clone() for name, value in teacher.model.state_dict().items()}
    output = teacher.model.get_output_embeddings().weight
    micros, again = rows(), rows()
    teacher.fill(micros, 20)
    place = output.data_ptr()
    moved = {name: p.data_ptr() for name, p in teacher.model.named_parameters() if p is not output}
    size = sum(p.nbytes for p in teacher.model.parameters() if p is not output)
    assert teacher.offload() * GIB == pytest.approx(size)
    assert output.data_ptr() == place == teacher.head.on(CPU)[0].data_ptr()
    assert all(p.data_ptr() != moved[name] for name, p in teacher.model.named_parameters() if p is not output)
    teacher.onload()
    assert all(torch.equal(value, before[name]) for name, value in teacher.model.state_dict().items())
    teacher.fill(again, 20)
    for one, other in zip(micros, again, strict=True):
        assert torch.equal(one.teacher_states, other.teacher_states)


def test_completions_of_a_teacher_depend_on_number_and_seed_only(teacher):
    options = dict(seed=5, temperature=1.0, max_new_tokens=6)
    numbers = [7, 3, 11, 20]
    together = teacher.generate(PROMPTS, numbers, **options)
    assert len({tuple(ids) for ids in together}) == 4 and all(0 < len(ids) <= 6 for ids in together)
    assert all(ids.index(3) == len(ids) - 1 for ids in together if 3 in ids)  # cut after the end token
    backwards = teacher.generate(PROMPTS[::-1], numbers[::-1], **options)
    assert backwards[::-1] == together
    teacher.offload()
    alone = [teacher.generate([prompt], [n], **options)[0] for prompt, n in zip(PROMPTS, numbers, strict=True)]
    assert alone == together and not teacher.memory.away
    assert teacher.generate(PROMPTS, numbers, **{**options, "seed": 6}) != together
    assert teacher.generate(PROMPTS, [1, 2, 4, 5], **options) != together
    assert [ids[:2] for ids in together] == teacher.generate(PROMPTS, numbers, **{**options, "max_new_tokens": 2})


def test_greedy_completions_of_a_teacher_are_its_most_likely_tokens(teacher):
    (ids,) = teacher.generate(PROMPTS[:1], [0], seed=0, temperature=0.0, max_new_tokens=5)
    assert own_logits(teacher.model, PROMPTS[0], ids).argmax(-1).tolist() == ids


# --- vocabularies ---


def vocabulary_of(tokens) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def known(vocabulary, chat_template=None, eos_token="a", pieces=1):
    """A tokenizer that has this vocabulary, and cuts text into pieces of as many characters."""
    return SimpleNamespace(
        get_vocab=lambda: vocabulary, chat_template=chat_template, eos_token=eos_token,
        eos_token_id=vocabulary.get(eos_token),
        encode=lambda text, add_special_tokens: [text[i : i + pieces] for i in range(0, len(text), pieces)],
    )  # fmt: skip


def test_the_same_tokenizer_is_shared_up_to_the_smaller_size(tokenizer):
    vocabulary = tokenizer.get_vocab()
    for sizes in ((64, 64), (64, 72), (72, 64)):
        assert teachers.shared_ids(tokenizer, sizes[0], dict(vocabulary), sizes[1]) == 64


def test_another_order_of_ids_is_refused_by_its_first_token():
    own, other = list("abcdef"), list("abdcef")
    with pytest.raises(ValueError, match=r"id 2 is 'c' for the student and 'd' for the teacher \(2 ids differ\)"):
        teachers.shared_ids(known(vocabulary_of(own)), 6, vocabulary_of(other), 6)
    moved = {**vocabulary_of("abcde"), "f": 9}  # nothing else has this id
    with pytest.raises(ValueError, match=r"id 9 is None for the student and 'f' for the teacher"):
        teachers.shared_ids(known(vocabulary_of(own)), 10, moved, 10)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_token_that_only_one_side_has_does_no_harm(side):
    plain, padded = vocabulary_of("abcdef"), vocabulary_of([*"abcdef", "<pad>"])
    own, other = (padded, plain) if side == "student" else (plain, padded)
    assert teachers.shared_ids(known(own), 8, other, 7) == 7


def stub_teacher(size, chat_template=None, **tokenizer):
    return SimpleNamespace(vocabulary=lambda: vocabulary_of("abcdef"), vocabulary_size=size, shared=size,
                           habits=teachers.habits(known({}, chat_template, **tokenizer)))  # fmt: skip


@pytest.mark.parametrize(("student", "size"), [(151_936, 152_064), (152_064, 151_936)])
def test_sizes_that_differ_are_said_once(student, size, capsys):
    teacher = stub_teacher(size)
    assert teachers.agree(teacher, known(vocabulary_of("abcdef")), student) == teacher.shared == 151_936
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert said.endswith(f"the student has {student} token ids, the teacher {size}: the first 151936 count, on both "
                         "sides\n")  # fmt: skip
    assert teachers.agree(stub_teacher(4), known(vocabulary_of("abcdef")), 6) == 4
    assert "; 2 tokens of its tokenizer are not among them, and the student never" in capsys.readouterr().out


def test_where_all_is_the_same_nothing_is_said(capsys):
    assert teachers.agree(stub_teacher(64, "{{ a }}"), known(vocabulary_of("abcdef"), "{{ a }}"), 64) == 64
    assert capsys.readouterr().out == ""


def test_another_chat_template_is_refused_unless_allowed(capsys):
    pair = stub_teacher(64, "{{ a }}"), known(vocabulary_of("abcdef"), "{{ b }}")
    with pytest.raises(ValueError, match=r"another than the student's: it would .*allow_other_template"):
        teachers.agree(*pair, 64)
    assert teachers.agree(*pair, 64, True) == 64
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "warning: the teacher's chat template is another than the student's" in said


@pytest.mark.parametrize(("theirs", "own"), [("{{ a }}", None), (None, "{{ a }}")])
def test_a_chat_template_on_one_side_only_is_warned_of(theirs, own, capsys):
    assert teachers.agree(stub_teacher(64, theirs), known(vocabulary_of("abcdef"), own), 64) == 64
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "warning: the teacher's chat template is another than the student's" in said


@pytest.mark.parametrize(("other", "what"), [
    (dict(pieces=2), "the teacher's tokenizer cuts text into other tokens than the student's, though the ids are the"),
    (dict(eos_token="b"), "the teacher's end token is another than the student's: a student that learns it goes on"),
])  # fmt: skip
def test_tokenizers_that_differ_in_more_than_ids_are_warned_of(other, what, capsys):
    teacher, own = stub_teacher(64, **other), known(vocabulary_of("abcdef"))
    assert teachers.agree(teacher, own, 64) == 64
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"warning: {what}" in said
    teacher.habits = {"template_hash": teacher.habits["template_hash"]}  # all that an older server says
    teachers.agree(teacher, own, 64)
    assert capsys.readouterr().out == ""


def test_real_tokenizers_with_one_map_of_ids_and_another_normalizer_are_told_apart(tokenizer):
    from tokenizers import normalizers

    other = build_tokenizer()
    assert teachers.habits(other) == teachers.habits(tokenizer)
    other.backend_tokenizer.normalizer = normalizers.Replace("=", "-")
    assert other.get_vocab() == tokenizer.get_vocab()
    differ = {name for name, value in teachers.habits(other).items() if value != teachers.habits(tokenizer)[name]}
    assert differ == {"segments_hash"}


def test_a_run_does_not_go_on_with_another_teacher():
    local, others = SimpleNamespace(name="t", weights=64 * "a"), {"teacher": 64 * "b"}
    teachers.require_same(local, {})  # a new run, or one of an older version
    teachers.require_same(local, {"teacher": 64 * "a"})
    message = "the teacher 't' has the weights aaaaaaaaaaaa: must be those that this run began with, bbbbbbbbbbbb"
    with pytest.raises(ValueError, match=message):
        teachers.require_same(local, others)


def test_an_end_token_that_the_teacher_lacks_is_refused():
    own = known(vocabulary_of([*"abcdef", "<end>"]), eos_token="<end>")
    with pytest.raises(ValueError, match=r"end token '<end>' has id 6: must be one of the first 6 ids.*no completion"):
        teachers.agree(stub_teacher(6), own, 7)


# --- weights that leave and come back ---


def bytes_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def assert_weights(model, expected):
    for name, p in model.named_parameters(remove_duplicate=False):
        assert torch.equal(p, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_weights_travel_both_ways(dtype):
    model = build_model("qwen2").to(dtype)
    memory, size = Offload(model), sum(p.nbytes for p in model.parameters())
    assert not memory.frozen and memory.off() * GIB == pytest.approx(size)
    memory.on()
    with torch.no_grad():  # a step of training
        for p in model.parameters():
            p += 1.0
    after = bytes_of(model)
    home = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert memory.off() * GIB == pytest.approx(size) and memory.off() == 0.0
    assert_weights(model, after)
    assert all(p.data_ptr() != home[name] for name, p in model.named_parameters())
    with torch.no_grad():  # also what happens to them meanwhile
        model.model.norm.weight += 1.0
    after = bytes_of(model)
    memory.on()
    memory.on()
    assert_weights(model, after)
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_weights_are_copied_once(monkeypatch):
    model = build_model("qwen2").requires_grad_(False)
    memory, copies = Offload(model), []
    copy_to_host = memory._copy_to_host
    monkeypatch.setattr(memory, "_copy_to_host", lambda: copies.append(1) or copy_to_host())
    before, places = bytes_of(model), []
    for _ in range(3):
        assert memory.off() > 0
        places.append([p.data_ptr() for p in model.parameters()])
        assert_weights(model, before)
        memory.on()
        assert_weights(model, before)
    assert memory.frozen and len(copies) == 1 and places[0] == places[1] == places[2]


def test_tied_weights_stay_tied_and_layouts_stay():
    model = build_model("qwen2")
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    memory, strides, before = Offload(model), weight.stride(), bytes_of(model)
    assert strides == (1, 64)
    for move in (memory.off, memory.on, memory.off, memory.on):
        move()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert weight.stride() == strides
        assert_weights(model, before)


def test_what_is_kept_stays_where_it_is():
    model = build_model("qwen2")
    kept = model.lm_head.weight  # tied: the embedding too
    place, others = kept.data_ptr(), sum(p.nbytes for p in model.parameters()) - kept.nbytes
    memory = Offload(model, keep=[kept])
    assert memory.off() * GIB == pytest.approx(others) and kept.data_ptr() == place
    memory.on()
    assert kept.data_ptr() == place


def test_a_model_of_two_dtypes_comes_back():
    model = build_model("gpt2")
    model.transformer.h[0].to(torch.bfloat16)
    memory, before = Offload(model), bytes_of(model)
    assert memory.off() * GIB == pytest.approx(sum(p.nbytes for p in model.parameters()))
    assert_weights(model, before)
    memory.on()
    assert_weights(model, before)
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_after_leaving_and_coming_back_is_the_step_without(dtype):
    models = [build_model("qwen2").to(dtype) for _ in range(2)]
    optimizers = [optim.AdamW(model, 1e-2) for model in models]
    memory = Offload(models[0])
    batch = pack(PROMPTS, COMPLETIONS)
    for step in range(3):
        memory.off()
        moved = optimizers[0].offload()
        small = sum(p.numel() for p in models[0].parameters()) * 4
        assert moved * GIB == pytest.approx((2 if dtype == torch.float32 else 3) * small)  # masters in fp32 are weights
        assert optimizers[0].offload() == 0.0
        memory.on()
        for model, optimizer in zip(models, optimizers, strict=True):
            LogProbs(model, 1.0)(*batch.tokens)[0].sum().backward()
            optimizer.step(1.0)
        assert_weights(models[0], bytes_of(models[1]))
        assert step or not torch.equal(models[0].lm_head.weight, build_model("qwen2").to(dtype).lm_head.weight)
