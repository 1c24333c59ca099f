"""The contract of a model: a rollout has the log-probabilities of the plain forward pass, training has them too, and a
model that cannot keep this is refused.

"Plain" is model(one row).logits: no padding, no cache, no other rows.
"""

import copy
import functools
import runpy

import pytest
import torch
from bounds import rounding
from conftest import ROOT, build_tokenizer
from test_engine import as_on_gpu  # noqa: F401
from test_rollout import Letters, calls, completions, flags, lines
from transformers import AutoModelForImageTextToText, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from common.generation import paths
from common.generation.paths import Path
from common.generation.rollout import Sampler
from common.generation.runner import Runner
from common.generation.stopping import Stopping
from common.maths import losses
from common.model import agreement, attention, head, models, positions, states
from common.model.logprobs import LogProbs

zoo = runpy.run_path(str(ROOT / "scripts" / "dev" / "families.py"))
KNOWN = {*zoo["names"](), *zoo["VARIANTS"]}
families = pytest.mark.families
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20], [7, 3, 5], [8, 8]]
ENDS = list(range(3, 97, 9))  # rows end at many different times
NATS = 1e-4  # fp32 leaves 1e-6 to 3e-5 in four layers with logits of 2


def known(*names: str, slow: tuple[str, ...] = ()) -> list:
    """Families that this version of transformers has."""
    each = [*((name, ()) for name in names), *((name, families) for name in slow)]
    return [pytest.param(name, marks=marks) for name, marks in each if name in KNOWN]


SLOW_HYBRIDS = ("qwen3_5", "qwen3_next", "granitemoehybrid", "jamba", "bamba", "zamba2")
HYBRIDS = known("qwen3_5_text", "lfm2", "nemotron_h", "falcon_h1", slow=SLOW_HYBRIDS)
FEW_HYBRIDS = known("qwen3_5_text", "nemotron_h", slow=("lfm2", "falcon_h1", *SLOW_HYBRIDS))
WITHOUT_CACHE = known("recurrent_gemma", slow=("rwkv", "xlstm", "minimax"))


@functools.cache
def original(name: str, **changes) -> torch.nn.Module:
    torch.set_num_threads(1)
    return zoo["build"](name, **changes)


def build(name: str, **changes) -> torch.nn.Module:
    return copy.deepcopy(original(name, **changes))


def save(folder, model) -> str:
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def save_with_images(folder) -> str:
    """A folder of Qwen3.5 as it is published: with a vision tower, which a run on text leaves out."""
    whole, text = AutoModelForImageTextToText.from_config(zoo["config"]("qwen3_5")), original("qwen3_5")
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    return save(folder, whole)


def sampler_of(model, **options) -> Sampler:
    return Sampler([model], **{**dict(end_ids=ENDS, pad_id=0, max_new_tokens=12), **options})


def generate(sampler, group_size=3, temperature=1.0, prompts=PROMPTS, seed=2):
    return sampler.generate(prompts, group_size=group_size, temperature=temperature, seed=seed)


def plain_logps(model, prompt, completion) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)


def assert_plain(batch, model, greedy=False):
    """The log-probabilities of a rollout are those of the model's own logits."""
    for i, (prompt, completion) in enumerate(zip(batch.prompts, completions(batch), strict=True)):
        logps, n = plain_logps(model, prompt.tolist(), completion), len(completion)
        assert (batch.rollout_logps[i, :n] - logps[range(n), completion]).abs().max() <= NATS
        assert not batch.rollout_logps[i, n:].any() and not set(completion[:-1]) & set(ENDS)
        assert not greedy or logps.argmax(-1).tolist() == completion


def assert_same(one, other):
    assert completions(one) == completions(other)
    assert (one.rollout_logps - other.rollout_logps).abs().max() <= NATS


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_decodes_in_the_engine_as_it_computes_a_row(name, capsys):
    plain, model = original(name), build(name)
    sampler = sampler_of(model)
    assert sampler.path == Path(engine=True) and sampler.engines[0].runner.states.kept
    assert "states of its other layers" in (said := lines(capsys)[-1]) and "nats from the plain forward pass" in said
    assert_plain(generate(sampler, 1, 0), plain, greedy=True)
    batch = generate(sampler)
    assert_plain(batch, plain)
    assert len(set(batch.lengths.tolist())) > 3
    assert_same(generate(sampler), batch)  # nothing is left of the rollouts before
    for rollout_batch, check_every in ((3, 1), (7, 3)):  # prompts wait for rows that end
        sampler = sampler_of(model, rollout_batch=rollout_batch)
        sampler.engines[0].check_every = check_every
        assert_same(generate(sampler), batch)
        assert sampler.engines[0].rows <= max(3, rollout_batch) < len(batch)


@pytest.mark.parametrize("name", FEW_HYBRIDS)
def test_a_hybrid_decodes_as_on_a_gpu(name, as_on_gpu):  # noqa: F811
    # states have the same address from graph to graph, and those of ended and padding rows harm nobody
    for rollout_batch in (0, 6):
        sampler = as_on_gpu(sampler_of(build(name), rollout_batch=rollout_batch))
        before = len(as_on_gpu.captures)
        batch = generate(sampler)
        assert_plain(batch, original(name))
        assert len(as_on_gpu.captures) > before
        assert_same(generate(sampler), batch)
    assert any(sum(rows) < b for rows, b in as_on_gpu.arranged)  # with padding


@pytest.mark.skipif("qwen3_5" not in KNOWN, reason="not in this version of transformers")
def test_a_hybrid_that_is_saved_with_a_vision_tower_is_read_as_its_language_model(tmp_path):
    _, model = models.load_policy(save_with_images(tmp_path), CPU, "fp32")
    assert not any("visual" in key for key in model.state_dict())
    assert_plain(generate(sampler_of(model)), original("qwen3_5"))


@pytest.mark.parametrize("name", [*HYBRIDS, *known("diffllama", slow=("rwkv", "recurrent_gemma", "doge", "mixtral"))])
def test_training_computes_what_a_row_alone_gives_and_sums_the_gradients_of_rows(name):
    model = build(name)
    policy = LogProbs(model, 1.0)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (12, 5, 8)]
    cuts = [3, 4, 1]
    weight_mC = torch.arange(1.0, 3 * 9 + 1).view(3, 9).sin()

    def gradients(loss) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected, loss = [], torch.zeros(())
    for row, q, weight_C in zip(rows, cuts, weight_mC, strict=True):
        logps = model(input_ids=torch.tensor([row]), use_cache=False).logits[0].log_softmax(-1)[q - 1 : -1]
        logps = logps.gather(-1, torch.tensor(row[q:])[:, None])[:, 0]
        expected.append(logps.detach())
        loss = loss + weight_C[: len(logps)] @ logps
    by_row = gradients(loss)
    prompts, replies = torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for i, (row, q) in enumerate(zip(rows, cuts, strict=True)):
        prompts[i, 4 - q :], replies[i, : len(row) - q] = torch.tensor(row[:q]), torch.tensor(row[q:])
    sizes = torch.tensor([len(row) - q for row, q in zip(rows, cuts, strict=True)])
    logps_mC, _ = policy(prompts, torch.tensor(cuts), replies, sizes)
    for logps, own, n in zip(logps_mC, expected, sizes.tolist(), strict=True):
        assert (logps[:n] - own).abs().max() <= NATS and not logps[n:].any()
    together = gradients((logps_mC * weight_mC).sum())
    size = max(gradient.abs().max().item() for gradient in by_row.values())
    # forward and backward through four layers of about a dozen products over 64 terms each, which add up over 25 tokens
    bound = rounding(3 * 4 * 12 * 64 + 25, size)
    assert together.keys() == by_row.keys()
    assert {key: e for key in by_row if not (e := (together[key] - by_row[key]).abs().max().item()) <= bound} == {}


@pytest.mark.parametrize("name", WITHOUT_CACHE)
def test_models_whose_caches_are_wrong_are_recomputed(name, capsys):
    plain, model, letters = original(name), build(name), Letters()
    options = dict(max_new_tokens=6)
    sampler = sampler_of(model, **options)
    assert sampler.path == Path(cached=False) and "without a cache" in lines(capsys)[-1]
    batch = generate(sampler)
    assert_plain(batch, plain)
    assert_plain(generate(sampler, 1, 0), plain, greedy=True)
    sampler = sampler_of(model, **options, rollout_batch=4)
    seen = calls(model)
    assert_same(generate(sampler), batch)
    assert max(len(call["input_ids"]) for call in seen) == 4
    stopped = generate(sampler_of(model, **options, rollout_batch=6, stopping=Stopping(("ab",), letters)))
    cut = []
    for ids in completions(batch):
        found = [n for n in range(1, len(ids) + 1) if "ab" in letters.decode(ids[:n])]
        cut.append(ids[: found[0]] if found else ids)
    assert completions(stopped) == cut != completions(batch)


def test_two_calls_of_attention_in_one_module_fall_back(capsys):
    plain, model = original("diffllama"), build("diffllama")
    sampler = sampler_of(model)
    assert sampler.path == Path() and "attend more than once" in lines(capsys)[-1]
    assert_plain(generate(sampler), plain)
    # the same model as it is left by a count that is wrong: found by the probe
    model = build("diffllama")
    support = attention.install(build("llama"))
    decoder = model.get_decoder()
    modules = [module for module in decoder.modules() if type(module).__name__.endswith("Attention")]
    layers = [attention.Layer(module, 2, 8, 2) for module in modules]
    decoder.set_attn_implementation(attention.NAME)
    wrong = attention.Support("", "", tuple(layers), support.window)
    assert paths.check(Path(engine=True), model, wrong, ())[1]
    assert paths.choose(model, wrong, ())[0] != Path(engine=True)


# ---- a path that is wrong is not chosen ----


def masks_are_lost(monkeypatch):
    forward = Runner._read_rows

    def read(self, *args):
        def lose(module, args, kwargs):
            mask = kwargs.get("attention_mask")
            return args, kwargs | {"attention_mask": torch.ones_like(mask)} if mask is not None else kwargs

        with self.decoder.register_forward_pre_hook(lose, with_kwargs=True):
            return forward(self, *args)

    monkeypatch.setattr(Runner, "_read_rows", read)


def states_stay_when_gaps_close(monkeypatch):
    keep = Runner.keep

    def without_states(self, *args):
        pool, self.states = self.states, states.Pool(self.decoder, ())
        keep(self, *args)
        self.states = pool

    monkeypatch.setattr(Runner, "keep", without_states)


def a_state_is_forgotten(monkeypatch):
    read = states.Pool.read

    def forget(self, b):
        for tensor in self.tensors[:1]:
            tensor[:b] = 0
        return read(self, b)

    monkeypatch.setattr(states.Pool, "read", forget)


def states_of_another_row(monkeypatch):
    write = states.Pool.write
    monkeypatch.setattr(
        states.Pool, "write", lambda self, cache, repeats, rows: write(self, cache, repeats, rows.roll(1))
    )


def positions_are_one_off(monkeypatch):
    step = Runner._step

    def late(self, b, *args):
        self.state.position_shift[:b] += 1
        step(self, b, *args)
        self.state.position_shift[:b] -= 1

    monkeypatch.setattr(Runner, "_step", late)


def the_first_rows_of_a_cache_are_kept(monkeypatch):
    reorder = DynamicCache.reorder_cache

    def keep_first(self, rows):
        reorder(self, torch.arange(len(rows)) if len(rows) == len(rows.unique()) else rows)

    monkeypatch.setattr(DynamicCache, "reorder_cache", keep_first)


def caches_are_not_reordered(monkeypatch):
    monkeypatch.setattr(DynamicCache, "reorder_cache", lambda self, rows: None)


ENGINE, ONE_LENGTH, OVER_CACHE, NO_CACHE = Path(True), Path(True, left_padding=False), Path(), Path(cached=False)


@pytest.mark.parametrize(("name", "mutate", "wrong", "chosen"), [
    ("falcon_h1", masks_are_lost, [ENGINE], ONE_LENGTH),
    pytest.param("qwen3_5_text", masks_are_lost, [ENGINE], ONE_LENGTH, marks=families),
    pytest.param("lfm2", masks_are_lost, [ENGINE], ONE_LENGTH, marks=families),
    ("qwen3_5_text", states_stay_when_gaps_close, [ENGINE, ONE_LENGTH], OVER_CACHE),
    pytest.param("nemotron_h", states_stay_when_gaps_close, [ENGINE, ONE_LENGTH], OVER_CACHE, marks=families),
    pytest.param("lfm2", states_stay_when_gaps_close, [ENGINE, ONE_LENGTH], OVER_CACHE, marks=families),
    pytest.param("qwen3_5_text", a_state_is_forgotten, [ENGINE, ONE_LENGTH], OVER_CACHE, marks=families),
    ("nemotron_h", a_state_is_forgotten, [ENGINE, ONE_LENGTH], OVER_CACHE),
    ("lfm2", states_of_another_row, [ENGINE], ONE_LENGTH),
    ("llama", positions_are_one_off, [ENGINE], OVER_CACHE),
    ("diffllama", the_first_rows_of_a_cache_are_kept, [OVER_CACHE, Path(left_padding=False)], NO_CACHE),
    ("diffllama", caches_are_not_reordered, [OVER_CACHE, Path(left_padding=False)], NO_CACHE),
])  # fmt: skip
def test_a_path_that_is_wrong_is_found_by_the_probe_and_not_taken(monkeypatch, name, mutate, wrong, chosen):
    if name not in KNOWN:
        pytest.skip("not in this version of transformers")
    model = build(name)
    model.get_input_embeddings().weight.data[0] = model.get_input_embeddings().weight.data[5]  # padding is a token
    support = attention.install(model)
    assert all(paths.check(path, model, support, ())[1] == "" for path in wrong)
    mutate(monkeypatch)
    failures = [paths.check(path, model, support, ())[1] for path in wrong]
    assert all(failures), failures
    path, reason = paths.choose(model, support, ())
    assert path == chosen and failures[-1] in reason


def test_a_model_that_no_path_serves_is_refused_with_what_each_gave(monkeypatch):
    model = build("llama")
    monkeypatch.setattr(head, "scale_of", lambda model: 0.9)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: .* engine: differs by .*; over the cache .*; without a "):
        sampler_of(model)


def test_beyond_its_window_a_model_takes_the_path_that_was_found_for_it(monkeypatch):
    # also if that is the one without a cache
    model = build("mistral", sliding_window=20)
    monkeypatch.setattr(DynamicCache, "reorder_cache", lambda self, rows: None)
    sampler = sampler_of(model, rollout_batch=3)
    assert sampler.path == ENGINE
    assert_plain(generate(sampler), model)
    assert sampler._beyond_window == NO_CACHE


# ---- noise ----


def first_ratio(model) -> torch.Tensor:
    policy, tokens = LogProbs(model, 1.0), torch.randint(3, 97, (3, 9), generator=torch.Generator().manual_seed(1))
    given = tokens[:, :4], torch.tensor([4, 2, 3]), tokens[:, 4:], torch.tensor([5, 5, 1])
    old, (logps, _) = policy(*given)[0].detach(), policy(*given)
    assert logps.requires_grad and torch.equal(old, logps)
    mask = torch.arange(5) < given[3][:, None]
    return losses.sequence_ratio(logps, old, mask)


LAYERS = dict(layerdrop=0.3, activation_dropout=0.1)  # whole layers are dropped


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "name", known("phimoe-noise", "falcon-dropout", "biogpt", slow=("mixtral-noise", "dbrx-noise", "minimax-noise",
                                                                    "bloom-dropout"))
)  # fmt: skip
def test_noise_of_any_name_is_off_and_the_first_ratio_is_one(tmp_path, name, checkpointing):
    changes = LAYERS if name == "biogpt" else {}
    folder = save(tmp_path, build(name, **changes))
    _, model = models.load_policy(folder, CPU, "fp32", checkpointing)
    assert torch.equal(first_ratio(model), torch.ones(3))
    assert any(module.training for module in model.modules()) == checkpointing
    plain, ids = build(name, **changes), torch.arange(3, 20)[None]
    assert model.config.to_dict() == models.load_frozen(folder, CPU, "fp32").config.to_dict()  # keeps its rates
    assert (model(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max() <= NATS
    with pytest.raises(ValueError, match=r"two forward passes .* draws random numbers .* = 0\.[13]"):
        LogProbs(plain.train(), 1.0)  # as it would be


def test_noise_that_stays_is_refused():
    model = build("llama")
    model.model.norm.register_forward_hook(lambda module, args, out: out + 1e-3 * torch.rand(out.shape))
    with pytest.raises(ValueError, match="LlamaForCausalLM: two forward passes over the same rows differ"):
        LogProbs(model, 1.0)


# ---- rows and their neighbours ----


def tokens_of(*lengths: int) -> tuple[torch.Tensor, ...]:
    """Rows of so many tokens, of which three are the prompt."""
    ids = torch.randint(3, 97, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(3))
    sizes = torch.tensor(lengths)
    return ids[:, :3], torch.full_like(sizes, 3), ids[:, 3:], sizes - 3


@pytest.mark.parametrize("name", known("phi3-longrope", "llama-dynamic", slow=("phimoe-longrope",)))
def test_positions_that_depend_on_the_longest_row_are_refused_where_they_begin_to(name):
    model = build(name)
    policy, sampler = LogProbs(model, 1.0), sampler_of(model)
    with pytest.raises(ValueError, match=r"row 1 of a batch has 100 tokens.* beyond 64 tokens .*lower max_prompt_tok"):
        policy(*tokens_of(40, 100))
    for refuse in (sampler.require_fit, lambda prompts: generate(sampler, prompts=prompts)):
        with pytest.raises(
            ValueError, match=r"up to 65 tokens .* beyond 64 tokens .*lower max_prompt_tokens or max_new"
        ):
            refuse([[5] * 40, [5] * 53])
    prompts, lengths, replies, sizes = tokens_of(40, 64)
    short = policy(prompts, lengths, replies, sizes)[0][0, :37]
    alone = policy(prompts[:1], lengths[:1], replies[:1, :37], sizes[:1])[0][0]
    assert (short - alone).abs().max() <= NATS
    batch = generate(sampler, prompts=[[5, 6] * 26, [7] * 20])  # up to 64 tokens
    assert_plain(batch, model)
    logps = policy(*batch.tokens)[0]
    assert (logps - batch.rollout_logps).abs().max() <= NATS


def test_a_model_that_normalises_over_the_batch_is_computed_row_by_row():
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, out: out - 0.5 * out.mean(0, keepdim=True))
    policy = LogProbs(model, 1.0)
    assert policy.alone and not policy.packed and "rows alone" in policy.layout
    prompts, lengths, replies, sizes = tokens_of(9, 12, 5)
    together = policy(prompts, lengths, replies, sizes)[0]
    for i, n in enumerate(sizes.tolist()):
        row = torch.cat([prompts[i], replies[i, :n]]).tolist()
        logps = plain_logps(model, row[:3], row[3:])[range(n), row[3:]]
        assert (together[i, :n] - logps).abs().max() <= NATS and not together[i, n:].any()
    sampler = sampler_of(model, max_new_tokens=5)
    assert sampler.path == NO_CACHE
    assert_plain(generate(sampler), model)


@pytest.mark.skipif("doge" not in KNOWN, reason="not causal in this version of transformers")
def test_a_model_that_is_not_causal_is_refused():
    with pytest.raises(ValueError, match=r"DogeForCausalLM: .* the log-probabilities of the plain forward pass"):
        sampler_of(build("doge", is_moe=True))


# ---- heads ----


@pytest.mark.parametrize(("name", "changes", "scale"), [
    ("granite", dict(logits_scaling=4.0), 0.25), ("cohere", dict(logit_scale=0.0625), 0.0625),
    ("falcon_h1", dict(lm_head_multiplier=0.3), 0.3), ("hyperclovax", dict(logits_scaling=3.0), 3.0),
    ("llama", {}, 1.0),
])  # fmt: skip
def test_the_factor_of_a_head_is_measured(tmp_path, name, changes, scale):
    if name not in KNOWN:
        pytest.skip("not in this version of transformers")
    plain = build(name, **changes)
    _, model = models.load_policy(save(tmp_path, plain), CPU, "fp32")
    assert head.scale_of(model) == pytest.approx(scale)
    batch = generate(sampler_of(model))
    assert_plain(batch, plain)
    assert (LogProbs(model, 1.0)(*batch.tokens)[0] - batch.rollout_logps).abs().max() <= NATS


@pytest.mark.parametrize("name", known("granite", "llama"))
def test_a_factor_that_the_config_does_not_explain_is_refused(name):
    model = build(name)
    model.lm_head.register_forward_hook(lambda module, args, out: 1.7 * out)
    with pytest.raises(ValueError, match=r"logits (are 0.85 times|differ by)"):
        head.check(model)
    with pytest.raises(ValueError, match=r"its logits are 0.85 times|plain forward pass"):
        sampler_of(model)


@pytest.mark.parametrize("name", known("recurrent_gemma", "xlstm"))
def test_a_soft_cap_of_any_name_is_applied_and_one_that_is_unknown_refused(name, monkeypatch):
    model = build(name)
    assert head.softcap_of(model) == 30
    head.check(model)
    monkeypatch.setattr(head, "SOFT_CAPS", ())
    with pytest.raises(ValueError, match="its logits differ by"):
        head.check(model)


# ---- modes ----


@pytest.mark.parametrize("name", known("qwen3_5_text", "phimoe-noise"))
def test_activations_are_still_recomputed_after_a_rollout(tmp_path, name):
    _, model = models.load_policy(save(tmp_path, build(name)), CPU, "fp32", gradient_checkpointing=True)
    policy, count = LogProbs(model, 1.0), 0
    before, sampler = flags(model), sampler_of(model)
    blocks = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) and hasattr(m, "mlp")]
    assert blocks and all(block.training for block in blocks)

    def look(module, args):
        nonlocal count
        count += 1

    batch = generate(sampler)
    assert flags(model)["modes"] == before["modes"]
    with blocks[0].mlp.register_forward_pre_hook(look):
        policy(*batch.tokens)[0].sum().backward()
    assert count == 2  # forward, and again in the backward pass


# ---- a run ----


@pytest.mark.parity
def test_a_hybrid_trains_and_goes_on_after_a_stop_bit_for_bit(launcher, tmp_path):
    if "qwen3_5" not in KNOWN:
        pytest.skip("not in this version of transformers")
    folder = save_with_images(tmp_path / "model")
    options = dict(policy_model=folder, eval_every=0, num_minibatches=1, save_every=1)
    straight = launcher.run("gspo_multigpu", tmp_path / "straight", steps=2, **options).succeeded()
    for line in straight.steps:
        assert line["rollout_mismatch"] < 1e-5 and line["ratio_max"] == 1.0
    launcher.run("gspo_multigpu", tmp_path / "parts", steps=1, **options).succeeded()
    parts = launcher.run("gspo_multigpu", tmp_path / "parts", steps=2, **options).succeeded()
    one, other = straight.weights(2), parts.weights(2)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert any(not torch.equal(one[key], weight) for key, weight in straight.weights(1).items())


class NoBackward(torch.autograd.Function):
    """A kernel that only reads, or one that refuses this card."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("incorrect results on this card")


def test_a_model_whose_backward_pass_fails_is_refused_unless_it_is_frozen():
    model = build("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: NoBackward.apply(output))
    with pytest.raises(ValueError, match=r"Llama.*must have a backward pass.*incorrect results on this card"):
        LogProbs(model, 1.0)
    assert LogProbs(model.requires_grad_(False), 1.0).packed
    model = build("llama")
    assert LogProbs(model, 1.0).packed and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("few", [0, agreement.FEW])
def test_a_weight_that_saving_or_loading_would_lose_is_found_without_writing(monkeypatch, few):
    monkeypatch.setattr(agreement, "FEW", few)  # with values, or names and shapes alone
    model = build("qwen3_moe")
    agreement.require_saveable(model)
    model.model.layers[1].extra = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"1 of its weights would be lost or changed \(model.layers.1.extra\)"):
        agreement.require_saveable(model)
    model = build("llama")
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.ones(5, 7))
    with pytest.raises(ValueError, match="would be lost or changed"):
        agreement.require_saveable(model)


def test_small_models_are_compared_by_value(monkeypatch):
    model = build("llama")
    convert = agreement.revert_weight_conversion

    def halve(model, weights):
        return {name: x / 2 if "up_proj" in name else x for name, x in convert(model, weights).items()}

    monkeypatch.setattr(agreement, "revert_weight_conversion", halve)
    with pytest.raises(ValueError, match="4 of its weights would be lost or changed"):
        agreement.require_saveable(model)


def test_a_cache_that_forgets_too_much_is_found_when_rows_pass_the_window(monkeypatch, capsys):
    # soft-capped attention is not the engine's, so the cache decodes on either side of the window
    plain = original("gemma2-window", sliding_window=24)
    sampler = Sampler([build("gemma2-window", sliding_window=24)], end_ids=ENDS, pad_id=0, max_new_tokens=12)
    assert sampler.path == OVER_CACHE and sampler.window == 24
    update = DynamicSlidingWindowLayer.update

    def forget(self, *args, **kwargs):
        found = update(self, *args, **kwargs)
        if self.cumulative_length > self.sliding_window:
            self.values = self.values * 0
        return found

    monkeypatch.setattr(DynamicSlidingWindowLayer, "update", forget)
    long = [*PROMPTS, list(range(4, 34))]
    batch = sampler.generate(long, group_size=2, temperature=1.0)
    assert "of up to 42 tokens: now without a cache" in lines(capsys)[-1]
    assert_plain(batch, plain)


@pytest.mark.parametrize(("name", "limit"), [
    *((name, None) for name in ("jamba", "nemotron_h", "granitemoehybrid", "falcon-alibi", "llama") if name in KNOWN),
    ("gpt2", 40), ("opt", 40),  # learned, the second with two more rows
])  # fmt: skip
def test_rows_are_limited_by_positions_that_a_model_has(name, limit):
    model = build(name, **({"n_positions": 40} if name == "gpt2" else {"max_position_embeddings": 40}))
    assert positions.longest_sequence(model)[0] == limit
    ids = torch.randint(3, 97, (1, 60), generator=torch.Generator().manual_seed(0))
    if limit:
        return
    with torch.no_grad():
        one, other = (model(input_ids=x, use_cache=False).logits[:, :40] for x in (ids, ids[:, :40]))
    assert (one - other).abs().max() <= NATS


@pytest.mark.parametrize(("name", "reason"), [("gemma2", "soft-capped attention"), ("gemma3n_text", "of others")])
def test_the_reason_for_a_slower_path_is_one_of_the_model(name, reason):
    assert reason in attention.install(build(name)).not_cached


def test_a_path_that_is_not_finite_where_the_plain_pass_is_serves_no_model(monkeypatch):
    step = Runner._step

    def overflow(self, b, *args):
        for keys, _ in self.cache.pools:
            keys.fill_(torch.nan)
        step(self, b, *args)

    monkeypatch.setattr(Runner, "_step", overflow)
    model = build("llama")
    path, reason = paths.choose(model, attention.install(model), ())
    assert path == OVER_CACHE and "engine: differs by inf nats" in reason
