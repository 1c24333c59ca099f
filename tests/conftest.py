"""Tiny tokenizers and models, built from configs: nothing is downloaded.

torch and transformers are imported where they are used: xdist's first process reads this file and runs no test.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import dataclasses
import gc
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if importlib.util.find_spec("triton") and not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # kernels of common/fused/ run on the CPU; read when they are defined

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # for each of many test processes, not one for each core

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<unk>", "<im_start>", "<im_end>", "user", "assistant", "\n", *"+-=?", "####", ".", "what", "is"]
WORDS += [str(n) for n in range(40)]
TEMPLATE = (
    "{% for m in messages %}<im_start> {{ m['role'] }} {{ m['content'] }} <im_end> {% endfor %}"
    "{% if add_generation_prompt %}<im_start> assistant {% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<im_end>",
        additional_special_tokens=["<im_start>"], chat_template=TEMPLATE,
    )  # fmt: skip
    return fast


def build_model(family: str) -> torch.nn.Module:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(int(family == "teacher"))
    shared = dict(vocab_size=64, eos_token_id=3, pad_token_id=0, bos_token_id=None, initializer_range=0.2)
    if family in ("qwen2", "teacher"):
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512)  # fmt: skip
        return Qwen2ForCausalLM(Qwen2Config(**shared, **sizes))
    # default dropout of 0.1, learned absolute positions
    return GPT2LMHeadModel(GPT2Config(**shared, n_embd=32, n_layer=2, n_head=4, n_positions=64))


TINY = {  # kinds of models whose attention is plain
    "llama": {}, "qwen2": {}, "qwen3": dict(head_dim=16), "mistral": dict(sliding_window=None),
    "gemma": dict(head_dim=8), "phi": {}, "gpt2": {},
}  # fmt: skip


def tiny_model(kind: str, **options) -> torch.nn.Module:
    """A causal language model of any kind that transformers has, in eval mode; biases and norms are not trivial."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, pad_token_id=0,
                 bos_token_id=1, eos_token_id=3)  # fmt: skip
    config = AutoConfig.for_model(kind, **{**small, **TINY.get(kind, {}), **options})
    model = AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        if p.ndim == 1:
            p.data += 0.1 * torch.randn(p.shape)
    return model


# The files that take longest start first, since xdist hands out whole files; tests that mostly wait for servers stand
# between those that compute.
FIRST = [
    "test_readme", "test_resume", "test_faults", "test_poster_launcher", "test_grpo", "test_teacher_server",
    "test_golden", "test_scripts", "test_sft", "test_poster_server", "test_gkd", "test_gkd_server", "test_parity",
    "test_self_distillation", "test_greso", "test_cross_tokenizer",
    "test_demonstrations", "test_data", "test_plan", "test_contract", "test_fused", "test_measures", "test_engine",
    "test_rollout", "test_benchmark", "test_images", "test_poster_grpo", "test_logprobs", "test_toy",
    "test_reward_client", "test_config", "test_drafts", "test_poster_toys", "test_notebook", "test_rewards",
    "test_memory", "test_blocks", "test_experts", "test_sft_faults", "test_distributed", "test_visualquality",
    "test_copies",
]  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write tests/golden/ instead of comparing with it")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports make a million objects and no garbage: it is not looked for meanwhile, and afterwards not in these."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # or extension modules report their types as leaked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the files above to the front; the tests of a file stay together and in order."""
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


def set_rounding() -> None:
    """Kernels that round differently, on request: tests/README.md lists what the suite was run with."""
    import torch

    if os.environ.get("RL_HAND_TEST_MKLDNN") == "0":
        torch.backends.mkldnn.set_flags(False)


@pytest.fixture(scope="session", autouse=True)
def rounding() -> None:
    set_rounding()


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory) -> dict[str, Path]:
    """Saved folders of the tiny models: "qwen2", "gpt2", and "teacher", of the same shape as the first."""
    import torch

    folders, before = {}, torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # the first test that asks for them may run in fp64
    for family in ("qwen2", "gpt2", "teacher"):
        folders[family] = tmp_path_factory.mktemp(family)
        build_model(family).save_pretrained(folders[family])
        build_tokenizer().save_pretrained(folders[family])
    torch.set_default_dtype(before)
    return folders


@pytest.fixture(scope="session")
def sums_file(tmp_path_factory) -> Path:
    """Forty rows of one-digit sums."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"prompt": f"{a} + {b} = ?" + " ." * (a % 3), "answer": str(a + b)} for a in range(8) for b in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def chats_file(tmp_path_factory) -> Path:
    """Thirty chats with one to three replies."""
    rows = []
    for i in range(30):
        messages = []
        for k in range(1 + i % 3):
            messages += [{"role": "user", "content": f"{i % 7} + {k} = ?" + " ." * (i % 4)},
                         {"role": "assistant", "content": f"{i % 7 + k}"}]  # fmt: skip
        rows.append({"messages": messages})
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROOT = Path(__file__).resolve().parents[1]
FAMILIES = {  # the first script of each is the one the others are compared with
    "gspo": ("gspo", "gspo_multigpu", "gspo_ddp"),
    "grpo": ("grpo", "grpo_multigpu", "grpo_ddp", "similarity_grpo"),
    "gkd": ("gkd", "gkd_multigpu", "gkd_ddp"),
    "sft": ("sft", "sft_ddp"),
}
FOLDERS = {"sft": "gkd"}  # of families that stand in the folder of another
SCRIPTS = {name: ROOT / FOLDERS.get(family, family) / f"{name}.py"
           for family, names in FAMILIES.items() for name in names}  # fmt: skip
# Importing torch and transformers takes longer than a small run: a server does it once, and each run is a fork of it.
PRELOAD = ["preload"]


def reward(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """What a random policy can earn; some completions cannot be scored."""
    return [float(len(c) % 5) if len(c) % 7 else float("nan") for c in completions]


SMALL = dict(steps=3, batch_size=4, group_size=4, num_minibatches=2, max_new_tokens=8, micro_batch_tokens=60,
             save_every=2, keep_checkpoints=9, eval_every=2, eval_examples=8, sample_every=1, learning_rate=2e-4,
             warmup_steps=4, device="cpu")  # fmt: skip
TIMEOUT = 100  # seconds; a run takes two on a quiet machine


class Run:
    """A script at work, or done: one process per rank."""

    def __init__(self, processes: list, outputs: list[Path], out_dir: Path):
        self.processes, self.output_files, self.out_dir = processes, outputs, out_dir

    def wait(self, timeout: float = TIMEOUT) -> Run:
        """Waits for all processes; kills them and fails when they take too long."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        if None in self.codes:
            self.kill()
            pytest.fail(f"not done after {timeout} s; it printed:\n{self.output}")
        return self

    def wait_for(self, happened, timeout: float = TIMEOUT) -> None:
        end = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > end or None not in self.codes:
                self.kill()
                pytest.fail(f"ended, or waited {timeout} s in vain; it printed:\n{self.output}")
            time.sleep(0.01)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)

    @property
    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    @property
    def output(self) -> str:
        return "".join(file.read_text(errors="replace") for file in self.output_files)

    def succeeded(self) -> Run:
        assert set(self.codes) == {0}, self.output
        return self

    @property
    def lines(self) -> list[dict]:
        return read_lines(self.out_dir / "metrics.jsonl")

    @property
    def steps(self) -> list[dict]:
        return [line for line in self.lines if "learning_rate" in line]

    @property
    def samples(self) -> list[dict]:
        return read_lines(self.out_dir / "samples.jsonl")

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.out_dir.glob("checkpoint-*"))

    def weights(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """Of the policy, after the last step saved."""
        from safetensors.torch import load_file

        folder = self.checkpoints[-1] if step is None else f"checkpoint-{step:06d}"
        return load_file(self.out_dir / folder / "model.safetensors")


class Command:
    """A child process with the interface of multiprocessing's, and its own process group."""

    def __init__(self, command: list, output: Path, environment: dict[str, str]):
        with open(output, "wb") as file:
            self.popen = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                          env=environment, start_new_session=True)  # fmt: skip
        self.pid = self.popen.pid

    @property
    def exitcode(self) -> int | None:
        return self.popen.poll()

    def join(self, timeout: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def fault(*names: str) -> Iterator[None]:
    """Notes for the table whether the faults that the block tried were survived."""
    survived = False
    try:
        yield
        survived = True
    finally:
        if table := os.environ.get("RL_HAND_FAULTS"):  # of scripts/dev/soak.sh
            with open(table, "a") as file:
                file.writelines(json.dumps({"fault": name, "survived": survived}) + "\n" for name in names)


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    import torch

    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


def fork(target: Callable, calls: list[tuple]) -> list:
    """Starts a function in one process for each tuple of arguments."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes = [context.Process(target=target, args=arguments, daemon=True) for arguments in calls]
    # the server, started with the first of them, finds common/ and preload.py, asks no hub, computes in one thread
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        for process in processes:
            process.start()
    return processes


@dataclasses.dataclass
class Given:
    """Objects that a test hands to a script; they are pickled for the process of every rank."""

    rewards: Sequence | None = None  # functions, each with weight 1, or pairs of function and weight
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)  # at the top of the script, by name
    prepare: Callable | None = None  # called with the script's module before its main; may replace attributes


def fork_script(
    script: Path, arguments: list[str], outputs: list[Path], environment: dict[str, str] | None = None,
    given: Given | None = None,
) -> list:  # fmt: skip
    """Starts what `python script arguments` does; for several outputs, the ranks that torchrun would start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    group |= {"WORLD_SIZE": str(len(outputs)), "LOCAL_WORLD_SIZE": str(len(outputs))}
    calls = []
    for rank, output in enumerate(outputs):
        output.touch()
        own = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if len(outputs) > 1 else {}
        calls.append((str(script), arguments, str(output), (environment or {}) | own, given or Given()))
    return fork(_run_script, calls)


def _run_script(script: str, arguments: list[str], output: str, environment: dict[str, str], given: Given) -> None:
    import torch

    _redirect(output)
    os.chdir(ROOT)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(int(os.environ.get("RL_HAND_TEST_THREADS", 1)))
    set_rounding()
    sys.argv = [script, *arguments]
    if given == Given():
        runpy.run_path(script, run_name="__main__")
        return
    module = load_script(script)
    for name, value in given.constants.items():
        assert hasattr(module, name), f"{script} has no constant {name}"
        setattr(module, name, value)
    if given.prepare:
        given.prepare(module)
    pairs = [pair if isinstance(pair, tuple) else (pair, 1.0) for pair in given.rewards or ()]
    module.main(module.config.parse(module.Config), **({} if given.rewards is None else {"rewards": pairs}))


def load_script(path: str | Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def constants_of_config(script: str | Path) -> set[str]:
    """What is an option of other scripts and a constant of this one's Config."""
    classes = [node for node in ast.parse(Path(script).read_text()).body if getattr(node, "name", "") == "Config"]
    assigned = [node for each in classes for node in each.body if isinstance(node, ast.Assign)]
    return {target.id for node in assigned for target in node.targets}


def _run_function(function: Callable, arguments: tuple, output: str) -> None:
    _redirect(output)
    set_rounding()
    function(*arguments)


def _redirect(output: str) -> None:
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


class Launcher:
    """Starts scripts with small settings on tiny models: by name with `reward`, by path with their own rewards."""

    def __init__(self, defaults: dict, models: dict[str, dict], copies: Path, outputs: Path):
        self.defaults, self.models, self.copies, self.outputs = defaults, models, copies, outputs
        self._count = itertools.count()
        self._trained: dict[tuple, Run] = {}

    def copy(self, script: str = "gspo", **constants: Any) -> Path:
        """A copy as a user makes it, for real command lines: with `reward` above, and constants set at its top."""
        text = SCRIPTS[script].read_text()
        lines, replaced = text.splitlines(keepends=True), {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == "reward":
                replaced[node.lineno - 1, node.end_lineno] = inspect.getsource(reward)
            elif isinstance(node, ast.Assign) and (name := getattr(node.targets[0], "id", "")) in constants:
                replaced[node.lineno - 1, node.end_lineno] = f"{name} = {constants[name]!r}\n"
        assert len(replaced) == 1 + len(constants), f"{script}.py lacks one of reward, {', '.join(constants)}"
        for (first, end), source in sorted(replaced.items(), reverse=True):
            lines[first:end] = [source]
        path = self.copies / f"{script}_{next(self._count)}_copy.py"
        path.write_text("".join(lines))
        return path

    def options(self, script: Path, out_dir: Path, **options) -> list[str]:
        family = {"gkd": "distillation", "sft": "sft", "sup": "sft"}.get(script.stem[:3], "rl")
        fixed = constants_of_config(script)
        defaults = {name: value for name, value in self.defaults.items() if name not in fixed}
        values = {**defaults, **self.models[family], **options, "out_dir": out_dir}
        return [text for name, value in values.items() for text in (f"--{name}", str(value))]

    def start(
        self, script: str | Path, out_dir: Path, ranks: int = 1, *, rewards: Sequence | None = None,
        constants: dict[str, Any] | None = None, prepare: Callable | None = None, **options,
    ) -> Run:  # fmt: skip
        if isinstance(script, str):
            script, rewards = SCRIPTS[script], [reward] if rewards is None else rewards
        given = Given(rewards, constants or {}, prepare)
        outputs = self._outputs(ranks)
        processes = fork_script(script, self.options(script, out_dir, **options), outputs, given=given)
        return Run(processes, outputs, Path(out_dir))

    def _outputs(self, ranks: int) -> list[Path]:
        """A file for each rank: not every file system keeps what two append at once."""
        number = next(self._count)
        return [self.outputs / f"{number}.{rank}.txt" for rank in range(ranks)]

    def run_function(self, function, ranks: int, arguments: tuple = (), timeout: float = TIMEOUT) -> None:
        """Runs a function of a test module in several processes; its first argument is the rank, then their number."""
        outputs = self._outputs(ranks)
        calls = [(function, (rank, ranks, *arguments), str(output)) for rank, output in enumerate(outputs)]
        Run(fork(_run_function, calls), outputs, self.outputs).wait(timeout).succeeded()

    def run(self, script: str | Path, out_dir: Path, ranks: int = 1, timeout: float = TIMEOUT, **options) -> Run:
        return self.start(script, out_dir, ranks, **options).wait(timeout)

    def trained(self, script: str = "gspo", ranks: int = 1, **options) -> Run:
        """A run that went well; tests that ask for the same one share it, so leave it as it is."""
        key = (script, ranks, *sorted(options.items()))
        if key not in self._trained:
            out_dir = self.outputs / f"run{next(self._count)}"
            self._trained[key] = self.run(script, out_dir, ranks, **options).succeeded()
        return self._trained[key]

    def command(self, command: list, script: Path, out_dir: Path, **options) -> Run:
        """Starts a script through a real command line, such as ["torchrun", "--nproc_per_node=2"]."""
        output = self.outputs / f"{next(self._count)}.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        process = Command([*command, script, *self.options(script, out_dir, **options)], output, environment)
        return Run([process], [output], Path(out_dir))


class Slow:
    """The reward above, after a pause in which a test does something to the run."""

    __name__ = "reward"

    def __init__(self, seconds: float = 0.3):
        self.seconds = seconds

    def __call__(self, completions: list[str], answers: list[str], **columns: list) -> list[float]:
        print("scoring", flush=True)
        time.sleep(self.seconds)
        return reward(completions, answers, **columns)


def two_replicas(module: ModuleType, count: int = 2) -> None:
    """`prepare`: several replicas in one process, all on the CPU, where a layout of GPUs would have them."""
    import torch

    from common.base import devices

    cpu = torch.device("cpu")

    layout = devices.Layout(
        (cpu,) * count, sampling=tuple(range(count)), reference=cpu, reward=cpu, teacher=(cpu,), embedder=(cpu,)
    )
    devices.layout = lambda *_, **__: layout


@pytest.fixture(scope="session")
def launcher(model_folders, sums_file, tmp_path_factory) -> Iterator[Launcher]:
    """Copied scripts stand in a folder of the clone that is removed at the end."""
    copies = ROOT / "tests" / f".copies-{os.getpid()}"
    copies.mkdir()
    (copies / ".gitignore").write_text("*\n")
    data = dict(train_data=sums_file, eval_data=sums_file)
    students = dict(student_model=model_folders["qwen2"], teacher_model=model_folders["teacher"])
    models = {"rl": dict(policy_model=model_folders["qwen2"], kl_coef=0.1), "distillation": students}
    models["sft"] = dict(policy_model=model_folders["qwen2"])
    yield Launcher({**SMALL, **data}, models, copies, tmp_path_factory.mktemp("outputs"))
    shutil.rmtree(copies)
