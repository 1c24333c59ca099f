"""The inside of gkd/teacher_server.py: the teacher's model, its queue of requests, and their format.

Dims: m sequences, N completion tokens of all together, n in one chunk, H hidden size, V vocabulary, K top k.
"""

import math
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from common.base import service
from common.base.checks import require
from common.distill import distillation, teacher_client, teachers
from common.generation import rollout
from common.maths import divergences
from common.maths.sampling import COLDEST
from common.model import head, models, sources

MAX_ANSWER = 2**31  # bytes of an answer
MAX_SEQUENCES = 2**16  # of a request: each takes some kilobytes and microseconds, however short it is
FORMAT = "`read` in common/distill/teacher_worker.py"  # which documents the format of requests
OPTIONS = {"shared", "temperature", "deadline_seconds", "top_k", "seed", "max_new_tokens"}  # of requests
MOST_SAMPLERS = 2  # kept, one per length of completions: each has a cache in GPU memory


class Refused(Exception):
    """A request that gets no result: HTTP status and reason."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


@dataclass(eq=False)
class Job:
    """A request in the queue."""

    prompts: list[torch.Tensor]  # int64
    completions: list[torch.Tensor]  # int64; empty: to be generated
    deadline: float  # on the clock of time.monotonic
    temperature: float
    shared: int
    top_k: int = 0
    numbers: list[int] = field(default_factory=list)
    seed: int = 0
    max_new_tokens: int = 0
    pieces: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    future: Future = field(default_factory=Future)

    @property
    def size(self) -> int:
        """Tokens to compute."""
        return sum(map(len, self.prompts)) + sum(map(len, self.completions)) + len(self.prompts) * self.max_new_tokens


class Teacher:
    """The model and the queue of requests; one thread computes.

    Attributes:
        state: "loading", "ready", "draining" or "failed: why".
        info: the answer to /info, once the model is loaded.
        counts: for /metrics.
    """

    def __init__(self, cfg: Any):
        """An empty queue; `load` loads the model.

        Args:
            cfg: the Config of the server.
        """
        self.cfg, self.state, self.info, self.counts = cfg, "loading", {}, Counter()
        self.waiting: deque[Job] = deque()
        self.busy = False
        self._too_late = math.inf  # time.monotonic() after which no client waits for the present batch
        self.samplers: dict[tuple[int, int], rollout.Sampler] = {}
        self._changed = threading.Condition()

    def load(self) -> None:
        """Loads the model and computes one answer with it; call it in the thread that calls `work`.

        Raises:
            ValueError: the model cannot be found, or is of a kind the numbers would be wrong for.
            FloatingPointError: it computes something that is not finite.
        """
        cfg, gpus = self.cfg, torch.cuda.device_count()
        require(cfg.device != "cuda" or gpus > 0, "device = 'cuda'", "no GPU is visible", "set it to 'auto' or 'cpu'")
        if cfg.device == "cpu" or not gpus:
            self.devices = [torch.device("cpu")]
        else:
            self.devices = [torch.device("cuda", i) for i in range(gpus)]
        self.model = models.load_spread(cfg.teacher_model, self.devices, cfg.dtype)
        self.compile = cfg.compile and len(self.devices) == 1
        self.tokenizer = sources.load_tokenizer(cfg.teacher_model)
        self.tokens = self.tokenizer.get_vocab()
        self.states = distillation.HiddenStates(self.model, 1.0, self.compile)
        output = self.model.get_output_embeddings()
        self.weight, self.bias = head.operand(output.weight), output.bias
        self.softcap = head.softcap_of(self.model)
        V = len(output.weight)
        # a position the model has no embedding for would end the whole process on a GPU
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or cfg.max_tokens
        self.info = {
            "protocol": teacher_client.PROTOCOL,
            "model": cfg.teacher_model,
            "weights": models.fingerprint(self.model),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "vocabulary_size": V,
            "tokenizer_hash": teacher_client.vocabulary_hash(self.tokens),
            **teachers.tokenizer_traits(self.tokenizer),
            "max_top_k": min(cfg.max_top_k or V, V),
            "max_tokens": min(cfg.max_tokens, positions),
        }
        ids = torch.arange(4) % V
        job = Job([ids[:2], ids[:1]], [ids[2:], ids[1:]], math.inf, 1.0, V, top_k=min(4, V))
        self.answer([job])
        logps_NK, tail_N = (job.future.result()[name] for name in ("logps", "tail"))
        mass_N = logps_NK.exp().sum(-1) + tail_N.exp()
        if not ((logps_NK.diff() <= 0).all() and (mass_N - 1).abs().max() < teacher_client.MASS_ERROR):
            raise FloatingPointError(f"a first try gave the masses {mass_N.tolist()}, or a top k out of order")
        if self.state == "loading":
            self.state = "ready"

    def submit(self, job: Job) -> Future:
        """Queues a request.

        Args:
            job: its future gets the answer.

        Raises:
            Refused: the model is not ready, or the queue is full.
        """
        with self._changed:
            if self.state != "ready":
                raise Refused(503, self.state)
            if len(self.waiting) >= self.cfg.max_queue:
                self.counts["rejected"] += 1
                raise Refused(429, f"{len(self.waiting)} requests wait, as many as max_queue allows: come again later")
            self.waiting.append(job)
            self._changed.notify()
        return job.future

    @property
    def late(self) -> float:
        """Seconds since the last client stopped waiting for the present batch; below 0: one still waits."""
        return time.monotonic() - self._too_late

    def drain(self) -> None:
        """Takes no new requests; `work` returns once the queue is answered."""
        with self._changed:
            self.state = "draining"
            self._changed.notify()

    def work(self) -> None:
        """Answers requests until `drain`."""
        while jobs := self._take():
            start, self.busy = time.monotonic(), True
            self._too_late = max(start + self.cfg.deadline_seconds, *(job.deadline for job in jobs))
            try:
                self.answer(jobs)
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                _fail(jobs, Refused(507, f"out of memory: start the server with a lower --max_batch_tokens ({error})"))
            except torch.AcceleratorError as error:  # the GPU is lost to this process, which has to end
                with self._changed:
                    self.state = f"failed: {error}"
                    _fail([*jobs, *self.waiting], Refused(503, self.state))
                raise
            except Exception as error:  # reported to the client; the next request may succeed
                _fail(jobs, Refused(500, f"{type(error).__name__}: {error}"))
            self.busy, self._too_late = False, math.inf
            self.counts["batches"] += 1
            self.counts["sequences"] += sum(len(job.prompts) for job in jobs)
            self.counts["tokens"] += sum(job.size for job in jobs)
            self.counts["model_seconds"] += time.monotonic() - start

    def _take(self) -> list[Job]:
        """The next batch: one request to generate, or as many others as fit; empty when drained."""
        jobs: list[Job] = []
        with self._changed:
            while not jobs:
                while not self.waiting:
                    if self.state == "draining":
                        return []
                    self._changed.wait(1.0)  # the timeout catches a signal that comes just before
                while self.waiting:
                    job = self.waiting[0]
                    alone = not (job.completions and all(other.completions for other in jobs))
                    full = sum(other.size for other in [*jobs, job]) > self.cfg.max_batch_tokens
                    if jobs and (alone or full):
                        break
                    self.waiting.popleft()
                    if time.monotonic() > job.deadline:
                        self.counts["expired"] += 1
                        _fail([job], Refused(504, "its deadline passed while it waited"))
                    elif job.future.set_running_or_notify_cancel():
                        jobs.append(job)
        return jobs

    @torch.no_grad()
    def answer(self, jobs: list[Job]) -> None:
        """Computes what requests ask for.

        Args:
            jobs: one to generate, or some with completions; their futures get the answers.
        """
        if not jobs[0].completions:
            return self._generate(jobs[0])
        rows = [(job, *pair) for job in jobs for pair in zip(job.prompts, job.completions, strict=True)]
        for part in self._cut(rows):
            _, prompts, completions = zip(*part, strict=True)
            prompt_ids, prompt_mask = self._pad(prompts, "left")
            completion_ids, completion_mask = self._pad(completions, "right")
            hidden_NH, _ = self.states.states(prompt_ids, prompt_mask, completion_ids, completion_mask)
            hidden_NH, start = head.scaled(self.model, hidden_NH).to(self.weight.device), 0
            for job, own in groupby(part, key=lambda row: row[0]):
                ids_N = torch.cat([completion for _, _, completion in own]).to(hidden_NH.device)
                self._project(job, hidden_NH[start : start + len(ids_N)], ids_N)
                start += len(ids_N)
        for job in jobs:
            tensors = (torch.cat(pieces) for pieces in zip(*job.pieces, strict=True))
            answer = dict(zip(("ids", "logps", "tail", "token_logps"), tensors, strict=True))
            if all(x.isfinite().all() for x in answer.values()):
                job.future.set_result(answer)
            else:
                _fail([job], Refused(500, "hidden states or logits of the teacher are not finite: try --dtype fp32"))

    def _project(self, job: Job, hidden_NH: torch.Tensor, ids_N: torch.Tensor) -> None:
        """Adds the top k of some tokens to a job, a chunk at a time: [N, V] never exists."""
        weight, bias = self.weight[: job.shared], None if self.bias is None else self.bias[: job.shared]
        for hidden_nH, ids_n in head.chunks(hidden_NH, ids_N):
            logits_nV = head.project(hidden_nH, weight, bias, self.softcap)
            logps_nV = divergences.log_softmax(logits_nV, job.temperature)
            logps_nK, ids_nK = logps_nV.topk(job.top_k)
            token_logps_n = logps_nV.gather(-1, ids_n[:, None]).squeeze(-1)
            piece = ids_nK.int(), logps_nK, divergences.tail_logp(logps_nV, ids_nK), token_logps_n
            job.pieces.append(tuple(x.cpu() for x in piece))

    def _cut(self, rows: list[tuple]) -> list[list[tuple]]:
        """Splits rows into forward passes; padding counts where the model computes it."""
        parts: list[list[tuple]] = []
        sizes: list[int] = []
        for row in rows:
            sizes.append(len(row[1]) + len(row[2]))
            computed = sum(sizes) if self.states.packed else max(sizes) * len(sizes)
            if not parts or computed > self.cfg.max_batch_tokens:
                parts.append([])
                sizes = sizes[-1:]
            parts[-1].append(row)
        return parts

    def _pad(self, sequences: tuple[torch.Tensor, ...], side: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids = pad_sequence(list(sequences), True, 0, padding_side=side)
        mask = pad_sequence([torch.ones(len(x), dtype=torch.bool) for x in sequences], True, False, padding_side=side)
        return ids.to(self.devices[0]), mask.to(self.devices[0])

    def _generate(self, job: Job) -> None:
        key, V = (job.max_new_tokens, job.shared), self.info["vocabulary_size"]
        if key not in self.samplers:
            while len(self.samplers) >= MOST_SAMPLERS:
                del self.samplers[next(iter(self.samplers))]
            self.samplers[key] = rollout.Sampler(
                [self.model], end_ids=sources.end_token_ids(self.tokenizer, self.model), pad_id=0,
                max_new_tokens=job.max_new_tokens, suppressed_ids=range(job.shared, V), compile=self.compile,
            )  # fmt: skip
        batch = self.samplers[key].generate([prompt.tolist() for prompt in job.prompts], group_size=1, seed=job.seed,
                                            temperature=job.temperature, prompt_numbers=job.numbers)  # fmt: skip
        tokens, lengths = torch.cat(batch.completions).int(), batch.lengths.int()
        job.future.set_result({"tokens": tokens, "completion_lengths": lengths, "truncated": batch.truncated})


def read(path: str, body: bytes, teacher: Teacher) -> Job:
    """Parses and checks a request: a body in the safetensors format, with options as text in the metadata.

    Both kinds: `tokens` int32, all sequences one behind the other; `prompt_lengths` int32 [m]. Options: `shared`, the
    number of first ids that count (all); `temperature` (1); `deadline_seconds`, after which it need not be computed.

    /topk_logprobs: each completion follows its prompt; `completion_lengths` int32 [m]; option `top_k` (0: all).
    Answer: `ids` int32 [N, K], `logps` fp32 [N, K] in falling order, `tail` fp32 [N], log of the mass of all other ids,
    `token_logps` fp32 [N] of the completions' tokens.

    /generate: `numbers` int64 [m], which name the random numbers of each prompt; options `seed` (0), `max_new_tokens`.
    Answer: `tokens` int32, all completions one behind the other, `completion_lengths` int32 [m], `truncated` bool [m].

    Args:
        path: /topk_logprobs or /generate.
        body: of the request.
        teacher: that will answer it.

    Raises:
        ValueError: it is not what this server answers, with the reason.
    """
    tensors, options = service.unpack(body)
    scored = path == "/topk_logprobs"
    _require_tensors(tensors, scored)
    for name in options.keys() - OPTIONS:  # or a misspelled option would silently have its default
        raise ValueError(f"option {name!r:.80}: must be one of {', '.join(sorted(OPTIONS))}; see {FORMAT}")
    info, tokens, prompts = teacher.info, tensors["tokens"], tensors["prompt_lengths"].long()
    max_new_tokens = 0 if scored else _option(options, "max_new_tokens", 0, int)
    V, limit, m = info["vocabulary_size"], info["max_tokens"], len(prompts)
    shared, temperature = _option(options, "shared", V, int), _option(options, "temperature", 1.0, float)
    seconds = _option(options, "deadline_seconds", teacher.cfg.deadline_seconds, float)

    completions = tensors["completion_lengths"].long() if scored else torch.zeros(m, dtype=torch.int64)
    others = completions if scored else tensors["numbers"]
    require(m > 0, "0 sequences", "must be at least 1", "send no request")
    require(m <= MAX_SEQUENCES, f"{m} sequences", f"must be at most {MAX_SEQUENCES}", "send fewer at a time")
    require(len(others) == m, f"{m} prompts, {len(others)} of the others", "must be as many", "send one for each")
    lengths = torch.stack([prompts, completions], dim=1)
    shortest = int(lengths.min()) if scored else int(prompts.min())
    require(shortest > 0, f"a prompt or completion of {shortest} tokens", "must have at least 1", "leave the row out")
    total, longest = int(lengths.sum()), int(lengths.sum(1).max()) + max_new_tokens
    require(total == len(tokens), f"lengths add up to {total}", f"must be the {len(tokens)} tokens", "correct them")
    require(longest <= limit, f"a sequence of {longest} tokens", f"must be at most {limit}", "see --max_tokens")
    low, high = (int(x) for x in tokens.aminmax())
    require(low >= 0 and high < V, f"token ids from {low} to {high}", f"must be from 0 to {V - 1}",
            "translate them to the tokenizer of this teacher")  # fmt: skip
    require(0 < shared <= V, f"shared = {shared}", f"must be from 1 to {V}", "leave it out for all")
    warm = temperature >= COLDEST or (not scored and temperature == 0)
    require(warm and temperature < math.inf, f"temperature = {temperature}",
            f"must be finite and at least {COLDEST}: logits divided by less overflow", "1 changes nothing")  # fmt: skip
    require(seconds > 0, f"deadline_seconds = {seconds}", "must be above 0", "raise it")

    pieces = tokens.long().split(lengths.flatten().tolist())
    job = Job(list(pieces[::2]), list(pieces[1::2]) if scored else [], time.monotonic() + seconds, temperature, shared)
    if scored:
        job.top_k = _option(options, "top_k", 0, int) or shared
        most, highest = info["max_top_k"], max(int(x.max()) for x in job.completions)
        require(0 < job.top_k <= most, f"top_k = {job.top_k}", f"must be from 1 to {most}", "see --max_top_k")
        require(job.top_k <= shared, f"top_k = {job.top_k}", f"must be at most shared = {shared}", "lower it")
        require(highest < shared, f"a completion token {highest}", f"must be below shared = {shared}", "raise shared")
        answered = int(completions.sum()) * job.top_k
    else:
        require(max_new_tokens > 0, f"max_new_tokens = {max_new_tokens}", "must be at least 1", "raise it")
        job.numbers, job.seed, job.max_new_tokens = others.tolist(), _option(options, "seed", 0, int), max_new_tokens
        answered = m * max_new_tokens
    require(8 * answered <= MAX_ANSWER, f"an answer of {8 * answered} bytes", f"must be at most {MAX_ANSWER}",
            "ask for fewer tokens at a time")  # fmt: skip
    return job


def _require_tensors(tensors: dict[str, torch.Tensor], scored: bool) -> None:
    """Refuses a request without the tensors of its kind."""
    expected = {"tokens": torch.int32, "prompt_lengths": torch.int32}
    expected |= {"completion_lengths": torch.int32} if scored else {"numbers": torch.int64}
    for name, dtype in expected.items():
        x = tensors.get(name)
        got = "nothing" if x is None else f"{x.dtype} {list(x.shape)}"
        good = x is not None and x.dtype == dtype and x.ndim == 1
        require(good, f"{name}: {got}", f"must be {dtype} of one dimension", f"see {FORMAT}")


def _option(options: dict[str, str], name: str, default: float, kind: type) -> float:
    text = options.get(name, default)
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{name} = {text!r}: must be a number; see {FORMAT}") from error


def _fail(jobs: list[Job], why: Refused) -> None:
    for job in jobs:
        if not job.future.done():
            job.future.set_exception(why)
