"""Soak of the reward service: a training whose server is killed again and again must equal one whose server lives.

Run:   python scripts/dev/soak_rewards.py                           about 20 minutes on one core, nothing to download
       python scripts/dev/soak_rewards.py --minutes 60 --kills 60 --seed 1

The built-in poster policy trains with the server in a process of its own, which is killed with SIGKILL at random
moments, every second time in the middle of a request, and started again some seconds later. When the minutes are over,
the training is stopped; then as many steps are made once more, with a server that is left alone. Metrics and final
states must be the same bit for bit, and every completion scored; else the exit code is 1.
"""

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from common.base import checks, config
from grpo.poster import synthetic

PATIENCE = 300  # seconds for what takes a few, such as the next request
MEASURED = ("seconds", "tokens_per_second", "memory_gib", "host_memory_gib")  # beginnings of what no two runs share
SCORER = '''"""The CPU formula, made slow; a file is there while it is at work."""
import itertools, time
from pathlib import Path

def slow(mark, delay):
    calls = itertools.count()
    def rate(images, metas):
        if next(calls):  # the first is the self-test of the server, which nobody waits for
            Path(mark).touch()
            time.sleep(delay)
            Path(mark).unlink()
        return [meta["cpu"] for meta in metas]
    return rate
'''


@dataclass(frozen=True)
class Config:
    """Soak of the reward service for posters."""

    minutes: float = 10.0  # of the training with kills, from its first step on
    kills: int = 10  # of the server in this time
    away: float = 5.0  # seconds until it is started again, at most
    delay: float = 0.5  # seconds that the scorer takes longer for a batch
    batch_size: int = 16  # prompts per step, with 4 completions each
    seed: int = 0  # of the moments of the kills
    folder: str = ""  # a new one, for runs and logs; "": a temporary one

    def __post_init__(self):
        checks.at_least(self, 0, "kills", "away", "delay")
        checks.at_least(self, 1, "batch_size")
        checks.above_zero(self, "minutes")


class Soak:
    """A server and a training, one of each at a time, and the folder of their files."""

    def __init__(self, cfg: Config, folder: Path):
        self.cfg, self.folder, self.mark = cfg, folder, folder / "scoring"
        self.running: dict[str, subprocess.Popen] = {}
        self.logs: dict[str, Path] = {}
        rows = [synthetic.record(seed, 0) for seed in range(500)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "slow_scorer.py").write_text(SCORER)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start_server(self) -> None:
        """Always with the same port and options."""
        self.mark.unlink(missing_ok=True)
        options = json.dumps({"mark": str(self.mark), "delay": self.cfg.delay})
        scorer = f"{self.folder / 'slow_scorer.py'}:slow"
        self._start("reward_server", port=self.port, scorer=scorer, scorer_options=options)

    def start_training(self, name: str, steps: int) -> None:
        """Its folder gets this name."""
        self._start("poster_grpo", reward_url=f"http://127.0.0.1:{self.port}", train_data=self.folder / "rows.jsonl",
                    out_dir=self.folder / name, steps=steps, device="cpu", batch_size=self.cfg.batch_size, group_size=4,
                    save_every=10**9, eval_examples=16)  # fmt: skip

    def _start(self, script: str, **options: Any) -> None:
        self.logs[script] = self.folder / f"{len(list(self.folder.glob('*.txt')))}.{script}.txt"
        given = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, str(ROOT / "grpo" / "poster" / f"{script}.py"), *given]
        with self.logs[script].open("wb") as file:
            self.running[script] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                                                    preexec_fn=_end_with_parent)  # fmt: skip

    def wait(self, happened: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Until something is so. Exits if a process ends meanwhile, or it takes too long."""
        end = time.monotonic() + seconds
        while not happened():
            ended = [name for name, process in self.running.items() if process.poll() is not None]
            if ended or time.monotonic() > end:
                what = f"{ended[0]} ended" if ended else f"waited {seconds:g} s in vain"
                sys.exit(f"error: {what}: see {self.folder}")
            time.sleep(0.01)

    def end(self, script: str, seconds: float = PATIENCE) -> None:
        """Waits for the end of a process, which must go well."""
        if code := self.running.pop(script).wait(seconds):
            sys.exit(f"error: {script} ended with code {code}: see {self.logs[script]}")

    def kill_server(self) -> str:
        """What it was doing."""
        server = self.running.pop("reward_server")
        server.kill()
        server.wait()
        idle = "ready, " in self.logs["reward_server"].read_text()
        return "scoring" if self.mark.exists() else "ready" if idle else "starting"

    def train_with_kills(self) -> str:
        """The run "killed"; returns a summary of the kills."""
        rng, hit, seconds = random.Random(self.cfg.seed), Counter(), 60 * self.cfg.minutes
        moments = sorted(rng.uniform(0, seconds) for _ in range(self.cfg.kills))
        self.start_server()
        self.start_training("killed", 10**6)
        self.wait(lambda: bool(_steps(_lines(self.folder / "killed"))))
        begin = time.monotonic()
        for number, moment in enumerate(moments):
            self.wait(lambda moment=moment: time.monotonic() > begin + moment, seconds + PATIENCE)
            if number % 2 == 0:
                self.wait(lambda: not self.mark.exists())  # or what is left of the request may be too short
                self.wait(self.mark.exists)
                time.sleep(rng.uniform(0, self.cfg.delay / 2))
            hit[self.kill_server()] += 1
            time.sleep(rng.uniform(0, self.cfg.away))
            self.start_server()
        self.wait(lambda: time.monotonic() > begin + seconds, seconds + PATIENCE)
        self.running["poster_grpo"].terminate()  # it finishes its step, and saves
        self.end("poster_grpo")
        noticed = self.logs["poster_grpo"].read_text().count(": going on")
        return f"{hit.total()} kills of a server that was {dict(hit)}; {noticed} outages noticed by the training"

    def train_straight(self) -> None:
        """The run "straight", of as many steps."""
        self.start_training("straight", len(_steps(_lines(self.folder / "killed"))))
        self.end("poster_grpo", 2 * 60 * self.cfg.minutes + PATIENCE)
        self.running["reward_server"].terminate()
        self.end("reward_server")


def _end_with_parent() -> None:
    """In a new process: the kernel kills it when the soak has ended, even if that was killed itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run, without durations and memory."""
    path = run / "metrics.jsonl"
    text = path.read_text().rpartition("\n")[0] if path.exists() else ""  # half a line may be there already
    kept = [line for line in map(json.loads, text.splitlines()) if "seconds_save" not in line]
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in kept]


def _steps(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of training steps, without those of evaluations."""
    return [line for line in metrics if "learning_rate" in line]


def differences(folder: Path) -> list[str]:
    """How the runs "killed" and "straight" differ: nothing is good.

    Args:
        folder: that holds both.
    """
    killed, straight = (_lines(folder / name) for name in ("killed", "straight"))
    found = [f"step {line['step']}: {line['unscored']:.0%} unscored" for line in _steps(killed) if line["unscored"]]
    if len(_steps(killed)) != len(_steps(straight)):
        found.append(f"{len(_steps(killed))} and {len(_steps(straight))} steps")
    for one, other in zip(killed, straight, strict=False):  # the second run evaluates at its end
        names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
        found += [f"step {one['step']}: {name} {one.get(name)} and {other.get(name)}" for name in names]
    for one in (folder / "killed").glob("checkpoint-*/*.safetensors"):  # weights, optimizer, random states
        other = folder / "straight" / one.relative_to(folder / "killed")
        if not other.exists() or one.read_bytes() != other.read_bytes():
            found.append(f"{one} and {other}")
    return found


def main(cfg: Config) -> None:
    """Prints a summary; exits with code 1 if the runs differ."""
    folder = Path(cfg.folder or tempfile.mkdtemp(prefix="soak_rewards_")).absolute()
    folder.mkdir(parents=True, exist_ok=not cfg.folder)  # the runs of another soak would be resumed
    soak = Soak(cfg, folder)
    try:
        kills = soak.train_with_kills()
        soak.train_straight()
    finally:
        for process in soak.running.values():
            process.kill()
    done, found = _steps(_lines(folder / "killed")), differences(folder)
    print(f"{len(done)} steps of {4 * cfg.batch_size} completions, reward {done[0]['reward']:.3f} to "
          f"{done[-1]['reward']:.3f}; {kills}; files in {folder}")  # fmt: skip
    print("\n".join(["DIFFERENT:", *found[:20]]) if found else "metrics and weights are equal, all is scored")
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main(config.parse(Config))
