"""Client of an HTTP reward service, such as grpo/poster/reward_server.py, with batches and retries.

Request:  POST /compute_reward_batch {"items": [{"id", "solution_str", "ground_truth", "prompt",
          "step", "extra_info"}, ...]}; an id is STEP.ROW.NONCE, and no other request has it; the prompt
          is text or chat messages
Response: {"results": [{"id", "ok": true, "score", ...}, {"id", "ok": false, "error": {"code",
          "message", "retryable"}}, ...], "fingerprint": "..."}, one result per item, in order;
          other numbers of a result are reported as metrics
Start:    GET /health answers 200 when the service is ready; GET /info returns its "fingerprint",
          which changes with everything that changes scores. A run does not continue with another
          fingerprint.

An item that the service could not score is NaN, never 0, and is left out.
"""

import json
import math
import os
import secrets
import sys
import time
from collections.abc import Mapping
from numbers import Real
from typing import Any

from common.base.checks import require
from common.base.distributed import OutageError, print_main
from common.base.service import PAUSES, Service
from common.tasks.scoring import ARGUMENTS

BATCH_ITEMS = 32  # maximum items of a request
BATCH_BYTES = 2**22  # maximum bytes of a request, half of what the service accepts
ITEM_TRIES = 3  # for items with retryable errors
LEAST_SCORED = 0.75  # minimum scored share of a group; below it the baseline is biased
MOST_LOST = 0.2  # maximum unscored share of a step; above it the service counts as unavailable
FLAT_STEPS = 5  # consecutive calls with equal scores, or with few completions that parse, before a warning
LEAST_PARSED = 0.1  # minimum share of completions that parse
MEND = "Mend the service, then run the same command: what was sampled is scored first"
NOT_METRICS = ("id", "ok", "score", "ms", "service")  # "service" is the metric of the score


class RewardService:
    """Scores completions with the service at a `reward_url`.

    Attributes:
        fingerprint: of everything that scores depend on.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 120.0,
        patience_s: float = 900.0,
        workers: int = 4,
        token: str | None = None,
        fingerprint: str | None = None,
    ):
        """Waits until the service is ready.

        Args:
            url: such as "http://127.0.0.1:8899".
            timeout_s: seconds for one request.
            patience_s: seconds that the service may be unavailable, now and later.
            workers: requests in flight.
            token: of the service; default: RL_HAND_REWARD_TOKEN of the environment.
            fingerprint: required one, of a resumed run; None: any.

        Raises:
            OutageError: the service did not become ready.
            ValueError: its fingerprint is missing or another one.
        """
        token = os.environ.get("RL_HAND_REWARD_TOKEN", "") if token is None else token
        self.service = Service(url, token=token, timeout_s=timeout_s, patience_s=patience_s, workers=workers,
                               content_type="application/json")  # fmt: skip
        self.service.wait_until_ready(patience_s)
        found = _read(self.service.get("/info"), url).get("fingerprint")
        known = isinstance(found, str) and found != ""
        require(known, f"fingerprint of {url}: {found!r}", "must be text", "/info says what scores depend on")
        self.fingerprint = found if fingerprint is None else fingerprint
        self._require_fingerprint(found)
        self.service.on_recovery = self._check_fingerprint
        self._flat, self._malformed = 0, 0

    def scores(self, arguments: Mapping[str, Any], group_size: int) -> dict[str, tuple[list[float], float]]:
        """Scores of completions, for `extra` of `scoring.score`.

        Args:
            arguments: of reward functions, B rows grouped by prompt; `answers` are sent as
                `ground_truth`. The column `extra_info` is sent if it exists, else all columns.
            group_size: completions per prompt; a group with fewer than 75 % scored becomes NaN.

        Returns:
            "service": scores with weight 1; other numbers of the results by name, with weight 0.
            NaN = unscored.

        Raises:
            OutageError: the service was unavailable for longer than the patience, failed, refused,
                sent an invalid response or another fingerprint, or left more than a fifth unscored.
                The run can save and resume later.
            ValueError: a column cannot be sent.
        """
        nonce = secrets.token_hex(4)  # a service that repeats earlier answers is found out
        items = [_item(row, nonce, arguments) for row in range(len(arguments["completions"]))]
        try:
            results, failed = self._results(items)
        except OutageError:
            raise
        except (RuntimeError, ValueError) as error:  # available, but unusable
            raise OutageError(f"{error}. {MEND}") from error
        if failed:
            example = str(next(iter(failed.values())))
            summary = f"{len(failed)} of {len(items)} completions were not scored, such as: {example:.500}"
            if len(failed) > MOST_LOST * len(items):
                raise OutageError(f"{self.service.url}: {summary}. {MEND}")
            print_main(f"warning: {summary}; they are left out")
        values = [math.nan if result is None else float(result["score"]) for result in results]
        for start in range(0, len(values), group_size):
            group = values[start : start + group_size]
            if sum(not math.isnan(x) for x in group) < LEAST_SCORED * len(group):
                values[start : start + group_size] = [math.nan] * len(group)
        named = {"service": (values, 1.0)}
        for name in dict.fromkeys(name for result in results if result for name in result):
            numbers = [_number(result, name) for result in results]
            if name not in NOT_METRICS and not all(map(math.isnan, numbers)):
                named[name] = (numbers, 0.0)
        self._watch(named)
        return named

    def _results(self, items: list[bytes]) -> tuple[list[dict[str, Any] | None], dict[int, Any]]:
        """The result of each item, None after failure, and the last error of each failed item."""
        results: list[dict[str, Any] | None] = [None] * len(items)
        failed: dict[int, Any] = {}

        def ask(rows: list[int]) -> None:
            for row, result in zip(rows, self._ask([items[row] for row in rows]), strict=True):
                if result["ok"]:
                    results[row] = result
                    failed.pop(row, None)
                else:
                    failed[row] = result["error"]

        todo, pause = list(range(len(items))), PAUSES[0]
        for tried in range(ITEM_TRIES):
            if tried:
                time.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
            self.service.for_each(ask, _parts([len(item) for item in items], todo))
            todo = sorted(row for row, error in failed.items() if error.get("retryable"))
            if not todo:
                break
        return results, failed

    def _ask(self, items: list[bytes]) -> list[dict[str, Any]]:
        """The results of one request, checked."""
        url = self.service.url
        answer = _read(self.service.post("/compute_reward_batch", b'{"items":[' + b",".join(items) + b"]}"), url)
        self._require_fingerprint(answer.get("fingerprint"))
        results = answer.get("results")
        if not isinstance(results, list) or len(results) != len(items):
            got = f"{len(results)} results" if isinstance(results, list) else f"{results!r:.80}"
            raise RuntimeError(f"{url}: {got} for {len(items)} items: must be one each, in order")
        for item, result in zip(items, results, strict=True):
            wanted = json.loads(item)["id"]
            if not isinstance(result, dict) or result.get("id") != wanted:
                raise RuntimeError(f"{url}: {result!r:.200}: must be the result with the id {wanted!r}")
            if result.get("ok") is True:
                score = result.get("score")
                if not _is_number(score) or not 0 <= score <= 1:
                    raise RuntimeError(f"{url}: a score of {score!r}: must be a number from 0 to 1")
            elif result.get("ok") is not False or not isinstance(result.get("error"), dict) or "score" in result:
                raise RuntimeError(f"{url}: {result!r:.200}: must be ok with a score, or an error without one")
        return results

    def _check_fingerprint(self) -> None:
        self._require_fingerprint(_read(self.service.once("GET", "/info"), self.service.url).get("fingerprint"))

    def _require_fingerprint(self, found: Any) -> None:
        require(
            found == self.fingerprint,
            f"the fingerprint of {self.service.url} is {found!r}",
            f"must be that of the run, {self.fingerprint!r}: rewards of two services cannot be compared",
            "start the service as before, or go on with --allow_reward_change",
        )

    def _watch(self, named: dict[str, tuple[list[float], float]]) -> None:
        """Warns once if scores stay equal, or if few completions parse, for FLAT_STEPS calls."""
        known = [x for x in named["service"][0] if not math.isnan(x)]
        self._flat = self._flat + 1 if len(known) > 1 and max(known) - min(known) < 1e-6 else 0
        if self._flat == FLAT_STEPS:
            print_main(f"warning: {FLAT_STEPS} times in a row all scores were {known[0]:g}: nothing is learned of them")
        parsed = [x for x in named.get("parse_ok", ([], 0.0))[0] if not math.isnan(x)]
        self._malformed = self._malformed + 1 if parsed and sum(parsed) < LEAST_PARSED * len(parsed) else 0
        if self._malformed == FLAT_STEPS:
            text = "fewer than 10 % of completions parsed: begin with a supervised start, or raise max_new_tokens"
            print_main(f"warning: {FLAT_STEPS} times in a row {text}")


def _item(row: int, nonce: str, arguments: Mapping[str, Any]) -> bytes:
    """One item of a request as JSON."""
    own = {name: values[row] if isinstance(values, list) else values for name, values in arguments.items()}
    columns = {name: value for name, value in own.items() if name not in ARGUMENTS or name == "completion_tokens"}
    step, prompt = own.get("step", 0), own.get("prompts")
    item = {"id": f"{step}.{row}.{nonce}", "solution_str": own["completions"], "ground_truth": own["answers"],
            "prompt": prompt, "step": step, "extra_info": own.get("extra_info", columns) or {}}  # fmt: skip
    try:
        return json.dumps(item, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"row {row}: its columns cannot be sent as JSON ({error}); put what the service needs into extra_info"
        ) from error


def _parts(sizes: list[int], rows: list[int]) -> list[list[int]]:
    """Splits rows into requests."""
    parts: list[list[int]] = []
    total = BATCH_BYTES
    for row in rows:
        total += sizes[row]
        if total > BATCH_BYTES or len(parts[-1]) == BATCH_ITEMS:
            parts.append([])
            total = sizes[row]
        parts[-1].append(row)
    return parts


def _read(body: bytes, url: str) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RuntimeError(f"{url} answered {body[:80]!r}, which is no JSON ({error})") from error
    if not isinstance(answer, dict):
        raise RuntimeError(f"{url} answered {body[:80]!r}: must be a JSON object")
    return answer


def _is_number(value: Any) -> bool:
    # compared, not converted: a JSON integer may be larger than any float
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _number(result: dict[str, Any] | None, name: str) -> float:
    """A number or bool of a result; NaN for anything else."""
    value = None if result is None else result.get(name)
    return float(value) if isinstance(value, bool) or _is_number(value) else math.nan
