"""Tests of common/logprobs.py against log-softmax over the full logits of one unpadded row at a time."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from common import logprobs, losses, models
from common.logprobs import LogProbs
from common.rollout import RolloutBatch

CPU = torch.device("cpu")
FAMILIES = ["qwen2", "gpt2"]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22], [23]]
COMPLETIONS = [[30, 31, 3], [32, 33], [34, 35, 36, 37, 38, 39, 3], [40]]


@pytest.fixture(scope="module")
def policies(model_folders):
    """In train mode, as the update sees them."""
    torch.set_num_threads(1)
    return {family: models.load_policy(str(model_folders[family]), CPU, "fp32")[1] for family in FAMILIES}


def pack(prompts, completions, left=0, right=0, garbage=0) -> RolloutBatch:
    """Prompts padded on the left, completions on the right, `left` and `right` columns wider than they need be."""
    Q, C = max(map(len, prompts)) + left, max(map(len, completions)) + right
    prompt_ids, completion_ids = torch.full((len(prompts), Q), garbage), torch.full((len(prompts), C), garbage)
    prompt_mask = torch.zeros(len(prompts), Q, dtype=torch.bool)
    completion_mask = torch.zeros(len(prompts), C, dtype=torch.bool)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        prompt_ids[i, Q - len(prompt) :], prompt_mask[i, Q - len(prompt) :] = torch.tensor(prompt), True
        completion_mask[i, : len(completion)] = True
        completion_ids[i, : len(completion)] = torch.tensor(completion, dtype=torch.long)
    rows = torch.arange(len(prompts))
    return RolloutBatch(prompt_ids, prompt_mask, completion_ids, completion_mask, lengths=completion_mask.sum(1),
                        truncated=rows < 0, rows=rows)  # fmt: skip


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
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
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
        self.config = SimpleNamespace()

    def get_output_embeddings(self):
        return self.head

    def get_decoder(self):
        return lambda input_ids, **kwargs: SimpleNamespace(last_hidden_state=self.hidden.expand(*input_ids.shape, -1))


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


def test_position_ids_count_tokens_only():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    expected = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 4, 5], [0] * 6])
    assert torch.equal(logprobs.position_ids(mask), expected)
    assert torch.equal(logprobs.position_ids(mask.bool()), expected)


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
    stats = logprobs._token_stats
    monkeypatch.setattr(logprobs, "_token_stats", lambda *args: sizes.append(len(args[3])) or stats(*args))
    for chunk in (2048, 13, 5, 1):
        monkeypatch.setattr(logprobs, "CHUNK_TOKENS", chunk)
        sizes.clear()
        logps, entropy = LogProbs(model, 0.7)(*batch.tokens)
        assert max(sizes) <= chunk and sum(sizes) == 13
        found = gradients(model, (logps * weights(logps.shape)).sum())
        results.append((logps.detach(), entropy, found))
    for logps, entropy, found in results[1:]:
        torch.testing.assert_close(logps, results[0][0], rtol=0, atol=1e-6)
        torch.testing.assert_close(entropy, results[0][1], rtol=0, atol=1e-6)
        assert_same_gradients(found, results[0][2], atol=1e-6)


def test_logits_of_several_chunks_are_not_kept_for_the_backward_pass(policies, monkeypatch):
    kept = []
    for chunk in (2048, 4):
        monkeypatch.setattr(logprobs, "CHUNK_TOKENS", chunk)
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=shapes: s.append(tuple(t.shape)) or t, lambda t: t):
            LogProbs(policies["gpt2"], 1.0)(*pack(PROMPTS, COMPLETIONS).tokens)
        kept.append([shape for shape in shapes if shape[-1:] == (64,)])  # the vocabulary; nothing else is that wide
    assert (13, 64) in kept[0] and not kept[1]


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


def test_gradient_checkpointing_does_not_change_gradients(model_folders):
    found = []
    for checkpointing in (False, True):
        _, model = models.load_policy(str(model_folders["gpt2"]), CPU, "fp32", gradient_checkpointing=checkpointing)
        logps, _ = LogProbs(model, 1.0)(*pack(PROMPTS, COMPLETIONS).tokens)
        found.append(gradients(model, (logps * weights(logps.shape)).sum()))
    assert_same_gradients(found[0], found[1], atol=1e-6)


def test_fill_writes_each_micro_batch_its_own_rows(policies):
    policy, batch = LogProbs(policies["qwen2"], 1.0), pack(PROMPTS, COMPLETIONS)
    micros = [batch.select(torch.tensor(rows)) for rows in ([2, 0], [1], [3])]
    logprobs.fill(micros, "old_logps", policy, CPU)
    whole, _ = policy(*batch.tokens)
    for micro in micros:
        C = micro.completion_ids.shape[1]
        torch.testing.assert_close(micro.old_logps, whole[micro.rows][:, :C].detach(), rtol=0, atol=1e-5)
        assert micro.ref_logps is None


# --- precision ---


def test_logits_of_a_bf16_model_are_not_rounded(model_folders):
    _, model = models.load_policy(str(model_folders["qwen2"]), CPU, "bf16")
    hidden = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    weight = model.get_output_embeddings().weight
    assert weight.dtype == torch.bfloat16
    exact = hidden.double() @ weight.double().T
    logits = logprobs.vocabulary_logits(model, hidden)
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
        monkeypatch.setattr(logprobs, "CHUNK_TOKENS", chunk)
        logps, _ = LogProbs(model, 1.0)(*batch.tokens)
        found.append(gradients(model, logps.sum())["model.embed_tokens.weight"].float())
    # one rounding to bf16 (2^-8) at most between them; 104 bf16 additions would be far off
    assert (found[0] - found[1]).norm() <= 2**-8 * found[0].norm()


# --- heads that do more ---


def tiny(config_class, model_class, **more):
    torch.manual_seed(0)
    return model_class(
        config_class(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, pad_token_id=0, eos_token_id=3, bos_token_id=None, initializer_range=0.2,
                     **more)
    )  # fmt: skip


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
    batch.drop(torch.ones(4, dtype=torch.bool))
    logps, entropy = LogProbs(model, 1.0)(*batch.tokens)
    ratio = losses.sequence_ratio(logps, torch.zeros_like(logps), batch.completion_mask)
    surrogate = losses.clipped_surrogate(ratio, torch.ones(4), 0.2, 0.2)
    loss = -torch.where(batch.completion_mask.any(1), surrogate, 0.0).sum() / max(1, batch.num_trained)
    loss = loss + losses.aggregate(losses.kl_estimate(logps, torch.zeros_like(logps), "k3"), batch.completion_mask,
                                   "seq_mean", 1)  # fmt: skip
    assert loss.item() == 0.0 and not entropy.any()
    loss.backward()  # DistributedDataParallel waits for every gradient: None would hang it
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert torch.equal(p.grad, torch.zeros_like(p)), name


def test_a_masked_row_changes_nothing_for_the_others(policies):
    model, policy = policies["gpt2"], LogProbs(policies["gpt2"], 1.0)
    batch, rest = pack(PROMPTS, COMPLETIONS), pack(PROMPTS[:2], COMPLETIONS[:2])
    batch.drop(torch.tensor([False, False, True, True]))
    logps, rest_logps = policy(*batch.tokens)[0], policy(*rest.tokens)[0]
    assert not logps[2:].any()
    torch.testing.assert_close(logps[:2, :3], rest_logps, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, logps.sum()), gradients(model, rest_logps.sum()), atol=1e-4)
