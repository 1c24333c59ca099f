"""Measures the poster reward service under load: posters per second, and the latency of requests and of /health.

Run:   python scripts/dev/benchmark_rewards.py                                 starts a server, on the CPU
       python scripts/dev/benchmark_rewards.py --clients 64 --batch 8 --workers 2
       python scripts/dev/benchmark_rewards.py --url http://127.0.0.1:8899     a server that is already running

Every client sends one batch after another of ground-truth posters and of posters with shifted layers, which cost the
same. The clients are threads of this process and use cores of the same machine, unlike a training on another machine.
"""

import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from common.base import checks, config
from grpo.poster import synthetic

POSTERS = 256  # distinct posters
HEALTH_EVERY = 0.02  # seconds between requests to /health


@dataclass(frozen=True)
class Config:
    """Load on the poster reward service."""

    url: str = ""  # of a running server; "": start one, and stop it at the end
    clients: int = 8  # concurrent clients
    seconds: float = 10.0  # of measurement
    batch: int = 32  # posters per request
    level: int = 1  # of the synthetic posters
    workers: int = 0  # worker processes of the server started here; 0: its default

    def __post_init__(self):
        checks.at_least(self, 1, "clients", "batch")
        checks.at_least(self, 0, "level", "workers")
        checks.above_zero(self, "seconds")


def bodies(cfg: Config) -> list[bytes]:
    """JSON bodies of batch requests that together hold POSTERS distinct posters."""
    rng, made = random.Random(0), []
    for seed in range(POSTERS):
        record = synthetic.record(seed, cfg.level)
        poster = json.loads(synthetic.gold(record))
        for layer in poster["layers"] if seed % 2 else []:
            layer["x"] += rng.randint(-9, 9)
        made.append({"id": str(seed), "solution_str": json.dumps(poster), "ground_truth": record["ground_truth"]})
    parts = [[made[(start + i) % POSTERS] for i in range(cfg.batch)] for start in range(0, POSTERS, cfg.batch)]
    return [json.dumps({"items": part}).encode() for part in parts]


def ask(connection: http.client.HTTPConnection, path: str, body: bytes | None = None) -> tuple[int, bytes, float]:
    """Sends one request, a GET if `body` is None; returns status, response body and seconds."""
    start = time.monotonic()
    token = os.environ.get("RL_HAND_REWARD_TOKEN", "")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection.request("GET" if body is None else "POST", path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    return answer.status, content, time.monotonic() - start


def measure(cfg: Config, host: str, port: int) -> dict[str, float]:
    """Measures a server that is ready."""
    requests, done, took, health, statuses = bodies(cfg), [0], [], [], Counter()
    end, lock = time.monotonic() + cfg.seconds, threading.Lock()

    def client(number: int) -> None:
        connection, turn = http.client.HTTPConnection(host, port, timeout=120), number
        while time.monotonic() < end:
            status, content, seconds = ask(connection, "/compute_reward_batch", requests[turn % len(requests)])
            turn += 1
            with lock:
                statuses[status] += 1
                if status == 200 and time.monotonic() < end:
                    took.append(seconds)
                    done[0] += sum(result["ok"] for result in json.loads(content)["results"])
            if status != 200:
                time.sleep(0.1)

    def poll_health() -> None:
        connection = http.client.HTTPConnection(host, port, timeout=120)
        while time.monotonic() < end:
            health.append(ask(connection, "/health")[2])
            time.sleep(HEALTH_EVERY)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(cfg.clients)]
    threads.append(threading.Thread(target=poll_health))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "posters_per_second": done[0] / cfg.seconds,
        "request_p50_ms": 1000 * statistics.median(took),
        "request_max_ms": 1000 * max(took),
        "health_p50_ms": 1000 * statistics.median(health),
        "health_p99_ms": 1000 * sorted(health)[int(0.99 * len(health))],
        "health_max_ms": 1000 * max(health),
        "refused": sum(count for status, count in statuses.items() if status != 200),
    }


def main(cfg: Config) -> None:
    """Prints one line of JSON."""
    server, url = None, cfg.url
    if not url:
        command = [sys.executable, str(ROOT / "grpo" / "poster" / "reward_server.py"), "--port", "0",
                   "--workers", str(cfg.workers)]  # fmt: skip
        server = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
        said = ""
        while "ready, " not in said:
            said = server.stdout.readline()
            if not said:
                sys.exit("error: the server ended before it was ready")
        url = said.partition("ready, ")[2].partition(",")[0]
    try:
        parts = urlsplit(url)
        numbers = {name: round(value, 1) for name, value in measure(cfg, parts.hostname, parts.port or 80).items()}
    finally:
        if server:
            server.terminate()
            server.wait()
    print(json.dumps({"clients": cfg.clients, "batch": cfg.batch, "cores": os.cpu_count(), **numbers}))


if __name__ == "__main__":
    main(config.parse(Config))
