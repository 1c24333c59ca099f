"""Tests of the decode engine (engine, scheduler, runner, cache): what is computed when, and what stays for later calls.

What happens on a GPU in half precision is tried on the CPU too: a plain attention stands for the kernel, and a graph
is an object that takes the captured step again, after a look at the memory it would read.
"""

import copy
import functools
import itertools
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from bounds import assert_rounded
from conftest import TINY, tiny_model
from test_rollout import NORMS, assert_same, completions, in_double  # noqa: F401

from common.generation import flash_cache, scheduler
from common.generation.flash_cache import FlashCache
from common.generation.rollout import Sampler
from common.generation.runner import Runner
from common.generation.scheduler import Group, Row, Scheduler, Space
from common.generation.sdpa_cache import SdpaCache
from common.model import attention, head
from common.model.attention import Packed

families = pytest.mark.families
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20], [1, 2, 3], [7], [9, 9, 4, 4, 4], [8, 7]]
ENDS = [3, 40, 41, 42, 43]  # rows end at many different times
OPTIONS = dict(end_ids=ENDS, pad_id=0, max_new_tokens=14)
MM = head.mm


@functools.cache
def tiny(kind, **options) -> torch.nn.Module:
    """In fp64 the weights that are drawn in fp32: with these, rows end at many times, but not at their first token."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    model = tiny_model(kind, **options).double()
    torch.set_default_dtype(torch.float64)
    return model


def generate(sampler, group_size, temperature=1.0, seed=3, prompts=PROMPTS):
    return sampler.generate(prompts, group_size=group_size, temperature=temperature, seed=seed)


@functools.cache
def expected(kind, group_size, temperature=1.0):
    """What a new sampler gives for all prompts."""
    return generate(Sampler([tiny(kind)], **OPTIONS), group_size, temperature)


@pytest.fixture
def in_single(monkeypatch):
    """Heads in fp32, as users have them."""
    monkeypatch.setattr(head, "mm", MM)
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def watched(check_every=None, **options) -> tuple[Sampler, list[list[int]], list[int]]:
    """A sampler, and what its decoder computes: the lengths of prompts, and how many rows get a token each."""
    model, prompts, steps = copy.deepcopy(tiny("qwen2")), [], []
    sampler = Sampler([model], **OPTIONS, **options)

    def look(module, args, kwargs):
        way, shape = kwargs["rl"], kwargs["input_ids"].shape
        if isinstance(way, Packed):
            prompts.append(way.lengths)
            assert shape == (1, sum(way.lengths))
        else:
            steps.append(shape[0])
            assert shape[1] == 1

    model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
    sampler.engines[0].check_every = check_every or sampler.engines[0].check_every
    return sampler, prompts, steps


@pytest.mark.parametrize(("kind", "temperature"), [("qwen2", 0), ("qwen2", 0.7), ("gpt2", 0), ("gpt2", 1.0), *(
    pytest.param(kind, temperature, marks=families) for kind in TINY for temperature in (0, 0.7))])  # fmt: skip
def test_log_probabilities_are_those_of_a_full_forward_pass(kind, temperature):
    batch = expected(kind, 4, temperature)
    for i, completion in enumerate(completions(batch)):
        prompt, n = PROMPTS[i // 4], len(completion)
        with torch.no_grad():
            logits = tiny(kind)(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logps = (logits / (temperature or 1)).log_softmax(-1)
        assert_rounded(batch.rollout_logps[i, :n], logps[range(n), completion], **NORMS)
        assert not batch.rollout_logps[i, n:].any()
        assert temperature or logits.argmax(-1).tolist() == completion
        assert not set(completion[:-1]) & set(ENDS)
    assert not temperature or len(set(batch.lengths.tolist())) > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_half_precision_give_logits_in_fp32(in_single, dtype):
    model, hidden = tiny_model("qwen2").to(dtype), []
    sampler = Sampler([model], end_ids=[999], pad_id=0, max_new_tokens=6)
    handle = model.get_decoder().register_forward_hook(lambda *args: hidden.append(args[-1].last_hidden_state))
    batch = generate(sampler, 1)
    handle.remove()
    assert hidden[0].dtype == dtype and batch.rollout_logps.dtype == torch.float32
    hidden[0] = hidden[0][0, batch.prompt_lengths.cumsum(0) - 1, None]
    states_BTH, weight = torch.cat(hidden, 1).detach().double(), model.lm_head.weight.detach().double()
    expected = (states_BTH @ weight.T).log_softmax(-1).gather(-1, batch.completion_ids[..., None])[..., 0]
    # fp32 sums over 32 numbers, and over the vocabulary; bf16 logits would be off by 2^-8 of their size
    largest = (states_BTH.abs() @ weight.abs().T).max().item()
    assert_rounded(batch.rollout_logps, expected, terms=32 + 64 + 8, magnitude=largest, dtype=torch.float32)


@pytest.mark.parametrize(("group_size", "rollout_batch", "check_every"), [
    (1, 1, 1), (1, 4, 1), (4, 0, 1), (4, 9, 1), (4, 20, 3), (4, 0, 100),
])  # fmt: skip
def test_any_number_of_rows_at_once_gives_the_same_completions(group_size, rollout_batch, check_every):
    sampler, prompts, steps = watched(check_every, rollout_batch=rollout_batch)
    batch = generate(sampler, group_size)
    assert_same(batch, expected("qwen2", group_size))
    assert list(itertools.chain(*prompts)) == [len(prompt) for prompt in PROMPTS]  # once per group
    assert max(steps) <= (max(rollout_batch, group_size) if rollout_batch else len(batch))
    if check_every == 1:  # no row is computed after its end; the last token of a completion is never read
        assert sum(steps) == (batch.lengths - 1).sum()
        assert rollout_batch or steps == [n for t in range(1, 14) if (n := int((batch.lengths > t).sum()))]


def test_prompts_are_read_in_parts(monkeypatch):
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", 7)  # one prompt is longer
    sampler, prompts, _ = watched()
    assert_same(generate(sampler, 4), expected("qwen2", 4))
    assert prompts == [[4], [9], [1, 3, 1], [5, 2]]


CALLS = [  # prompts, group size, temperature: what training and evaluation ask of one sampler in turn
    (PROMPTS[:3], 4, 1.0), (PROMPTS[3:], 1, 0), (PROMPTS[:4], 8, 1.0), ([PROMPTS[0] * 6, PROMPTS[1] * 3], 2, 0.7),
    (PROMPTS[:3], 4, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "rollout_batch", "release", "gpu"), [
    ("qwen2", 0, True, False), ("qwen2", 8, False, True),
    pytest.param("gpt2", 0, False, False, marks=families), pytest.param("gpt2", 8, True, True, marks=families),
])  # fmt: skip
def test_calls_do_not_disturb_one_another(as_on_gpu, kind, rollout_batch, release, gpu):
    sampler = Sampler([tiny(kind)], **OPTIONS, rollout_batch=rollout_batch)
    sampler = as_on_gpu(sampler) if gpu else sampler
    for i, (prompts, group_size, temperature) in enumerate(CALLS):
        fresh = generate(Sampler([tiny(kind)], **OPTIONS), group_size, temperature, i, prompts)
        assert_same(generate(sampler, group_size, temperature, i, prompts), fresh)
        if release:
            sampler.engines[0].release()


def test_memory_grows_when_it_has_to_and_can_be_given_back():
    sampler, addresses = Sampler([tiny("qwen2")], **OPTIONS), []
    decoder = sampler.engines[0]
    for prompts, group_size in ((PROMPTS, 4), (PROMPTS[:2], 2), (PROMPTS, 4), (PROMPTS, 8), (PROMPTS, 4)):
        generate(sampler, group_size, prompts=prompts)
        addresses.append(decoder.runner.cache.pools[0][0].data_ptr())
    assert addresses[0] == addresses[1] == addresses[2] and addresses[3] == addresses[4]
    # 56 rows of 9 + 14 tokens, in 2 layers of 2 heads of 8 numbers, keys and values of 8 bytes
    assert decoder.cache_bytes == 56 * 23 * 2 * 2 * 8 * 2 * 8
    decoder.release()
    assert decoder.cache_bytes == 0


@pytest.mark.parametrize("gpu", [False, True])
def test_a_sampler_works_again_after_weights_were_broken_and_repaired(as_on_gpu, gpu):
    model = copy.deepcopy(tiny("gpt2"))
    sampler, places = Sampler([model], **OPTIONS), model.transformer.wpe.weight.data
    sampler = as_on_gpu(sampler) if gpu else sampler
    before, good = generate(sampler, 2), places.clone()
    for place, temperature in ((0, 1.0), (12, 0), (12, 1.0)):  # of a prompt, of completions only
        places[place] = torch.nan
        with pytest.raises(FloatingPointError, match="not finite"):
            generate(sampler, 2, temperature)
        places.copy_(good)
    assert_same(generate(sampler, 2), before)  # nothing of what was broken is left in the cache


def plain_flash(q, k, v, offsets, starts, longest, capacity, scaling, used):
    """What the kernel computes, from its definition, after a look at everything it would not check itself."""
    assert offsets.dtype == starts.dtype == used.dtype == torch.int32
    assert len(offsets) == len(starts) == len(used) + 1 and offsets[0] == 0 and offsets[-1] == len(q)
    queries = offsets.diff()
    assert (queries >= 0).all() and (queries <= longest).all() and (used >= 1).all() and (used <= capacity).all()
    assert (starts >= 0).all() and (starts[:-1] + used <= len(k)).all()
    segment = torch.arange(len(used)).repeat_interleave(queries)  # of each query
    place = torch.arange(int(used.max()))
    seen = place < used[segment, None]
    at = torch.where(seen, starts[segment, None] + place, 0)
    repeats = q.shape[1] // k.shape[1]
    keys, values = (x[at].masked_fill(~seen[..., None, None], 0.0).repeat_interleave(repeats, 2) for x in (k, v))
    scores = torch.einsum("nhd,nlhd->hnl", q, keys).mul(scaling).masked_fill(~seen, -torch.inf)
    return torch.einsum("hnl,nlhd->nhd", scores.softmax(-1), values), scores.logsumexp(-1)


class Graph:
    """In place of a CUDA graph: takes the captured step again, if everything is where it was."""

    def captured(self, runner, b, step):
        self.runner, self.b, self.step = runner, b, step
        self.memory, self.numbers = self.look()

    def look(self):
        """What a graph holds: tensors, by address and shape, and the numbers that were on the host."""
        runner = self.runner
        tensors = [runner.state.table, runner.out_tokens, runner.out_logps, runner.uniforms, runner.healthy,
                   runner.cache.segments, *(x for pool in runner.cache.pools for x in pool),
                   *runner.model.parameters()]  # fmt: skip
        space = runner.cache.space
        numbers = space.tokens, space.group_size, runner.cache.num_segments(self.b), (space.longest - 1).bit_length()
        return [x.detach() for x in tensors], numbers  # held, so that no address is used again

    def replay(self):
        memory, numbers = self.look()
        assert [(x.data_ptr(), x.shape) for x in memory] == [(x.data_ptr(), x.shape) for x in self.memory]
        assert numbers == self.numbers
        self.step()

    def pool(self):
        return "pool"


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Makes a sampler decode as on a GPU: as_on_gpu(sampler). Lists what was captured and arranged."""
    under_capture = []

    @contextmanager
    def capture_into(graph, stream, pool=None, capture_error_mode="global"):
        under_capture.append(graph)
        yield
        under_capture.pop()

    monkeypatch.setattr(flash_cache, "_flash", plain_flash)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: SimpleNamespace(wait_stream=lambda other: None))
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture_into)

    step, capture, arrange = Runner._step, Runner._capture, FlashCache.arrange

    def watched_step(self, b, sampling, longest=0):
        if under_capture:
            under_capture[0].captured(self, b, lambda: step(self, b, sampling))
        step(self, b, sampling, longest)

    def harmless_capture(self, b, sampling):
        def written():
            state = self.state
            alive = ((state.done == 0) & (state.count > 0)).nonzero().flatten().tolist()
            # keys of the rows at work, but for those of the token that is computed next
            keys = [self.cache.pools[0][0][state.start[i] : state.start[i] + state.count[i] - 1] for i in alive]
            numbers = state.table, self.out_tokens[:-1], self.out_logps[:-1], self.uniforms, self.healthy
            return [x.clone() for x in (*numbers, *keys)]

        before = written()
        graph = capture(self, b, sampling)
        torch.testing.assert_close(written(), before, rtol=0, atol=0, equal_nan=True)  # not touched
        assert (self.state.done[:b] == 0).any()  # rows were at work meanwhile
        prepare.captures.append(b)
        return graph

    def watched_arrange(self, groups, b):
        prepare.arranged.append(([len(group.rows) for group in groups], b))
        arrange(self, groups, b)

    monkeypatch.setattr(Runner, "_step", watched_step)
    monkeypatch.setattr(Runner, "_capture", harmless_capture)
    monkeypatch.setattr(FlashCache, "arrange", watched_arrange)

    def prepare(sampler, check_every=3):
        for decoder in sampler.engines:
            runner, decoder.check_every = decoder.runner, check_every
            runner.cache, runner.use_graphs = FlashCache(runner.cache.layers, runner.cache.dtype, runner.device), True
        return sampler

    prepare.captures, prepare.arranged = [], []
    return prepare


@pytest.mark.parametrize(("kind", "group_size", "rollout_batch", "check_every"), [
    ("qwen2", 1, 4, 3), ("qwen2", 4, 0, 3), ("qwen2", 4, 9, 3), ("gpt2", 4, 0, 100),
    *(pytest.param(*case, marks=families) for case in (
        ("qwen2", 1, 0, 3), ("qwen2", 4, 4, 3), ("qwen2", 4, 0, 1), ("gpt2", 4, 20, 3),
        *((kind, 4, 12, 3) for kind in TINY if kind not in ("qwen2", "gpt2")))),
])  # fmt: skip
def test_every_arrangement_of_the_gpu_gives_the_same_completions(
    as_on_gpu, kind, group_size, rollout_batch, check_every
):
    sampler = as_on_gpu(Sampler([tiny(kind)], **OPTIONS, rollout_batch=rollout_batch), check_every)
    for temperature in (1.0, 0)[: 1 if rollout_batch else 2]:
        assert_same(generate(sampler, group_size, temperature), expected(kind, group_size, temperature))
    assert all(sum(rows) <= b <= max(8, group_size * len(PROMPTS)) for rows, b in as_on_gpu.arranged)
    if check_every > 3 or kind != "qwen2":  # rows that have ended do nothing until they leave
        return
    if group_size == 4 and rollout_batch != 4:
        assert any(len(set(rows)) > 1 for rows, _ in as_on_gpu.arranged)  # some rows of a group have ended
        assert any(sum(rows) < b for rows, b in as_on_gpu.arranged)  # with padding
    if (group_size, rollout_batch) == (4, 0):
        assert {28, 16, 8} == {b for _, b in as_on_gpu.arranged} == set(as_on_gpu.captures)


def test_options_of_sampling_hold_as_on_a_gpu(as_on_gpu):
    some = dict(top_k=20, top_p=0.9, min_p=0.05, min_new_tokens=3, suppressed_ids=[5, 9])
    for options in (OPTIONS | some, OPTIONS | dict(max_new_tokens=1)):
        sampler = as_on_gpu(Sampler([tiny("qwen2")], **options))
        assert_same(generate(sampler, 4), generate(Sampler([tiny("qwen2")], **options), 4))


def test_graphs_are_kept_as_long_as_memory_stays_where_it_is(as_on_gpu):
    model = copy.deepcopy(tiny("qwen2", num_hidden_layers=1))
    sampler = as_on_gpu(Sampler([model], **OPTIONS))
    runner, captures = sampler.engines[0].runner, as_on_gpu.captures

    def new_graphs(group_size=4, temperature=1.0, prompts=PROMPTS) -> int:
        known = len(captures)
        generate(sampler, group_size, temperature, prompts=prompts)
        return len(captures) - known

    first = new_graphs()
    assert first == len(runner.graphs) > 1
    assert new_graphs(prompts=PROMPTS[::-1]) == 0  # other prompts
    assert new_graphs(temperature=0.5) > 0 and len(runner.graphs) > first  # another distribution, beside the others
    assert new_graphs(1, 0, PROMPTS[:2]) > 0 and new_graphs() == 0  # smaller
    with torch.no_grad():
        for p in model.parameters():  # weights that change where they are
            p.mul_(0.7)
    assert new_graphs() == 0
    assert_same(generate(sampler, 4), generate(Sampler([model], **OPTIONS), 4))
    model.model.norm.weight.data = model.model.norm.weight.data.clone()  # and elsewhere
    assert new_graphs() == len(runner.graphs) > 0
    # a cache that has to grow: for more rows, for longer prompts
    assert new_graphs(8) == len(runner.graphs) and new_graphs(8) == 0
    assert new_graphs() > 0 and new_graphs(8) == 0
    assert new_graphs(8, prompts=[*PROMPTS[:6], [4] * 40]) == len(runner.graphs)
    runner.release()
    assert not runner.graphs and new_graphs() == len(runner.graphs) > 0


@pytest.mark.parametrize(("one", "other"), [
    ((PROMPTS[:1], 2), (PROMPTS[2:5], 4)),  # groups of another size, with as many segments
    ((PROMPTS[:3], 4), (PROMPTS[:4], 4)),  # more segments
    ((PROMPTS[:3], 4), ([[5] * 20, *PROMPTS[:2]], 4)),  # longer prompts
])  # fmt: skip
def test_no_graph_serves_what_it_was_not_captured_for(as_on_gpu, one, other):
    options = {**OPTIONS, "max_new_tokens": 10}
    sampler = as_on_gpu(Sampler([tiny("qwen2")], **options), check_every=1)
    generate(sampler, 8, prompts=[[5] * 20, *PROMPTS[:4]])  # memory for all of it
    runner, graphs = sampler.engines[0].runner, []
    memory = runner.cache.pools[0][0].data_ptr()
    for prompts, group_size in (one, other):
        known = set(runner.graphs)
        fresh = generate(Sampler([tiny("qwen2")], **options), group_size, prompts=prompts)
        assert_same(generate(sampler, group_size, prompts=prompts), fresh)
        graphs.append({key[0] for key in set(runner.graphs) - known})
    assert runner.cache.pools[0][0].data_ptr() == memory
    assert 8 in graphs[0] & graphs[1]  # batches of the same size


def test_more_completions_in_the_same_cache_need_new_graphs(as_on_gpu):
    sampler = as_on_gpu(Sampler([tiny("qwen2")], **OPTIONS, rollout_batch=8))
    runner = sampler.engines[0].runner
    generate(sampler, 4, prompts=PROMPTS[:4])
    memory, graphs = runner.cache.pools[0][0].data_ptr(), set(runner.graphs.values())
    assert_same(generate(sampler, 4), expected("qwen2", 4))  # the tokens drawn have to go elsewhere
    assert runner.cache.pools[0][0].data_ptr() == memory
    assert graphs and not graphs & set(runner.graphs.values())


def test_adapters_are_merged_where_graphs_read(as_on_gpu):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(tiny("qwen2")), lora)
    sampler = as_on_gpu(Sampler([model], **OPTIONS))
    before = generate(sampler, 4)
    assert_same(before, generate(Sampler([model], **OPTIONS), 4))
    graphs = dict(sampler.engines[0].runner.graphs)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.mul_(-1.5)
    after = generate(sampler, 4)
    assert_same(after, generate(Sampler([model], **OPTIONS), 4))
    assert completions(after) != completions(before)
    assert graphs and graphs.items() <= sampler.engines[0].runner.graphs.items()


def test_engine_says_what_serves(monkeypatch, as_on_gpu):
    sampler = Sampler([tiny("qwen2")], **OPTIONS)
    assert isinstance(sampler.engines[0].runner.cache, SdpaCache)
    assert "static cache (cpu, float64" in sampler.engines[0].name
    assert "CUDA graphs" in as_on_gpu(sampler).engines[0].name
    monkeypatch.setattr(attention, "on_flash", lambda x: x.ndim == 2 and x.dtype == torch.bfloat16)
    assert isinstance(Sampler([tiny("qwen2")], **OPTIONS).engines[0].runner.cache, SdpaCache)
    monkeypatch.setattr(attention, "on_flash", lambda x: x.ndim == 2 and x.shape[-1] == 8)
    assert isinstance(Sampler([tiny("qwen2")], **OPTIONS).engines[0].runner.cache, FlashCache)
    assert isinstance(Sampler([tiny("qwen3")], **OPTIONS).engines[0].runner.cache, SdpaCache)  # heads of 16


def test_flash_decode_can_be_traced(monkeypatch, in_single):
    monkeypatch.setattr(flash_cache, "_flash", plain_flash)
    q, k, v = torch.randn(6, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    offsets, starts, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 6, 6], [3, 10, 0, 0], [5, 2, 1]))
    out, lse = flash_cache.flash_decode(q, k, v, offsets, starts, 4, 8, 0.3, used)
    assert out.shape == q.shape and lse.shape == (4, 6) and lse.dtype == torch.float32
    torch.library.opcheck(flash_cache.flash_decode, (q, k, v, offsets, starts, 4, 8, 0.3, used),
                          test_utils=("test_schema", "test_faketensor"))  # fmt: skip


LAYERS = (attention.Layer(None, num_heads=2, head_size=8, queries_per_key=2),) * 3


@pytest.mark.parametrize(("kind", "slots"), [(FlashCache, 2 * 10 + 8 * 5), (SdpaCache, 8 * (10 + 5))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_takes_the_memory_it_says(kind, slots, dtype):
    space = Space(rows=8, batch=8, prompts=2, group_size=4, longest=10, tokens=5)
    one = kind(LAYERS, dtype, torch.device("cpu"))
    assert one.bytes(space) == slots * 2 * 2 * 8 * 3 * dtype.itemsize
    assert one.reserve(space)
    taken = sum(x.numel() * x.element_size() for pool in one.pools for x in pool)
    padding = 2 * 2 * 8 * 3 * dtype.itemsize if kind is FlashCache else 0  # one slot
    assert taken == one.bytes(space) + padding
    assert not one.reserve(space) and not one.reserve(Space(4, 8, 1, 4, 10, 5))  # it fits
    if kind is FlashCache:  # the slot of padding belongs to no row; it is finite from the beginning
        last = Group(prompt=1, slot=1, length=9, first=4, rows=[Row(sequence=7, slot=7, born=0)])
        for longest, grows in ((20, False), (21, True)):  # 20 + 8 * 5 slots are as many as before
            assert one.reserve(Space(8, 8, 1, 4, longest, 5)) == grows
            assert one.starts(last)[0] + 5 == longest + 40 == one.padding
        assert all(not x[-1].any() for pool in one.pools for x in pool)
    assert one.reserve(Space(8, 8, 2, 4, 40, 5)) and not one.reserve(space)  # it has to grow


@pytest.mark.parametrize(("share", "groups"), [(1.2, 7), (1.0, 6), (0.2, 1), (0.1, 0)])
def test_as_many_groups_are_decoded_at_once_as_memory_holds(monkeypatch, share, groups):
    decoder = Sampler([tiny("qwen2")], **OPTIONS).engines[0]
    for max_rows, rows, prompts in ((0, 28, 7), (8, 8, 4), (9, 8, 4), (2, 4, 2)):  # prompts outlive some of their rows
        limited = Space(rows=rows, batch=max(8, rows), prompts=prompts, group_size=4, longest=9, tokens=14)
        assert decoder._plan(PROMPTS, 4, 14, max_rows) == limited
    how_many = (PROMPTS, 4, 14, 0)
    everything = decoder._plan(*how_many)
    needed = decoder.runner.cache.bytes(everything) + 16 * everything.rows * 64
    decoder.device = SimpleNamespace(type="cuda", index=0)
    for name, value in (("mem_get_info", (int(share * needed), 0)), ("memory_reserved", 0), ("memory_allocated", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    if not groups:
        with pytest.raises(ValueError, match=r"group_size = 4, max_new_tokens = 14: .* lower one"):
            decoder._plan(*how_many)
        return
    space = decoder._plan(*how_many)
    assert space.rows == 4 * groups and space.tokens == 14 and space.longest == 9
    assert decoder.runner.cache.bytes(space) + 16 * space.rows * 64 <= 0.9 * share * needed
    assert decoder._plan(PROMPTS, 4, 14, 8).rows == min(8, 4 * groups)
    # what torch's allocator holds and does not use is free too, and so is the cache of the last rollout
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * needed)
    assert decoder._plan(*how_many).rows == 28


def test_ended_rows_leave_for_waiting_prompts_once_a_quarter_of_the_batch_is_free():
    space = Space(rows=8, batch=8, prompts=4, group_size=2, longest=5, tokens=10)
    schedule = Scheduler([3, 5, 1, 2, 4, 2], space, check_every=4, smallest=0)
    entered = schedule.admit()
    assert entered == schedule.groups() and [group.prompt for group in entered] == [0, 1, 2, 3]
    assert [group.places for group in entered] == [slice(i, i + 2) for i in (0, 2, 4, 6)]
    assert (schedule.batch_size, schedule.longest, schedule.steps_until_check) == (8, 5, 4)
    schedule.step = 4
    assert schedule.longest == 9 and schedule.admit() == [] and schedule.close_gaps([False] * 8) is None
    assert schedule.close_gaps([i in (0, 1, 4) for i in range(8)]) == [2, 3, 5, 6, 7]
    assert [(group.prompt, len(group.rows)) for group in schedule.groups()] == [(1, 2), (2, 1), (3, 2)]
    (group,) = schedule.admit()  # three rows are free, and the slot of one prompt
    assert group[:4] == (4, 0, 4, 5) and {row.born for row in group.rows} == {4}
    assert len({row.slot for row in schedule.rows}) == 7  # each has one of its own
    assert schedule.close_gaps([True] * 7) == [] and [group.prompt for group in schedule.admit()] == [5]
    schedule.step = 11
    assert schedule.steps_until_check == 2 and schedule.unfinished  # nine tokens follow the first
    assert schedule.close_gaps([True, True]) == [] and not schedule.unfinished


def test_batches_for_graphs_come_in_few_sizes_and_shrink_only_to_those():
    space = Space(rows=50, batch=50, prompts=50, group_size=1, longest=1, tokens=9)
    schedules = {n: Scheduler([1] * n, space, 4, smallest=8) for n in (1, 8, 9, 17, 33, 50)}
    assert all(len(schedule.admit()) == n for n, schedule in schedules.items())
    assert {n: schedule.batch_size for n, schedule in schedules.items()} == {1: 8, 8: 8, 9: 16, 17: 32, 33: 50, 50: 50}
    for n, ended, kept in ((17, 0, None), (33, 1, list(range(1, 33))), (50, 17, None), (8, 8, [])):
        assert schedules[n].close_gaps([i < ended for i in range(n)]) == kept
