"""Tests of what distillation computes: common/distill/distillation.py, common/distill/teachers.py and
common/training/offload.py.
"""

import copy
import functools
from types import SimpleNamespace

import pytest
import test_logprobs
import torch
from bounds import assert_rounded, rounding
from conftest import build_model, build_tokenizer, tiny_model
from test_divergences import exact, exact_top
from test_logprobs import COMPLETIONS, PROMPTS, ROUNDINGS, Live, assert_same, assert_same_gradients, gradients, pack
from torch import nn

from common.distill import distillation, offpolicy, teachers
from common.distill.distillation import Divergences, Head, HiddenStates
from common.distill.teachers import LocalTeacher
from common.maths import losses
from common.model import head
from common.model.logprobs import LogProbs
from common.training import optim
from common.training.offload import Offloader

CPU = torch.device("cpu")
GIB = 2**30
BETAS = [0.0, 0.5, 1.0]
ROWS = list(zip(PROMPTS, COMPLETIONS, strict=True))
MODELS = {  # other sizes of the hidden states and of the vocabulary, biases, soft caps, tied and untied heads
    "qwen2": lambda: tiny_model("qwen2", tie_word_embeddings=True),
    "llama": lambda: tiny_model("llama", tie_word_embeddings=False),
    "phi": lambda: tiny_model("phi", num_key_value_heads=4),
    "gemma2": lambda: tiny_model("gemma2", head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=None),
    "wide": lambda: tiny_model("llama", hidden_size=48, vocab_size=72, num_hidden_layers=1),
    "wide_phi": lambda: tiny_model("phi", hidden_size=48, vocab_size=72, num_hidden_layers=1, num_key_value_heads=4),
}
K = 5
tensor_cores = test_logprobs.tensor_cores  # a fixture


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


def said_of(kind, teacher, batch, rows, temperature, shared=64) -> tuple[Head | None, tuple]:
    """Head and hidden states of a teacher, or no head and its top k of what it says itself."""
    with torch.no_grad():
        if kind == "states":
            return Head(teacher), HiddenStates(teacher, 1.0)(*batch.tokens)
        shape = batch.completion_ids.shape
        ids, logps = torch.zeros(*shape, K, dtype=torch.int32), torch.zeros(*shape, K)
        tail, tokens = torch.zeros(shape), torch.zeros(shape)
        for i, (prompt, completion) in enumerate(rows):
            logp = (own_logits(teacher, prompt, completion)[:, :shared] / temperature).log_softmax(-1)
            n = len(completion)
            logps[i, :n], ids[i, :n] = logp.topk(K, dim=-1)
            tail[i, :n] = logp.scatter(-1, ids[i, :n].long(), -torch.inf).logsumexp(-1)
            tokens[i, :n] = logp[range(n), completion]
    return None, (ids, logps, tail, tokens)


def dense(student, teacher, kind, said, weights, beta, shared=64) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, and what is reported, from whole logits in double precision; with the gradients of autograd."""
    values, loss = torch.zeros(*weights.shape, len(Divergences.values), dtype=torch.float64), 0.0
    for i, (prompt, completion) in enumerate(ROWS):
        own, theirs = (own_logits(x, prompt, completion).double()[:, :shared] for x in (student, teacher))
        n, tokens = len(completion), (range(len(completion)), completion)
        if kind == "states":
            betas = [exact(own, theirs.detach(), b, 0.7) for b in (beta, 0.0, 1.0)]
        else:
            ids, logps, tail, _ = (x[i, :n] for x in said)
            betas = [exact_top(own, ids.long(), logps, tail, b, 0.7) for b in (beta, 0.0, 1.0)]
        logq, logp = ((x / 0.7).log_softmax(-1) for x in (own, theirs))
        found = dict(zip(Divergences.values[:3], betas, strict=True), student_logps=logq[tokens],
                     teacher_logps=logp[tokens], entropy=-(logq.exp() * logq).sum(-1))  # fmt: skip
        values[i, :n] = torch.stack([found[name] for name in Divergences.values], -1).detach()
        loss = loss + (betas[0] * weights[i, :n]).sum()
    return loss, values


def trained(student, teacher, kind="states", beta=0.5, rows=ROWS, weights=None, batch=None, shared=64,
            aggregation="token_mean") -> SimpleNamespace:  # fmt: skip
    """Loss, values and gradients of `Divergences`, and the weights and what the teacher said."""
    batch = batch or pack(*zip(*rows, strict=True))
    teacher_head, said = said_of(kind, teacher, batch, rows, 0.7, shared)
    if weights is None:
        weights = losses.weights(batch.completion_mask, aggregation, batch.completion_mask.sum())
    loss, values = Divergences(student, 0.7, False, beta, shared, teacher_head)(*batch.tokens, weights, *said)
    assert loss.shape == (1,) and loss.dtype == values.dtype == torch.float32 and not values.requires_grad
    found = gradients(student, loss.sum())
    return SimpleNamespace(loss=loss.detach(), values=values, gradients=found, said=said, weights=weights)


def assert_same_values(actual, expected):
    """Equal but for rounding in both models; a divergence sums p (log p - log q), each log at most 32."""
    assert_rounded(actual, expected, 2 * ROUNDINGS, magnitude=64.0)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", ["states", "top_k"])
@pytest.mark.parametrize(("student", "teacher", "aggregation", "shared", "chunk", "slices"), [
    ("qwen2", "wide", "token_mean", 64, 1024, 16), ("llama", "wide_phi", "seq_mean", 64, 1024, 1),
    ("phi", "gemma2", "token_mean", 50, 5, 2), ("gemma2", "wide", "seq_mean", 64, 1, 3),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_whole_logits(
    student, teacher, kind, beta, aggregation, shared, chunk, slices, monkeypatch
):
    student, teacher, mask = model_of(student), model_of(teacher, 1), pack(PROMPTS, COMPLETIONS).completion_mask
    sizes, project = [], distillation.project
    monkeypatch.setattr(distillation, "project", lambda *args: sizes.append(len(args[0])) or project(*args))
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(distillation, "SLICES", slices)
    found = trained(student, teacher, kind, beta, aggregation=aggregation, shared=shared)
    assert max(sizes) <= chunk and sum(sizes) == 13 * (2 if kind == "states" else 1)
    loss, values = dense(student, teacher, kind, found.said, found.weights, beta, shared)
    assert_same_values(found.loss, loss[None])
    assert_same_values(found.values, values)
    assert not found.values[~mask].any()
    assert_same_gradients(found.gradients, gradients(student, loss), terms=4 * ROUNDINGS)
    if shared < 64:  # of ids that one side lacks nothing is learned
        assert not found.gradients["lm_head.weight"][50:].any() and not found.gradients["lm_head.bias"][50:].any()
    counts = mask.sum(1).float()
    torch.testing.assert_close(found.weights.sum(1) * 13, counts if aggregation == "token_mean" else torch.ones(4))


@pytest.mark.parametrize(("beta", "end"), [
    (1e-6, "forward"), (1 - 1e-6, "reverse"), (0.0, ""), (1.0, ""), (0.01, ""), (0.99, ""),
])  # fmt: skip
def test_a_beta_that_all_but_switches_the_loss_off_is_warned_of(beta, end, capsys):
    Divergences(model_of("qwen2"), 1.0, False, beta, 64, None)
    out = capsys.readouterr().out
    assert all(part in out for part in (f"beta = {beta}", "times 1e-06", f"set loss to {end}_kl")) if end else not out
    for beta, temperature, wrong in ((1.5, 1.0, "beta = 1.5"), (0.5, 0.0, "temperature = 0")):  # and these are refused
        with pytest.raises(ValueError, match=wrong):
            Divergences(model_of("qwen2"), temperature, False, beta, 64, None)


@pytest.mark.parametrize("kind", ["states", "top_k"])
def test_a_row_counts_the_same_alone_padded_and_among_others(kind):
    student, teacher = model_of("qwen2"), model_of("wide", 1)
    weights = torch.rand(4, 7, generator=torch.Generator().manual_seed(0))
    whole = trained(student, teacher, kind, weights=weights)
    padded = pack(PROMPTS, COMPLETIONS, left=3, right=2, garbage=41)
    wide = nn.functional.pad(weights, (0, 2), value=9.0)  # of no token
    other = trained(student, teacher, kind, weights=wide, batch=padded)
    apart = [trained(student, teacher, kind, rows=[row], weights=w[None, : len(row[1])])
             for row, w in zip(ROWS, weights, strict=True)]  # fmt: skip
    assert_same_values(other.values[:, :7], whole.values)
    for part, expected in zip(apart, whole.values, strict=True):
        assert_same_values(part.values[0], expected[: part.values.shape[1]])
    summed = {name: sum(part.gradients[name] for part in apart) for name in whole.gradients}
    for loss, found in ((other.loss, other.gradients), (sum(part.loss for part in apart), summed)):
        assert_rounded(loss, whole.loss, 2 * ROUNDINGS, magnitude=64.0 * weights.sum().item())
        assert_same_gradients(found, whole.gradients)


@pytest.mark.parametrize("kind", ["states", "top_k"])
def test_what_stands_outside_the_completions_has_no_influence(kind):
    student, teacher, batch = model_of("llama"), model_of("wide", 1), pack(PROMPTS, COMPLETIONS)
    teacher_head, said = said_of(kind, teacher, batch, ROWS, 1.0)
    policy = Divergences(student, 1.0, False, 0.5, 64, teacher_head)
    weights, results = torch.ones(4, 7), []
    for garbage in (False, True):
        if garbage:  # after the end token, and before the prompt
            batch.completion_ids[~batch.completion_mask] = 61
            batch.prompt_ids[~batch.prompt_mask] = 62
            weights[~batch.completion_mask] = torch.nan
            for x in said:
                x[~batch.completion_mask] = torch.nan if x.is_floating_point() else 10**6
        loss, values = policy(*batch.tokens, weights, *said)
        results.append((loss.detach(), values, gradients(student, loss.sum())))
    assert all(torch.equal(*pair) for pair in zip(*(result[:2] for result in results), strict=True))  # never read
    assert_same_gradients(results[1][2], results[0][2])


def test_without_weights_or_without_tokens_there_is_no_loss():
    student, teacher, weights = model_of("phi"), model_of("wide", 1), torch.zeros(4, 7)
    none = trained(student, teacher, weights=weights)
    assert none.loss.item() == 0.0 and none.values[..., 0].max() > 0.1
    assert all(gradient.isfinite().all() and not gradient.any() for gradient in none.gradients.values())
    batch = pack(PROMPTS, COMPLETIONS)
    batch.completion_mask[:] = False
    none = trained(student, teacher, weights=torch.ones(4, 7), batch=batch)
    assert none.loss.item() == 0.0 and not none.values.any() and not none.said[0].any()
    assert not any(gradient.any() for gradient in none.gradients.values())


def test_a_frozen_head_or_body_leaves_the_gradients_of_the_rest():
    teacher, student = model_of("wide", 1), copy.deepcopy(model_of("phi"))
    whole, (weight, bias) = trained(student, teacher).gradients, ("lm_head.weight", "lm_head.bias")
    for trains in (whole.keys() - {weight}, whole.keys() - {weight, bias}, {weight, bias}):
        for name, p in student.named_parameters():
            p.requires_grad_(name in trains)
        assert_same_gradients(trained(student, teacher).gradients, {name: whole[name] for name in trains})


def test_without_gradients_the_values_are_the_same_and_none_is_made(monkeypatch):
    made, weighted = [], distillation._weighted
    monkeypatch.setattr(distillation, "_weighted", lambda *args: made.append(weighted(*args)) or made[-1])
    batch, weights = pack(PROMPTS, COMPLETIONS), torch.full((4, 7), 0.1)
    teacher_head, said = said_of("states", model_of("wide", 1), batch, ROWS, 1.0)
    policy = Divergences(model_of("phi"), 1.0, False, 0.5, 64, teacher_head)
    loss, values = policy(*batch.tokens, weights, *said)
    assert made and all(grad is not None for _, grad in made)
    made.clear()
    with torch.no_grad():
        other, other_values = policy(*batch.tokens, weights, *said)
    assert made and all(grad is None for _, grad in made) and not other.requires_grad
    assert torch.equal(loss.detach(), other) and torch.equal(values, other_values)  # by the same operations


@pytest.mark.parametrize("kind", ["states", "top_k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fixture", ["tokenizer", "tensor_cores"], ids=["as on a CPU", "as on a GPU"])
def test_in_half_precision_gradients_are_close_to_those_of_fp32(request, fixture, dtype, kind):
    request.getfixturevalue(fixture)
    student, teacher = (copy.deepcopy(x).to(dtype) for x in (model_of("phi"), model_of("wide", 1)))
    found = trained(student, teacher, kind)
    other = trained(copy.deepcopy(student).float(), copy.deepcopy(teacher).float(), kind)  # of rounded weights, too
    assert {gradient.dtype for gradient in found.gradients.values()} == {dtype}
    most = rounding(2 * 2 * 7, dtype=dtype)  # of each of seven products in two layers, forward and backward
    one, expected = (torch.cat([g.double().flatten() for g in x.gradients.values()]) for x in (found, other))
    assert (one - expected).norm() <= most * expected.norm()
    assert (found.loss - other.loss).abs() <= most * other.loss


def states_and_heads(dtype, N, V, H) -> tuple[torch.Tensor, ...]:
    """Hidden states and head of a student, head and hidden states of a teacher, and tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, theirs, states = (torch.randn(*shape, generator=generator).to(dtype)
                                      for shape in ((N, H), (V, H), (V, 6), (N, 6)))  # fmt: skip
    return hidden.requires_grad_(), weight.requires_grad_(), theirs, states, torch.zeros(N, dtype=torch.int64)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_small_weights_lose_nothing(dtype, scale):
    """Hidden states in, gradients out: exact but for the rounding of the result, also where a step has many tokens."""
    N, V, H = 40, 30, 8
    hidden, weight, theirs, states, ids = states_and_heads(dtype, N, V, H)
    leaves, weights = (hidden, weight), torch.rand(N, generator=torch.Generator().manual_seed(1)) * 1e-7
    target = distillation.Full((theirs, None, None), V, 0.5, 1.0, False)
    loss, _ = distillation._TokenLoss.apply(*leaves, None, weights, None, V, target, ids, states)
    own, other = (x.double() @ w.double().t() for x, w in ((hidden, weight), (states, theirs)))
    exact_loss = exact(own, other, 0.5) @ weights.double()
    found, expected = (torch.autograd.grad(x.sum() * scale, leaves) for x in (loss, exact_loss))
    smallest = 6e-8 if dtype == torch.float16 else 0.0  # of the result: what the scale of the loss is for
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        # in fp32 the logits are at most 16, in sums of H, V and N terms; then the result is rounded
        bound = rounding(N + V + H, 16.0) * other.abs().max() + torch.finfo(dtype).eps * other.abs() + smallest
        assert ((one.double() - other.double()).abs() <= bound).all()


def loss_memory(kind, dtype, chunk, monkeypatch, N=96, V=3000, H=8) -> float:
    """Peak of forward and backward, beyond what has to be there, in chunks of fp32 logits."""
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    hidden, weight, theirs, states, ids = states_and_heads(dtype, N, V, H)
    leaves, weights = (hidden, weight), torch.full((N,), 1.0 / N)
    if kind == "states":
        said, heads, target = (states,), (weight, theirs), distillation.Full((theirs, None, None), V, 0.5, 1.0, False)
    else:
        logps, top_ids = (states.float() @ theirs.float().t()).log_softmax(-1).topk(K)
        said, heads = (top_ids.int(), logps, torch.full((N,), -2.0), torch.zeros(N)), (weight,)
        target = distillation.TopK(0.5, 1.0, False)
    with Live([*leaves, theirs, weights, ids, *said]) as live:
        loss, values = distillation._TokenLoss.apply(*leaves, None, weights, None, V, target, ids, *said)
        loss.sum().backward()
    gradients_in_fp32 = 4 * (hidden.numel() + weight.numel())
    outputs = hidden.grad.nbytes + weight.grad.nbytes + 2 * values.nbytes  # of the chunks, and together
    in_fp32 = sum(4 * x.numel() for x in heads) if dtype != torch.float32 else 0  # half precision is multiplied so
    return (live.peak - gradients_in_fp32 - outputs - in_fp32) / (4 * chunk * V)


@pytest.mark.parametrize(("kind", "dtype", "most"), [  # of student and teacher, and slices
    ("states", torch.float32, 2.75), ("states", torch.bfloat16, 2.75), ("top_k", torch.float32, 1.5),
])  # fmt: skip
def test_no_more_than_three_chunks_of_logits_are_alive(kind, dtype, most, monkeypatch):
    small, large = (loss_memory(kind, dtype, chunk, monkeypatch) for chunk in (16, 48))
    assert 0.8 < large <= most and small <= most
    assert 48 * large > 2 * 16 * small  # it is the chunk that counts
    monkeypatch.setattr(distillation, "SLICES", 1)
    assert loss_memory(kind, dtype, 48, monkeypatch) > 4  # what is measured are tensors of that size


def micro_batches(prompts=PROMPTS, completions=COMPLETIONS, tokens=20):
    """As the update sees them."""
    return offpolicy.batch(prompts, completions, 0, [3], CPU).minibatches(1, tokens, True)[0]


@pytest.fixture(scope="module", params=["qwen2", "gpt2"])
def teacher(request, model_folders):
    torch.set_num_threads(1)
    return LocalTeacher(str(model_folders[request.param]), [CPU], "fp32", temperature=0.7, compile=True)


@pytest.mark.parametrize("micro_batch_tokens", [0, 20])
def test_the_states_of_a_teacher_are_its_logits(teacher, micro_batch_tokens):
    micros = micro_batches()
    assert len(micros) > 1
    teacher.fill(micros, micro_batch_tokens)
    weight, bias, softcap = teacher.head.on(CPU)
    for micro in micros:
        assert micro.teacher.tensors[0].shape == (*micro.completion_ids.shape, 32) and len(micro.teacher.tensors) == 1
        for states, row in zip(micro.teacher.states, micro.rows.tolist(), strict=True):
            n = len(COMPLETIONS[row])
            assert_same(head.project(states[:n], weight, bias, softcap), own_logits(teacher.model, *ROWS[row]))
            assert not states[n:].any()
    assert not any(p.requires_grad for p in teacher.model.parameters())
    assert teacher.vocabulary_size == teacher.shared == 64


def test_a_teacher_of_tokens_says_how_likely_they_are(model_folders):
    teacher = LocalTeacher(str(model_folders["qwen2"]), [CPU], "fp32", temperature=0.7, compile=True, tokens_only=True)
    micros = micro_batches()
    teacher.fill(micros, 20)
    assert teacher.head is None and all(micro.teacher.states is None for micro in micros)
    for micro in micros:
        for found, row in zip(micro.teacher.token_logps, micro.rows.tolist(), strict=True):
            n, logps = len(COMPLETIONS[row]), (own_logits(teacher.model, *ROWS[row]) / 0.7).log_softmax(-1)
            assert_same(found[:n], logps[range(n), COMPLETIONS[row]])
    assert len(teacher.memory.params) == len(list(teacher.model.parameters()))  # no part of it is at work elsewhere


@pytest.mark.parametrize("tokens_only", [False, True])
def test_a_teacher_that_overflows_is_named(tokens_only, model_folders):
    name, options = str(model_folders["qwen2"]), dict(temperature=0.7, compile=True)
    teacher = LocalTeacher(name, [CPU], "fp32", tokens_only=tokens_only, **options)
    teacher.fill(micro_batches(), 20)
    with torch.no_grad():  # in one layer, for some token
        teacher.model.model.layers[0].mlp.down_proj.weight.mul_(torch.finfo(torch.float32).max)
    what = "token_logps" if tokens_only else "states"
    with pytest.raises(FloatingPointError, match=f"'{name}'.* {what} .*not all finite.*float32.*set dtype"):
        teacher.fill(micro_batches(), 20)


def test_rows_of_different_lengths_do_not_diverge_from_a_teacher_that_is_the_student(teacher):
    student = Divergences(teacher.model, 0.7, False, 0.0, 64, teacher.head)
    some = PROMPTS[:3], [[5, 6], [7, 8, 9, 10, 11], [12]]
    for tokens in (1, 12, 1000):  # one row in each micro-batch, some, and all
        micros = micro_batches(*some, tokens)
        teacher.fill(micros, tokens)
        for micro in micros:
            _, values = student(*micro.tokens[:4], micro.completion_mask.float(), *micro.teacher.tensors)
            assert_same(values[..., :3], torch.zeros_like(values[..., :3]))
            assert values[..., 5].max() > 0.5


def test_an_offloaded_teacher_comes_back_bit_for_bit(teacher):
    before = {name: value.clone() for name, value in teacher.model.state_dict().items()}
    output = teacher.model.get_output_embeddings().weight
    micros, again = micro_batches(), micro_batches()
    teacher.fill(micros, 20)
    place = output.data_ptr()
    size = sum(p.nbytes for p in teacher.model.parameters() if p is not output)
    assert teacher.offload() * GIB == pytest.approx(size)  # without the head, which is kept; tied: the embedding, too
    assert output.data_ptr() == place == teacher.head.on(CPU)[0].data_ptr()
    teacher.onload()
    assert all(torch.equal(value, before[name]) for name, value in teacher.model.state_dict().items())
    teacher.fill(again, 20)
    for one, other in zip(micros, again, strict=True):
        assert torch.equal(one.teacher.states, other.teacher.states)


def test_completions_of_a_teacher_depend_on_number_and_seed_only(teacher):
    options, numbers = dict(seed=5, temperature=1.0, max_new_tokens=6), [7, 3, 11, 20]
    together = teacher.generate(PROMPTS, numbers, **options)
    assert len({tuple(ids) for ids in together}) == 4 and all(0 < len(ids) <= 6 for ids in together)
    assert all(ids.index(3) == len(ids) - 1 for ids in together if 3 in ids)  # cut after the end token
    # others beside a prompt change its probabilities by rounding only, and the draws of this seed are not that close
    assert teacher.generate(PROMPTS[::-1], numbers[::-1], **options)[::-1] == together
    teacher.offload()
    alone = [teacher.generate([prompt], [n], **options)[0] for prompt, n in zip(PROMPTS, numbers, strict=True)]
    assert alone == together and not teacher.memory.offloaded
    assert teacher.generate(PROMPTS, numbers, **{**options, "seed": 6}) != together
    assert teacher.generate(PROMPTS, [1, 2, 4, 5], **options) != together
    assert [ids[:2] for ids in together] == teacher.generate(PROMPTS, numbers, **{**options, "max_new_tokens": 2})
    # at temperature 0 they are its most likely tokens
    (ids,) = teacher.generate(PROMPTS[:1], [0], seed=0, temperature=0.0, max_new_tokens=5)
    assert own_logits(teacher.model, PROMPTS[0], ids).argmax(-1).tolist() == ids


def vocabulary_of(tokens) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def known(tokens="abcdef", chat_template=None, eos_token="a", pieces=1):
    """A tokenizer that has these tokens, and cuts text into pieces of as many characters."""
    vocabulary = tokens if isinstance(tokens, dict) else vocabulary_of(tokens)
    return SimpleNamespace(
        get_vocab=lambda: vocabulary, chat_template=chat_template, eos_token=eos_token,
        eos_token_id=vocabulary.get(eos_token),
        encode=lambda text, add_special_tokens: [text[i : i + pieces] for i in range(0, len(text), pieces)],
    )  # fmt: skip


def stub_teacher(size, chat_template=None, **tokenizer):
    traits = teachers.tokenizer_traits(known({}, chat_template, **tokenizer))
    return SimpleNamespace(vocabulary=lambda: vocabulary_of("abcdef"), vocabulary_size=size, tokenizer_traits=traits)


@pytest.mark.parametrize(("own", "size", "other", "other_size", "shared"), [
    ("abcdef", 64, "abcdef", 72, 64),
    ("abcdef", 8, [*"abcdef", "<pad>"], 7, 7), ([*"abcdef", "<pad>"], 8, "abcdef", 7, 7),  # a token of one side only
])  # fmt: skip
def test_the_same_tokenizer_is_shared_up_to_the_smaller_size(own, size, other, other_size, shared):
    assert teachers.shared_ids(known(own), size, vocabulary_of(other), other_size) == shared


@pytest.mark.parametrize(("student", "size"), [(151_936, 152_064), (152_064, 151_936)])
def test_sizes_that_differ_are_said_once(student, size, capsys):
    teacher = stub_teacher(size)
    assert teachers.agree(teacher, known(), student) == teacher.shared == 151_936
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"student has {student} token ids, the teacher {size}: the first 151936" in said
    assert teachers.agree(stub_teacher(4), known(), 6) == 4
    assert "2 tokens of its tokenizer are not among them" in capsys.readouterr().out


@pytest.mark.parametrize(("teacher", "own", "refused"), [
    (stub_teacher(64, "{{ a }}"), known(chat_template="{{ b }}"), "chat template.*allow_other_template"),
    (stub_teacher(6), known([*"abcdef", "<end>"], eos_token="<end>"), "'<end>' has id 6: must be one of the first 6"),
    (stub_teacher(64), known("abdcef"), r"id 2 is 'd' for the student and 'c' for the teacher \(2 ids differ\)"),
    (stub_teacher(64), known({**vocabulary_of("abcde"), "f": 9}), "id 5 is None for the student and 'f' for the teach"),
])  # fmt: skip
def test_another_tokenizer_or_chat_template_and_an_end_token_that_the_teacher_lacks_are_refused(teacher, own, refused):
    with pytest.raises(ValueError, match=refused):
        teachers.agree(teacher, own, 64)


@pytest.mark.parametrize(("theirs", "own", "allowed", "warning"), [
    (dict(chat_template="{{ a }}"), dict(chat_template="{{ a }}"), False, ""),
    (dict(chat_template="{{ a }}"), dict(chat_template="{{ b }}"), True, "chat template is another"),
    ({}, dict(chat_template="{{ a }}"), False, "chat template is another"),
    (dict(pieces=2), {}, False, "cuts text into other tokens"),
    (dict(eos_token="b"), {}, False, "end token is another"),
])  # fmt: skip
def test_tokenizers_that_differ_in_more_than_ids_are_warned_of(theirs, own, allowed, warning, capsys):
    teacher = stub_teacher(64, **theirs)
    assert teachers.agree(teacher, known(**own), 64, allowed) == 64
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "warning: the teacher's" in said and warning in said if warning else said == ""
    teacher.tokenizer_traits = {"template_hash": teacher.tokenizer_traits["template_hash"]}  # of an older server
    teachers.agree(teacher, known(**own), 64, allowed)
    assert ("warning" in capsys.readouterr().out) == ("chat template" in warning)


def test_real_tokenizers_with_one_map_of_ids_and_another_normalizer_are_told_apart(tokenizer):
    from tokenizers import normalizers

    other = build_tokenizer()
    assert teachers.tokenizer_traits(other) == teachers.tokenizer_traits(tokenizer)
    other.backend_tokenizer.normalizer = normalizers.Replace("=", "-")
    assert other.get_vocab() == tokenizer.get_vocab()
    own, others = teachers.tokenizer_traits(tokenizer), teachers.tokenizer_traits(other)
    assert {name for name, value in others.items() if value != own[name]} == {"segments_hash"}


def test_a_run_does_not_go_on_with_another_teacher():
    local = SimpleNamespace(name="t", weights=64 * "a")
    teachers.require_same(local, {})  # a new run, or one of an older version
    teachers.require_same(local, {"teacher": 64 * "a"})
    with pytest.raises(ValueError, match=r"'t' has the weights aaaaaaaaaaaa: must be those .*, bbbbbbbbbbbb"):
        teachers.require_same(local, {"teacher": 64 * "b"})


def bytes_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def assert_weights(model, expected):
    for name, p in model.named_parameters(remove_duplicate=False):
        assert torch.equal(p, expected[name]), name


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_travel_both_ways_as_they_are_and_frozen_ones_are_copied_once(frozen, monkeypatch):
    model = build_model("qwen2").requires_grad_(not frozen)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    model.model.layers[1].to(torch.bfloat16)
    memory, size, strides, copies, places = Offloader(model), sum(p.nbytes for p in model.parameters()), (1, 64), [], []
    copy_to_host = memory._copy_to_host
    monkeypatch.setattr(memory, "_copy_to_host", lambda: copies.append(1) or copy_to_host())
    for _ in range(3):
        before, home = bytes_of(model), [p.data_ptr() for p in model.parameters()]
        assert memory.offload() * GIB == pytest.approx(size) and memory.offload() == 0.0
        places.append([p.data_ptr() for p in model.parameters()])
        assert all(here != there for here, there in zip(home, places[-1], strict=True))
        assert_weights(model, before)
        if not frozen:  # also what happens to them meanwhile
            model.model.norm.weight.data += 1.0
            before = bytes_of(model)
        memory.onload()
        memory.onload()
        assert_weights(model, before)
        assert model.lm_head.weight is model.model.embed_tokens.weight and weight.stride() == strides
        assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {
            (torch.float32, not frozen), (torch.bfloat16, not frozen)
        }  # fmt: skip
        for p in model.parameters() if not frozen else ():  # a step of training
            p.data += 1.0
    assert memory.frozen == frozen and (not frozen or (len(copies) == 1 and places[0] == places[1] == places[2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_after_leaving_and_coming_back_is_the_step_without(dtype):
    models = [build_model("qwen2").to(dtype) for _ in range(2)]
    optimizers = [optim.AdamW(model, 1e-2) for model in models]
    memory = Offloader(models[0])
    batch = pack(PROMPTS, COMPLETIONS)
    for step in range(3):
        memory.offload()
        moved = optimizers[0].offload()
        small = sum(p.numel() for p in models[0].parameters()) * 4
        assert moved * GIB == pytest.approx((2 if dtype == torch.float32 else 3) * small)  # masters in fp32 are weights
        assert optimizers[0].offload() == 0.0
        memory.onload()
        for model, optimizer in zip(models, optimizers, strict=True):
            LogProbs(model, 1.0)(*batch.tokens)[0].sum().backward()
            optimizer.step(1.0)
        assert_weights(models[0], bytes_of(models[1]))
        assert step or not torch.equal(models[0].lm_head.weight, build_model("qwen2").to(dtype).lm_head.weight)
