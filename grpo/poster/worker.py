"""The requests that wait for scores, the one thread that scores them, and its scorer: the inside of reward_server.py.

A batch of items goes through two stages: processes do the CPU part (assessors.py), then the scorer rates all posters of
the batch at once, in the thread that called `work`. While it does, the processes work on the next batch.
"""

import hashlib
import json
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from grpo.poster import assessors, counts, reward, scorers, synthetic
from grpo.poster.errors import ScorerError
from grpo.poster.fonts import Fonts
from grpo.poster.items import MAX_BODY, MAX_ITEMS, Item, Refused

SELF_TEST = 0.9  # structure and accuracy of a good poster, at least
FAILURES = 3  # batches in a row that the scorer failed at, before it has to pass the self-test again
COMPONENTS = ("score", "structure", "accuracy", "visual")
SOURCES = ("layout", "fonts", "render", "reward", "errors", "scorers")  # modules whose text is part of the fingerprint


@dataclass(eq=False)
class Request:
    """Items that are answered together.

    Attributes:
        deadline: of time.monotonic(); an item that nobody waits for any more is not scored.
        future: gets the results, one per item, in order.
    """

    items: list[Item]
    deadline: float
    future: Future = field(default_factory=Future)

    def __post_init__(self):
        self.results: list[dict[str, Any] | Refused | None] = [None] * len(self.items)
        self.left = len(self.items)
        self.future.set_running_or_notify_cancel()  # cannot be cancelled: only `put` ends it

    def put(self, index: int, result: dict[str, Any] | Refused) -> None:
        """Notes the result of an item; in the scoring thread.

        Args:
            index: of the item.
            result: its scores, or why there are none.
        """
        self.results[index] = result
        self.left -= 1
        if not self.left:
            self.future.set_result(self.results)


Started = list[tuple[Request, int, Future]]  # items of a batch that the processes work on


class Rewards:
    """The scorer, the one thread that uses it, and the requests that wait for that.

    Attributes:
        state: "loading", "ready", "degraded" (the scorer fails and is tried out again), "draining" or "failed: why".
        info: what /info says, once it is loaded.
        counts: for /metrics.
    """

    def __init__(self, cfg: Any):
        """Nothing is loaded yet.

        Args:
            cfg: the Config of the server.
        """
        self.cfg, self.state, self.info = cfg, "loading", {}
        self.counts = counts.Counts("poster_")
        self.scorer: Any = None
        self.waiting: deque[tuple[Request, int]] = deque()
        self.started: Started = []
        self.failures = 0  # batches in a row
        self._too_late = math.inf  # time.monotonic() after which nobody waits for what the scorer works at
        self._changed = threading.Condition()

    def load(self) -> None:
        """Loads the scorer and tries everything out; to be called in the thread that calls `work`.

        Raises:
            ValueError: the scorer or a font cannot be used.
            RuntimeError: a good poster gets no good score.
        """
        cfg = self.cfg
        fonts = Fonts(cfg.fonts)
        self.scorer = scorers.load(cfg.scorer, cfg.options)
        options = assessors.Options(cfg.fonts, cfg.coord_space, cfg.asset_root, self.scorer.needs_image)
        self.processes = assessors.Assessors(cfg.processes, options, cfg.item_seconds)
        self.info = {
            "protocol": 1,
            "version": reward.VERSION,
            "weights": cfg.weights,
            "scorer": self.scorer.name,
            "scorer_identity": self.scorer.identity,
            "fonts": fonts.identity,
            "coord_space": cfg.coord_space,
            "workers": cfg.processes,
            "limits": {
                "body_bytes": MAX_BODY,
                "items": MAX_ITEMS,
                "image_bytes": assessors.MAX_IMAGE_BYTES,
                "queue": cfg.max_queue,
                "batch": cfg.max_batch,
            },
        }
        self.info["fingerprint"] = fingerprint(self.info)
        self._self_test()
        if self.state == "loading":
            self.state = "ready"

    def _self_test(self) -> None:
        record = synthetic.record(0, 1)
        images = {f"image_{i}": reference for i, reference in enumerate(record["images"], 1)}
        truth, extra = json.dumps(record["ground_truth"]), json.dumps(record["extra_info"])
        request = Request([Item(None, synthetic.gold(record), truth, extra, images)], math.inf)
        self._finish(self._start([(request, 0)]))
        (result,) = request.future.result()
        if isinstance(result, Refused) or min(result["structure"], result["accuracy"]) < SELF_TEST:
            raise RuntimeError(f"the self-test failed: a good poster got {result}, must get at least {SELF_TEST}")

    def submit(self, items: list[Item], seconds: float) -> Future:
        """Puts items into the queue.

        Args:
            items: of a request.
            seconds: that it waits.

        Returns:
            One result per item: scores, or Refused.

        Raises:
            Refused: not ready, or too many wait.
        """
        request = Request(items, time.monotonic() + seconds)
        with self._changed:
            self.require_ready()
            self.require_room(len(items))
            self.waiting.extend((request, index) for index in range(len(items)))
            self._changed.notify()
        return request.future

    def gauges(self) -> dict[str, float]:
        """What /metrics says of now, and what the scorer itself counts."""
        own = {f"scorer_{name}": count for name, count in dict(getattr(self.scorer, "counters", {})).items()}
        return {"waiting": len(self.waiting), "ready": int(self.state == "ready"), **own}

    @property
    def late(self) -> float:
        """Seconds for which nobody has waited any more for what the scorer works at; below 0: somebody does."""
        return time.monotonic() - self._too_late

    def require_ready(self) -> None:
        """Raises Refused if nothing can be scored now."""
        if self.state != "ready":
            raise Refused(self.state.partition(":")[0], self.state)

    def require_room(self, items: int) -> None:
        """Raises Refused if so many do not fit into the queue now.

        Args:
            items: of a request.
        """
        if len(self.waiting) + items > self.cfg.max_queue:
            text = f"{len(self.waiting)} items wait, {self.cfg.max_queue} at most (--max_queue): come again later"
            raise Refused("queue_full", text)

    def drain(self) -> None:
        """No new request is taken any more; `work` returns when those that wait are answered."""
        with self._changed:
            self.state = "draining"
            self._changed.notify()

    def work(self) -> None:
        """Scores until `drain`.

        Raises:
            RuntimeError: the scorer failed again and again, and did not pass the self-test after that.
        """
        while (batch := self._take(wait=not self.started)) or self.started:
            following = self._start(batch)
            self._finish(self.started)
            self.started = following
            if self.failures >= FAILURES and self.state == "ready":
                self.state = "degraded"
                self._self_test()
                self.failures = 0
                if self.state == "degraded":
                    self.state = "ready"
        self.processes.close()

    def fail(self, error: Exception) -> None:
        """Says why nothing will be scored any more to all who ask, or wait.

        Args:
            error: that `load` or `work` raised.
        """
        with self._changed:
            self.state = f"failed: {error}"
            left = [*((request, index) for request, index, _ in self.started), *self.waiting]
            self.waiting.clear()
        for request, index in left:
            if request.results[index] is None:
                self._refuse(request, index, Refused("failed", self.state))

    def _take(self, wait: bool) -> list[tuple[Request, int]]:
        """The items scored next. None: there are none, and `wait` is off or all is done."""
        batch: list[tuple[Request, int]] = []
        with self._changed:
            while True:
                while wait and not self.waiting and self.state != "draining":
                    self._changed.wait(1.0)  # a signal that comes just before is seen then
                if wait and self.state != "draining":  # more may come; while a batch is at work, it is that time
                    full = time.monotonic() + self.cfg.batch_wait_ms / 1000
                    while len(self.waiting) < self.cfg.max_batch and (left := full - time.monotonic()) > 0:
                        self._changed.wait(left)
                while self.waiting and len(batch) < self.cfg.max_batch:
                    request, index = self.waiting.popleft()
                    if time.monotonic() > request.deadline:
                        self._refuse(request, index, Refused("deadline", "its deadline passed while it waited"))
                    else:
                        batch.append((request, index))
                if batch or not wait or (self.state == "draining" and not self.waiting):
                    return batch

    def _start(self, batch: Iterable[tuple[Request, int]]) -> Started:
        return [(q, i, self.processes.submit(assessors.assess, q.items[i])) for q, i in batch]

    def _finish(self, started: Started) -> None:
        """Scores a batch whose CPU part is done, or nearly."""
        assessed: list[tuple[Request, int, reward.Assessed]] = []
        for request, index, future in started:
            try:
                assessed.append((request, index, future.result()))
            except Refused as refused:
                self._refuse(request, index, refused)
        shown = [(q.items[i], x) for q, i, x in assessed if x.parse_ok]  # a malformed poster has no look
        metas = [{"cpu": x.cpu_visual, "extra_info": json.loads(item.extra_info), "solution": item.solution}
                 for item, x in shown]  # fmt: skip
        rated = iter(zip(self._rate([x.image for _, x in shown], metas), metas, strict=True))
        for request, index, x in assessed:
            visual, meta = next(rated) if x.parse_ok else (0.0, {})
            if isinstance(visual, Refused):
                self._refuse(request, index, visual)
                continue
            try:
                result = {"ok": True, **reward.result(x, visual, self.cfg.weights)}
                json.dumps(result, allow_nan=False)  # what cannot be sent is the fault of this item, not of its batch
            except Exception as error:  # a bug; one item should not end the server, and be sent to the next one then
                traceback.print_exc()
                self._refuse(request, index, Refused("internal", f"{type(error).__name__}: see the log of the server"))
                continue
            if isinstance(model := _checked(meta.get("visual_quality")), float):  # without the CPU formula
                result["visual_quality"] = model
            self._count(result)
            request.put(index, result)
        if started:
            self.counts.observe("batch_size", len(started), counts.SIZES)

    def _rate(self, images: list[Any], metas: list[dict[str, Any]]) -> list[float | Refused]:
        """Visual scores by the scorer. What is no number in [0, 1] is an error, never a score."""
        if not metas:
            return []
        if self.state != "loading":  # its first call may compile for long
            self._too_late = time.monotonic() + self.cfg.deadline_seconds
        try:
            values = list(self.scorer.score_batch(images, metas))
        except Exception as error:  # the clients hear of it, and the next batch may be another
            self.failures += 1
            traceback.print_exc()
            text = f"the scorer failed: {type(error).__name__}; see the log of the server"
            return [Refused("scorer_failed", text)] * len(metas)
        finally:
            self._too_late = math.inf
        self.failures = 0
        if len(values) != len(metas):
            text = f"the scorer gave {len(values)} values for {len(metas)} posters"
            return [Refused("scorer_invalid", text)] * len(metas)
        return [_checked(value) for value in values]

    def _refuse(self, request: Request, index: int, refused: Refused) -> None:
        self.counts.add("item_errors_total", code=refused.code)
        request.put(index, refused)

    def _count(self, result: dict[str, Any]) -> None:
        self.counts.add("items_total")
        for name in COMPONENTS:
            self.counts.observe("part", result[name], counts.SHARES, part=name)
        if not result["parse_ok"]:
            self.counts.add("malformed_total", reason=result["reason"])
        for warning in result["warnings"]:
            self.counts.add("warnings_total", warning=warning)


def _checked(value: Any) -> float | Refused:
    if isinstance(value, ScorerError):
        return Refused(value.code, str(value), value.retryable)
    if isinstance(value, Real) and 0 <= value <= 1:  # NaN is not
        return float(value)
    return Refused("scorer_invalid", f"the scorer gave {value!r:.80}: must be a number from 0 to 1")


def fingerprint(info: dict[str, Any]) -> str:
    """Of all that scores depend on: two servers with the same one score alike.

    Args:
        info: of /info.
    """
    names = ("version", "weights", "scorer", "scorer_identity", "fonts", "coord_space")
    digest = hashlib.sha256(json.dumps({name: info[name] for name in names}, sort_keys=True).encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()
