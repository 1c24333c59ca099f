"""A teacher behind HTTP, for distillation: gkd/teacher_server.py is the other end.

Dims: m sequences, C completion tokens of one at most, N of all together, K the teacher's top k.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from common.base.checks import require
from common.base.service import Service, pack, unpack
from common.generation.batches import RolloutBatch, TeacherOutput
from common.maths.sampling import COLDEST

PROTOCOL = 1  # goes up when requests or answers change their meaning
IDENTITY = ("protocol", "model", "weights", "tokenizer_hash", "template_hash", "vocabulary_size", "dtype")
INFO = {"vocabulary_size": int, "max_top_k": int, "model": str, "weights": str, "tokenizer_hash": str}  # of /info
REQUEST_TOKENS = 16384  # prompt and completion tokens of one request, where the script gives no limit
ANSWER_BYTES = 2**28  # target size of an answer: a large top k makes the requests smaller
MAX_ANSWER = 2**31 + 2**28  # bytes of one answer at most: the server's limit, and room for the tails
PROMPTS = 512  # in one request to generate
MASS_ERROR = 1e-3  # how far from 1 the top k and the tail may add up
SORTED_IDS = 1024  # up to here, repeated ids are found by sorting; beyond, a table of all ids is faster
LOGP_ERROR = 1e-4  # nats, between the two log-probabilities that an answer gives of one token


def vocabulary_hash(vocabulary: dict[str, int]) -> str:
    """Hash of a vocabulary: equal for equal tokens at equal ids.

    Args:
        vocabulary: ids by token, as a tokenizer's get_vocab gives them.

    Returns:
        SHA-256 in hexadecimal digits.
    """
    return _hash(sorted((number, token) for token, number in vocabulary.items()))


def identity(info: dict[str, Any]) -> str:
    """Hash of what a server computes with; every answer carries it.

    Args:
        info: the answer to /info.
    """
    return _hash([info.get(name) for name in IDENTITY])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class RemoteTeacher:
    """A teacher behind a server.

    Attributes:
        head: None: a server sends no hidden states, so no output head is needed.
        to_save: None: its weights do not change.
        info: the server's answer to /info.
        name: of the model.
        weights: their `models.fingerprint`.
        vocabulary_size: rows of the teacher's output head.
        max_top_k: upper bound on `top_k`.
        tokenizer_hash: from `vocabulary_hash`.
        tokenizer_traits: those of `teachers.tokenizer_traits`, among other entries of `info`.
        shared: number of the first ids over which the teacher normalizes and from which it generates; set by
            `teachers.agree`.
    """

    head = None
    to_save = None

    def __init__(
        self,
        url: str,
        *,
        top_k: int,
        temperature: float,
        workers: int,
        timeout_s: float = 600.0,
        patience_s: float = 1800.0,
        token: str | None = None,
    ):
        """Waits until the server is ready.

        Args:
            url: such as "http://127.0.0.1:15555".
            top_k: tokens asked for per token; 0: all shared ones.
            temperature: divides the teacher's logits.
            workers: requests in flight at a time.
            timeout_s: seconds for one answer.
            patience_s: seconds that the server may be unreachable, now and later.
            token: of the server; by default the environment's RL_HAND_TEACHER_TOKEN.

        Raises:
            OutageError: the server did not become ready.
            ValueError: the server sends fewer than `top_k` tokens, or is no teacher of this version.
        """
        require(top_k >= 0, f"top_k = {top_k}", "must be 0 or more", "0 asks for the whole vocabulary")
        require(COLDEST <= temperature < math.inf, f"temperature = {temperature}",
                f"must be above 0, finite, and at least {COLDEST}", "1 is usual")  # fmt: skip
        token = os.environ.get("RL_HAND_TEACHER_TOKEN", "") if token is None else token
        self.service = Service(url, token=token, timeout_s=timeout_s, patience_s=patience_s, workers=workers,
                               max_answer=MAX_ANSWER)  # fmt: skip
        self.top_k, self.temperature = top_k, temperature
        self.service.wait_until_ready(patience_s)
        self.info = _read_info(url, self.service.get("/info"))
        self.vocabulary_size, self.shared = self.info["vocabulary_size"], self.info["vocabulary_size"]
        self.max_top_k, self.name, self.weights = self.info["max_top_k"], self.info["model"], self.info["weights"]
        self.tokenizer_hash, self.tokenizer_traits = self.info["tokenizer_hash"], self.info
        most = min(top_k or self.vocabulary_size, self.vocabulary_size)
        require(
            most <= self.max_top_k,
            f"top_k = {top_k}, which is {most} of {self.vocabulary_size} ids",
            f"{url} sends at most {self.max_top_k}",
            f"lower it, or start the server with --max_top_k {most}",
        )
        self.service.on_recovery = self._check_same

    def vocabulary(self) -> dict[str, int]:
        """Ids by token, of the teacher's tokenizer."""
        found = _object(self.service.get("/vocabulary"))
        numbers = all(type(id_) is int for id_ in found.values())
        # a truncated one would agree with every tokenizer
        if not numbers or vocabulary_hash(found) != self.tokenizer_hash:
            raise ValueError(f"{self.service.url}: a vocabulary of {len(found)} tokens, which is not that of /info")
        return found

    def fill(self, micros: Iterable[RolloutBatch], micro_batch_tokens: int = 0) -> None:
        """Sets `teacher` of micro-batches to the teacher's top k.

        With one worker, requests depend on the micro-batches alone: a run whose server was killed and restarted gets
        the same numbers bit for bit.

        Args:
            micros: micro-batches; padding gets 0.
            micro_batch_tokens: prompt and completion tokens in one request, at most; a longer sequence is alone.

        Raises:
            OutageError: the server was unreachable for longer than the patience.
            RuntimeError: the server failed, with its message.
            ValueError: the server refused, or its answer does not fit the request.
        """
        micros, prompts, completions = list(micros), [], []
        for micro in micros:
            prompts += [ids.int() for ids in micro.prompts]
            completions += [ids.int() for ids in micro.completions]
        K, N = min(self.top_k or self.shared, self.shared), sum(map(len, completions))
        found = {"ids": torch.empty(N, K, dtype=torch.int32), "logps": torch.empty(N, K), "tail": torch.empty(N),
                 "token_logps": torch.empty(N)}  # fmt: skip

        def ask(part: tuple[int, list[int]]) -> None:
            start, rows = part
            answer = self._ask([prompts[i] for i in rows], [completions[i] for i in rows], K)
            for name, tensor in answer.items():
                found[name][start : start + len(tensor)] = tensor

        rows = [i for i, completion in enumerate(completions) if len(completion)]
        sizes = [len(prompts[i]) + len(completions[i]) for i in rows]
        limit = min(
            micro_batch_tokens or REQUEST_TOKENS, ANSWER_BYTES // (8 * K), -(-sum(sizes) // self.service.workers)
        )
        parts, start, room = [], 0, 0
        for i, size in zip(rows, sizes, strict=True):
            if size > room:
                parts.append((start, []))
                room = limit
            parts[-1][1].append(i)
            start, room = start + len(completions[i]), room - size
        self.service.for_each(ask, parts)

        start = 0
        for micro in micros:
            sampled_mC = torch.arange(micro.completion_ids.shape[1]) < micro.lengths[:, None]
            part, padded = slice(start, start + int(micro.lengths.sum())), {}
            for name, tensor in found.items():
                out = torch.zeros(*sampled_mC.shape, *tensor.shape[1:], dtype=tensor.dtype)
                out[sampled_mC] = tensor[part]
                padded["tail_logp" if name == "tail" else name] = out.to(micro.device)
            micro.teacher, start = TeacherOutput(**padded), part.stop

    def generate(
        self,
        prompts: Sequence[list[int]],
        numbers: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_new_tokens: int,
    ) -> list[list[int]]:
        """Completions by the teacher, equal to those of a `rollout.Sampler` with its weights.

        Args:
            prompts: token ids of each.
            numbers: place of each prompt in the data: it names its stream of random numbers.
            seed: of the run.
            temperature: of the softmax; 0 takes the most likely token.
            max_new_tokens: tokens after which a completion is cut off.

        Returns:
            Token ids of each completion, the end token included unless it was cut off.

        Raises:
            OutageError: as `fill`; likewise RuntimeError and ValueError.
        """
        completions: list[list[int]] = [[] for _ in prompts]
        options = dict(seed=seed, temperature=temperature, max_new_tokens=max_new_tokens, shared=self.shared,
                       deadline_seconds=self.service.timeout_s)  # fmt: skip

        def ask(start: int) -> None:
            own = prompts[start : start + PROMPTS]
            request = {
                "tokens": torch.tensor(list(itertools.chain(*own)), dtype=torch.int32),
                "prompt_lengths": torch.tensor(list(map(len, own)), dtype=torch.int32),
                "numbers": torch.tensor(list(numbers[start : start + PROMPTS])),
            }
            answer = self._post("/generate", request, options)
            tokens, lengths = answer.get("tokens"), answer.get("completion_lengths")
            whole = tokens is not None and lengths is not None and len(lengths) == len(own) and tokens.ndim == 1
            whole = whole and tokens.dtype == lengths.dtype == torch.int32 and lengths.ndim == 1
            if not (whole and int(lengths.min()) >= 1 and int(lengths.max()) <= max_new_tokens
                    and int(lengths.sum()) == len(tokens) and _ids_within(tokens, self.shared)):  # fmt: skip
                raise ValueError(
                    f"{self.service.url}: asked for {len(own)} completions of 1 to {max_new_tokens} tokens below "
                    f"{self.shared}, got {_shapes(answer)}"
                )
            completions[start : start + len(own)] = [ids.tolist() for ids in tokens.split(lengths.tolist())]

        self.service.for_each(ask, range(0, len(prompts), PROMPTS))
        return completions

    def refresh(self, student: Any, step: int) -> None:
        """No-op: a server's weights stay as they are."""

    def offload(self) -> float:
        """No-op: the server has memory of its own. Returns 0.0 GiB."""
        return 0.0

    def onload(self) -> None:
        """No-op."""

    def _ask(self, prompts: list[torch.Tensor], completions: list[torch.Tensor], K: int) -> dict[str, torch.Tensor]:
        """One request to /topk_logprobs and its checked answer."""
        pairs = itertools.chain(*zip(prompts, completions, strict=True))
        request = {
            "tokens": torch.cat(list(pairs)),
            "prompt_lengths": torch.tensor(list(map(len, prompts)), dtype=torch.int32),
            "completion_lengths": torch.tensor(list(map(len, completions)), dtype=torch.int32),
        }
        # the deadline keeps the server from computing a request that timed out here
        options = dict(top_k=K, temperature=self.temperature, shared=self.shared,
                       deadline_seconds=self.service.timeout_s)  # fmt: skip
        answer = self._post("/topk_logprobs", request, options)
        self._check(answer, torch.cat(completions), K)
        return answer

    def _check(self, answer: dict[str, torch.Tensor], tokens_N: torch.Tensor, K: int) -> None:
        """Refuses an answer that cannot be the top k at these tokens."""
        N = len(tokens_N)
        asked = {"ids": ((N, K), torch.int32), "logps": ((N, K), torch.float32), "tail": ((N,), torch.float32),
                 "token_logps": ((N,), torch.float32)}  # fmt: skip
        if {name: (tuple(x.shape), x.dtype) for name, x in answer.items()} != asked:
            raise ValueError(
                f"{self.service.url}: asked for {K} of {self.shared} log-probabilities at {N} tokens, got "
                f"{_shapes(answer)} in place of {_shapes({k: torch.empty(s, dtype=d) for k, (s, d) in asked.items()})}"
            )
        for name in ("logps", "tail", "token_logps"):
            if not answer[name].isfinite().all():
                count = int((~answer[name].isfinite()).sum())
                raise ValueError(f"{self.service.url}: {count} of {answer[name].numel()} {name} are not finite")
        if not _ids_within(answer["ids"], self.shared):
            low, high = answer["ids"].aminmax()
            raise ValueError(f"{self.service.url}: ids from {low} to {high}, must be from 0 to {self.shared - 1}")
        error = (answer["logps"].double().exp().sum(-1) + answer["tail"].double().exp() - 1).abs().max().item()
        if error > MASS_ERROR:
            raise ValueError(
                f"{self.service.url}: probabilities of the top {K} and the tail add up to 1 only within {error:.3g}, "
                f"must be {MASS_ERROR}"
            )
        if not _all_different(answer["ids"], self.shared):
            raise ValueError(f"{self.service.url}: an id stands twice among the top {K} of a token, must stand once")
        # The log-probability of the token itself: equal to that among the top k, or below all of them. This detects
        # permuted rows, too.
        is_token_NK = answer["ids"] == tokens_N[:, None]
        among_N, token_logps_N = is_token_NK.any(-1), answer["token_logps"]
        expected_N = torch.where(is_token_NK, answer["logps"], 0.0).sum(-1)
        highest_N = torch.minimum(answer["logps"].amin(-1), answer["tail"])
        wrong_N = torch.where(among_N, (token_logps_N - expected_N).abs(), token_logps_N - highest_N) > LOGP_ERROR
        if wrong_N.any():
            row = int(wrong_N.int().argmax())
            raise ValueError(
                f"{self.service.url}: log-probability {token_logps_N[row]:.6g} of token {tokens_N[row]} does not agree "
                f"with the top {K} and the tail, by which it must be "
                + (f"{expected_N[row]:.6g}" if among_N[row] else f"at most {highest_N[row]:.6g}")
            )

    def _post(self, path: str, request: dict[str, torch.Tensor], options: dict[str, Any]) -> dict[str, torch.Tensor]:
        tensors, metadata = unpack(self.service.post(path, pack(request, options)))
        if metadata.get("identity") != identity(self.info):  # restarted between two requests
            self._check_same()
            raise ValueError(f"{self.service.url}: an answer that does not come from the server of /info")
        return tensors

    def _check_same(self) -> None:
        """Requires that a restarted server computes what it did before."""
        now = _read_info(self.service.url, self.service.once("GET", "/info"))
        changed = [f"{k}: {self.info.get(k)!r} -> {now.get(k)!r}" for k in IDENTITY if self.info.get(k) != now.get(k)]
        require(
            not changed,
            f"{self.service.url} is another teacher than before ({', '.join(changed)})",
            "a run has one teacher",
            "start the server with the model of this run, or a new run with another out_dir",
        )


def _read_info(url: str, body: bytes) -> dict[str, Any]:
    """The checked answer to /info."""
    info = _object(body)
    given, remedy = info.get("protocol"), "give the address of gkd/teacher_server.py, of the version of this script"
    require(given == PROTOCOL, f"{url}: /info begins {body[:40]!r}, protocol {given}", f"must be {PROTOCOL}", remedy)
    for name, kind in INFO.items():
        require(type(info.get(name)) is kind, f"{url}: /info says {name} = {info.get(name)!r}",
                f"must be of type {kind.__name__}", remedy)  # fmt: skip
    return info


def _object(body: bytes) -> dict[str, Any]:
    """A JSON object; empty for any other body, of another service or a proxy."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _all_different(ids_NK: torch.Tensor, limit: int) -> bool:
    """Whether no id stands twice in a row; all are from 0 to limit - 1."""
    if ids_NK.shape[1] <= SORTED_IDS:
        return bool((ids_NK.sort(-1).values.diff(dim=-1) > 0).all())
    return all(torch.zeros(limit, dtype=torch.bool).index_fill_(0, ids_K.long(), True).sum() == len(ids_K)
               for ids_K in ids_NK)  # fmt: skip


def _ids_within(ids: torch.Tensor, limit: int) -> bool:
    return not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < limit)


def _shapes(tensors: dict[str, torch.Tensor]) -> str:
    return "{" + ", ".join(f"{k}: {str(v.dtype)[6:]} {list(v.shape)}" for k, v in sorted(tensors.items())) + "}"
