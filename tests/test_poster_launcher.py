"""One command for the poster training and its reward service, with a stand-in for the training."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import requests
from conftest import ROOT, Command
from test_teacher_server import free_port, wait_for

pytestmark = pytest.mark.services
SCRIPT = "scripts/start_poster_training_with_reward_server.sh"
# Scores a poster every tenth of a second. What it does at the end is in its options.
TRAINER = """
import json, signal, sys, time, urllib.request
from grpo.poster import synthetic
options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1) if options.get("--stop") != "never" else None)
record = synthetic.record(3, 0)
body = json.dumps({"solution_str": synthetic.gold(record), "ground_truth": record["ground_truth"]}).encode()
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
def score():
    url, kind = options["--reward_url"] + "/compute_reward", {"Content-Type": "application/json"}
    return json.loads(opener.open(urllib.request.Request(url, body, kind), timeout=10).read())["score"]
print("options", json.dumps(options), flush=True)
done = 0
while done < int(options.get("--steps", 3)) and not stopped:
    try:
        print("step", done, "score", score(), flush=True)
        done += 1
    except OSError as error:
        print("no answer", flush=True)
    time.sleep(0.1)
if stopped:
    time.sleep(1)
    print("after the signal", score(), flush=True)
sys.exit(int(options.get("--code", 0)))
"""


class Launch(Command):
    """The launcher at work, or done."""

    def __init__(self, folder, trainer, port: int, *options, gpus: str = "", training: tuple = (), out_dir=None):
        self.out_dir, self.port = out_dir or folder / "run", port
        self.console = folder / f"console{len(list(folder.glob('console*')))}.txt"
        command = ["bash", ROOT / SCRIPT, "--port", port, "--trainer", trainer, *options, "--", "--out_dir",
                   self.out_dir, *training]  # fmt: skip
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "PATH": path, "PYTHONPATH": str(ROOT),
                       "OMP_NUM_THREADS": "1", "RL_HAND_REWARD_TOKEN": ""}  # fmt: skip
        super().__init__(command, self.console, environment)

    def ended(self, code: int) -> str:
        self.join(60)
        assert self.exitcode == code, self.output
        return self.output

    @property
    def output(self) -> str:
        return self.console.read_text(errors="replace")

    @property
    def status(self) -> dict:
        return json.loads(self.read("launcher.json") or "{}")

    def read(self, name: str) -> str:
        path = self.out_dir / name
        return path.read_text() if path.exists() else ""

    def kill(self) -> None:
        """Nothing is left, whatever happened."""
        pids = [self.status.get(f"{name}_pid") for name in ("server", "trainer")]
        super().kill()
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def launch(tmp_path):
    trainer, started = tmp_path / "trainer.py", []
    trainer.write_text(TRAINER)

    def launch(*options, port: int | None = None, **others) -> Launch:
        started.append(Launch(tmp_path, trainer, port or free_port(), *options, **others))
        return started[-1]

    yield launch
    for run in started:
        run.kill()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_service_that_dies_is_started_again_and_all_ends_with_the_training(launch):
    run = launch("--workers", "1", training=("--steps", "12"))
    wait_for(lambda: "step 2" in run.read("training.log"))
    first = run.status
    assert first["phase"] == "training" and alive(first["server_pid"]) and alive(first["trainer_pid"])
    info = requests.get(f"http://127.0.0.1:{run.port}/info").json()
    assert info["instance_id"].startswith(f"{first['launcher_pid']}-") and info["workers"] == 1
    os.kill(first["server_pid"], signal.SIGKILL)
    output = run.ended(0)
    last = run.status
    assert (last["phase"], last["restarts"], last["exit_code"]) == ("done", 1, 0)
    assert last["server_pid"] != first["server_pid"] and not alive(last["server_pid"])
    assert "the service died; starting it again" in output and "[train] no answer" in output
    assert "[train] step 11 score" in output and output.count("[reward] rewards (cpu): ready") == 2
    log, rewards = run.read("training.log"), run.read("reward_server.log")
    assert '"--device": "cpu"' in log and f'"--reward_url": "http://127.0.0.1:{run.port}"' in log
    assert "SIGTERM: answering what is waiting" in rewards  # it was asked to end, not killed


def test_ctrl_c_stops_the_training_first_and_the_service_after_it(launch):
    run = launch(training=("--steps", "100000"))
    wait_for(lambda: "step 1" in run.read("training.log"))
    os.kill(run.pid, signal.SIGINT)
    output = run.ended(0)
    assert "[train] after the signal" in output  # the service still answered
    assert "SIGTERM: answering what is waiting" in run.read("reward_server.log")
    assert not alive(run.status["server_pid"]) and not alive(run.status["trainer_pid"])


def test_a_folder_has_one_launcher_until_its_training_has_ended(launch):
    run = launch("--workers", "1", training=("--steps", "100000", "--stop", "never"))
    wait_for(lambda: "step 0" in run.read("training.log"))
    status, log = run.status, run.read("reward_server.log")
    launcher, trainer = status["launcher_pid"], status["trainer_pid"]
    message = f'run is at work for another launcher, .*"launcher_pid": {launcher},"trainer_pid": {trainer}'
    assert re.search(message, launch().ended(1))  # on another port
    os.kill(run.pid, signal.SIGKILL)
    assert re.search(message, launch().ended(1))  # its training goes on
    assert run.status == status and run.read("reward_server.log") == log
    os.killpg(trainer, signal.SIGKILL)
    lock = ["flock", "--nonblock", run.out_dir / ".launcher.lock", "true"]
    wait_for(lambda: subprocess.run(lock).returncode == 0)  # although the service is still there
    assert alive(status["server_pid"])


def test_a_service_that_runs_is_used_only_when_asked_for_and_codes_are_those_of_the_training(launch, tmp_path):
    port = free_port()
    command = [sys.executable, ROOT / "grpo" / "poster" / "reward_server.py", "--port", port]
    server = Command(command, tmp_path / "s.txt", {**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_for(lambda: "ready, " in (tmp_path / "s.txt").read_text(), 60)
        refused = launch(port=port, out_dir=tmp_path / "refused")
        # torchrun, with a process for each GPU: the CPU scorer leaves both to the training; its own code would be 1
        both = launch("--reuse_server", port=port, gpus="0,1", training=("--code", "75"), out_dir=tmp_path / "both")
        run = launch("--reuse_server", port=port, training=("--code", "3"))
        stubborn = launch("--reuse_server", port=port, training=("--steps", "100000", "--stop", "never"),
                          out_dir=tmp_path / "stubborn")  # fmt: skip
        output = refused.ended(1)
        assert f"port {port}" in output and "--port" in output and "--reuse_server" in output
        assert "[train] step 2 score" in run.ended(3) and not run.read("reward_server.log")
        output = both.ended(75)
        assert "rewards on the CPU, training on 0,1" in output and output.count("step 2 score") == 2
        assert "gave up waiting for the service" in output
        wait_for(lambda: "step 1" in stubborn.output)
        os.kill(stubborn.pid, signal.SIGTERM)
        wait_for(lambda: stubborn.status["phase"] == "stopping")
        assert alive(stubborn.status["trainer_pid"])
        os.kill(stubborn.pid, signal.SIGTERM)
        stubborn.ended(128 + signal.SIGKILL)
        assert server.exitcode is None  # whoever used it left it running
    finally:
        server.kill()
        server.join(10)


def test_a_service_that_is_not_ready_is_said_why_and_nothing_is_left(launch, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")  # a scorer that takes long to load
    slow = "--wait", "1", "--scorer", f"{tmp_path / 'slow.py'}:Slow"
    wrong, late = launch("--structur_weight", "1"), launch(*slow, out_dir=tmp_path / "late")
    output = wrong.ended(1)
    assert "the service ended before it was ready" in output and "did you mean --structure_weight?" in output
    assert "not ready within 1 s: raise --wait" in late.ended(1)
    for run in (wrong, late):
        assert not run.read("training.log") and run.status["exit_code"] == 1 and not alive(run.status["server_pid"])


def test_wrong_options_are_refused_before_anything_starts_and_help_is_the_head():
    for options, code, message in (
        (["train"], 2, "options of the training stand after --"), (["--port"], 2, "--port has no value"),
        (["--trainer", "none.py"], 2, "none.py: there is no such file"), (["--token", "x"], 2, "RL_HAND_REWARD_TOKEN"),
        (["--help"], 0, "--reuse_server"),
    ):  # fmt: skip
        done = subprocess.run(["bash", SCRIPT, *options], cwd=ROOT, capture_output=True, text=True, timeout=30)
        said = done.stderr if code else done.stdout
        assert done.returncode == code and message in said and "set -euo" not in said
