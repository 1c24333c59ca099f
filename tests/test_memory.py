"""Tests of common/base/memory.py: a run whose memory runs out goes on, in smaller pieces and with the same numbers."""

import copy
import dataclasses
import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from bounds import assert_rounded, rounding
from comparing import assert_close, config_of
from conftest import assert_equal_weights, build_model, two_replicas
from test_rollout import PROMPTS, assert_same, completions, fp64, make_sampler

from common.base import distributed, memory
from common.distill import distillation
from common.generation import batches
from common.generation.runner import Runner
from common.maths import losses
from common.model import logprobs, models, passes
from common.planning import plan
from common.run import metrics
from common.training import budgets, optim

CPU = torch.device("cpu")
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."
# Sums on the way to a gradient: in two layers over up to 64 numbers, five times; over 64 tokens of the vocabulary, and
# 12 sequences of up to 21 tokens
TERMS = 2 * 5 * 64 + 64 + 12 * 21


@pytest.fixture(scope="module")
def batch():
    """Twelve sequences, with advantages, of three prompts."""
    torch.set_num_threads(1)
    gc.freeze()  # what is there now, or each collection after a failure would look at all of it
    with fp64():
        sampler = make_sampler(build_model("qwen2").eval(), end_ids=[3, 7, 9, 20, 21, 22])
        sampled = sampler.generate(PROMPTS, group_size=4, temperature=1.0)
    assert len(set(sampled.lengths.tolist())) > 3
    sampled.advantages = torch.linspace(-1, 1, 12)
    yield sampled
    gc.unfreeze()


def limit(policy, tokens, backward=False) -> list[int]:
    """From now on memory suffices for so many tokens in a forward pass with gradients; gives what was tried."""
    tried = []

    def count(module, args):
        if torch.is_grad_enabled():
            prompts = dict(zip(args[5].tolist(), args[1].tolist(), strict=True))  # computed once per group
            tried.append(sum(prompts.values()) + int(args[3].sum()))
            if tried[-1] > tokens and not backward:
                raise torch.OutOfMemoryError(FULL)

    def fail(module, args, output):
        def run_out(gradient):
            if tried[-1] > tokens:
                raise torch.OutOfMemoryError(FULL)

        if output.requires_grad:
            output.register_hook(run_out)

    policy.register_forward_pre_hook(count)
    if backward:  # gradients of the last layer have been added by then
        policy.model.get_decoder().layers[0].register_forward_hook(fail)
    return tried


def limit_rows(module, rows, error=None) -> list[int]:
    """From now on memory suffices for so many rows in a forward pass; gives what was tried."""
    tried = []

    def look(module, args, kwargs):
        tried.append(len(args[0] if args else kwargs["input_ids"]))
        if tried[-1] > rows:
            raise error or torch.OutOfMemoryError(FULL)

    module.register_forward_pre_hook(look, with_kwargs=True)
    return tried


def update(folder, batch, tokens, budget, inject=None, devices=(CPU,)) -> SimpleNamespace:
    """The update of a script, two epochs of two minibatches."""
    model = build_model("qwen2")
    replicas = models.replicate(model, devices, len(devices))
    policies = [logprobs.LogProbs(replica, 1.0) for replica in replicas]
    tried = inject(policies[-1]) if inject else []
    optimizer, log = optim.AdamW(model, 0.1), metrics.Log(str(folder), 0, 1, [])
    optimizer._rule["eps"] = 1.0  # with its own, gradients close to 0 would make steps out of their rounding
    cut = batch.minibatches(2, tokens, True, devices=devices)
    passes.fill(cut[1], "old_logps", policies, devices, tokens)
    first = []
    for number, minibatch in enumerate(cut * 2):

        def forward_backward(micro, number=number):
            logps_mC, entropy_mC = policies[micro.replica](*micro.tokens)
            if micro.old_logps is None:
                micro.old_logps = logps_mC.detach()
            ratio_m = losses.sequence_ratio(logps_mC, micro.old_logps, micro.completion_mask)
            loss = -(ratio_m * micro.advantages).sum() / 6
            optimizer.scale(loss).backward()
            entropy_m = losses.masked_mean(entropy_mC, micro.completion_mask)
            mean = loss.detach() * 6 / len(micro)
            log.add(len(micro), loss=mean, entropy=entropy_m.mean(), seen_max=ratio_m.detach().max())
            first.extend(ratio_m.tolist() if number == 0 else [])

        budget.run(minibatch, forward_backward, optimizer, log, replicas)
        models.sum_gradients(replicas)
        log.add(grad_norm=optimizer.step(1.0))
        models.refresh(replicas)
    counts = {key: float(value) for key, value in log._weights.items()}
    log._tokens = 1.0
    with log.time("update"):
        pass
    line = log.end_step(1)
    log.close()
    for replica in replicas[1:]:
        assert all(map(torch.equal, replica.parameters(), model.parameters()))
        assert all(p.grad is None for p in replica.parameters())
    numbers = {name: line[name] for name in ("loss", "entropy", "grad_norm", "seen_max")}
    return SimpleNamespace(
        weights=model.state_dict(), numbers=numbers, counts=counts, first=first, cut=cut, tried=tried
    )


def assert_same_update(one, other):
    """The same but for the order of sums, and as much of everything."""
    for name, value in one.weights.items():  # four steps of at most the learning rate
        assert_rounded(other.weights[name], value, terms=4 * TERMS, magnitude=0.1)
    bound = rounding(4 * TERMS)
    assert one.numbers == pytest.approx(other.numbers, rel=bound, abs=bound) and one.counts == other.counts


@pytest.mark.parametrize("backward", [False, True])
def test_an_update_that_runs_out_of_memory_gives_what_a_smaller_one_gives(tmp_path, batch, capsys, backward):
    enough = budgets.Budget(25)
    small = update(tmp_path / "one", batch, 25, enough, lambda policy: limit(policy, 25))
    assert enough.tokens == 25
    released = []
    budget = budgets.Budget(1000, release=lambda: released.append(True))
    large = update(tmp_path / "two", batch, 1000, budget, lambda policy: limit(policy, 40, backward))
    assert_same_update(small, large)
    # all of the first minibatch at once, then the half of it that did go well, and never again too much
    size = large.tried[0]
    assert size == batch.minibatches(2, 1000, True)[0][0].size > 40 and budget.tokens < 40
    said = capsys.readouterr().out.splitlines()
    assert f"batches of {size} tokens" in said[0]
    assert len(said) == len(released) == len([tokens for tokens in large.tried if tokens > 40])
    assert f"now {budget.tokens}; set micro_batch_tokens to {budget.tokens}" in said[-1]
    # without an update since the rollout the ratio is 1, also after the second attempt
    assert large.first and set(large.first[-6:]) == {1.0}
    # the halves stay, with their old log-probabilities, for the second epoch
    assert all(len(minibatch) > 1 for minibatch in large.cut)
    assert all(micro.old_logps.shape == micro.completion_ids.shape for minibatch in large.cut for micro in minibatch)


def test_rows_that_are_padded_count_with_their_prompts_when_memory_runs_out(batch):
    # 4 completions, 4 times the prompt and the padding: half of them is what fits next
    model, tried = build_model("qwen2"), []
    optimizer, log = optim.AdamW(model, 1e-3), SimpleNamespace(mark=lambda: None, rollback=lambda mark: None)
    micro = batch.select(torch.arange(8, 12))
    micro.prompt_ids, micro.prompt_lengths = torch.full((4, 100), 5), torch.full((4,), 100)
    minibatch, budget = [micro], budgets.Budget(1000, packs=lambda micro: False)

    def forward_backward(micro):
        tried.append(len(micro))
        if len(micro) > 2:
            raise torch.OutOfMemoryError(FULL)

    budget.run(minibatch, forward_backward, optimizer, log)
    assert tried == [4, 2, 2] and budget.tokens == 2 * micro.longest


def test_nothing_of_a_failed_attempt_is_alive_in_the_next(batch):
    model, alive = build_model("qwen2"), []
    policy, optimizer, budget = logprobs.LogProbs(model, 1.0), optim.AdamW(model, 1e-3), budgets.Budget(1000)
    (minibatch,) = batch.minibatches(1, 1000, True)

    def keep(module, args, output):
        assert not any(reference() is not None for reference in alive), "activations of before"
        alive[:] = [weakref.ref(output)]

    limit(policy, 60, backward=True)
    model.get_decoder().layers[0].register_forward_hook(keep)
    log = SimpleNamespace(mark=lambda: None, rollback=lambda mark: None)

    def forward_backward(micro):
        loss = policy(*micro.tokens)[0].sum()
        loss.backward()

    gc.disable()
    try:
        budget.run(minibatch, forward_backward, optimizer, log)
    finally:
        gc.enable()
    assert budget.tokens < 100 and len(minibatch) > 1


def test_what_is_no_lack_of_memory_goes_on(batch):
    budget, optimizer = budgets.Budget(1000), optim.AdamW(build_model("qwen2"), 1e-3)
    log = SimpleNamespace(mark=lambda: None)

    def forward_backward(micro):
        raise error

    for error in (RuntimeError("shapes do not match"), ValueError(FULL)):
        with pytest.raises(type(error)):
            budget.run([batch], forward_backward, optimizer, log)
    assert budget.tokens == 1000
    quoted = f"rank 1 failed in phase 'update': OutOfMemoryError: {FULL}"
    for error in (torch.OutOfMemoryError("x"), RuntimeError(FULL), RuntimeError("CUDA error: out of memory"),
                  RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")):  # fmt: skip
        assert memory.is_out_of_memory(error)
    for error in (RuntimeError(quoted), memory.FatalOutOfMemoryError("a sequence", "wait"), MemoryError(),
                  RuntimeError("CUDA error: an illegal memory access was encountered")):  # fmt: skip
        assert not memory.is_out_of_memory(error)


def test_what_does_not_fit_alone_ends_the_run_with_what_to_change(tmp_path, batch):
    with pytest.raises(memory.FatalOutOfMemoryError, match=r"a single sequence of \d+ tokens does not fit") as caught:
        update(tmp_path / "one", batch, 1000, budgets.Budget(1000, "plan: 80 GiB"), lambda policy: limit(policy, 4))
    text = str(caught.value)
    assert "gradient_checkpointing" in text and FULL in text and text.endswith("\nplan: 80 GiB")
    # ranks that compute together do not try again
    with pytest.raises(memory.FatalOutOfMemoryError, match="set micro_batch_tokens to 500; or"):
        update(tmp_path / "two", batch, 1000, budgets.Budget(1000, redo=False), lambda policy: limit(policy, 40))
    model = build_model("qwen2")
    policy, sampler = logprobs.LogProbs(model, 1.0), make_sampler(model)
    limit_rows(model.get_decoder(), 0, RuntimeError("CUDA error: out of memory"))
    with pytest.raises(memory.FatalOutOfMemoryError, match="a forward pass of 1 sequences"):
        passes.fill([batch], "ref_logps", policy, CPU)
    with pytest.raises(memory.FatalOutOfMemoryError, match="not even the 4 completions of one prompt"):
        sampler.generate(PROMPTS, group_size=4, temperature=1.0)


def test_the_message_has_the_peaks_of_the_gpus_in_use(monkeypatch):
    bytes_of = {"memory_reserved": [3, 0], "max_memory_allocated": [2.5, 0], "memory_allocated": [1, 0]}
    for name, values in bytes_of.items():
        monkeypatch.setattr(torch.cuda, name, lambda i, values=values: int(values[i] * 2**30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (2**30, 80 * 2**30))
    text = str(memory.FatalOutOfMemoryError("a sequence", "wait"))
    assert text.endswith("a sequence; wait\n  GPU 0: peak 2.5 GiB, now 1.0; 1.0 of 80.0 GiB free")


def test_halves_hold_all_rows_and_about_as_many_tokens(batch):
    batch = dataclasses.replace(batch, replica=3)
    one, other = batch.halves()
    assert torch.cat([one.rows, other.rows]).tolist() == list(range(12)) and one.replica == other.replica == 3
    sizes = [int((half.prompt_lengths + half.lengths).sum()) for half in (one, other)]
    assert abs(sizes[0] - sizes[1]) <= int((batch.prompt_lengths + batch.lengths).max())
    assert one.size + other.size - batch.size == int(one.prompt_lengths[-1])  # that of the group they divide
    assert torch.equal(other.advantages, batch.advantages[len(one) :])
    for pair in (batch.select(torch.tensor([0, 4])), batch.select(torch.tensor([8, 5]))):
        assert [len(half) for half in pair.halves()] == [1, 1]


def test_halving_gives_every_row_in_order(batch):
    minibatch = batch.minibatches(1, 70, True)[0]

    def weigh(micro):
        if micro.size > 30:
            raise torch.OutOfMemoryError(FULL)
        return micro.size

    pairs = list(memory.map_with_halving(minibatch, weigh))
    rows = [row for micro in minibatch for row in micro.rows.tolist()]
    assert [row for micro, _ in pairs for row in micro.rows.tolist()] == rows
    assert all(micro.size == result <= 30 for micro, result in pairs)
    with pytest.raises(memory.FatalOutOfMemoryError, match="a single sequence"):
        list(memory.map_with_halving(minibatch, lambda micro: weigh(batch)))


@pytest.mark.parametrize(("tokens", "states"), [(0, False), (40, True), (1000, False)])
def test_forward_passes_that_run_out_of_memory_give_the_same(batch, capsys, states, tokens):
    model = build_model("qwen2").requires_grad_(False)
    policy = (distillation.HiddenStates if states else logprobs.LogProbs)(model, 1.0)
    field = "states" if states else "ref_logps"
    micros, others = (batch.minibatches(1, tokens or 60, True)[0] for _ in range(2))
    passes.fill(micros, field, policy, CPU, tokens)
    tried = limit_rows(policy, 2)
    passes.fill(others, field, policy, CPU, tokens)
    for one, other in zip(micros, others, strict=True):
        assert_rounded(getattr(one, field), getattr(other, field), terms=TERMS, magnitude=16.0)
        assert getattr(one, field).any()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len([rows for rows in tried if rows > 2]) > 0
    tried.clear()  # it is remembered
    passes.fill(others, field, policy, CPU, tokens)
    assert max(tried) <= 2 and sum(tried) == 12 and capsys.readouterr().out == ""


@pytest.mark.parametrize(("engine", "num_replicas"), [(True, 2), (False, 1)])
def test_a_rollout_that_runs_out_of_memory_gives_the_same_completions(capsys, engine, num_replicas):
    model = build_model("qwen2").double().train()
    replicas = models.replicate(model, (CPU,) * num_replicas)
    prompts = [ids for ids in PROMPTS for _ in range(2)]
    options = dict(group_size=3, temperature=1.0, seed=5)
    with fp64():
        whole = make_sampler(copy.deepcopy(model), engine, max_new_tokens=6).generate(prompts, **options)
        sampler = make_sampler(replicas, engine, max_new_tokens=6)
        tried = limit_rows(replicas[-1].get_decoder(), 3)
        capsys.readouterr()
        assert_same(sampler.generate(prompts, **options), whole)
        said = capsys.readouterr().out.splitlines()
        assert f"out of memory while {18 // num_replicas} completions" in said[0]
        assert len(said) == len([rows for rows in tried if rows > 3]) > 0 and 3 <= sampler.rollout_batch < 6
        assert completions(sampler.generate(prompts, **options)) == completions(whole)
    assert capsys.readouterr().out == "" and model.training


def test_work_is_dealt_evenly():
    assert batches.deal([5, 9, 1, 4], 2) == [[1, 2], [0, 3]]  # 10 and 9
    assert batches.deal([1, 1, 1, 1, 1], 2) == [[0, 2, 4], [1, 3]]
    assert batches.deal([3], 3) == [[0], [], []] and batches.deal([7, 2, 5], 1) == [[0, 1, 2]]
    assert batches.in_rounds(["abc", "", "d"]) == [(0, "a"), (2, "d"), (0, "b"), (0, "c")]


@pytest.mark.parametrize(("num_replicas", "tokens"), [(2, 25), (3, 25), (3, 1000)])
def test_every_replica_gets_its_share_of_every_minibatch(batch, tokens, num_replicas):
    cut = batch.minibatches(3, tokens, True, devices=(CPU,) * num_replicas)
    for minibatch in cut:
        assert [micro.replica for micro in minibatch][:num_replicas] == list(range(num_replicas))
        sizes = [sum(m.size for m in minibatch if m.replica == k) for k in range(num_replicas)]
        longest = max(int((m.prompt_lengths + m.lengths).max()) for m in minibatch)
        assert max(sizes) - min(sizes) <= longest and all(len(m) == 1 or m.size <= tokens for m in minibatch)
    assert sorted(row for minibatch in cut for m in minibatch for row in m.rows.tolist()) == list(range(12))


def test_several_replicas_learn_what_one_does(tmp_path, batch):
    one = update(tmp_path / "one", batch, 60, budgets.Budget(60))
    for number, inject in ((4, None), (2, lambda policy: limit(policy, 30, True))):
        budget = budgets.Budget(60)
        several = update(tmp_path / str(number), batch, 60, budget, inject, (CPU,) * number)
        assert_same_update(one, several)
        assert {micro.replica for minibatch in several.cut for micro in minibatch} == set(range(number))
        assert budget.tokens == 60 if inject is None else budget.tokens <= 30  # one of several may run out of memory


def little_memory(module, on_rank: int | None = None, replicas: int = 1) -> None:
    """Memory for 40 tokens in the update, 6 rows in other forward passes, and 4 rows in a rollout."""
    states, step = logprobs.LogProbs.states, Runner._step

    def limit(exceeded: bool) -> None:
        if exceeded and on_rank in (None, distributed.rank()):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def limited_states(self, *args):
        size = int(args[1].sum() + args[3].sum()) if torch.is_grad_enabled() else 40 * len(args[0]) // 6
        limit(size > 40 and len(args[0]) > 1)
        return states(self, *args)

    def limited_step(self, b, *args):
        limit(b > 4 and len(self.end) < 5)  # with more end tokens it is the check at the start
        return step(self, b, *args)

    logprobs.LogProbs.states, Runner._step = limited_states, limited_step
    if replicas > 1:
        two_replicas(module, replicas)


@pytest.mark.parametrize(("script", "replicas"), [
    ("gspo", 1), pytest.param("grpo_multigpu", 2, marks=pytest.mark.parity),
    pytest.param("gkd_multigpu", 2, marks=pytest.mark.parity),
])  # fmt: skip
def test_a_run_goes_on(launcher, tmp_path, script, replicas):
    usual = launcher.trained(script, steps=3)
    options = dict(micro_batch_tokens=1000, steps=3, prepare=partial(little_memory, replicas=replicas))
    run = launcher.run(script, tmp_path / "run", **options).succeeded()
    for said in ("completions were sampled at once: now 4", "out of memory with micro-batches of", "sequences: now"):
        assert said in run.output
    assert run.samples == usual.samples
    assert_close(run, usual)


def sized_card(module, tokens):
    """A plan that chooses micro-batches, as on a GPU; one of a resumed run takes those it had."""
    require_fit = plan.require_fit

    def chosen(cfg, *args, resumed_tokens=0, **known):
        print("resumed with micro-batches of", resumed_tokens)
        planned = require_fit(cfg, *args, **known)
        return planned if cfg.micro_batch_tokens else planned.with_options(micro_batch_tokens=resumed_tokens or tokens)

    plan.require_fit = chosen


def test_the_micro_batches_that_a_plan_chose_are_recorded_and_kept(launcher, tmp_path):
    asked = launcher.run("gspo", tmp_path / "asked", steps=3, micro_batch_tokens=50).succeeded()
    options = dict(micro_batch_tokens=0, resume="auto")
    first = launcher.run("gspo", tmp_path / "run", steps=2, prepare=partial(sized_card, tokens=50), **options)
    assert "resumed with micro-batches of 0\n" in first.succeeded().output
    run = launcher.run("gspo", tmp_path / "run", steps=3, prepare=partial(sized_card, tokens=500), **options)
    assert "resumed with micro-batches of 50\n" in run.succeeded().output
    assert config_of(run)["micro_batch_tokens"] == 50
    assert_equal_weights(run.weights(), asked.weights())
    on_cpu = launcher.run("gspo", tmp_path / "cpu", steps=1, micro_batch_tokens=0).succeeded()
    assert config_of(on_cpu)["micro_batch_tokens"] == 8192


@pytest.mark.parity
@pytest.mark.parametrize(("script", "group_size"), [("gspo_multigpu", 2), ("gkd_multigpu", 1)])
def test_replicas_may_have_nothing_to_do(launcher, tmp_path, script, group_size):
    # of four, one has no prompt to sample from, and each minibatch leaves some without a row
    options = dict(batch_size=3, group_size=group_size, steps=2, eval_examples=1)
    usual = launcher.trained(script, **options)
    run = launcher.run(script, tmp_path / "run", prepare=partial(two_replicas, count=4), **options).succeeded()
    assert run.samples == usual.samples
    assert_close(run, usual)


@pytest.mark.parity
def test_one_rank_runs_out_of_memory_and_the_other_does_not(launcher, tmp_path):
    usual = launcher.trained("gspo_ddp", 2, steps=3)
    options = dict(micro_batch_tokens=1000, steps=3, prepare=partial(little_memory, on_rank=1))
    run = launcher.run("gspo_ddp", tmp_path / "run", 2, **options).succeeded()
    assert "rank 1: out of memory with micro-batches of" in run.output and "rank 0: out of" not in run.output
    assert_close(run, usual)
