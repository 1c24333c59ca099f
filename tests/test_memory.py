"""Tests of common/memory.py: a run whose memory runs out goes on, in smaller pieces and with the same numbers."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from conftest import REWARD, build_model
from test_parity import assert_close
from test_rollout import PROMPTS, assert_equal, completions, make_sampler

from common import distillation, logprobs, losses, memory, metrics, models, optim, rollout

CPU = torch.device("cpu")
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture(scope="module")
def batch():
    """Twelve sequences, with advantages, of three prompts."""
    torch.set_num_threads(1)
    sampled = make_sampler(build_model("qwen2").eval(), end_ids=[3, 7, 9, 20, 21, 22]).generate(
        PROMPTS, group_size=4, temperature=1.0
    )
    assert len(set(sampled.lengths.tolist())) > 3
    sampled.advantages = torch.linspace(-1, 1, 12)
    return sampled


def log_of(folder) -> metrics.Log:
    return metrics.Log(str(folder), 0, 1, [])


def limit(policy, tokens, backward=False) -> list[int]:
    """From now on memory suffices for so many tokens in a forward pass with gradients; gives what was tried."""
    tried = []

    def count(module, args):
        if torch.is_grad_enabled():
            tried.append(int(args[1].sum() + args[3].sum()))
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


def update(folder, batch, tokens, budget, inject=None, minibatches=2, epochs=2, devices=(CPU,)):
    """The update of a script: weights, what was logged, and the ratios of the first minibatch."""
    model = build_model("qwen2")
    replicas = models.replicate(model, devices, len(devices))
    policies = [logprobs.LogProbs(replica, 1.0) for replica in replicas]
    tried = inject(policies[-1]) if inject else []
    optimizer, log = optim.AdamW(model, 1e-3), log_of(folder)
    cut = batch.minibatches(minibatches, tokens, True, devices=devices)
    logprobs.fill([micro for part in cut[1:] for micro in part], "old_logps", policies, devices, tokens)
    first = []
    for number, minibatch in enumerate(cut * epochs):
        for micro in budget.passes(minibatch, optimizer, log, replicas):
            with budget.room():
                logps_mC, entropy_mC = policies[micro.replica](*micro.tokens)
                if micro.old_logps is None:
                    micro.old_logps = logps_mC.detach()
                ratio_m = losses.sequence_ratio(logps_mC, micro.old_logps, micro.completion_mask)
                loss = -(ratio_m * micro.advantages).sum() / 6
                optimizer.scale(loss).backward()
                entropy_m = losses.masked_mean(entropy_mC, micro.completion_mask)
                mean = loss.detach() * 6 / len(micro)
                log.add(len(micro), loss=mean, entropy=entropy_m.mean(), seen_max=ratio_m.detach().max())
                first += ratio_m.tolist() if number == 0 else []
            loss = None
        models.sum_gradients(replicas)
        log.add(grad_norm=optimizer.step(1.0))
        models.refresh(replicas)
    weights = dict(log._weights)
    log._tokens = 1.0
    with log.time("update"):
        pass
    line = log.end_step(1)
    log.close()
    for replica in replicas[1:]:
        assert all(map(torch.equal, replica.parameters(), model.parameters()))
        assert all(p.grad is None for p in replica.parameters())
    numbers = {name: value for name, value in line.items() if name in ("loss", "entropy", "grad_norm", "seen_max")}
    return dict(model.state_dict()), numbers, weights, first, cut, tried


def same(one, other):
    """Of what `update` gives: weights and numbers up to the order of a sum, and as much of everything."""
    for name, value in one[0].items():
        torch.testing.assert_close(other[0][name], value, rtol=1e-4, atol=2e-6, msg=name)
    assert one[1] == pytest.approx(other[1], rel=1e-4, abs=1e-6) and len(one[1]) == 4
    assert {key: float(value) for key, value in one[2].items()} == {key: float(x) for key, x in other[2].items()}


# --- the update ---


@pytest.mark.parametrize("backward", [False, True])
def test_an_update_that_runs_out_of_memory_gives_what_a_smaller_one_gives(tmp_path, batch, capsys, backward):
    small = update(tmp_path / "one", batch, 25, memory.Budget(25))
    released = []
    budget = memory.Budget(1000, release=lambda: released.append(True))
    large = update(tmp_path / "two", batch, 1000, budget, lambda policy: limit(policy, 40, backward))
    same(small, large)
    # all of the first minibatch at once, then the half of it that did go well, and never again too much
    size = large[5][0]
    assert size == batch.minibatches(2, 1000, True)[0][0].size > 40 and budget.tokens < 40
    said = capsys.readouterr().out.splitlines()
    halvings = [int(line.split("batches of ")[1].split()[0]) for line in said]
    assert halvings[0] == size and len(said) == len(released) == len([tokens for tokens in large[5] if tokens > 40])
    assert said[-1].endswith(f"now {budget.tokens}; set micro_batch_tokens to {budget.tokens} to begin with that")
    # without an update since the rollout the ratio is 1, also after the second attempt
    assert large[3] and set(large[3][-6:]) == {1.0}
    # the halves stay, with their old log-probabilities, for the second epoch
    assert all(len(minibatch) > 1 for minibatch in large[4])
    assert all(micro.old_logps.shape == micro.completion_ids.shape for minibatch in large[4] for micro in minibatch)


def test_an_update_with_room_enough_is_as_if_there_were_no_limit(tmp_path, batch):
    budget = memory.Budget(30)
    one = update(tmp_path, batch, 30, budget, lambda policy: limit(policy, 30))
    assert budget.tokens == 30
    assert [[micro.rows.tolist() for micro in minibatch] for minibatch in one[4]] == [
        [micro.rows.tolist() for micro in minibatch] for minibatch in batch.minibatches(2, 30, True)
    ]


def test_nothing_of_a_failed_attempt_is_alive_in_the_next(batch):
    model, alive = build_model("qwen2"), []
    policy, optimizer, budget = logprobs.LogProbs(model, 1.0), optim.AdamW(model, 1e-3), memory.Budget(1000)
    (minibatch,) = batch.minibatches(1, 1000, True)

    class Log:
        def mark(self):
            return None

        def back(self, mark):
            pass

    def keep(module, args, output):
        assert not any(reference() is not None for reference in alive), "activations of before"
        alive[:] = [weakref.ref(output)]

    limit(policy, 60, backward=True)
    model.get_decoder().layers[0].register_forward_hook(keep)
    gc.disable()
    try:
        for micro in budget.passes(minibatch, optimizer, Log()):
            with budget.room():
                loss = policy(*micro.tokens)[0].sum()
                loss.backward()
            loss = None
    finally:
        gc.enable()
    assert budget.tokens < 100 and len(minibatch) > 1


def test_what_is_no_lack_of_memory_goes_on():
    budget = memory.Budget(1000)
    with pytest.raises(RuntimeError, match="shapes"), budget.room():
        raise RuntimeError("shapes do not match")
    with pytest.raises(ValueError), budget.room():
        raise ValueError(FULL)
    assert budget.tokens == 1000
    quoted = f"rank 1 failed in phase 'update': OutOfMemoryError: {FULL}"
    errors = {
        torch.OutOfMemoryError("x"): True, RuntimeError(FULL): True, RuntimeError("CUDA error: out of memory"): True,
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"): True,
        RuntimeError(quoted): False, memory.HopelessError("a sequence", "wait"): False, MemoryError(): False,
        RuntimeError("CUDA error: an illegal memory access was encountered"): False,
    }  # fmt: skip
    assert {str(error): memory.is_out_of_memory(error) for error in errors} == {str(e): x for e, x in errors.items()}


def test_a_single_sequence_that_does_not_fit_ends_the_run_with_what_to_change(tmp_path, batch, capsys):
    with pytest.raises(memory.HopelessError, match=r"a single sequence of \d+ tokens does not fit") as caught:
        update(tmp_path, batch, 1000, memory.Budget(1000, "plan: 80 GiB"), lambda policy: limit(policy, 4))
    text = str(caught.value)
    assert "gradient_checkpointing" in text and "lora_rank" in text and text.endswith("\nplan: 80 GiB")
    assert FULL in text and capsys.readouterr().out.count("out of memory") >= 2


def test_ranks_that_compute_together_are_told_what_to_set(tmp_path, batch):
    with pytest.raises(memory.HopelessError, match="set micro_batch_tokens to 500; or"):
        update(tmp_path, batch, 1000, memory.Budget(1000, redo=False), lambda policy: limit(policy, 40))


def test_the_message_has_the_peaks_of_the_gpus_in_use(monkeypatch):
    bytes_of = {"memory_reserved": [3, 0], "max_memory_allocated": [2.5, 0], "memory_allocated": [1, 0]}
    for name, values in bytes_of.items():
        monkeypatch.setattr(torch.cuda, name, lambda i, values=values: int(values[i] * 2**30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (2**30, 80 * 2**30))
    text = str(memory.HopelessError("a sequence", "wait"))
    assert text == "out of memory: a sequence; wait\n  GPU 0: peak 2.5 GiB, now 1.0; 1.0 of 80.0 GiB free"


# --- cutting ---


def test_halves_hold_all_rows_and_about_as_many_tokens(batch):
    batch = dataclasses.replace(batch, replica=3)
    one, other = batch.halves()
    assert torch.cat([one.rows, other.rows]).tolist() == list(range(12)) and one.replica == other.replica == 3
    longest = int((batch.prompt_lengths + batch.lengths).max())
    assert one.size + other.size == batch.size and abs(one.size - other.size) <= longest
    assert torch.equal(other.advantages, batch.advantages[len(one) :])
    for pair in (batch.select(torch.tensor([0, 4])), batch.select(torch.tensor([8, 5]))):
        assert [len(half) for half in pair.halves()] == [1, 1]


def test_each_gives_every_row_in_order(batch):
    minibatch = batch.minibatches(1, 70, True)[0]
    rows = [row for micro in minibatch for row in micro.rows.tolist()]

    def weigh(micro):
        if micro.size > 30:
            raise torch.OutOfMemoryError(FULL)
        return micro.size

    pairs = list(memory.each(minibatch, weigh))
    assert [row for micro, _ in pairs for row in micro.rows.tolist()] == rows
    assert all(micro.size == result <= 30 for micro, result in pairs)
    with pytest.raises(memory.HopelessError, match="a single sequence"):
        list(memory.each(minibatch, lambda micro: weigh(batch)))


# --- forward passes ---


@pytest.mark.parametrize("tokens", [0, 40, 1000])
@pytest.mark.parametrize("states", [False, True])
def test_forward_passes_that_run_out_of_memory_give_the_same(batch, capsys, states, tokens):
    model = build_model("qwen2").requires_grad_(False)
    policy = (distillation.HiddenStates if states else logprobs.LogProbs)(model, 1.0)
    field = "teacher_states" if states else "ref_logps"
    micros, others = (batch.minibatches(1, tokens or 60, True)[0] for _ in range(2))
    logprobs.fill(micros, field, policy, CPU, tokens)
    calls = []

    def run_out(module, args):
        calls.append(len(args[0]))
        if calls[-1] > 2:
            raise torch.OutOfMemoryError(FULL)

    policy.register_forward_pre_hook(run_out)
    logprobs.fill(others, field, policy, CPU, tokens)
    for one, other in zip(micros, others, strict=True):
        torch.testing.assert_close(getattr(one, field), getattr(other, field), rtol=0, atol=1e-5)
        assert getattr(one, field).any()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len([rows for rows in calls if rows > 2]) > 0
    # it is remembered
    calls.clear()
    logprobs.fill(others, field, policy, CPU, tokens)
    assert max(calls) <= 2 and sum(calls) == 12 and capsys.readouterr().out == ""


def test_a_forward_pass_of_one_sequence_that_does_not_fit_is_hopeless(batch):
    policy = logprobs.LogProbs(build_model("qwen2"), 1.0)

    def run_out(module, args):
        raise RuntimeError("CUDA error: out of memory")

    policy.register_forward_pre_hook(run_out)
    with pytest.raises(memory.HopelessError, match="a forward pass of 1 sequences"):
        logprobs.fill([batch], "ref_logps", policy, CPU)


# --- rollouts ---


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_rollout_that_runs_out_of_memory_gives_the_same_completions(capsys, engine, num_replicas):
    model = build_model("qwen2").train()
    replicas = models.replicate(model, (CPU,) * num_replicas)
    prompts = [ids for ids in PROMPTS for _ in range(2)]
    options = dict(group_size=3, temperature=1.0, seed=5)
    whole = make_sampler(copy.deepcopy(model), engine).generate(prompts, **options)
    sampler = make_sampler(replicas, engine)
    calls = []

    def run_out(module, args, kwargs):
        calls.append(len(kwargs["input_ids"]))
        if calls[-1] > 3:
            raise torch.OutOfMemoryError(FULL)

    replicas[-1].get_decoder().register_forward_pre_hook(run_out, with_kwargs=True)
    capsys.readouterr()
    again = sampler.generate(prompts, **options)
    assert completions(again) == completions(whole)
    torch.testing.assert_close(again.rollout_logps, whole.rollout_logps, rtol=0, atol=1e-5)
    assert_equal(dataclasses.replace(again, rollout_logps=whole.rollout_logps), whole)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"out of memory while {18 // num_replicas} completions were sampled at once: now ")
    assert len(said) == len([rows for rows in calls if rows > 3]) > 0 and 3 <= sampler.rollout_batch < 6
    sampler.generate(prompts, **options)
    assert capsys.readouterr().out == "" and model.training


def test_a_group_that_cannot_be_sampled_is_hopeless():
    model = build_model("qwen2")
    sampler = make_sampler(model)

    def run_out(module, args):
        raise torch.OutOfMemoryError(FULL)

    model.get_decoder().register_forward_pre_hook(run_out)
    with pytest.raises(memory.HopelessError, match="not even the 4 completions of one prompt"):
        sampler.generate(PROMPTS, group_size=4, temperature=1.0)


# --- several GPUs in one process ---


def test_work_is_dealt_evenly():
    assert rollout.deal([5, 9, 1, 4], 2) == [[1, 2], [0, 3]]  # 10 and 9
    assert rollout.deal([1, 1, 1, 1, 1], 2) == [[0, 2, 4], [1, 3]]
    assert rollout.deal([3], 3) == [[0], [], []] and rollout.deal([7, 2, 5], 1) == [[0, 1, 2]]
    assert rollout.in_rounds(["abc", "", "d"]) == [(0, "a"), (2, "d"), (0, "b"), (0, "c")]


@pytest.mark.parametrize("tokens", [25, 1000])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_every_replica_gets_its_share_of_every_minibatch(batch, tokens, num_replicas):
    for minibatch in batch.minibatches(3, tokens, True, devices=(CPU,) * num_replicas):
        numbers = [micro.replica for micro in minibatch]
        assert numbers[:num_replicas] == list(range(num_replicas))
        sizes = [sum(m.size for m in minibatch if m.replica == k) for k in range(num_replicas)]
        longest = max(int((m.prompt_lengths + m.lengths).max()) for m in minibatch)
        assert max(sizes) - min(sizes) <= longest and all(len(m) == 1 or m.size <= tokens for m in minibatch)
    rows = [row for part in batch.minibatches(3, tokens, True, devices=(CPU,) * num_replicas) for m in part
            for row in m.rows.tolist()]  # fmt: skip
    assert sorted(rows) == list(range(12))


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_several_replicas_learn_what_one_does(tmp_path, batch, num_replicas):
    one = update(tmp_path / "one", batch, 60, memory.Budget(60))
    several = update(tmp_path / "two", batch, 60, memory.Budget(60), devices=(CPU,) * num_replicas)
    same(one, several)
    assert {micro.replica for minibatch in several[4] for micro in minibatch} == set(range(num_replicas))


def test_one_of_several_replicas_may_run_out_of_memory(tmp_path, batch):
    one = update(tmp_path / "one", batch, 60, memory.Budget(60))
    budget = memory.Budget(60)
    several = update(tmp_path / "two", batch, 60, budget, lambda policy: limit(policy, 30, True), devices=(CPU,) * 2)
    same(one, several)
    assert budget.tokens <= 30


# --- whole runs ---

# Memory suffices for 40 tokens in the update, 6 rows in other forward passes, and 4 rows in a rollout
INJECTION = """from common.config import require


def _states(self, *args, real=logprobs.LogProbs.states):
    size = int(args[1].sum() + args[3].sum()) if torch.is_grad_enabled() else 40 * len(args[0]) // 6
    if size > 40 and len(args[0]) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return real(self, *args)


def _step(self, b, *args, real=rollout.Engine._step):
    if b > 4:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return real(self, b, *args)


logprobs.LogProbs.states, rollout.Engine._step = _states, _step
"""


# Two policy GPUs, both of which are the CPU
TWO = {
    "    home = gpus.policy[0]\n": """
    class Two(devices.Layout):
        replicas = property(lambda self: list(self.policy))

    home = gpus.reference
    gpus = Two((home, home), home, home, (home,))
""",
    "    home = gpus.student[0]\n": """
    home = gpus.student[0]
    gpus = devices.DistillationLayout((home, home), None, gpus.teacher)
""",
}


@pytest.mark.parametrize(("script", "on_two"), [("gspo", ""), ("grpo_multigpu", "policy"), ("gkd_multigpu", "student")])
def test_a_run_goes_on(launcher, tmp_path, script, on_two):
    usual = launcher.trained(script, steps=3)
    edits = {"from common.config import require\n": INJECTION}
    edits |= {old: new for old, new in TWO.items() if on_two and on_two in old}
    options = dict(micro_batch_tokens=1000, steps=3)
    copied = launcher.copy(script, REWARD, edits)
    run = launcher.run(copied, tmp_path / "run", **options).succeeded()
    for said in ("completions were sampled at once: now 4", "out of memory with micro-batches of", "sequences: now"):
        assert said in run.output
    assert run.samples == usual.samples
    assert_close(run, usual, metrics=2e-3, weights=1e-5)


@pytest.mark.parametrize(("script", "role"), [("gspo_multigpu", "policy"), ("gkd_multigpu", "student")])
def test_replicas_may_have_nothing_to_do(launcher, tmp_path, script, role):
    # of four, one has no prompt to sample from, and each minibatch leaves some without a row
    options = dict(batch_size=3, group_size=1 if role == "student" else 2, steps=2, eval_examples=1)
    usual = launcher.trained(script, **options)
    edits = {old: new.replace("(home, home)", "(home,) * 4") for old, new in TWO.items() if role in old}
    run = launcher.run(launcher.copy(script, REWARD, edits), tmp_path / "run", **options).succeeded()
    assert run.samples == usual.samples
    assert_close(run, usual, metrics=1e-4, weights=1e-5)


def test_one_rank_runs_out_of_memory_and_the_other_does_not(launcher, tmp_path):
    usual = launcher.trained("gspo_ddp", 2, steps=3)
    there = INJECTION.replace("if size > 40", "if distributed.rank() == 1 and size > 40")
    there = there.replace("if b > 4", "if distributed.rank() == 1 and b > 4")
    copied = launcher.copy("gspo_ddp", REWARD, {"from common.config import require\n": there})
    run = launcher.run(copied, tmp_path / "run", 2, micro_batch_tokens=1000, steps=3).succeeded()
    assert "rank 1: out of memory with micro-batches of" in run.output and "rank 0: out of" not in run.output
    assert_close(run, usual, metrics=2e-3, weights=1e-5)
