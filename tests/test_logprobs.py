"""Tests of common/model/logprobs.py against log-softmax over the full logits of one unpadded row at a time."""

import copy
import gc
import itertools
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from bounds import assert_rounded, rounding
from conftest import build_model, tiny_model
from test_attention import varlen
from test_rollout import flags, make_sampler, traces
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from common.loop import Policy, Reference
from common.maths import losses
from common.model import attention, head, lora, models, passes, positions
from common.model.logprobs import LogProbs
from common.training import offload, optim
from gspo import gspo

CPU = torch.device("cpu")
FAMILIES = ["qwen2", "gpt2"]
OTHERS = {"llama": {}, "qwen3": {}, "mistral": dict(sliding_window=12), "gemma": {}, "phi": {},  # phi: biases
          "gemma2": dict(head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=None)}  # fmt: skip
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22], [23]]
COMPLETIONS = [[30, 31, 3], [32, 33], [34, 35, 36, 37, 38, 39, 3], [40]]
# Roundings on the way through a tiny model: in each of two layers seven products over at most 64 terms, two norms over
# 32 and attention over up to 32 positions; then a head over 32 and a softmax over 64.
ROUNDINGS = 2 * (7 * 64 + 2 * 32 + 2 * 32) + 32 + 64


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


@pytest.fixture(scope="module")
def policies(model_folders):
    """In train mode, as the update sees them; activations of GPT-2 are checkpointed."""
    torch.set_num_threads(1)
    loaded = {family: models.load_policy(str(model_folders[family]), CPU, "fp32", family == "gpt2")[1]
              for family in FAMILIES}  # fmt: skip
    return loaded | {kind: tiny_model(kind, **options).train() for kind, options in OTHERS.items()}


def as_batch(*tokens) -> SimpleNamespace:
    """A micro-batch: ids and mask of the prompts, ids and mask of the completions."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    return SimpleNamespace(**dict(zip(names, tokens, strict=True)), tokens=tokens, ref_logps=None)


def pack(prompts, completions, left=0, right=0, garbage=0) -> SimpleNamespace:
    """Prompts padded on the left, completions on the right; wider than they need be, `garbage` in the padding."""
    Q, C = max(map(len, prompts)) + left, max(map(len, completions)) + right
    prompt_ids, completion_ids = (torch.full((len(prompts), width), garbage) for width in (Q, C))
    prompt_mask, completion_mask = (torch.zeros(ids.shape, dtype=torch.bool) for ids in (prompt_ids, completion_ids))
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        prompt_ids[i, Q - len(prompt) :] = torch.tensor(prompt)
        prompt_mask[i, Q - len(prompt) :] = True
        completion_ids[i, : len(completion)] = torch.tensor(completion, dtype=torch.long)
        completion_mask[i, : len(completion)] = True
    return as_batch(prompt_ids, prompt_mask, completion_ids, completion_mask)


def random_batch(m, Q, C, seed=0) -> SimpleNamespace:
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


def naive_gradients(model, which=0) -> dict[str, torch.Tensor]:
    """Of the weighted sum over all rows, one at a time; of log-probabilities, or (1) of entropies."""
    rows = zip(PROMPTS, COMPLETIONS, weights((4, 7)), strict=True)
    return gradients(model, sum(naive(model, p, c, 0.7)[which] @ w_C[: len(c)] for p, c, w_C in rows))


def assert_same(actual, expected):
    """Equal but for rounding in a tiny model, whose logits stay below 16 at all temperatures used here."""
    assert_rounded(actual, expected, ROUNDINGS, magnitude=16.0)


def assert_same_gradients(found, expected, terms=3 * ROUNDINGS):
    """Equal but for rounding, forward and backward, relative to the largest: some are differences of large ones."""
    assert found.keys() == expected.keys()
    bound = rounding(terms, max(gradient.abs().max().item() for gradient in expected.values()))
    errors = {name: (found[name] - expected[name]).abs().max().item() for name in expected}
    wrong = {name: error for name, error in errors.items() if not error <= bound}  # NaN is wrong
    assert not wrong, (bound, wrong)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_packed_rows_are_padded_rows_are_single_rows(policies, family):
    model, batch, shapes = policies[family], pack(PROMPTS, COMPLETIONS), []
    mask, w = batch.completion_mask, weights((4, 7))
    rows = [naive(model, p, c, 0.7) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    (expected_logps, expected_entropy), of_logps = map(torch.cat, zip(*rows, strict=True)), naive_gradients(model)
    of_entropy = naive_gradients(model, which=1)
    head.check(model)
    for packed in (True, False):
        policy = LogProbs(model, 0.7, compile=True, train_entropy=packed)
        assert policy.packed and not policy.compiled  # on a CPU
        assert all(module._compiled_call_impl is None for module in model.modules())
        policy.packed = packed
        with model.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        ):
            logps, entropy = policy(*batch.tokens)
        assert logps.dtype == entropy.dtype == torch.float32 and entropy.requires_grad == packed
        assert not logps[~mask].any() and not entropy[~mask].any()
        assert_same(logps[mask], expected_logps)
        assert_same(entropy[mask], expected_entropy)
        found = gradients(model, ((logps + packed * 3 * entropy) * w).sum())
        assert_same_gradients(found, {name: of_logps[name] + packed * 3 * of_entropy[name] for name in of_logps})
    assert shapes == [(1, 30), (4, 11)]  # no padding where packed, and else as much as the longest row needs


@pytest.mark.parametrize(("window", "packed"), [(8, False), (10, False), (11, True), (None, True)])
def test_sliding_windows_shorter_than_a_sequence_are_not_packed(window, packed):
    model = tiny_model("mistral", sliding_window=window)
    policy, shapes = LogProbs(model, 1.0), []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    logps, _ = policy(*pack(PROMPTS, COMPLETIONS).tokens)  # the longest sequence has 11 tokens
    assert policy.packed and shapes == [1 if packed else 4]
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        assert_same(logps[i, : len(completion)], naive(model, prompt, completion, 1.0)[0])


# Rows of three prompts, of one token too, in any order; one completion is empty, one prompt has a single row.
GROUPS = [4, 0, 4, 7, 0, 4, 7]
OF_GROUPS = [{4: PROMPTS[0], 0: PROMPTS[1], 7: PROMPTS[3]}[number] for number in GROUPS]
SEVEN = [*COMPLETIONS, [], [41, 3], [42] * 6]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5, 6], [4, 1], [6, 2, 0], [3]], ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_a_prompt_that_rows_share_is_computed_once(policies, family, rows):
    model, policy, shapes = policies[family], LogProbs(policies[family], 0.7, train_entropy=True), []
    batch, results = pack([OF_GROUPS[i] for i in rows], [SEVEN[i] for i in rows], right=1), []
    groups, tokens = [GROUPS[i] for i in rows], sum(len(SEVEN[i]) for i in rows)
    prompts = sum(len(prompt) for prompt in {tuple(OF_GROUPS[i]) for i in rows})
    with model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    ):
        for group in (None, torch.tensor(groups)):
            logps, entropy = policy(*batch.tokens, None, group)
            w = weights(logps.shape)
            results.append((logps.detach(), entropy.detach(), gradients(model, ((logps + 3 * entropy) * w).sum())))
    assert shapes == [(1, sum(len(OF_GROUPS[i]) for i in rows) + tokens), (1, prompts + tokens)]
    (logps, entropy, of_weights), (shared_logps, shared_entropy, found) = results
    assert_same(shared_logps, logps)
    assert_same(shared_entropy, entropy)
    assert_same_gradients(found, of_weights)
    policy.packed = False  # as beyond a sliding window
    padded, _ = policy(*batch.tokens, None, torch.tensor(groups))
    assert_same(padded, logps)


def test_a_group_of_several_prompts_is_refused(policies):
    policy = LogProbs(policies["qwen2"], 1.0)
    with pytest.raises(ValueError, match=r"groups \[0, 1, 1, 2\] .* \[4, 9, 3, 1\] tokens: .* another number"):
        policy(*pack(PROMPTS, COMPLETIONS).tokens, None, torch.tensor([0, 1, 1, 2]))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_and_checkpoints_see_a_shared_prompt_as_all_weights_do(model_folders, checkpointing):
    folder = str(model_folders["qwen2"])
    _, model = models.load_policy(folder, CPU, "fp32", checkpointing, lora.Options(4, 8.0))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    policy, batch, results = LogProbs(model, 0.7), pack(OF_GROUPS, SEVEN), []
    for group in (None, torch.tensor(GROUPS)):
        logps, _ = policy(*batch.tokens, None, group)
        results.append((logps.detach(), gradients(model, (logps * weights(logps.shape)).sum())))
    assert_same(results[1][0], results[0][0])
    assert_same_gradients(results[1][1], results[0][1])
    assert all("lora" in name and gradient.any() for name, gradient in results[1][1].items())


@pytest.mark.parametrize(("limit", "sizes"), [(0, [18, 14, 20]), (100, [35]), (5, [11, 16, 8])])
def test_fill_shares_prompts_over_micro_batches(policies, limit, sizes):
    policy, tokens = LogProbs(policies["qwen2"], 1.0), []
    lengths = [len(completion) for completion in SEVEN]
    whole, _ = policy(*pack(OF_GROUPS, SEVEN).tokens)
    micros, cut = [], [[1, 0], [6, 5, 3], [4, 2]]
    for rows in cut:
        micro = pack([OF_GROUPS[i] for i in rows], [SEVEN[i] for i in rows])
        micro.group, micro.lengths = torch.tensor([GROUPS[i] for i in rows]), torch.tensor([lengths[i] for i in rows])
        micro.prompt_lengths = torch.tensor([len(OF_GROUPS[i]) for i in rows])
        micro.tokens = micro.prompt_ids, micro.prompt_lengths, micro.completion_ids, micro.lengths, None, micro.group
        micro.longest = int((micro.prompt_lengths + micro.lengths).max())
        micros.append(micro)
    with policy.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    ):
        passes.fill(micros, "old_logps", policy, CPU, limit)
    assert tokens == sizes
    for rows, micro in zip(cut, micros, strict=True):
        assert_same(micro.old_logps, whole[rows][:, : micro.completion_ids.shape[1]])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_what_stands_in_it_does_not_matter(policies, family, packed):
    model, order = policies[family], [2, 0, 3, 1]  # nor does the order of rows, or one that is masked
    policy, plain, w = LogProbs(model, 1.0), pack(PROMPTS, COMPLETIONS), weights((4, 7))
    prompts, completions = ([rows[i] for i in order] + [[41] * 3] for rows in (PROMPTS, COMPLETIONS))
    padded = pack(prompts, completions, left=4, right=2, garbage=41)
    padded.completion_mask[4] = False
    policy.packed = packed
    (logps, entropy), (other, other_entropy) = policy(*plain.tokens), policy(*padded.tokens)
    for x in (other, other_entropy):
        assert not x[:, 7:].any() and not x[4].any()
    assert_same(other[:4, :7], logps[order])
    assert_same(other_entropy[:4, :7], entropy[order])
    found = gradients(model, (other[:4, :7] * w[order]).sum())
    assert_same_gradients(found, gradients(model, (logps * w).sum()))
    padded.completion_mask[:] = False
    logps, entropy = policy(*padded.tokens)
    assert not logps.any() and not entropy.any()
    assert not any(gradient.any() for gradient in gradients(model, logps.sum()).values())  # zeros, not None


class Live(TorchDispatchMode):
    """Follows the memory of all tensors that operations return, and of those only: bytes alive, and their peak."""

    def __init__(self, known=()):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.alive, self.peak, self.largest = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
            del storage
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def head_inputs(N, V=50, H=8, bias=False, dtype=torch.float32, frozen=False, size=1.0, device=CPU) -> tuple:
    """Hidden states, weight and bias of a head, tokens, and the gradient of their log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias_V, grad = (torch.randn(*shape, generator=generator) for shape in ((N, H), (V, H), (V,), (N,)))
    ids = torch.randint(0, V, (N,), generator=generator)
    hidden, weight, bias_V = ((size * x).to(device, dtype) for x in (hidden, weight, bias_V))
    for x in (weight, bias_V):
        x.requires_grad_(not frozen)
    return hidden.requires_grad_(), weight, bias_V if bias else None, ids.to(device), grad.to(device)


def exact_head(logits, ids, temperature, softcap):
    """The definition: log-probabilities of the tokens, entropies, and log-probabilities of all ids."""
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logps = (logits / temperature).log_softmax(-1)
    return logps.gather(-1, ids[:, None]).squeeze(-1), -(logps.exp() * logps).sum(-1), logps


def compare_heads(inputs, temperature=1.0, softcap=None, compile=False, scale=1.0, factors=(1.0, 0.0)):
    """Values and gradients against double precision; the loss weighs log-probabilities and entropies by `factors`."""
    hidden, weight, bias, ids, grad = inputs
    (N, H), V = hidden.shape, len(weight)
    found = head.logps_from_weight(*inputs[:4], temperature, softcap, compile, factors[1] != 0)
    assert found[0].dtype == found[1].dtype == torch.float32 and found[1].requires_grad == (factors[1] != 0)
    h, W = hidden.detach().double(), weight.detach().double()
    b = torch.zeros(V, dtype=torch.float64, device=W.device) if bias is None else bias.detach().double()
    logits = (h @ W.T + b).requires_grad_()
    *exact, logps = exact_head(logits, ids, temperature, softcap)

    # a logit errs by H products; its error is the relative one of its probability, to which the sum over V adds
    size = max((h.abs() @ W.abs().T + b.abs()).flatten().tolist(), default=0.0) / temperature
    error = rounding(H + 8, size) + rounding(V + 8)
    torch.testing.assert_close(found[0].double(), exact[0], rtol=0, atol=error)
    torch.testing.assert_close(found[1].double(), exact[1], rtol=0, atol=4 * math.log(V) * error)

    loss, exact_loss = (sum((f * grad * x).sum() for f, x in zip(factors, out, strict=True)) for out in (found, exact))
    leaves = {name: x for name, x in zip("hWb", inputs[:3], strict=True) if x is not None and x.requires_grad}
    (G,) = torch.autograd.grad(exact_loss, logits)
    # d log p = 1 - p, and d entropy = -p (log p + entropy), which the slope of a soft cap multiplies
    likely = factors[0] + abs(factors[1]) * (logps.detach().abs() + 4 * math.log(V))
    P = (logps.detach().exp() * likely + (softcap is not None) * F.one_hot(ids, V)) * grad.abs()[:, None] / temperature
    parts = {"h": lambda G, h, W: G @ W, "W": lambda G, h, W: G.T @ h, "b": lambda G, h, W: G.sum(0)}
    for (name, leaf), one in zip(leaves.items(), torch.autograd.grad(loss * scale, leaves.values()), strict=True):
        assert one.dtype == leaf.dtype
        dtype, sizes = torch.finfo(leaf.dtype), (h.abs(), W.abs())
        bound = error * parts[name](P, *sizes) + (rounding(N + V) + 2 * dtype.eps) * parts[name](G.abs(), *sizes)
        # what fp16 can hold, of the result and of gradients of logits, which are scaled to head.LARGEST_GRADIENT
        smallest = dtype.smallest_normal * dtype.eps / scale
        unit = 4 * max(map(abs, factors)) * grad.abs().max().item() / temperature / head.LARGEST_GRADIENT if N else 0.0
        bound = bound + dtype.smallest_normal * dtype.eps * unit * parts[name](torch.ones_like(G), *sizes)
        assert ((one.double() / scale - parts[name](G, h, W)).abs() <= bound + smallest).all(), name


@pytest.mark.parametrize(("logits", "temperature", "logp", "entropy"), [
    ([2.0, 0.0], 1.0, -0.126928, 0.365334),  # p = 1 / (1 + e^-2) = 0.880797; -p ln p - (1 - p) ln (1 - p)
    ([2.0, 0.0], 0.5, -0.018150, 0.090095),  # p = 1 / (1 + e^-4) = 0.982014
    ([0.0, -torch.inf, -torch.inf], 1.0, 0.0, 0.0),  # 0 * log 0 counts as 0
    ([0.5] * 64, 1.0, -math.log(64), math.log(64)),
])  # fmt: skip
def test_temperature_divides_the_logits(logits, temperature, logp, entropy):
    inputs = torch.ones(1, 1), torch.tensor(logits)[:, None], None, torch.tensor([0])
    found = head.logps_from_weight(*inputs, temperature, None, False)
    assert [x.item() for x in found] == pytest.approx([logp, entropy], abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("chunk", [1024, 5])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.3, None), (0.7, 2.0)])
@pytest.mark.parametrize("factors", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)], ids=["log-probability", "entropy", "both"])
@pytest.mark.parametrize("frozen", [False, True])
def test_head_is_its_definition(monkeypatch, frozen, factors, temperature, softcap, chunk):
    sizes, stats = [], head._stats
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(head, "_stats", lambda *args: sizes.append(len(args[1])) or stats(*args))
    for tokens, bias in ((13, False), (13, True), (0, True)):
        sizes.clear()
        compare_heads(head_inputs(tokens, bias=bias, frozen=frozen), temperature, softcap, factors=factors)
        assert max(sizes) <= chunk and sum(sizes) == tokens
    if not frozen:  # the head alone can be trained, too
        hidden, *others = head_inputs(13, bias=True)
        compare_heads((hidden.detach(), *others), temperature, softcap, factors=factors)


def test_the_entropy_of_tokens_without_probability_has_a_finite_gradient():
    hidden, weight, _, ids, _ = head_inputs(3)
    _, entropy = head.logps_from_weight(hidden * 1e4, weight, None, ids, 1.0, None, False, True)
    (found,) = torch.autograd.grad(entropy.sum(), hidden)
    assert found.isfinite().all()


@pytest.mark.parametrize("frozen", [False, True])
def test_no_tensor_is_larger_than_a_chunk_of_logits_and_a_frozen_head_computes_them_once(monkeypatch, frozen):
    monkeypatch.setattr(head, "CHUNK_TOKENS", 10)  # more than the hidden size: the weight is smaller
    inputs = head_inputs(95, V=300, frozen=frozen)
    with Live() as live:
        logps, _ = head.logps_from_weight(*inputs[:4], 0.7, None, False)
        if frozen:
            monkeypatch.setattr(head, "project", None)
        logps.sum().backward()
    assert live.largest == 4 * 10 * 300


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
    compare_heads(head_inputs(13, V=3000, dtype=dtype, frozen=frozen, size=0.02), temperature=0.1, scale=scale)


def test_a_bf16_head_keeps_gradients_of_likely_tokens_and_sums_of_many(request, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_TOKENS", 1)
    hidden, weight, _, ids, _ = head_inputs(1, dtype=torch.bfloat16)
    hidden = hidden.detach().repeat(400, 1).requires_grad_()  # added up in bf16, the sum would end at 256 equal ones
    compare_heads((hidden, weight, None, ids.repeat(400), torch.ones(400)))
    # p = 1 - 1e-4 is 1 in bf16: a gradient made of W[y] - pW after rounding would be 0
    request.getfixturevalue("tensor_cores")
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[9.25], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    compare_heads((hidden, weight, None, torch.tensor([0]), torch.ones(1)))


def test_logits_of_a_bf16_model_are_not_rounded(model_folders):
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "bf16")
    hidden = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    weight = model.get_output_embeddings().weight.detach()
    logits, exact = head.vocabulary_logits(model, hidden), hidden.double() @ weight.double().T
    size = (hidden.double().abs() @ weight.double().abs().T).max().item()
    assert weight.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert_rounded(logits, exact, terms=32, magnitude=size)
    assert (model.lm_head(hidden) - exact).abs().max() > 10 * rounding(32, size)  # or nothing was compared


@pytest.mark.parametrize(("family", "checkpointing", "dtype"), [
    ("qwen2", False, "fp32"), ("qwen2", True, "bf16"), ("gpt2", True, "fp32"), ("gpt2", False, "bf16"),
])  # fmt: skip
def test_the_first_ratio_is_exactly_one(model_folders, family, checkpointing, dtype):
    # the same operations on the same numbers, though GPT-2's config has dropout and only the update has gradients
    folder = str(model_folders[family])
    _, model = models.load_policy(folder, CPU, dtype, gradient_checkpointing=checkpointing)
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    assert bool(checkpointed) == checkpointing
    assert [module for module in model.modules() if module.training] == checkpointed  # nothing else draws numbers
    policy, batch = LogProbs(model, 0.7), pack(PROMPTS, COMPLETIONS)
    passes.fill([batch], "old_logps", policy, CPU)
    passes.fill([batch], "ref_logps", LogProbs(models.load_frozen(folder, CPU, dtype), 0.7), CPU)
    logps, _ = policy(*batch.tokens)
    assert logps.requires_grad and not batch.old_logps.requires_grad
    assert torch.equal(logps, batch.old_logps) and torch.equal(logps, batch.ref_logps)
    ratio = losses.sequence_ratio(logps, batch.old_logps, batch.completion_mask)
    assert torch.equal(ratio, torch.ones(4))
    assert all(g.any() for g in gradients(model, ratio.sum()).values())  # every weight takes part


@pytest.mark.parametrize(("compiled", "field"), [(True, "old_logps"), (True, "ref_logps"), (False, "old_logps")])
def test_fill_writes_rows_and_computes_as_a_compiled_update_does_only_for_it(policies, monkeypatch, compiled, field):
    monkeypatch.setattr(head, "kernel", lambda function, compile: function)
    model, modes, cut = copy.deepcopy(policies["qwen2"]), [], [[2, 0], [1], [3]]
    policy = LogProbs(model, 1.0)
    whole, _ = policy(*pack(PROMPTS, COMPLETIONS).tokens)
    policy.compiled = compiled
    model.model.register_forward_hook(lambda *args: modes.append(torch.is_grad_enabled()))
    micros = [pack([PROMPTS[i] for i in rows], [COMPLETIONS[i] for i in rows]) for rows in cut]
    passes.fill(micros, field, policy, CPU)
    for rows, micro in zip(cut, micros, strict=True):
        logps_mC = getattr(micro, field)
        assert_same(logps_mC, whole[rows][:, : micro.completion_ids.shape[1]])
        other = "ref_logps" if field == "old_logps" else "old_logps"
        assert getattr(micro, other, None) is None and not logps_mC.requires_grad
    assert modes == [compiled and field == "old_logps"] * 3  # the reference is not in the update
    assert torch.is_grad_enabled() and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.parity)])
def test_blocks_and_head_are_compiled_once(model_folders, monkeypatch, checkpointing):
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32", gradient_checkpointing=checkpointing)
    policy, batches = LogProbs(model, 0.7), [random_batch(*size) for size in ((3, 5, 9), (4, 9, 12), (1, 30, 40))]
    groups = [GROUPS, [n for n in GROUPS for _ in range(2)], [0] * 3]  # another variant of the blocks
    for one, prompts in zip(groups, (OF_GROUPS, [x for x in OF_GROUPS for _ in range(2)], [[8] * 20] * 3), strict=True):
        batches.append(pack(prompts, (SEVEN * 2)[: len(prompts)]))
        batches[-1].tokens += (None, torch.tensor(one))
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
    monkeypatch.setattr(attention, "on_flash", lambda x: True)  # the host's lists of lengths are not looked at
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    kernels = {f: torch.compile(f, dynamic=True, backend=backend) for f in (head._stats, head._logit_gradient)}
    monkeypatch.setattr(head, "kernel", lambda function, compile: kernels[function] if compile else function)
    for block in model.model.layers:
        block.compile(dynamic=True, backend=backend)
    # the compiler keeps few variants of a layer: used up by examining it, it would leave decoding uncompiled
    assert attention.install(model).not_packed == "" and not graphs
    policy.compiled = True
    for batch, (logps, found) in zip(batches, expected, strict=True):
        passes.fill([batch], "old_logps", policy, CPU)
        compiled_logps, _ = policy(*batch.tokens)
        assert torch.equal(compiled_logps, batch.old_logps)
        assert_same(compiled_logps, logps)
        assert_same_gradients(gradients(model, compiled_logps.sum()), found)
        assert len(graphs) == 3 + (len(batch.tokens) > 4)  # one for all blocks, two for the head; shared prompts
    torch._dynamo.reset()


def test_a_reference_runs_the_code_that_is_compiled_for_the_policy(model_folders, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def wrapper(model, **options):  # what happens on a GPU
        wrapped = LogProbs(model, 1.0)
        for block in model.model.layers:
            block.compile(dynamic=True, backend=backend)
        wrapped.compiled = True
        return wrapped

    cfg = gspo.Config(policy_model=str(model_folders["qwen2"]), device="cpu", kl_coef=0.1)
    policy = Policy(cfg)
    batch = make_sampler(policy.model).generate(PROMPTS, group_size=2, temperature=1.0)
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "on_flash", lambda x: True)  # the host's lists of lengths are not looked at
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(head, "kernel", lambda function, compile: function)
    policy.wrap(wrapper)
    reference = Reference(cfg, policy)
    policy.fill_logps([batch], "old_logps", 1000)
    assert len(graphs) == 1
    reference.fill_logps([batch], 1000)
    assert len(graphs) == 1 and torch.equal(batch.ref_logps, batch.old_logps)
    torch._dynamo.reset()


def test_lora(model_folders):
    peft = pytest.importorskip("peft")
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32", gradient_checkpointing=True)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    policy, batch = LogProbs(model, 0.7), pack(PROMPTS, COMPLETIONS)
    assert policy.packed
    logps, _ = policy(*batch.tokens)
    found = gradients(model, (logps * weights(logps.shape)).sum())
    assert found and all("lora" in name and grad.any() for name, grad in found.items())
    assert_same_gradients(found, naive_gradients(model))
    passes.fill([batch], "old_logps", policy, CPU)
    assert torch.equal(batch.old_logps, logps)
    with model.disable_adapter():
        passes.fill([batch], "ref_logps", policy, CPU)
    assert (batch.ref_logps - batch.old_logps).abs().max() > 0.01


@pytest.mark.parametrize("where", ["target_modules", "modules_to_save"])
def test_adapters_of_the_head_are_refused(model_folders, where):
    peft = pytest.importorskip("peft")
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32")
    modules = {"target_modules": ["q_proj"], where: ["lm_head"]}
    with pytest.raises(TypeError, match=r"output head.*target_modules"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns that the head is tied
        LogProbs(peft.get_peft_model(model, peft.LoraConfig(r=4, **modules)), 1.0)


def test_the_head_is_checked_where_models_are_loaded_and_leaves_their_mode_as_it_was(
    policies, tmp_path, tokenizer, monkeypatch
):
    scaled = tiny_model("granite", logits_scaling=4.0)
    scaled.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for load in (lambda *where: models.load_policy(*where)[1], models.load_frozen):
        assert head.scale_of(load(str(tmp_path), CPU, "fp32")) == 0.25
        with monkeypatch.context() as patch:
            patch.setattr(head, "SCALES", ())  # a factor of a name that nobody knows
            with pytest.raises(ValueError, match="GraniteForCausalLM: its logits differ"):
                load(str(tmp_path), CPU, "fp32")
    for dtype in (torch.float32, torch.bfloat16):
        head.check(tiny_model("granite", logits_scaling=1.0).to(dtype))
    for training in (True, False):
        model = copy.deepcopy(policies["gpt2"]).train(training)
        head.check(model)
        assert {module.training for module in model.modules()} == {training}
    model.transformer.ln_f.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="logits differ by nan"):
        head.check(model)


def test_a_sequence_with_more_tokens_than_learned_positions_is_refused_by_row():
    # such as an answer of the data, which no rollout has looked at
    policy = LogProbs(build_model("gpt2").eval(), 1.0)  # 64 positions
    prompts, lengths = torch.full((2, 3), 5), torch.tensor([3, 3])
    policy(prompts, lengths, torch.full((2, 61), 6), torch.tensor([9, 61]))
    with pytest.raises(ValueError, match=r"row 1 .* 65 tokens.* 64 positions; lower max_prompt_tokens"):
        policy(prompts, lengths, torch.full((2, 62), 6), torch.tensor([9, 62]))


@pytest.mark.parametrize(("top", "limit", "name"), [(32, 32, "index_topk"), (128, 64, "rotary"), (None, 64, "rotary")])
def test_the_lowest_limit_of_positions_counts(top, limit, name):
    model = tiny_model("llama", max_position_embeddings=64, rope_parameters=dict(
        rope_type="dynamic", rope_theta=10_000.0, factor=4.0))  # fmt: skip
    model.config.index_topk = top
    found, reason = positions.longest_sequence(model)
    assert found == limit and name in reason


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
        passes.fill(micros, "old_logps", policy, CPU)
        passes.fill(micros, "ref_logps", reference, CPU)
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
    assert any(before[0]["modes"]) and before[0]["config"].get("attn_pdrop") == 0.1


def test_nothing_piles_up_from_step_to_step(model_folders):
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "fp32")
    policy, sampler = LogProbs(model, 1.0), make_sampler(model, max_new_tokens=4)
    optimizer, weights_of = optim.AdamW(model, 1e-4, offload="rollout"), offload.Offloader(model)
    generator, kept = torch.Generator().manual_seed(0), []
    for step in range(8):
        lengths = torch.randint(1, 30, (4,), generator=generator).tolist() if step else [30] * 4  # the longest first
        batch = sampler.generate([[4 + n] * n for n in lengths], group_size=2, temperature=1.0, step=step)
        minibatches = batch.minibatches(2, 60, policy.packed)
        for minibatch in minibatches:
            passes.fill(minibatch, "old_logps", policy, CPU)
        weights_of.offload()
        weights_of.onload()
        for minibatch in minibatches:
            for micro in minibatch:
                ratio = losses.sequence_ratio(policy(*micro.tokens)[0], micro.old_logps, micro.completion_mask)
                optimizer.scale(ratio.sum() / 8).backward()
            optimizer.step(1.0)
        optimizer.check()
        optimizer.offload_for_rollout()
        if step in (3, 7):
            del batch, minibatches, minibatch, micro, ratio
            gc.collect()
            found = [x.untyped_storage() for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
            kept.append(sum({storage.data_ptr(): storage.nbytes() for storage in found}.values()))
    assert kept[0] == kept[1]


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
    for tokens, softcap in itertools.product((13, 4, 0), (None, 2.0)):
        # log-probabilities, entropies, and factors of either sign; with a loss scale as in fp16
        for scale, factors in ((2.0**6, (1.0, 0.0)), (1.0, (0.0, 1000.0)), (1.0, (1.0, -0.3))):
            inputs = head_inputs(tokens, 3000, 16, bias=True, dtype=dtype, frozen=frozen, device=cuda)
            compare_heads(inputs, 0.7, softcap, compile and tokens > 1, scale, factors)


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
    sizes = [(3, 5, 9), (6, 20, 30), (1, 30, 20), (9, 3, 40)]
    batches = [random_batch(*size, seed=seed) for seed, size in enumerate(sizes)]
    for prompts, completions, groups in ((OF_GROUPS, SEVEN, GROUPS), ([[8] * 40] * 7, SEVEN, [0] * 7)):
        batches.append(pack(prompts, completions))
        batches[-1].tokens += (None, torch.tensor(groups))
    for batch in batches:
        results = []
        for one in (exact, padded, policy):
            *tokens, group = (*batch.tokens, None, None)[:6]
            tokens = [x if x is None else x.to(one.model.device) for x in tokens]
            logps, _ = one(*tokens, group if one is policy else None)
            found = gradients(one.model, (logps * weights(logps.shape).to(logps.device)).sum())
            results.append((logps.detach().cpu(), torch.cat([g.flatten().float().cpu() for g in found.values()])))
        passes.fill([batch], "old_logps", policy, cuda)
        assert torch.equal(batch.old_logps, results[2][0])  # the first ratio is exactly 1
        for expected, rough, ours in zip(*results, strict=True):
            assert (ours - expected).norm() <= 1.5 * (rough - expected).norm() + 1e-3 * expected.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs == 4 * compile  # blocks with shared prompts


@gpu
def test_the_host_waits_once_in_a_forward_pass(model_folders, cuda):
    _, model = models.load_policy(str(model_folders["qwen2"]), cuda, "bf16")
    policy, tokens = LogProbs(model, 1.0), [x.to(cuda) for x in pack(OF_GROUPS, SEVEN).tokens]
    tokens += [None, torch.tensor(GROUPS)]
    policy(*tokens)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy(*tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchronizing" in str(w.message)]) == 1


@gpu
@pytest.mark.parametrize(("compile", "gib"), [(False, 2.3), (True, 1.6)])
def test_memory_of_a_large_head(cuda, compile, gib):
    hidden, weight, _, ids, grad = head_inputs(4096, V=151_936, H=896, dtype=torch.bfloat16, device=cuda)
    for _ in range(2):
        hidden.grad = weight.grad = None
        before = torch.cuda.memory_allocated(cuda)
        torch.cuda.reset_peak_memory_stats(cuda)
        head.logps_from_weight(hidden, weight, None, ids, 1.0, None, compile)[0].backward(grad)
    assert torch.cuda.max_memory_allocated(cuda) - before < gib * 2**30  # all logits would take 2.3 in fp32
