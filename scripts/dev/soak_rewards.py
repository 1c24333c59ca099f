"""Soak test of the poster reward service: killing the server repeatedly must not change the training.

Run:   python scripts/dev/soak_rewards.py                           about 20 minutes on one core, nothing to download
       python scripts/dev/soak_rewards.py --minutes 60 --kills 60 --seed 1

The built-in poster policy trains while the server is killed with SIGKILL at random moments, every second time in the
middle of a request, and restarted some seconds later. When the minutes are over, the training is stopped and repeated
for the same number of steps with an undisturbed server. Metrics and final states must be equal bit for bit, and every
completion must be scored; otherwise the exit code is 1.
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

PATIENCE = 300  # seconds to wait for what should take a few, such as the next request
MEASURED = ("seconds", "tokens_per_second", "memory_gib", "host_memory_gib")  # prefixes: differ between equal runs
SCORER = '''"""The CPU formula, slowed down; the file `mark` exists while a batch is being scored."""
import itertools, time
from pathlib import Path

def slow(mark, delay):
    calls = itertools.count()
    def rate(images, metas):
        if next(calls):  # the first call is the server's self-test
            Path(mark).touch()
            time.sleep(delay)
            Path(mark).unlink()
        return [meta["cpu"] for meta in metas]
    return rate
'''


@dataclass(frozen=True)
class Config:
    """Soak test of the poster reward service."""

    minutes: float = 10.0  # of training with kills, counted from its first step
    kills: int = 10  # of the server during that time
    away: float = 5.0  # seconds until the server is restarted, at most
    delay: float = 0.5  # seconds added to the scoring of a batch
    batch_size: int = 16  # prompts per step, with 4 completions each
    seed: int = 0  # of the times of the kills
    folder: str = ""  # new folder for runs and logs; "": a temporary one

    def __post_init__(self):
        checks.at_least(self, 0, "kills", "away", "delay")
        checks.at_least(self, 1, "batch_size")
        checks.above_zero(self, "minutes")


class Soak:
    """At most one server and one training process, and the folder of their files."""

    def __init__(self, cfg: Config, folder: Path):
        self.cfg, self.folder, self.mark = cfg, folder, folder / "scoring"
        self.running: dict[str, subprocess.Popen] = {}
        self.logs: dict[str, Path] = {}
        rows = [synthetic.record(seed, 0) for seed in range(500)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / "slow_scorer.py").write_text(SCORER, encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start_server(self) -> None:
        """Starts the reward server, always with the same port and options."""
        self.mark.unlink(missing_ok=True)
        options = json.dumps({"mark": str(self.mark), "delay": self.cfg.delay})
        scorer = f"{self.folder / 'slow_scorer.py'}:slow"
        self._start("reward_server", port=self.port, scorer=scorer, scorer_options=options)

    def start_training(self, name: str, steps: int) -> None:
        """Starts a training in the folder `name`."""
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
        """Waits until `happened()`; exits if a process ends meanwhile or the time is up."""
        end = time.monotonic() + seconds
        while not happened():
            ended = [name for name, process in self.running.items() if process.poll() is not None]
            if ended or time.monotonic() > end:
                what = f"{ended[0]} ended" if ended else f"waited {seconds:g} s in vain"
                sys.exit(f"error: {what}: see {self.folder}")
            time.sleep(0.01)

    def end(self, script: str, seconds: float = PATIENCE) -> None:
        """Waits for a process to end; exits if it failed."""
        if code := self.running.pop(script).wait(seconds):
            sys.exit(f"error: {script} ended with code {code}: see {self.logs[script]}")

    def kill_server(self) -> str:
        """Kills the server and returns what it was doing: "scoring", "ready" or "starting"."""
        server = self.running.pop("reward_server")
        server.kill()
        server.wait()
        idle = "ready, " in self.logs["reward_server"].read_text(encoding="utf-8")
        return "scoring" if self.mark.exists() else "ready" if idle else "starting"

    def train_with_kills(self) -> str:
        """Trains the run "killed" and returns a summary of the kills."""
        rng, hit, seconds = random.Random(self.cfg.seed), Counter(), 60 * self.cfg.minutes
        moments = sorted(rng.uniform(0, seconds) for _ in range(self.cfg.kills))
        self.start_server()
        self.start_training("killed", 10**6)
        self.wait(lambda: bool(_steps(_lines(self.folder / "killed"))))
        begin = time.monotonic()
        for number, moment in enumerate(moments):
            self.wait(lambda moment=moment: time.monotonic() > begin + moment, seconds + PATIENCE)
            if number % 2 == 0:
                self.wait(lambda: not self.mark.exists())  # the rest of this request may be short
                self.wait(self.mark.exists)
                time.sleep(rng.uniform(0, self.cfg.delay / 2))
            hit[self.kill_server()] += 1
            time.sleep(rng.uniform(0, self.cfg.away))
            self.start_server()
        self.wait(lambda: time.monotonic() > begin + seconds, seconds + PATIENCE)
        self.running["poster_grpo"].terminate()  # it finishes its step, and saves
        self.end("poster_grpo")
        noticed = self.logs["poster_grpo"].read_text(encoding="utf-8").count(": going on")
        return f"{hit.total()} kills of a server that was {dict(hit)}; {noticed} outages noticed by the training"

    def train_straight(self) -> None:
        """Trains the run "straight" for as many steps as "killed"."""
        self.start_training("straight", len(_steps(_lines(self.folder / "killed"))))
        self.end("poster_grpo", 2 * 60 * self.cfg.minutes + PATIENCE)
        self.running["reward_server"].terminate()
        self.end("reward_server")


def _end_with_parent() -> None:
    """Runs in a child: has the kernel kill it when the soak ends, even if the soak is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _lines(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl, without durations and memory."""
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    text = text.rpartition("\n")[0]  # drop a line that is still being written
    kept = [line for line in map(json.loads, text.splitlines()) if "seconds_save" not in line]
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in kept]


def _steps(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of training steps, without those of evaluations."""
    return [line for line in metrics if "learning_rate" in line]


def differences(folder: Path) -> list[str]:
    """Differences between the runs "killed" and "straight" in `folder`; empty if they are equal."""
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
    folder.mkdir(parents=True, exist_ok=not cfg.folder)  # not the runs of another soak, which would be resumed
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
