"""Tests of common/logprobs.py against log-softmax over the full logits of one unpadded row at a time."""

import copy
import dataclasses
import gc
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import build_model
from test_rollout import flags, make_sampler, traces
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PretrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from common import attention, head, logprobs, lora, losses, models, offload, optim
from common.logprobs import LogProbs

CPU = torch.device("cpu")
FAMILIES = ["qwen2", "gpt2"]
OTHERS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=16)),
    "mistral": (MistralConfig, MistralForCausalLM, dict(sliding_window=12)),
    "gemma": (GemmaConfig, GemmaForCausalLM, dict(head_dim=16)),
    "phi": (PhiConfig, PhiForCausalLM, dict(num_key_value_heads=4)),  # its head has a bias
}
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22], [23]]
COMPLETIONS = [[30, 31, 3], [32, 33], [34, 35, 36, 37, 38, 39, 3], [40]]


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


def tiny(config_class, model_class, **more):
    torch.manual_seed(0)
    options = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                   num_key_value_heads=2, pad_token_id=0, eos_token_id=3, bos_token_id=None,
                   initializer_range=0.2)  # fmt: skip
    return model_class(config_class(**{**options, **more}))


@pytest.fixture(scope="module")
def policies(model_folders):
    """In train mode, as the update sees them."""
    torch.set_num_threads(1)
    loaded = {family: models.load_policy(str(model_folders[family]), CPU, "fp32")[1] for family in FAMILIES}
    built = {name: tiny(*kind, num_hidden_layers=2, **more).train() for name, (*kind, more) in OTHERS.items()}
    return loaded | built


@dataclasses.dataclass
class Batch:
    """Prompts padded on the left, completions on the right."""

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None

    @property
    def tokens(self) -> tuple[torch.Tensor, ...]:
        return self.prompt_ids, self.prompt_mask, self.completion_ids, self.completion_mask

    def on(self, device) -> "Batch":
        return Batch(*(tokens.to(device) for tokens in self.tokens))


def pack(prompts, completions, left=0, right=0, garbage=0) -> Batch:
    """`left` and `right` columns wider than they need be, `garbage` in the padding."""
    Q, C = max(map(len, prompts)) + left, max(map(len, completions)) + right
    batch = Batch(
        torch.full((len(prompts), Q), garbage), torch.zeros(len(prompts), Q, dtype=torch.bool),
        torch.full((len(prompts), C), garbage), torch.zeros(len(prompts), C, dtype=torch.bool),
    )  # fmt: skip
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        batch.prompt_ids[i, Q - len(prompt) :] = torch.tensor(prompt)
        batch.prompt_mask[i, Q - len(prompt) :] = True
        batch.completion_ids[i, : len(completion)] = torch.tensor(completion, dtype=torch.long)
        batch.completion_mask[i, : len(completion)] = True
    return batch


def random_batch(m, Q, C, seed=0) -> Batch:
    """Lengths of 1 to Q and 1 to C tokens; the first row has them all."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 50, (m, Q + C), generator=generator).tolist()
    lengths = [(Q, C), *((int(q * Q) + 1, int(c * C) + 1) for q, c in torch.rand(m - 1, 2, generator=generator))]
    return pack([row[:q] for row, (q, _) in zip(ids, lengths, strict=True)],
                [row[Q : Q + c] for row, (_, c) in zip(ids, lengths, strict=True)])  # fmt: skip


def naive(model, prompt, completion, temperature):
    """Log-probs and entropies of one row, no padding: the model's own logits, fp32."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float() / temperature
    logps = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logps[range(len(completion)), completion], -(logps.exp() * logps).sum(-1)


def weights(shape) -> torch.Tensor:
    """A weight per token, so that gradients of different tokens cannot cancel or be swapped."""
    return torch.arange(1.0, math.prod(shape) + 1).view(shape).sin()


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return found


def assert_same_gradients(a, b, atol):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


# --- values ---


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_entropies_are_those_of_the_full_logits(policies, family, temperature):
    model = policies[family]
    logps, entropy = LogProbs(model, temperature)(*pack(PROMPTS, COMPLETIONS).tokens)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        expected_logps, expected_entropy = naive(model, prompt, completion, temperature)
        n = len(completion)
        torch.testing.assert_close(logps[i, :n], expected_logps, rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy[i, :n], expected_entropy, rtol=0, atol=1e-5)
        assert not logps[i, n:].any() and not entropy[i, n:].any()
    assert logps.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_full_logits(policies, family):
    model, batch = policies[family], pack(PROMPTS, COMPLETIONS)
    w = weights(batch.completion_ids.shape)
    ours = gradients(model, (LogProbs(model, 0.7)(*batch.tokens)[0] * w).sum())
    rows = zip(PROMPTS, COMPLETIONS, w, strict=True)
    expected = sum((naive(model, p, c, 0.7)[0] * w_C[: len(c)]).sum() for p, c, w_C in rows)
    assert_same_gradients(ours, gradients(model, expected), atol=1e-4)


class Stub(nn.Module):
    """A model whose hidden state is always the same, so that its logits are too."""

    def __init__(self, hidden, weight, bias=None):
        super().__init__()
        self.hidden = nn.Parameter(torch.tensor(hidden))
        self.head = nn.Linear(len(hidden), len(weight), bias=bias is not None)
        self.head.weight.data = torch.tensor(weight)
        if bias is not None:
            self.head.bias.data = torch.tensor(bias)
        self.config = PretrainedConfig()

    def get_output_embeddings(self):
        return self.head

    def get_decoder(self):
        return self

    def forward(self, input_ids, **kwargs):
        return SimpleNamespace(last_hidden_state=self.hidden.expand(*input_ids.shape, -1))


@pytest.mark.parametrize(("temperature", "logp", "entropy"), [
    (1.0, -0.126928, 0.365334),  # p = 1 / (1 + e^-2) = 0.880797; -p ln p - (1 - p) ln (1 - p)
    (0.5, -0.018150, 0.090095),  # p = 1 / (1 + e^-4) = 0.982014
])  # fmt: skip
def test_temperature_divides_the_logits(temperature, logp, entropy):
    stub = Stub([1.0], [[2.0], [0.0]])  # logits [2, 0]
    logps, entropies = LogProbs(stub, temperature)(*pack([[1]], [[0]]).tokens)
    assert logps.item() == pytest.approx(logp, abs=1e-5)
    assert entropies.item() == pytest.approx(entropy, abs=1e-5)


def test_the_bias_of_a_head_counts():
    stub = Stub([1.0], [[2.0], [0.0]], bias=[-2.0, 0.0])  # logits [0, 0]
    logps, entropies = LogProbs(stub, 1.0)(*pack([[1]], [[0]]).tokens)
    assert logps.item() == pytest.approx(-math.log(2))
    assert entropies.item() == pytest.approx(math.log(2))


def test_entropy_of_a_certain_token_is_zero_and_of_a_uniform_distribution_log_v():
    certain = LogProbs(Stub([1.0], [[0.0], [-torch.inf], [-torch.inf]]), 1.0)(*pack([[1]], [[0]]).tokens)
    assert certain[0].item() == 0.0 and certain[1].item() == 0.0  # 0 * log 0 counts as 0
    uniform = LogProbs(Stub([1.0], [[0.5]] * 50), 1.0)(*pack([[1]], [[0]]).tokens)
    assert uniform[1].item() == pytest.approx(math.log(50), abs=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_packed_rows_are_padded_rows_are_single_rows(policies, family):
    model, batch = policies[family], pack(PROMPTS, COMPLETIONS)
    policy = LogProbs(model, 0.7)
    assert policy.packed and not policy.compiled
    w, shapes, results = weights(batch.completion_ids.shape), [], []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    for packed in (True, False):
        policy.packed = packed
        logps, entropy = policy(*batch.tokens)
        results.append((logps.detach(), entropy, gradients(model, (logps * w).sum())))
    handle.remove()
    assert shapes == [(1, 30), (4, 11)]  # no padding where packed, and else as much as the longest row needs
    rows = [naive(model, p, c, 0.7) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    expected = gradients(model, sum((logps @ w_C[: len(logps)] for (logps, _), w_C in zip(rows, w, strict=True))))
    for logps, entropy, found in results:
        torch.testing.assert_close(logps[batch.completion_mask], torch.cat([row[0] for row in rows]), rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy[batch.completion_mask], torch.cat([r[1] for r in rows]), rtol=0, atol=1e-5)
        assert_same_gradients(found, expected, atol=1e-4)


@pytest.mark.parametrize(("window", "packed"), [(8, False), (10, False), (11, True), (None, True)])
def test_sliding_windows_shorter_than_a_sequence_are_not_packed(window, packed):
    model = tiny(MistralConfig, MistralForCausalLM, num_hidden_layers=2, sliding_window=window)
    policy, shapes = LogProbs(model, 1.0), []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    logps, _ = policy(*pack(PROMPTS, COMPLETIONS).tokens)  # the longest sequence has 11 tokens
    assert policy.packed and shapes == [1 if packed else 4]
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        expected, _ = naive(model, prompt, completion, 1.0)
        torch.testing.assert_close(logps[i, : len(completion)], expected, rtol=0, atol=1e-5)


# --- what must not matter ---


@pytest.mark.parametrize("padding", [dict(left=3), dict(right=5), dict(left=4, right=2)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_what_stands_in_it_does_not_matter(policies, family, padding):
    model = policies[family]
    plain, padded = pack(PROMPTS, COMPLETIONS), pack(PROMPTS, COMPLETIONS, garbage=41, **padding)
    C = plain.completion_ids.shape[1]
    w = weights(plain.completion_ids.shape)
    results = []
    for batch in (plain, padded):
        logps, entropy = LogProbs(model, 1.0)(*batch.tokens)
        assert not logps[:, C:].any()
        results.append((logps[:, :C].detach(), entropy[:, :C], gradients(model, (logps[:, :C] * w).sum())))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-5)
    assert_same_gradients(results[0][2], results[1][2], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_do_not_matter(policies, family):
    # the prompts have 3 and 9 tokens, the completions 7 and 2
    model, policy = policies[family], LogProbs(policies[family], 1.0)
    prompts, completions = [PROMPTS[2], PROMPTS[1]], [COMPLETIONS[2], COMPLETIONS[1]]
    batch = pack(prompts, completions)
    logps, _ = policy(*batch.tokens)
    w = weights(logps.shape)
    summed = gradients(model, (logps * w).sum())
    apart = []
    for i in range(2):
        alone, _ = policy(*pack(prompts[i : i + 1], completions[i : i + 1]).tokens)
        n = len(completions[i])
        torch.testing.assert_close(logps[i, :n], alone[0], rtol=0, atol=1e-5)
        apart.append(gradients(model, (alone[0] * w[i, :n]).sum()))
    assert_same_gradients(summed, {name: apart[0][name] + apart[1][name] for name in summed}, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_order_of_rows_does_not_matter(policies, family):
    policy, batch, order = LogProbs(policies[family], 1.0), pack(PROMPTS, COMPLETIONS), torch.tensor([2, 0, 3, 1])
    logps, entropy = policy(*batch.tokens)
    shuffled_logps, shuffled_entropy = policy(*(tokens[order] for tokens in batch.tokens))
    torch.testing.assert_close(shuffled_logps, logps[order], rtol=0, atol=1e-5)
    torch.testing.assert_close(shuffled_entropy, entropy[order], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_give_the_same_values_and_gradients(policies, family, monkeypatch):
    model, batch = policies[family], pack(PROMPTS, COMPLETIONS)  # 13 tokens
    results, sizes = [], []
    stats = head._stats
    monkeypatch.setattr(head, "_stats", lambda *args: sizes.append(len(args[1])) or stats(*args))
    for chunk in (2048, 13, 5, 1):
        monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
        sizes.clear()
        logps, entropy = LogProbs(model, 0.7)(*batch.tokens)
        assert max(sizes) <= chunk and sum(sizes) == 13
        found = gradients(model, (logps * weights(logps.shape)).sum())
        results.append((logps.detach(), entropy, found))
    for logps, entropy, found in results[1:]:
        torch.testing.assert_close(logps, results[0][0], rtol=0, atol=1e-6)
        torch.testing.assert_close(entropy, results[0][1], rtol=0, atol=1e-6)
        assert_same_gradients(found, results[0][2], atol=1e-6)


# --- the head ---


class Sizes(TorchDispatchMode):
    """Writes down the elements of every tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, (tuple, list)) else [out]
        self.largest = max([self.largest, *(x.numel() for x in outputs if isinstance(x, torch.Tensor))])
        return out


def head_inputs(N, V=50, H=8, bias=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias_V, grad = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((N, H), (V, H), (V,), (N,))
    )
    ids = torch.randint(0, V, (N,), generator=generator)
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        bias_V.requires_grad_() if bias else None,
        ids,
        grad.float(),
    )


def exact_head(hidden, weight, bias, ids, temperature, softcap):
    """The definition, in double precision: log-probabilities and entropies."""
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logps = (logits / temperature).log_softmax(-1)
    return logps.gather(-1, ids[:, None]).squeeze(-1), -(logps.exp() * logps).sum(-1)


def compare_heads(inputs, temperature=1.0, softcap=None, compile=False, scale=1.0, atol=1e-5, rtol=1e-5):
    """Asserts that values and gradients are those of `exact_head`; tolerances are relative to the largest gradient."""
    hidden, weight, bias, ids, grad = inputs
    leaves = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
    logps, entropy = head._Head.apply(hidden, weight, bias, ids, temperature, softcap, compile)
    expected_logps, expected_entropy = exact_head(hidden, weight, bias, ids, temperature, softcap)
    assert logps.dtype == entropy.dtype == torch.float32 and not entropy.requires_grad
    torch.testing.assert_close(logps, expected_logps.float(), rtol=0, atol=atol)
    torch.testing.assert_close(entropy, expected_entropy.float(), rtol=0, atol=atol)
    found = torch.autograd.grad(logps, leaves, grad * scale)
    expected = torch.autograd.grad(expected_logps, leaves, grad.double())
    for leaf, one, other in zip(leaves, found, expected, strict=True):
        assert one.dtype == leaf.dtype
        error = (one.double() / scale - other.double()).abs()
        assert not len(ids) or error.max() <= rtol * other.abs().max(), (error.max(), other.abs().max())


@pytest.mark.parametrize("chunk", [1024, 13, 5, 1])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.3, None), (1.0, 2.0), (0.7, 2.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_head_is_its_definition(monkeypatch, bias, temperature, softcap, chunk):
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    compare_heads(head_inputs(13, bias=bias), temperature, softcap)


@pytest.mark.parametrize("chunk", [1024, 5])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.3, None), (0.7, 2.0)])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_trained_entropy_has_its_own_gradient(monkeypatch, frozen, temperature, softcap, chunk):
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    hidden, weight, bias, ids, grad = head_inputs(13, bias=True)
    for x in (weight, bias):
        x.requires_grad_(not frozen)
    leaves = [x for x in (hidden, weight, bias) if x.requires_grad]
    found = head._Head.apply(hidden, weight, bias, ids, temperature, softcap, False, True)
    expected = exact_head(hidden, weight, bias, ids, temperature, softcap)
    # the entropy alone, beside the log-probability, and the log-probability alone
    for factors in ((0.0, 1.0), (1.0, -0.3), (1.0, 0.0)):
        one, other = (
            torch.autograd.grad(sum((f * grad * out).sum() for f, out in zip(factors, outputs, strict=True)), leaves,
                                retain_graph=True)
            for outputs in (found, expected)
        )  # fmt: skip
        for a, b in zip(one, other, strict=True):
            assert (a - b).abs().max() <= 5e-5 * b.abs().max(), factors


def test_the_entropy_of_tokens_without_probability_has_a_finite_gradient():
    hidden, weight, _, ids, _ = head_inputs(3)
    _, entropy = head._Head.apply(hidden * 1e4, weight, None, ids, 1.0, None, False, True)
    (found,) = torch.autograd.grad(entropy.sum(), hidden)
    assert found.isfinite().all()


def test_the_entropy_of_a_policy_can_be_trained(policies):
    model, batch = policies["qwen2"], pack(PROMPTS, COMPLETIONS)
    logps, entropy = LogProbs(model, 0.7, train_entropy=True)(*batch.tokens)
    w = weights(logps.shape)
    found = gradients(model, (entropy * w).sum())
    rows = zip(PROMPTS, COMPLETIONS, w, strict=True)
    expected = sum((naive(model, p, c, 0.7)[1] * w_C[: len(c)]).sum() for p, c, w_C in rows)
    assert_same_gradients(found, gradients(model, expected), atol=1e-4)
    assert not LogProbs(model, 0.7)(*batch.tokens)[1].requires_grad


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1024, 5])
def test_a_frozen_head_gives_the_same_gradient_without_computing_logits_again(monkeypatch, chunk, bias):
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    inputs = head_inputs(13, bias=bias)
    for x in inputs[1:3]:
        if x is not None:
            x.requires_grad_(False)
    compare_heads(inputs, temperature=0.7, softcap=3.0)
    logps, _ = head._Head.apply(*inputs[:4], 0.7, None, False)
    monkeypatch.setattr(head, "project", None)
    logps.sum().backward()


def test_a_frozen_body_leaves_the_gradient_to_the_head():
    inputs = head_inputs(13)
    inputs[0].requires_grad_(False)
    compare_heads(inputs)


def test_a_tied_head_adds_to_the_gradient_of_the_embedding():
    _, weight, _, ids, grad = head_inputs(13)
    tied = head._Head.apply(F.embedding(ids.roll(1), weight), weight, None, ids, 1.0, None, False)[0]
    expected = exact_head(F.embedding(ids.roll(1), weight), weight, None, ids, 1.0, None)[0]
    (found,), (exact,) = torch.autograd.grad(tied, weight, grad), torch.autograd.grad(expected, weight, grad.double())
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_head_without_tokens_has_zero_gradients(frozen):
    hidden, weight, bias, ids, grad = head_inputs(0, bias=True)
    leaves = [hidden] if frozen else [hidden, weight, bias]
    weight.requires_grad_(not frozen)
    bias.requires_grad_(not frozen)
    logps, entropy = head._Head.apply(hidden, weight, bias, ids, 0.7, None, False)
    assert logps.shape == entropy.shape == (0,)
    for leaf, found in zip(leaves, torch.autograd.grad(logps, leaves, grad), strict=True):
        assert torch.equal(found, torch.zeros_like(leaf))


@pytest.mark.parametrize("frozen", [False, True])
def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch, frozen):
    monkeypatch.setattr(head, "CHUNK_TOKENS", 10)  # more than the hidden size: the weight is smaller
    inputs = head_inputs(95, V=300)
    inputs[1].requires_grad_(not frozen)
    with Sizes() as sizes:
        logps, _ = head._Head.apply(*inputs[:4], 0.7, None, False)
        logps.sum().backward()
    assert sizes.largest == 10 * 300


def test_no_logits_are_kept_for_the_backward_pass(policies):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        LogProbs(policies["gpt2"], 1.0)(*pack(PROMPTS, COMPLETIONS).tokens)
    assert (13, 32) in shapes and all(shape[-1:] != (64,) for shape in shapes)  # nothing but logits is that wide


@pytest.fixture
def tensor_cores(monkeypatch):
    """The operations that only GPUs have, so that gradients of logits are rounded to half precision as there."""
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
        library.impl(
            "addmm.dtype_out",
            lambda total, a, b, dtype, beta=1, alpha=1, out=None: out.copy_(total + a.to(dtype) @ b.to(dtype)), "CPU",
        )  # fmt: skip
        monkeypatch.setattr(head, "on_tensor_cores", lambda x: x.dtype in (torch.bfloat16, torch.float16))
        yield


@pytest.mark.parametrize("scale", [1e-4, 1.0, 2.0**14])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_holds_the_gradients_of_logits(tensor_cores, monkeypatch, dtype, frozen, scale):
    # at the largest scale they are beyond 65,504, and those of single tokens are below 6e-8 at the smallest
    monkeypatch.setattr(head, "CHUNK_TOKENS", 5)
    inputs = head_inputs(13, V=3000, dtype=dtype)
    for x in inputs[:2]:
        x.data.mul_(0.02)
    inputs[1].requires_grad_(not frozen)
    compare_heads(inputs, temperature=0.1, scale=scale, rtol=1e-2)


def test_likely_tokens_keep_their_gradient_in_half_precision(tensor_cores):
    # p = 1 - 1e-4 is 1 in bf16: a gradient made of W[y] - pW after rounding would be 0
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[9.25], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    compare_heads((hidden, weight, None, torch.tensor([0]), torch.ones(1)), rtol=1e-2)


# --- ratio 1 before anything moved ---


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_ratio_is_exactly_one(model_folders, family, checkpointing, dtype):
    # GPT-2 has a dropout of 0.1 in its config; old log-probs are taken without gradient, the update has it
    folder = str(model_folders[family])
    _, model = models.load_policy(folder, CPU, dtype, gradient_checkpointing=checkpointing)
    assert model.training
    assert checkpointing == any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    policy, batch = LogProbs(model, 0.7), pack(PROMPTS, COMPLETIONS)
    logprobs.fill([batch], "old_logps", policy, CPU)
    logprobs.fill([batch], "ref_logps", LogProbs(models.load_frozen(folder, CPU, dtype), 0.7), CPU)
    logps, _ = policy(*batch.tokens)
    assert logps.requires_grad and not batch.old_logps.requires_grad
    ratio = losses.sequence_ratio(logps, batch.old_logps, batch.completion_mask)
    assert torch.equal(ratio, torch.ones(4))
    assert torch.equal(losses.token_ratio(logps, batch.old_logps), torch.ones_like(logps))
    assert not losses.clip_stats(ratio, torch.tensor([1.0, -1, 1, -1]), 0, 0, torch.ones(4))["out_of_range"]
    assert not losses.kl_estimate(logps, batch.ref_logps, "k3").any()
    assert all(g.any() for g in gradients(model, ratio.sum()).values())  # every weight takes part


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_does_not_change_gradients(model_folders, family):
    found = []
    for checkpointing in (False, True):
        _, model = models.load_policy(str(model_folders[family]), CPU, "fp32", gradient_checkpointing=checkpointing)
        policy = LogProbs(model, 1.0)
        assert policy.packed
        logps, _ = policy(*pack(PROMPTS, COMPLETIONS).tokens)
        found.append(gradients(model, (logps * weights(logps.shape)).sum()))
    assert_same_gradients(found[0], found[1], atol=1e-6)


def test_fill_writes_each_micro_batch_its_own_rows(policies):
    policy = LogProbs(policies["qwen2"], 1.0)
    whole, _ = policy(*pack(PROMPTS, COMPLETIONS).tokens)
    cut = [[2, 0], [1], [3]]
    micros = [pack([PROMPTS[i] for i in rows], [COMPLETIONS[i] for i in rows]) for rows in cut]
    logprobs.fill(micros, "old_logps", policy, CPU)
    for rows, micro in zip(cut, micros, strict=True):
        C = micro.completion_ids.shape[1]
        torch.testing.assert_close(micro.old_logps, whole[rows][:, :C].detach(), rtol=0, atol=1e-5)
        assert micro.ref_logps is None


@pytest.mark.parametrize(("compiled", "trained"), [(True, True), (True, False), (False, True)])
def test_fill_makes_gradients_only_where_the_update_runs_a_compiled_graph(policies, monkeypatch, compiled, trained):
    monkeypatch.setattr(head, "kernel", lambda function, compile: function)
    model = copy.deepcopy(policies["qwen2"]).requires_grad_(trained)
    policy, batch, modes = LogProbs(model, 1.0), pack(PROMPTS, COMPLETIONS), []
    policy.compiled = compiled
    model.model.register_forward_hook(lambda *args: modes.append(torch.is_grad_enabled()))
    logprobs.fill([batch], "old_logps", policy, CPU)
    assert modes == [compiled and trained] and not batch.old_logps.requires_grad
    assert torch.is_grad_enabled() and all(p.grad is None for p in model.parameters())


# --- compiling ---


def test_nothing_is_compiled_on_a_cpu(policies):
    model = copy.deepcopy(policies["qwen2"])
    assert not LogProbs(model, 1.0, compile=True).compiled
    assert all(module._compiled_call_impl is None for module in model.modules())


class MaskedAttention(attention.Packed):
    """Packed attention in tensors only, as on a GPU, where the host's list of lengths is not looked at."""

    def attend(self, module, query, key, value, scaling):
        N = query.shape[2]
        row_N = torch.searchsorted(self.offsets, torch.arange(N, dtype=torch.int32), right=True)
        mask_NN = (row_N[:, None] == row_N) & torch.ones(N, N, dtype=torch.bool).tril()
        mask_NN &= torch.arange(N) < torch.arange(N)[:, None] + self.longest  # a number that changes
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_NN, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_and_head_are_compiled_once(model_folders, monkeypatch, checkpointing):
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32", gradient_checkpointing=checkpointing)
    policy, batches = LogProbs(model, 0.7), [random_batch(*size) for size in ((3, 5, 9), (4, 9, 12), (1, 30, 40))]
    expected = []
    for batch in batches:
        logps, _ = policy(*batch.tokens)
        expected.append((logps.detach(), gradients(model, logps.sum())))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(head, "CHUNK_TOKENS", 16)  # one chunk for some of the batches, several for others
    monkeypatch.setattr(attention, "Packed", MaskedAttention)
    kernels = {f: torch.compile(f, dynamic=True, backend=backend) for f in (head._stats, head._logit_gradient)}
    monkeypatch.setattr(head, "kernel", lambda function, compile: kernels[function] if compile else function)
    for block in model.model.layers:
        block.compile(dynamic=True, backend=backend)
    policy.compiled = True
    for batch, (logps, found) in zip(batches, expected, strict=True):
        logprobs.fill([batch], "old_logps", policy, CPU)
        compiled_logps, _ = policy(*batch.tokens)
        assert torch.equal(compiled_logps, batch.old_logps)
        torch.testing.assert_close(compiled_logps.detach(), logps, rtol=0, atol=1e-5)
        assert_same_gradients(gradients(model, compiled_logps.sum()), found, atol=1e-4)
        assert len(graphs) == 3  # one for all blocks, two for the head
    torch._dynamo.reset()


# --- LoRA ---


def test_lora(model_folders):
    peft = pytest.importorskip("peft")
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32", gradient_checkpointing=True)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    policy, batch = LogProbs(model, 0.7), pack(PROMPTS, COMPLETIONS)
    assert policy.packed
    logps, _ = policy(*batch.tokens)
    w = weights(logps.shape)
    found = gradients(model, (logps * w).sum())
    assert found and all("lora" in name and grad.any() for name, grad in found.items())
    rows = zip(PROMPTS, COMPLETIONS, w, strict=True)
    expected = sum((naive(model, p, c, 0.7)[0] * w_C[: len(c)]).sum() for p, c, w_C in rows)
    assert_same_gradients(found, gradients(model, expected), atol=1e-4)
    logprobs.fill([batch], "old_logps", policy, CPU)
    assert torch.equal(batch.old_logps, logps)
    with model.disable_adapter():
        logprobs.fill([batch], "ref_logps", policy, CPU)
    assert (batch.ref_logps - batch.old_logps).abs().max() > 0.01


@pytest.mark.parametrize("where", ["target_modules", "modules_to_save"])
def test_adapters_of_the_head_are_refused(model_folders, where):
    peft = pytest.importorskip("peft")
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32")
    modules = {"target_modules": ["q_proj"], where: ["lm_head"]}
    with pytest.raises(TypeError, match="of a plain"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns that the head is tied
        LogProbs(peft.get_peft_model(model, peft.LoraConfig(r=4, **modules)), 1.0)


# --- precision ---


def test_logits_of_a_bf16_model_are_not_rounded(model_folders):
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "bf16")
    hidden = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    weight = model.get_output_embeddings().weight
    assert weight.dtype == torch.bfloat16
    exact = hidden.double() @ weight.double().T
    logits = head.vocabulary_logits(model, hidden)
    assert logits.dtype == torch.float32
    ours, rounded = (logits - exact).abs().max(), (model.lm_head(hidden) - exact).abs().max()
    assert ours < 1e-4  # fp32 sums of 32 products of size 1
    assert rounded > 100 * ours


def test_log_probs_of_a_bf16_model_are_nearer_to_exact_than_those_of_bf16_logits(model_folders):
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "bf16")
    exact_model = copy.deepcopy(model).float()  # the same weights, no rounding between layers
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(4, 50, (16, 40), generator=generator).tolist()
    prompts, completions = [row[:8] for row in rows], [row[8:] for row in rows]
    with torch.no_grad():
        exact, _ = LogProbs(exact_model, 1.0)(*pack(prompts, completions).tokens)
        ours, _ = LogProbs(model, 1.0)(*pack(prompts, completions).tokens)
        ids = torch.tensor(rows)
        logits = model(input_ids=ids).logits
        assert logits.dtype == torch.bfloat16
        rounded = logits.float().log_softmax(-1)[:, 7:-1].gather(-1, ids[:, 8:, None]).squeeze(-1)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < (rounded - exact).abs().mean()


def test_gradients_of_a_bf16_head_add_up_in_fp32_over_chunks(model_folders, monkeypatch):
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "bf16")
    batch = pack(PROMPTS * 8, COMPLETIONS * 8)
    found = []
    for chunk in (2048, 1):
        monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
        logps, _ = LogProbs(model, 1.0)(*batch.tokens)
        found.append(gradients(model, logps.sum())["model.embed_tokens.weight"].float())
    # one rounding to bf16 (2^-8) at most between them; 104 bf16 additions would be far off
    assert (found[0] - found[1]).norm() <= 2**-8 * found[0].norm()


# --- heads that do more ---


def test_a_model_that_scales_its_logits_is_refused(tmp_path, tokenizer):
    scaled = tiny(GraniteConfig, GraniteForCausalLM, logits_scaling=4.0)
    with pytest.raises(ValueError, match="GraniteForCausalLM: its logits differ"):
        logprobs.check_head(scaled)
    scaled.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GraniteForCausalLM: its logits differ"):
        models.load_policy(str(tmp_path), CPU, "fp32")
    with pytest.raises(ValueError, match="GraniteForCausalLM: its logits differ"):
        models.load_frozen(str(tmp_path), CPU, "fp32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_model_without_scaling_is_accepted(dtype):
    logprobs.check_head(tiny(GraniteConfig, GraniteForCausalLM, logits_scaling=1.0).to(dtype))


def test_soft_capped_logits_are_computed_as_the_model_does():
    model = tiny(Gemma2Config, Gemma2ForCausalLM, head_dim=8, final_logit_softcapping=2.0)
    logprobs.check_head(model)
    prompt, completion = PROMPTS[0], COMPLETIONS[0]
    logps, _ = LogProbs(model, 0.7)(*pack([prompt], [completion]).tokens)
    torch.testing.assert_close(logps[0], naive(model, prompt, completion, 0.7)[0], rtol=0, atol=1e-5)
    model.config.final_logit_softcapping = None
    uncapped, _ = LogProbs(model, 0.7)(*pack([prompt], [completion]).tokens)
    assert (uncapped - logps).abs().max() > 0.1  # or the cap would not have been tested


@pytest.mark.parametrize("training", [True, False])
def test_checking_the_head_leaves_the_mode_as_it_was(policies, training):
    model = copy.deepcopy(policies["gpt2"]).train(training)
    logprobs.check_head(model)
    assert {module.training for module in model.modules()} == {training}


def test_broken_weights_do_not_pass_the_check(policies):
    model = copy.deepcopy(policies["qwen2"])
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="differ"):
        logprobs.check_head(model)


# --- nothing to train on ---


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_all_masked_micro_batch_gives_zero_loss_and_zero_gradients(model_folders, family, checkpointing):
    _, model = models.load_policy(str(model_folders[family]), CPU, "fp32", gradient_checkpointing=checkpointing)
    batch = pack(PROMPTS, COMPLETIONS)
    batch.completion_mask[:] = False
    logps, entropy = LogProbs(model, 1.0)(*batch.tokens)
    ratio = losses.sequence_ratio(logps, torch.zeros_like(logps), batch.completion_mask)
    surrogate = losses.clipped_surrogate(ratio, torch.ones(4), 0.2, 0.2)
    loss = -torch.where(batch.completion_mask.any(1), surrogate, 0.0).sum() / 1
    loss = loss + losses.aggregate(losses.kl_estimate(logps, torch.zeros_like(logps), "k3"), batch.completion_mask,
                                   "seq_mean", 1)  # fmt: skip
    assert loss.item() == 0.0 and not entropy.any()
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert torch.equal(p.grad, torch.zeros_like(p)), name


def test_a_masked_row_changes_nothing_for_the_others(policies):
    model, policy = policies["gpt2"], LogProbs(policies["gpt2"], 1.0)
    batch, rest = pack(PROMPTS, COMPLETIONS), pack(PROMPTS[:2], COMPLETIONS[:2])
    batch.completion_mask[2:] = False
    logps, rest_logps = policy(*batch.tokens)[0], policy(*rest.tokens)[0]
    assert not logps[2:].any()
    torch.testing.assert_close(logps[:2, :3], rest_logps, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, logps.sum()), gradients(model, rest_logps.sum()), atol=1e-4)


# --- one model in several roles ---


@pytest.mark.parametrize("adapters", [lora.Options(4, 8.0), None], ids=["adapters", "all weights"])
def test_a_step_leaves_modes_and_settings_as_they_were_wherever_it_fails(model_folders, adapters):
    # GPT-2 has dropout in its config, and the policy checkpoints activations, but not while it samples
    folder = str(model_folders["gpt2"])
    _, model = models.load_policy(folder, CPU, "fp32", True, adapters)
    frozen = model if adapters else models.load_frozen(folder, CPU, "fp32")
    policy, reference = LogProbs(model, 0.7), LogProbs(frozen, 0.7, adapters=not adapters)
    sampler = make_sampler(model, max_new_tokens=3)

    def step():
        batch = sampler.generate(PROMPTS[:2], group_size=2, temperature=0.7)
        (micros,) = batch.minibatches(1, 1000, policy.packed)
        logprobs.fill(micros, "old_logps", policy, CPU)
        logprobs.fill(micros, "ref_logps", reference, CPU)
        for micro in micros:
            logps, _ = policy(*micro.tokens)
            losses.kl_estimate(logps, micro.ref_logps, "k3").sum().backward()

    before, calls, fails_at = [flags(m) for m in (model, frozen)], 0, None

    def count(*args):
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise RuntimeError("out of memory")

    for decoder in {model.get_decoder(), frozen.get_decoder()}:
        decoder.register_forward_pre_hook(count)
    step()
    assert [flags(m) for m in (model, frozen)] == before and calls >= 6
    for fails_at in range(1, calls + 1):
        calls = 0
        with pytest.raises(RuntimeError, match="out of memory"):
            step()
        assert [flags(m) for m in (model, frozen)] == before and not traces(model), f"call {fails_at}"
    assert model.training and before[0]["config"].get("attn_pdrop") == 0.1


def test_nothing_piles_up_from_step_to_step(model_folders):
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32")
    policy, sampler = LogProbs(model, 1.0), make_sampler(model, max_new_tokens=4)
    optimizer, weights_of = optim.AdamW(model, 1e-4, offload="rollout"), offload.Offload(model)
    generator, kept = torch.Generator().manual_seed(0), []
    for step in range(12):
        lengths = torch.randint(1, 30, (4,), generator=generator).tolist() if step else [30] * 4  # the longest first
        batch = sampler.generate([[4 + n] * n for n in lengths], group_size=2, temperature=1.0, step=step)
        minibatches = batch.minibatches(2, 60, policy.packed)
        for minibatch in minibatches:
            logprobs.fill(minibatch, "old_logps", policy, CPU)
        weights_of.off()
        weights_of.on()
        for minibatch in minibatches:
            for micro in minibatch:
                ratio = losses.sequence_ratio(policy(*micro.tokens)[0], micro.old_logps, micro.completion_mask)
                optimizer.scale(ratio.sum() / 8).backward()
            optimizer.step(1.0)
        optimizer.check()
        optimizer.make_room()
        if step in (4, 11):
            del batch, minibatches, minibatch, micro, ratio
            gc.collect()
            found = [x.untyped_storage() for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
            kept.append(sum({storage.data_ptr(): storage.nbytes() for storage in found}.values()))
    assert kept[0] == kept[1]


# --- on a GPU ---


@pytest.fixture
def cuda():
    """Without TF32, which models in half precision switch on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()
    yield torch.device("cuda", 0)
    torch.set_float32_matmul_precision(before)


@gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_on_a_gpu(cuda, monkeypatch, dtype, frozen, compile):
    monkeypatch.setattr(head, "CHUNK_TOKENS", 5)
    rtol = 1e-4 if dtype == torch.float32 else 1e-2
    for tokens in (13, 4, 0):
        for softcap in (None, 2.0):
            inputs = [x.detach().to(cuda) for x in head_inputs(tokens, V=3000, H=16, bias=True, dtype=dtype)]
            inputs[0].requires_grad_()
            for x in inputs[1:3]:
                x.requires_grad_(not frozen)
            compare_heads(inputs, 0.7, softcap, compile and tokens > 1, scale=2.0**6, atol=1e-4, rtol=rtol)


@gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_entropy_is_trained_on_a_gpu(cuda, monkeypatch, dtype, compile):
    monkeypatch.setattr(head, "CHUNK_TOKENS", 64)
    hidden, weight, _, ids, grad = (x if x is None else x.to(cuda) for x in head_inputs(150, V=5000, H=64, dtype=dtype))
    hidden, weight = ((x * 0.3).detach().requires_grad_() for x in (hidden, weight))
    found = head._Head.apply(hidden, weight, None, ids, 0.7, None, compile, True)
    expected = exact_head(hidden, weight, None, ids, 0.7, None)
    # a loss scale as in fp16, and factors of either sign
    for factors in ((0.0, 1000.0), (1.0, -0.3)):
        one, other = (
            torch.autograd.grad(sum((f * grad * out).sum() for f, out in zip(factors, outputs, strict=True)),
                                [hidden, weight], retain_graph=True)
            for outputs in (found, expected)
        )  # fmt: skip
        for a, b in zip(one, other, strict=True):
            assert a.isfinite().all() and (a.double() - b).norm() <= 0.01 * b.double().norm(), factors


@gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_bf16_on_a_gpu_is_no_further_from_fp32_than_padded(model_folders, cuda, family, checkpointing, compile):
    _, model = models.load_policy(str(model_folders[family]), cuda, "bf16", gradient_checkpointing=checkpointing)
    exact, padded = LogProbs(copy.deepcopy(model).cpu().float(), 0.7), LogProbs(copy.deepcopy(model), 0.7)
    policy = LogProbs(model, 0.7, compile=compile)
    padded.packed = False
    assert policy.packed and policy.compiled == compile
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed, size in enumerate([(3, 5, 9), (6, 20, 30), (1, 30, 20), (9, 3, 40)]):
        batch, results = random_batch(*size, seed=seed), []
        for one in (exact, padded, policy):
            logps, _ = one(*batch.on(one.model.device).tokens)
            found = gradients(one.model, (logps * weights(logps.shape).to(logps.device)).sum())
            results.append((logps.detach().cpu(), torch.cat([g.flatten().float().cpu() for g in found.values()])))
        logprobs.fill([batch], "old_logps", policy, cuda)
        assert torch.equal(batch.old_logps, results[2][0])  # the first ratio is exactly 1
        for expected, rough, ours in zip(*results, strict=True):
            assert (ours - expected).norm() <= 1.5 * (rough - expected).norm() + 1e-3 * expected.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs == 3 * compile


@gpu
def test_the_host_waits_once_in_a_forward_pass(model_folders, cuda):
    _, model = models.load_policy(str(model_folders["qwen2"]), cuda, "bf16")
    policy, batch = LogProbs(model, 1.0), pack(PROMPTS, COMPLETIONS).on(cuda)
    policy(*batch.tokens)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy(*batch.tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchronizing" in str(w.message)]) == 1


@gpu
@pytest.mark.parametrize(("compile", "gib"), [(False, 2.3), (True, 1.6)])
def test_memory_of_a_large_head(cuda, compile, gib):
    inputs = [x.detach().to(cuda) for x in head_inputs(4096, V=151_936, H=896, dtype=torch.bfloat16) if x is not None]
    hidden, weight, ids, grad = inputs
    hidden.requires_grad_()
    weight.requires_grad_()
    for _ in range(2):
        hidden.grad = weight.grad = None
        before = torch.cuda.memory_allocated(cuda)
        torch.cuda.reset_peak_memory_stats(cuda)
        head._Head.apply(hidden, weight, None, ids, 1.0, None, compile)[0].backward(grad)
    assert torch.cuda.max_memory_allocated(cuda) - before < gib * 2**30  # all logits would take 2.3 in fp32


def test_examining_a_compiled_model_compiles_nothing():
    # the compiler keeps few variants of a layer: used up by this, it would leave decoding uncompiled, and say nothing
    from torch._dynamo.testing import CompileCounter

    model, counter = tiny_llama(), CompileCounter()
    support = attention.install(model)
    blocks = attention.decoder_layers(model, support)
    for block in blocks:
        block.compile(dynamic=True, backend=counter)
    assert attention.install(model).reason == support.reason == "" and len(blocks) == 2
    assert counter.frame_count == 0
    model.get_decoder()(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    assert counter.frame_count == 1  # so the counter does count


def tiny_llama():
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, pad_token_id=0)  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**small))


def test_a_sequence_with_more_tokens_than_learned_positions_is_refused_by_row():
    # such as an answer of the data, which no rollout has looked at
    policy = LogProbs(build_model("gpt2").eval(), 1.0)  # 64 positions
    prompts, lengths = torch.full((2, 3), 5), torch.tensor([3, 3])
    policy(prompts, lengths, torch.full((2, 61), 6), torch.tensor([9, 61]))
    said = (
        "row 1 of a batch has 65 tokens, prompt and completion, but the model has 64 positions; lower max_prompt_tokens"
    )
    with pytest.raises(ValueError, match=said):
        policy(prompts, lengths, torch.full((2, 62), 6), torch.tensor([9, 62]))
