"""Mutation test: puts 99 small faults into copies of this project, one at a time, and runs the tests on each.

Run:  python scripts/dev/mutate.py --out faults.md                  all faults, each against the fast tier
      python scripts/dev/mutate.py --out faults.md --first-only     only the test files named with each fault
      python scripts/dev/mutate.py --out faults.md --resume         continue an earlier run
      python scripts/dev/mutate.py kl-sign rng-lost                 only these
      python scripts/dev/mutate.py --root ../other --out other.md   another checkout with its own tests
      python scripts/dev/mutate.py --list                           where each fault goes; runs no test

The exit code is 1 if fewer than NEEDED faults were found, 2 if a fault has no place in the code or tests fail without a
fault. The checkout itself is never changed.
"""

import argparse
import ast
import contextlib
import dataclasses
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

NEEDED = 70
FIRST_LIMIT, REST_LIMIT = 900, 7200  # seconds; a run that takes longer counts as hanging
# these compare text, so they find every edit, whatever its effect
NO_PROOF = ("tests/test_copies.py", "tests/test_tools.py::test_every_fault_has_its_place_and_its_tests")
# The built-in models are trained once, without a fault: with one they would differ, and take long in every run
MODELS = """
from common.tasks import toy
from grpo.poster import toys

for module in (toy, toys):
    list(map(module.folder, module.STEPS))
"""


class Mutation(NamedTuple):
    """A fault that changes results, on the CPU too, and raises no error on import."""

    name: str
    kind: str  # sign, factor, swap, off by one, mask, dtype, sync, state (forgotten, or not brought back), check (lost)
    file: str  # relative to the root
    old: str  # occurs once in the file
    new: str
    first: str  # test files to run first, the cheapest first


# fmt: off
MUTATIONS = [Mutation(*fields) for fields in (
    # losses, log-probabilities, sampling
    ("kl-sign", "sign", "common/maths/losses.py", "return torch.exp(-d) + d - 1", "return torch.exp(d) - d - 1",
     "losses"),
    ("clip-ends", "swap", "common/maths/losses.py", "ratio.clamp(1 - epsilon_low, 1 + epsilon_high) *",
     "ratio.clamp(1 - epsilon_high, 1 + epsilon_low) *", "losses"),
    ("cispo-gradient", "factor", "common/maths/losses.py", "ratio.detach().clamp(max=cap)", "ratio.clamp(max=cap)",
     "losses"),
    ("advantages-fp32", "dtype", "common/maths/advantages.py", "rewards = rewards.double()",
     "rewards = rewards.float()", "advantages"),
    ("jsd-weights", "swap", "common/maths/divergences.py", "logp + math.log(beta), logq + math.log1p(-beta)",
     "logp + math.log1p(-beta), logq + math.log(beta)", "divergences"),
    ("top-p-edge", "off by one", "common/maths/sampling.py",
     "probabilities.cumsum(-1) - probabilities < sampling.top_p", "probabilities.cumsum(-1) < sampling.top_p",
     "sampling"),
    ("logps-shift", "off by one", "common/model/logprobs.py", "first_m[row_N] + position_N - 1,",
     "first_m[row_N] + position_N,", "logprobs"),
    ("window-of-layers", "swap", "common/model/attention.py", "self.window = min(self.window,",
     "self.window = max(self.window,", "attention"),
    ("head-temperature", "factor", "common/model/head.py", "factor_N = grad_N / steps.temperature", "factor_N = grad_N",
     "logprobs"),
    # supervised fine-tuning
    ("learned-shift", "off by one", "common/tasks/demonstrations.py", "[0] * len(between) + [1] * len(reply)",
     "[0] * (len(between) + 1) + [1] * (len(reply) - 1)", "demonstrations"),
    ("reply-end", "mask", "common/tasks/demonstrations.py", "self._before_end(ids, rows[i]), self.end]",
     "self._before_end(ids, rows[i])]", "demonstrations"),
    ("prefix-of-turns", "check", "common/tasks/demonstrations.py",
     "if after[: len(before)] != before or writer.end not in added:", "if writer.end not in added:", "demonstrations"),
    ("learned-count", "factor", "common/generation/batches.py", "self.lengths[self.trained].sum() - left_out",
     "self.lengths[self.trained].sum()", "sft"),
    ("cross-entropy-sign", "sign", "common/maths/divergences.py", "q_nV - is_token_nV.float()",
     "is_token_nV.float() - q_nV", "sft"),
    # rollouts
    ("one-end-token", "mask", "common/generation/runner.py", "(tokens[:, None] == self.end).any(1)",
     "(tokens == self.end[0])", "rollout"),
    ("cache-keeps-keys", "sync", "common/generation/runner.py", "[*self.cache.row_tensors, *self",
     "[*self.cache.row_tensors[:1], *self", "engine"),
    ("cache-moves-too-little", "off by one", "common/generation/sdpa_cache.py", "tensor[:, :, : self.filled]",
     "tensor[:, :, : self.filled - 2]", "engine"),
    ("cache-mask", "off by one", "common/generation/sdpa_cache.py", "device=self.device) <= write[:, None]",
     "device=self.device) < write[:, None]", "engine"),
    ("text-cut-off", "off by one", "common/generation/batches.py", "text = decode(ids[:-1])",
     "text = decode(ids)", "rollout"),
    ("drop-forgets", "mask", "common/generation/batches.py", "self.trained = self.trained & ~rows",
     "self.trained = ~rows", "rollout"),
    ("image-positions", "swap", "common/model/images.py", "start += max(h, w)", "start += min(h, w)", "images"),
    # prompts shared in the update, drafts, fused steps
    ("shared-last-state", "off by one", "common/model/logprobs.py", "head_m[nth_m] + prompt_m - 1",
     "head_m[nth_m] + prompt_m - 2", "logprobs"),
    ("shared-mask", "off by one", "common/model/attention.py", ".tril(read - own)", ".tril(read - own - 1)",
     "attention logprobs"),
    ("shared-positions", "off by one", "common/model/logprobs.py", "position_M + left_m[nth_M]", "position_M",
     "logprobs"),
    ("draft-one-too-many", "off by one", "common/generation/runner.py", "kept = number < new[row]",
     "kept = number <= new[row]", "drafts"),
    ("draft-random-numbers", "swap", "common/generation/runner.py", "self.uniforms[where[part]], count[part]",
     "self.uniforms[part], count[part]", "drafts"),
    ("fused-positions", "off by one", "common/fused/kernels.py", "row) + prompt + old\n", "row) + prompt + old + 1\n",
     "fused"),
    ("fused-merge", "factor", "common/fused/kernels.py", "        total += weight\n", "        total += 1\n", "fused"),
    ("fused-squares", "mask", "common/fused/kernels.py", "squares + t[None, :] * padded + m[:, None]",
     "squares + 0 * t[None, :] * padded + m[:, None]", "fused"),
    ("prompts-of-plan", "factor", "common/planning/footprint.py", "(min(rows, prompts) if once else rows)", "rows",
     "plan"),
    ("reserve-of-memory", "check", "common/planning/plan.py", "times(2).fits(room)", "times(2).fits()", "plan"),
    # models of any family: the path they decode on, and states of hybrids
    ("any-path", "check", "common/generation/paths.py", "        if not failure:\n", "        if True:\n", "contract"),
    ("best-prompt", "swap", "common/generation/contract.py", "torch.stack(by_prompt).amax()",
     "torch.stack(by_prompt).amin()", "contract"),
    ("states-in-order", "swap", "common/model/states.py", "tensor[rows] = value.repeat_interleave(repeats, 0)",
     "tensor[rows.sort().values] = value.repeat_interleave(repeats, 0)", "states"),
    ("states-move", "off by one", "common/model/states.py", "len(self.tensors[0]) >= rows",
     "len(self.tensors[0]) > rows", "states"),
    ("smallest-time-step", "mask", "common/model/states.py", ".clamp(low, high)", ".clamp(max=high)", "contract"),
    ("noise-unseen", "check", "common/model/agreement.py", "if torch.equal(one, seeded(1)) or",
     "if torch.equal(one, seeded(0)) or", "contract"),
    ("window-of-masks", "check", "common/model/attention.py", "min(probe.window, window_of_mask)", "probe.window",
     "attention"),
    ("padding-at-end", "mask", "common/model/attention.py", "mask_mT.flatten().nonzero()",
     "mask_mT.flip(1).flatten().nonzero()", "contract"),
    ("modes-lost", "state", "common/model/modes.py", "module.training = training", "module.training = False",
     "rollout"),
    # data and rewards
    ("answer-as-float", "dtype", "common/tasks/data.py", "str(int(Decimal(repr(value)))) if", "str(int(value)) if",
     "data"),
    ("list-without-order", "check", "common/tasks/answers.py", "unmatched[:1] if is_ordered else unmatched",
     "unmatched", "rewards"),
    ("numbers-read-twice", "off by one", "common/tasks/answer_prose.py", "plain, numbers = find_numbers(text)",
     "plain, numbers = text, find_numbers(text)[1]", "answers"),
    ("percent", "factor", "common/tasks/answer_numbers.py", '/ (100 if number.endswith("%") else 1)', "", "rewards"),
    ("weight-0-counts", "mask", "common/tasks/scoring.py", "if not weight:", "if False:", "scoring"),
    ("overlong-sign", "sign", "common/tasks/rewards.py", "(max_new_tokens - cache - lengths)",
     "(lengths - max_new_tokens + cache)", "rewards grpo"),
    ("cluster-sign", "sign", "common/tasks/diversity.py", "(labels, positive).to(rewards.dtype).pow(-alpha)",
     "(labels, positive).to(rewards.dtype).pow(alpha)", "similarity"),
    ("rarity-turned", "sign", "common/tasks/diversity.py", "((theirs > own) & scored", "((theirs < own) & scored",
     "diversity"),
    ("darling-counts-itself", "off by one", "common/tasks/diversity.py", "others / (count - 1).clamp(min=1)",
     "others / count.clamp(min=1)", "diversity"),
    ("mmr-forgets", "state", "common/tasks/diversity.py", "max(near, alike[i][latest])", "alike[i][latest]",
     "diversity"),
    ("dppo-direction", "swap", "common/maths/objectives.py", "torch.where(advantages > 0, above, below)",
     "torch.where(advantages > 0, below, above)", "objectives"),
    ("gdpo-weights", "factor", "common/maths/advantages.py", "(weights.double()[:, None, None] * by_function)",
     "by_function", "advantages"),
    ("kl-of-the-past", "sign", "common/maths/advantages.py", "kl.flip(-1).cumsum(-1).flip(-1)", "kl.cumsum(-1)",
     "advantages"),
    ("sampler-overwritten", "state", "common/loop/policy.py", " if getattr(micro, field) is None]", "]", "grpo"),
    ("greso-forgets", "state", "common/tasks/greso.py", "p_K.pow(z_K)", "p_K", "greso"),
    ("privileged-unread", "state", "common/distill/teachers.py", "torch.tensor(example.teacher_ids)",
     "torch.tensor(example.prompt_ids)", "self_distillation"),
    ("span-end", "off by one", "common/distill/cross_teacher.py", "first_mC[row, start] = other_start",
     "first_mC[row, start] = other_end - 1", "cross_tokenizer"),
    ("vector-length", "factor", "common/tasks/embedder.py", "vectors[rows_of[text]] = vector / length",
     "vectors[rows_of[text]] = vector", "embedder"),
    # models and memory
    ("attention-of-cudnn", "check", "common/model/models.py", "enable_cudnn_sdp(False)", "enable_cudnn_sdp(True)",
     "models"),
    ("replica-gradients", "sync", "common/model/models.py",
     "arrived if first.grad is None else first.grad.add_(arrived)", "arrived", "models"),
    ("adapter-seed", "sync", "common/model/lora.py", "torch.manual_seed(SEED)",
     "torch.manual_seed(torch.initial_seed())", "lora"),
    ("adapters-twice", "factor", "common/model/merging.py", "layer._disable_adapters = True  # or",
     "layer._disable_adapters = False  #", "lora"),
    ("masters-bf16", "dtype", "common/training/optim.py", "torch.empty_like(self._local(i), dtype=torch.float32)",
     "torch.empty_like(self._local(i))", "optim"),
    ("skipped-step-counts", "state", "common/training/optim.py", "self._steps += 1.0 - found_inf", "self._steps += 1.0",
     "optim"),
    ("sharded-mean", "factor", "common/training/sharding.py", "set_gradient_divide_factor(1.0)",
     "set_gradient_divide_factor(float(distributed.num_ranks()))", "sharding"),
    ("offload-stale", "state", "common/training/offload.py", "if first or not self.frozen:", "if first:",
     "distillation"),
    ("metrics-twice", "state", "common/training/budgets.py", "log.rollback(mark)", "log.mark()", "memory"),
    # distillation
    ("softcap-slope", "factor", "common/distill/distillation.py", "(1 - (logits_nV / softcap) ** 2)",
     "(1 - logits_nV / softcap)", "distillation"),
    ("end-left-out", "off by one", "common/distill/offpolicy.py", "enumerate(ids, 1) if token in",
     "enumerate(ids) if token in", "offpolicy"),
    ("other-teacher", "check", "common/distill/teachers.py", 'notes.get("teacher", teacher.weights)',
     'notes.get("teacher_weights", teacher.weights)', "distillation"),
    ("answer-of-another", "check", "common/distill/teacher_client.py",
     'if metadata.get("identity") != identity(self.info):', 'if not metadata.get("identity"):', "teacher_server"),
    ("not-ready", "check", "common/base/service.py", "(429, 502, 503, 504)", "(429, 502, 504)",
     "reward_client fuzz_servers"),
    ("tuples-lost", "dtype", "common/base/wire.py", "return tuple(_value(inner, tensors))",
     "return _value(inner, tensors)", "wire"),
    ("lock-shared", "sync", "common/base/storage.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
     "wire"),
    ("failure-is-0", "mask", "common/tasks/reward_client.py", "math.nan if result is None else float",
     "0.0 if result is None else float", "reward_client"),
    # a run and what it writes
    ("one-checkpoint-less", "off by one", "common/run/checkpoint.py", "departure(folder, out_dir)][:-keep]",
     "departure(folder, out_dir)][: 1 - keep]", "checkpoint"),
    ("rng-lost", "state", "common/run/checkpoint.py", "random_state.restore(_of_this_rank(folder / files.RNG))",
     "random_state.capture()", "checkpoint"),
    ("lines-of-last-step", "off by one", "common/run/metrics.py", '["step"] <= last_step', '["step"] < last_step',
     "metrics"),
    ("guard-late", "off by one", "common/run/guards.py", "if len(steps) >= self._cfg.collapse_steps}",
     "if len(steps) > self._cfg.collapse_steps}", "guards"),
    ("infinite-option", "check", "common/base/checks.py", " and name in MAY_BE_INFINITE)", ")", "numbers"),
    ("last-gradient", "sync", "common/base/distributed.py", "        if bucket:\n",
     "        if size > BUCKET_ELEMENTS:\n", "distributed"),
    ("error-is-result", "check", "common/base/background.py", "future.set_exception(error)", "future.set_result(error)",
     "reward_client"),
    # plans
    ("pinned-memory", "check", "common/planning/plan.py", "plan.pinned <= USABLE * plan.host_capacity and all(", "all(",
     "plan"),
    ("masters-of-fp32", "dtype", "common/planning/footprint.py", "masters = 4 if self.size == 2 and",
     "masters = 4 if self.size == 4 and", "plan"),
    ("reference-of-adapters", "mask", "common/planning/layouts.py", ' > 0 and not getattr(cfg, "lora_rank", 0):',
     " > 0:", "layouts"),
    ("shared-gpu", "check", "common/base/devices.py", 'set(own) & set(given.get("rollout", ()))', "set()", "devices"),
    ("advice-cost", "sign", "common/planning/advice.py", "HALVED * halved\n", "-HALVED * halved\n", "plan"),
    # posters
    ("layers-cut", "swap", "grpo/poster/layout.py", "min(MAX_LAYERS, 4 * len(truth.layers) + 8)",
     "max(MAX_LAYERS, 4 * len(truth.layers) + 8)", "poster_layout"),
    ("layers-for-free", "mask", "grpo/poster/reward.py", "total = emitted + len(truth)",
     "total = len(visible) + len(truth)", "poster_reward"),
    ("classes", "swap", "grpo/poster/convert.py", '"pku": {1: "text", 2: "logo",', '"pku": {1: "logo", 2: "text",',
     "poster_data"),
    ("path-leads-out", "check", "grpo/poster/records.py", "path.is_relative_to(root) and path.is_file()",
     "path.is_file()", "poster_data"),
    # training scripts, and what they share
    ("no-drop", "mask", "common/loop/scorer.py", "        micro.drop(left_out_B[micro.rows])\n", "", "golden parity"),
    ("replica-weights", "sync", "common/loop/policy.py", "models.refresh(self.trained)", "pass", "golden memory"),
    ("rank-gradients", "sync", "common/loop/trainer.py", "distributed.sum_gradients(self.optimizer.params)", "pass",
     "golden grpo"),
    ("gkd-sides", "sign", "common/generation/batches.py", "difference = self.token_logps - logps",
     "difference = logps - self.token_logps", "golden gkd"),
    ("similarity-unused", "state", "grpo/similarity_grpo.py", "rewards_AG = diversity.group_rewards(",
     "diversity.group_rewards(", "similarity"),
    ("rank-advantages", "sync", "common/base/distributed.py", "values.chunk(num_ranks())[rank()]",
     "values.chunk(num_ranks())[0]", "poster_grpo"),
    ("rounding-cap", "check", "common/model/agreement.py", "min(LARGEST, MARGIN * measured_rounding(model, rows))",
     "MARGIN * measured_rounding(model, rows)", "agreement"),
    ("special-tokens", "state", "common/model/agreement.py", "max(0, min(FIRST, size // 2, size - 10))", "0",
     "agreement"),
)]
# fmt: on


@dataclasses.dataclass
class Result:
    """Outcome of a fault; `mutation` is kept as it was tried, so that an edited one is tried again."""

    mutation: list[str]
    found_by: str  # id of a test, or a message about a test file that hung; "": not found
    seconds: float
    tried: str  # test files, or "all"


def place(root: Path, mutation: Mutation) -> str:
    """Returns the text of the mutated file, with the fault.

    Raises:
        ValueError: there is no such file, the text to be replaced does not occur exactly once, or the result does not
            compile.
    """
    path = root / mutation.file
    if not path.is_file():
        raise ValueError(f"mutation {mutation.name}: no file {mutation.file}, name the one that has its code now")
    text = path.read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1 or mutation.new == mutation.old:
        raise ValueError(
            f"mutation {mutation.name}: {mutation.old!r} stands {count} times in {mutation.file}, must be once; take a "
            "line of the present code that means the same, and another in its place"
        )
    text = text.replace(mutation.old, mutation.new)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"mutation {mutation.name}: the result does not compile: {error}") from error
    return text


def list_places(root: Path) -> list[str]:
    """Prints file and line of every mutation, and returns what is wrong with those that cannot be tried."""
    wrong = []
    for mutation in MUTATIONS:
        try:
            place(root, mutation)
        except ValueError as error:
            wrong.append(str(error))
            continue
        before = (root / mutation.file).read_text(encoding="utf-8").partition(mutation.old)[0]
        print(f"{mutation.name} ({mutation.kind}): {mutation.file}:{before.count(chr(10)) + 1}")
        tests = [f"tests/test_{name}.py" for name in mutation.first.split()]
        wrong += [f"mutation {mutation.name}: {test} does not exist" for test in tests if not (root / test).is_file()]
    return wrong


def tracked(root: Path) -> list[Path]:
    """Existing files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True).stdout.decode()
    return [Path(name) for name in listed.split("\0") if name and (root / name).is_file()]


def copy(root: Path, folder: Path) -> Path:
    """Copies the tracked files, as they are in the working tree."""
    for path in tracked(root):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, folder / path)
    return folder


def put(path: Path, text: str) -> None:
    """Writes a file and deletes its bytecode, which Python would reuse for a file of equal size and second."""
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


class Tests:
    """Runs pytest in a copy of the project."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.options, self.pid = folder, options, 0  # of pytest, while it runs
        self.files = {path.stem: path for path in (folder / "tests").rglob("test_*.py")}

    def named(self, first: str) -> list[str]:
        """Paths of the existing test files of `Mutation.first`."""
        paths = [self.files.get(f"test_{name}") for name in first.split()]
        return [str(path.relative_to(self.folder)) for path in paths if path]

    def run(self, arguments: list[str], limit: float, stop: bool = True, own_cache: bool = True) -> str:
        """Runs pytest and returns the first failure, "" if all tests passed.

        Args:
            arguments: test files and options of pytest.
            limit: seconds.
            stop: stop at the first failure; otherwise return all failures, one per line.
            own_cache: keep built-in models that a mutated project trains out of the shared cache.
        """
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
        command += arguments + ["-x"] * stop + [f"--deselect={test}" for test in (*NO_PROOF, *self.options.deselect)]
        command += ["-m", self.options.marks] if self.options.marks else []
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as scratch:
            environment = {**os.environ, "TMPDIR": scratch, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            if own_cache:
                cache = Path(os.environ.get("RL_HAND_CACHE") or "~/.cache/rl_hand").expanduser()
                environment["RL_HAND_CACHE"] = f"{scratch}/cache"
                os.mkdir(f"{scratch}/cache")
                for made in cache.glob("*"):
                    os.symlink(made, f"{scratch}/cache/{made.name}")
            with open(f"{scratch}/output.txt", "w+b") as file:
                process = subprocess.Popen(command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                                           stdout=file, stderr=file, start_new_session=True)  # fmt: skip
                self.pid, end = process.pid, time.monotonic() + limit
                # reap it only after its descendants are killed, so that its pid is not reused
                look = os.WEXITED | os.WNOHANG | os.WNOWAIT
                try:
                    while not (ended := os.waitid(os.P_PID, self.pid, look)) and time.monotonic() < end:
                        time.sleep(0.1)
                finally:
                    kill(self.pid)
                    self.pid, code = 0, process.wait()
                file.seek(0)
                output = file.read().decode(errors="replace")
        if not ended:
            return f"hang: {' '.join(arguments)[:80]} did not end in {limit:g} s"
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
        if code not in (0, 5) and not failed:  # not a test failure; after failures pytest may abort at exit
            raise RuntimeError(f"pytest {' '.join(arguments)[:80]} ended with {code}: {output[-500:]}")
        return failed[0] if failed and stop else "\n".join(failed)


def kill(pid: int) -> None:
    """Kills a process and all its descendants, in whatever session."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_bytes().rpartition(b")")[2].split()[1])
    family = [pid]
    for member in family:  # grows during the loop
        family += [child for child, parent in parents.items() if parent == member]
    for member in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # children whose parents have ended
        os.killpg(pid, signal.SIGKILL)


def attempt(mutation: Mutation, tests: Tests) -> Result:
    """Puts a fault into a copy, runs the tests, and restores the file."""
    text = place(tests.options.root, mutation)
    target, first, start = tests.folder / mutation.file, tests.named(mutation.first), time.monotonic()
    before = target.read_text(encoding="utf-8")
    put(target, text)
    try:
        found, tried = "", " ".join(first) or f"no file of {mutation.first!r}"
        for file in first:
            if found := tests.run([file], FIRST_LIMIT):
                break
        if not found and not tests.options.first_only:
            found, tried = tests.run(["tests", *(f"--ignore={file}" for file in first)], REST_LIMIT), "all"
    finally:
        put(target, before)
    return Result(list(mutation), found, round(time.monotonic() - start, 1), tried)


def table(results: dict[str, Result]) -> str:
    """The results as a Markdown page."""
    rows = [["mutation", "kind", "file", "found by", "s"], ["---"] * 5]
    for mutation in MUTATIONS:
        if result := results.get(mutation.name):
            found = f"`{result.found_by}`" if result.found_by else f"**NOT FOUND** in {result.tried}"
            rows.append([*mutation[:3], found.replace("|", "\\|"), f"{result.seconds:.0f}"])
    count = sum(bool(result.found_by) for result in results.values())
    head = f"{count} of {len(results)} faults found, out of a list of {len(MUTATIONS)}.\n\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write(results: dict[str, Result], out: Path | None) -> None:
    """Writes the page, and beside it the results that `known` reads."""
    if out:
        out.write_text(table(results), encoding="utf-8")
        lines = [json.dumps(dataclasses.asdict(result)) + "\n" for result in results.values()]
        out.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")


def void(results: dict[str, Result], tests: Tests) -> None:
    """Marks faults as not found if the test that found them also fails without a fault."""
    found = sorted({r.found_by for r in results.values() if r.found_by.startswith("tests/")})
    failed = tests.run(found, REST_LIMIT, False, False).splitlines() if found else []
    for result in results.values():
        if result.found_by in failed:
            result.found_by, result.tried = "", f"{result.tried}; {result.found_by} fails without a fault, too"


def known(out: Path) -> dict[str, Result]:
    """Results of an earlier run for mutations that have not changed since."""
    file = out.with_suffix(".jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    results = {line["mutation"][0]: Result(**line) for line in lines}
    own = {mutation.name: list(mutation) for mutation in MUTATIONS}
    same = {name: r for name, r in results.items() if name in own and own[name][2:5] == r.mutation[2:5]}
    # a fault that was not found is tried again with other test files
    return {name: r for name, r in same.items() if r.found_by or own[name][5] == r.mutation[5]}


def main(argv: list[str] | None = None) -> int:
    """Runs the mutations and returns the exit code."""
    names = [mutation.name for mutation in MUTATIONS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations; all by default")
    parser.add_argument("--list", action="store_true", help="print where each fault goes, and check that its text "
                        "occurs once, the result compiles and the test files exist; runs nothing")  # fmt: skip
    parser.add_argument("--first-only", action="store_true", help="run only the test files named with each fault")
    parser.add_argument("--jobs", type=int, default=1, help="mutations in parallel (default: %(default)s)")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2], help="checkout to copy")
    parser.add_argument("--marks", default="", help="expression for pytest -m (default: that of pyproject.toml)")
    parser.add_argument("--out", type=Path, help="Markdown file to write; results are kept in a .jsonl beside it")
    parser.add_argument("--resume", action="store_true", help="keep the results of --out and try only the others")
    parser.add_argument("--deselect", action="append", default=[], metavar="TEST", help="a test that always fails")
    parser.add_argument("--check", choices=("before", "after"), default="before", help="when to run the tests "
                        "without a fault: all of them before, or only those that found one, after")  # fmt: skip
    options = parser.parse_args(argv)
    options.root = options.root.resolve()
    if odd := sorted({*options.names} - {*names}):
        parser.error(f"mutations {odd}: must be of the list; {', '.join(names)}")
    if options.list:
        if wrong := list_places(options.root):
            parser.error("\n".join(wrong))
        return 0
    try:
        for mutation in MUTATIONS:
            place(options.root, mutation)
    except ValueError as error:
        parser.error(f"{error} (--list shows all)")
    results = known(options.out) if options.resume and options.out else {}
    wanted = [m for m in MUTATIONS if (m.name in options.names if options.names else m.name not in results)]
    results = {name: result for name, result in results.items() if name not in {m.name for m in wanted}}

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # unwinds the blocks below
    todo: queue.SimpleQueue[Mutation] = queue.SimpleQueue()
    for mutation in wanted:
        todo.put(mutation)
    lock, errors = threading.Lock(), []
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as scratch:
        workers = [Tests(copy(options.root, Path(scratch) / f"copy{i}"), options) for i in range(max(1, options.jobs))]
        if wanted:
            subprocess.run([sys.executable, "-c", MODELS], cwd=workers[0].folder, check=True)
        if wanted and options.check == "before":
            first = workers[0].named(" ".join(dict.fromkeys(" ".join(m.first for m in wanted).split())))
            print("trying the tests without a fault", flush=True)
            if failed := workers[0].run(first if options.first_only else ["tests"], REST_LIMIT, False, False):
                print(f"these tests fail without a fault, so they prove nothing: mend or --deselect them\n{failed}")
                return 2

        def work(tests: Tests) -> None:
            while not errors:
                try:
                    mutation = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    result = attempt(mutation, tests)
                except BaseException as error:
                    errors.append(error)
                    raise
                with lock:
                    results[mutation.name] = result
                    write(results, options.out)
                    print(f"{mutation.name}: {result.found_by or 'NOT FOUND'} ({result.seconds:.0f} s)", flush=True)

        threads = [threading.Thread(target=work, args=(tests,), daemon=True) for tests in workers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # Ctrl-C does not reach processes in other sessions
            errors.append(None)
            for pid in filter(None, [tests.pid for tests in workers]):
                kill(pid)
        if any(errors):
            return 2
        if options.check == "after":
            void(results, workers[0])
            write(results, options.out)
    print(table(results))
    tried = {m.name: results[m.name] for m in wanted if m.name in results} if options.names else results
    return int(sum(bool(result.found_by) for result in tried.values()) < min(NEEDED, len(tried)))


if __name__ == "__main__":
    sys.exit(main())
