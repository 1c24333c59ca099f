"""HTTP service that scores posters: structure, accuracy and visual quality against a ground truth.

Run:   python grpo/poster/reward_server.py          on the CPU (--help lists all options)
       CUDA_VISIBLE_DEVICES=7 python grpo/poster/reward_server.py --scorer visualquality_r1
       bash scripts/start_poster_training_with_reward_server.sh      together with a training run
Wire:  POST /compute_reward {"solution_str", "ground_truth", "extra_info"}
       POST /compute_reward_batch {"items": [...]}; Content-Type: application/json
       grpo/poster/items.py documents format and errors
       GET /health /livez /info /metrics
A malformed poster scores 0. If the service fails, the answer is an error, never a score.
"""

import json
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

sys.path.insert(0, str(next(p for p in Path(__file__).resolve().parents if (p / "common/maths/losses.py").is_file())))
from common.base import checks, config, serving
from common.base.checks import require
from grpo.poster.items import MAX_ITEMS
from grpo.poster.web import create_app
from grpo.poster.worker import Rewards


@dataclass(frozen=True)
class Config:
    """HTTP service that scores posters. Editing a line and passing --name value are the same."""

    scorer: str = "cpu"  # visual scorer: "cpu", "visualquality_r1", "package.module:factory" or "file.py:factory"
    scorer_options: str = "{}"  # more options of the scorer, a JSON object
    visual_model: str = "TianheWu/VisualQuality-R1-7B"  # of visualquality_r1: hub id or folder
    visual_alpha: float = 0.5  # its weight in the visual score; the CPU formula has the rest
    device: str = "auto"  # of visualquality_r1: "cuda", "cpu"; "auto": the first visible GPU, else the CPU
    dtype: str = "auto"  # "bf16", "fp16", "fp32"; "auto": bf16 on a GPU, fp32 on the CPU
    structure_weight: float = 0.4  # the weights of the parts are divided by their sum
    accuracy_weight: float = 0.4  # texts: as the brief asks, and legible
    visual_weight: float = 0.2  # visual quality
    coord_space: str = "px"  # of the policy: canvas pixels; or "rel1000", thousandths of the canvas
    font_paths: str = ""  # .ttf or .otf files, separated by commas, used before Pillow's font, which has only ASCII
    asset_root: str = ""  # folder of input images that requests name by path; "": requests contain the images
    host: str = "127.0.0.1"  # "0.0.0.0": reachable from other machines, which requires a token
    port: int = 8899  # 0: any free port
    token: str = ""  # sent by clients as "Authorization: Bearer"; better in the environment, RL_HAND_REWARD_TOKEN
    token_file: str = ""  # a file with the token
    allowed_hosts: str = ""  # host names of this machine that clients may use besides localhost, separated by commas
    workers: int = 0  # processes that parse and render; 0: cores - 1, from 1 to 4
    max_batch: int = 32  # items scored together
    batch_wait_ms: float = 10.0  # how long the first item of a batch waits for others
    max_queue: int = 1024  # items in the queue; above, requests are refused with 429
    item_seconds: float = 30.0  # timeout of the CPU part of an item, which usually takes 0.01 s
    deadline_seconds: float = 300.0  # timeout of a request, unless its X-Timeout-Ms is shorter

    def __post_init__(self):
        checks.at_least(self, 0, "structure_weight", "accuracy_weight", "visual_weight", "port", "workers",
                        "batch_wait_ms")  # fmt: skip
        checks.at_least(self, 1, "max_batch")
        checks.at_least(self, MAX_ITEMS, "max_queue")
        checks.above_zero(self, "item_seconds", "deadline_seconds")
        checks.one_of(self, coord_space=("px", "rel1000"))
        total = self.structure_weight + self.accuracy_weight + self.visual_weight
        require(0 < total < float("inf"), f"weights with the sum {total}", "must be finite and above 0", "raise one")
        require(0 <= self.visual_alpha <= 1, f"visual_alpha = {self.visual_alpha}", "must be from 0 to 1", "try 0.5")
        valid = isinstance(_json(self.scorer_options), dict)
        require(valid, f"scorer_options = {self.scorer_options!r}", "must be a JSON object", "write '{\"name\": 1}'")
        for name in ("token_file", "asset_root"):
            path = getattr(self, name)
            require(not path or Path(path).exists(), f"{name} = {path!r}", "is not there", "correct the path")
        require(self.local or bool(self.secret), f"host = {self.host!r} without a token",
                "whoever reaches the port could use the service", "set RL_HAND_REWARD_TOKEN on both sides")  # fmt: skip

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        return checks.is_loopback(self.host)

    @cached_property
    def secret(self) -> str:
        """The token, from option, file or environment."""
        from_file = Path(self.token_file).read_text(encoding="utf-8") if self.token_file else ""
        sources = (self.token, from_file, os.environ.get("RL_HAND_REWARD_TOKEN", ""))
        return next(filter(None, map(str.strip, sources)), "")

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the parts, with the sum 1."""
        parts = {name: getattr(self, f"{name}_weight") for name in ("structure", "accuracy", "visual")}
        return {name: weight / sum(parts.values()) for name, weight in parts.items()}

    @property
    def fonts(self) -> tuple[str, ...]:
        """Paths of the font files."""
        return tuple(filter(None, (path.strip() for path in self.font_paths.split(","))))

    @property
    def hosts(self) -> set[str] | None:
        """Host names that clients may use for this machine; None: any, given the token."""
        names = {name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip()}
        known = {"localhost", "127.0.0.1", "::1", self.host.strip("[]").lower(), *names}
        return known if self.local or names else None

    @property
    def processes(self) -> int:
        """Number of processes that parse and render."""
        return self.workers or min(4, max(1, (os.cpu_count() or 1) - 1))

    @property
    def options(self) -> dict[str, Any]:
        """Options of the scorer."""
        own = {}
        if self.scorer == "visualquality_r1":
            own = dict(model=self.visual_model, alpha=self.visual_alpha, device=self.device, dtype=self.dtype)
        return own | _json(self.scorer_options)


def _json(text: str) -> Any:
    """Parses JSON; None if it is invalid."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def main(cfg: Config) -> None:
    """Opens the port, then loads and runs the scorer in this thread; /health says when it is up."""
    rewards = Rewards(cfg)
    family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
    try:
        listener = socket.create_server((cfg.host, cfg.port), family=family)
    except OSError as error:
        sys.exit(f"error: {cfg.host}:{cfg.port} cannot be opened ({error}): give another --port or --host")
    # or Nagle's algorithm delays the body of an answer by 40 ms, until its header is acknowledged
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    address = f"http://{cfg.host}:{listener.getsockname()[1]}"
    print(f"rewards ({cfg.scorer}): loading, {address}/health says when they are ready", flush=True)
    options = dict(lifespan="off", ws="none", log_level="warning", access_log=False, timeout_graceful_shutdown=15)
    strict = dict(http=serving.StrictHTTP, timeout_keep_alive=75)
    server = uvicorn.Server(uvicorn.Config(create_app(rewards), **strict, **options))
    web = threading.Thread(target=server.run, args=([listener],), daemon=True)  # signals go to the main thread
    web.start()

    def stop(number: int, _: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # a second signal ends the process at once
        print(f"{signal.Signals(number).name}: answering what is waiting, then ending", flush=True)
        if rewards.state == "loading":
            sys.exit(0)
        rewards.drain()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    serving.end_when_stuck(lambda: rewards.late, cfg.deadline_seconds)
    try:
        rewards.load()
        print(f"rewards ({cfg.scorer}): ready, {address}, fingerprint {rewards.info['fingerprint'][:12]}", flush=True)
        rewards.work()
    except Exception as error:  # report it to clients, too
        rewards.fail(error)
        raise
    finally:
        server.should_exit = True
        web.join()


if __name__ == "__main__":
    main(config.parse(Config))
