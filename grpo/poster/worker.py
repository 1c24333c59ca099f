"""The core of the reward server: the queue of requests, and the thread that scores them in batches.

A batch goes through two stages: processes do the CPU part (assessors.py), then the scorer rates all its posters at
once, in the thread that called `work`. Meanwhile the processes work on the next batch.
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

from grpo.poster import assessors, counts, layout, reward, scorers, synthetic
from grpo.poster.errors import ScorerError
from grpo.poster.fonts import Fonts, missing_text
from grpo.poster.items import MAX_BODY, MAX_ITEMS, Item, Refused

SELF_TEST = 0.9  # least structure and accuracy of the good poster of the self-test
FAILURES = 3  # consecutive failed batches after which the scorer must pass the self-test again
COMPONENTS = ("score", "structure", "accuracy", "visual")
# modules whose source is in the fingerprint
SOURCES = ("layout", "fonts", "render", "reward", "errors", "scorers", "assessors", "pictures", "synthetic")


@dataclass(eq=False)
class Request:
    """Items that are answered together.

    Attributes:
        deadline: on the clock of time.monotonic(); later, items are refused instead of scored.
        future: of the results, one per item, in order.
    """

    items: list[Item]
    deadline: float
    future: Future = field(default_factory=Future)

    def __post_init__(self):
        self.results: list[dict[str, Any] | Refused | None] = [None] * len(self.items)
        self.left = len(self.items)
        self.future.set_running_or_notify_cancel()  # cannot be cancelled; only `put` completes it

    def put(self, index: int, result: dict[str, Any] | Refused) -> None:
        """Stores the result of an item; called by the scoring thread.

        Args:
            index: of the item.
            result: its scores, or why there are none.
        """
        self.results[index] = result
        self.left -= 1
        if not self.left:
            self.future.set_result(self.results)


Started = list[tuple[Request, int, Future]]  # a batch in the CPU stage


class Rewards:
    """The request queue and the scorer, which only the thread of `load` and `work` uses.

    Attributes:
        state: "loading", "ready", "degraded" (the scorer failed and must pass the self-test), "draining" or
            "failed: why".
        info: the answer of /info, once loaded.
        counts: for /metrics.
    """

    def __init__(self, cfg: Any):
        """Creates an empty queue; nothing is loaded yet.

        Args:
            cfg: the Config of the server.
        """
        self.cfg, self.state, self.info = cfg, "loading", {}
        self.counts = counts.Counts("poster_")
        self.scorer: Any = None
        self.waiting: deque[tuple[Request, int]] = deque()
        self.started: Started = []
        self.failures = 0  # consecutive failed batches
        self.missing: set[str] = set()  # characters that no font has, at most reward.MAX_MISSING
        self.missing_items = 0  # items with such characters
        self._warned = 0  # 1: of such characters of a policy, 2: of a ground truth
        self._too_late = math.inf  # time.monotonic() at which no client waits any more for the batch being rated
        self._changed = threading.Condition()

    def load(self) -> None:
        """Loads the scorer and runs a self-test; call it in the thread that calls `work`.

        Raises:
            ValueError: the scorer or a font is not usable.
            RuntimeError: a good poster does not get a good score.
        """
        cfg = self.cfg
        self.fonts = Fonts(cfg.fonts)
        self.scorer = scorers.load(cfg.scorer, cfg.options)
        options = assessors.Options(cfg.fonts, cfg.coord_space, cfg.asset_root, self.scorer.needs_image)
        self.processes = assessors.Assessors(cfg.processes, options, cfg.item_seconds)
        self.info = {
            "protocol": 1,
            "version": reward.VERSION,
            "weights": cfg.weights,
            "scorer": self.scorer.name,
            "scorer_identity": self.scorer.identity,
            "fonts": self.fonts.identity,
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
        """Queues the items of a request.

        Args:
            items: of the request.
            seconds: until its deadline.

        Returns:
            A future for one result per item: scores, or Refused.

        Raises:
            Refused: the server is not ready, or the queue is full.
        """
        request = Request(items, time.monotonic() + seconds)
        with self._changed:
            self.require_ready()
            self.require_room(len(items))
            self.waiting.extend((request, index) for index in range(len(items)))
            self._changed.notify()
        return request.future

    def gauges(self) -> dict[str, float]:
        """Current values for /metrics, with the counters of the scorer."""
        own = {f"scorer_{name}": count for name, count in dict(getattr(self.scorer, "counters", {})).items()}
        return {"waiting": len(self.waiting), "ready": int(self.state == "ready"), **own}

    @property
    def late(self) -> float:
        """Seconds since no client waits any more for the batch being rated; below 0 while one may."""
        return time.monotonic() - self._too_late

    def require_ready(self) -> None:
        """Raises Refused unless the state is "ready"."""
        if self.state != "ready":
            raise Refused(self.state.partition(":")[0], self.state)

    def require_room(self, items: int) -> None:
        """Raises Refused if the queue has no room for so many items."""
        if len(self.waiting) + items > self.cfg.max_queue:
            text = f"{len(self.waiting)} items wait, {self.cfg.max_queue} at most (--max_queue): come again later"
            raise Refused("queue_full", text)

    def drain(self) -> None:
        """Stops accepting requests; `work` returns once the queue is empty."""
        with self._changed:
            self.state = "draining"
            self._changed.notify()

    def work(self) -> None:
        """Scores batches until `drain`.

        Raises:
            RuntimeError: the scorer failed repeatedly, and then failed the self-test.
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
        """Refuses all queued and future requests.

        Args:
            error: raised by `load` or `work`.
        """
        with self._changed:
            self.state = f"failed: {error}"
            left = [*((request, index) for request, index, _ in self.started), *self.waiting]
            self.waiting.clear()
        for request, index in left:
            if request.results[index] is None:
                self._refuse(request, index, Refused("failed", self.state))

    def _take(self, wait: bool) -> list[tuple[Request, int]]:
        """Takes the next batch from the queue; empty if `wait` is off and nothing is queued, or after `drain`."""
        batch: list[tuple[Request, int]] = []
        with self._changed:
            while True:
                while wait and not self.waiting and self.state != "draining":
                    self._changed.wait(1.0)  # with a timeout, so that a signal just before is handled
                if wait and self.state != "draining":  # wait for a fuller batch, unless one is being rated
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
        """Waits for the CPU stage of a batch, rates it and completes its requests."""
        assessed: list[tuple[Request, int, reward.Assessed]] = []
        for request, index, future in started:
            try:
                assessed.append((request, index, future.result()))
            except Refused as refused:
                self._refuse(request, index, refused)
        shown = [(q.items[i], x) for q, i, x in assessed if x.parse_ok]  # malformed posters are not rated
        metas = [{"cpu": x.cpu_visual, "extra_info": json.loads(item.extra_info), "solution": item.solution,
                  "prompt": json.loads(item.prompt), "step": item.step} for item, x in shown]  # fmt: skip
        rated = iter(zip(self._rate([x.image for _, x in shown], metas), metas, strict=True))
        for request, index, x in assessed:
            visual, meta = next(rated) if x.parse_ok else (0.0, {})
            if isinstance(visual, Refused):
                self._refuse(request, index, visual)
                continue
            try:
                result = {"ok": True, **reward.result(x, visual, self.cfg.weights)}
                json.dumps(result, allow_nan=False)  # fail this item, not the batch, if it cannot be sent
            except (
                Exception
            ) as error:  # a bug must not end the server: clients would retry the item and end the next one
                traceback.print_exc()
                self._refuse(request, index, Refused("internal", f"{type(error).__name__}: see the log of the server"))
                continue
            if isinstance(model := _checked(meta.get("visual_quality")), float):  # score of the model alone
                result["visual_quality"] = model
            self._count(result)
            request.put(index, result)
        if started:
            self.counts.observe("batch_size", len(started), counts.SIZES)

    def _rate(self, images: list[Any], metas: list[dict[str, Any]]) -> list[float | Refused]:
        """Visual scores of the scorer; anything but a number in [0, 1] becomes an error."""
        if not metas:
            return []
        if self.state != "loading":  # the first call may compile for a long time
            self._too_late = time.monotonic() + self.cfg.deadline_seconds
        try:
            values = list(self.scorer.score_batch(images, metas))
        except Exception as error:  # report it to the clients; the next batch may succeed
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
        if refused.code == "missing_glyphs":
            self._note_missing(self.fonts.missing(layout.ground_truth(request.items[index].truth).letters), True)
        request.put(index, refused)

    def _count(self, result: dict[str, Any]) -> None:
        self.counts.add("items_total")
        for name in COMPONENTS:
            self.counts.observe("part", result[name], counts.SHARES, part=name)
        if not result["parse_ok"]:
            self.counts.add("malformed_total", reason=result["reason"])
        for warning in result["warnings"]:
            self.counts.add("warnings_total", warning=warning)
        if missing := result["details"].get("missing_characters"):
            self._note_missing(set(missing), "truth_glyphs_missing" in result["warnings"])

    def _note_missing(self, chars: set[str], of_truth: bool) -> None:
        """Counts an item with characters that no font has, and prints a warning for the first of each origin."""
        self.missing_items += 1
        self.counts.add("missing_glyphs_total")
        if self._warned < 1 + of_truth:
            self._warned = 1 + of_truth
            print(f"warning: {missing_text(chars)}; /info counts such items", flush=True)
        self.missing |= set(sorted(chars - self.missing)[: reward.MAX_MISSING - len(self.missing)])


def _checked(value: Any) -> float | Refused:
    if isinstance(value, ScorerError):
        return Refused(value.code, str(value), value.retryable)
    if isinstance(value, Real) and 0 <= value <= 1:  # rejects NaN
        return float(value)
    return Refused("scorer_invalid", f"the scorer gave {value!r:.80}: must be a number from 0 to 1")


def fingerprint(info: dict[str, Any]) -> str:
    """Hash of everything that scores depend on: servers with the same fingerprint give the same scores.

    Args:
        info: of /info.
    """
    names = ("version", "weights", "scorer", "scorer_identity", "fonts", "coord_space")
    digest = hashlib.sha256(json.dumps({name: info[name] for name in names}, sort_keys=True).encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()
