"""What the benchmarks share: random weights of known shapes, what a card can do, commands run as processes."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from common.base import devices, storage
from common.base.checks import require
from common.model import sources
from common.planning import shapes

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names in configs
SPECIALS = ["<pad>", "<unk>", "<end>"]  # the last three ids; the others are the words w0, w1, ...
SHAPES = {  # model type, vocabulary, hidden, intermediate, layers, heads, key-value heads, positions, tied embeddings
    "qwen0.5b": ("qwen2", 151936, 896, 4864, 24, 14, 2, 32768, True),
    "qwen1.5b": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 32768, True),
    "qwen7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 32768, False),
    # three layers of four are linear attention
    "qwen3.5-0.8b": ("qwen3_5_text", 248320, 1024, 3584, 24, 8, 2, 32768, True),
    "qwen3-30b-a3b-6": ("qwen3_moe", 151936, 2048, 6144, 6, 32, 4, 32768, False),  # 6 of 48 layers
    # as large as qwen3.5-0.8b, and all of it attention
    "dense-0.8b": ("qwen3", 248320, 1024, 3584, 28, 16, 8, 32768, True),
    "smollm2": ("llama", 49152, 576, 1536, 30, 9, 3, 8192, True),
    "tiny": ("qwen2", 512, 128, 256, 2, 4, 2, 4096, True),
    "tiny-teacher": ("qwen2", 512, 192, 384, 3, 6, 2, 4096, True),
}
OPTIONS = {  # further fields of their configs
    "dense-0.8b": dict(head_dim=128),
    "qwen3.5-0.8b": dict(head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
                         linear_value_head_dim=128, linear_conv_kernel_dim=4,
                         layer_types=6 * [*3 * ["linear_attention"], "full_attention"]),
    "qwen3-30b-a3b-6": dict(head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
}  # fmt: skip
CARDS = {  # name as torch gives it: bytes per second, and dense bf16 FLOP/s, of the data sheet
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12),
    "NVIDIA H200": (4.8e12, 989e12),
    "NVIDIA A100-SXM4-80GB": (2.04e12, 312e12),
    "NVIDIA A100-SXM4-40GB": (1.555e12, 312e12),
    "NVIDIA A100-PCIE-40GB": (1.555e12, 312e12),
    "NVIDIA L40S": (0.864e12, 362e12),
    "NVIDIA GeForce RTX 4090": (1.008e12, 165e12),
    "NVIDIA A10G": (0.6e12, 70e12),
}


# ---- models and prompts ----


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer without chat template for which one word, such as "w17", is one token."""
    words = [f"w{i}" for i in range(vocabulary - len(SPECIALS))] + SPECIALS
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "unk_token", "eos_token"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)


def config_of(name: str) -> PreTrainedConfig:
    """The transformers config for a name in SHAPES."""
    family, vocabulary, hidden, intermediate, layers, heads, kv_heads, positions, tied = SHAPES[name]
    return AutoConfig.for_model(
        family, vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=positions,
        tie_word_embeddings=tied, bos_token_id=None, pad_token_id=vocabulary - 3, eos_token_id=vocabulary - 1,
        **OPTIONS.get(name, {}),
    )  # fmt: skip


def make_model(name: str, num_ends: int, work_dir: Path) -> Path:
    """Folder with seeded random weights and a tokenizer, cached in `work_dir`.

    Args:
        name: key of SHAPES.
        num_ends: number of end tokens. Logits of random weights are nearly uniform, so every token ends a completion
            with probability num_ends / vocabulary.
        work_dir: cache folder.
    """
    cfg = config_of(name)
    recipe = repr((SHAPES[name], *OPTIONS.get(name, {}).items(), num_ends, transformers.__version__))
    folder = work_dir / "models" / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"
    if folder.is_dir():
        return folder
    torch.manual_seed(0)
    with pick_device("auto"):  # on a CPU, 7B take minutes
        model = AutoModelForCausalLM.from_config(cfg, dtype=torch.bfloat16, trust_remote_code=False)
    others = random.Random(0).sample(range(cfg.vocab_size - len(SPECIALS)), num_ends - 1)
    model.generation_config.eos_token_id = [*sorted(others), cfg.eos_token_id]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        for part in (model, make_tokenizer(cfg.vocab_size)):
            part.save_pretrained(Path(unfinished) / folder.name)
        storage.publish(Path(unfinished) / folder.name, folder)
    return folder


def write_prompts(path: Path, rows: int, prompt_tokens: int, vocabulary: int) -> None:
    """Writes prompts of random words with an answer that no completion can match."""
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            words = rng.choices(range(vocabulary - len(SPECIALS)), k=prompt_tokens)
            file.write(json.dumps({"prompt": " ".join(f"w{word}" for word in words), "answer": "-1"}) + "\n")


# ---- formulas ----


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model that the formulas need."""

    layers: int  # of attention
    attention_width: int  # heads * head_dim
    kv_width: int  # key-value heads * head_dim
    body: int  # parameters without embedding and head
    head: int  # parameters of the head, tied or not
    embedding: int = 0  # parameters of an untied embedding
    idle: int = 0  # parameters of the experts that a token does not go through
    state: int = 0  # bytes that layers other than attention hold for a sequence, in bf16

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.body + self.head + self.embedding


def shape_of(name: str) -> Shape:
    """The shape of a transformers folder, or of "toy", from its config alone."""
    cfg = AutoConfig.from_pretrained(sources.find(name), trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(cfg, trust_remote_code=False)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    apart = {id(weight): weight.numel() for weight in (head, embedding)}  # one entry if tied
    head_dim = getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads
    attention = [module for module in model.get_decoder().modules() if hasattr(module, "is_causal")]
    experts = max(getattr(cfg, key, None) or 0 for key in EXPERTS)
    stacked = [p.numel() for p in model.parameters() if experts and p.dim() == 3 and len(p) == experts]
    others = len(attention) < cfg.num_hidden_layers  # layers that hold states
    return Shape(
        len(attention), cfg.num_attention_heads * head_dim, cfg.num_key_value_heads * head_dim,
        model.num_parameters() - sum(apart.values()), head.numel(), sum(apart.values()) - head.numel(),
        sum(stacked) // experts * (experts - cfg.num_experts_per_tok) if stacked else 0,
        shapes.of(name).blocks.cache(torch.bfloat16).row if others else 0,
    )  # fmt: skip


def decode_bytes(
    shape: Shape, batch_size: int, group_size: int, prompt_tokens: int, new_tokens: int, itemsize: int
) -> float:
    """Bytes to be read for one more token in every sequence, mean over the tokens of a completion.

    Every weight is read once; a tied embedding counts once, as the head, an untied one not at all. Token t of a
    completion, t = 0 .. new_tokens - 1, attends to the prompt, whose keys and values the group shares, and to the t
    tokens before it, (new_tokens - 1) / 2 on average. Each has a key and a value in every layer of attention. A
    sequence's state is read and written. All experts count, although fewer sequences would read fewer.

    Args:
        shape: of the model.
        batch_size: prompts.
        group_size: completions per prompt.
        prompt_tokens: per prompt.
        new_tokens: per completion, the same for all.
        itemsize: bytes of one weight, and of one number of a key or value.
    """
    tokens = batch_size * (prompt_tokens + group_size * (new_tokens - 1) / 2)
    states = 2 * batch_size * group_size * shape.state
    return itemsize * (shape.body + shape.head + tokens * 2 * shape.layers * shape.kv_width) + states


# ---- running ----


def pick_device(device: str) -> torch.device:
    """The device that the scripts would use."""
    return torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")


def run(
    command: list[str], folder: Path, wanted: Callable[[], bool], timeout: float, ranks: int = 1, **environment: str
) -> None:
    """Runs a command, logging to folder/log.txt, and kills it once `wanted()`, polled every 20 ms, is true.

    Args:
        command: program and arguments.
        folder: for the log.
        wanted: whether the command has produced its result.
        timeout: seconds.
        ranks: processes, with torchrun's environment variables; torchrun itself starts its ranks in sessions of their
            own, where they outlive the launcher.
        **environment: variables to set.

    Raises:
        RuntimeError: the command ended or timed out before `wanted()`; the message has its last lines.
    """
    end, log = time.monotonic() + timeout, folder / "log.txt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    processes = []
    with open(log, "wb") as file:
        for rank in range(ranks):
            names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
            place = {**meet, **{name: str(number) for name, number in names.items()}} if ranks > 1 else {}
            env = {**os.environ, **environment, **place}
            processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env,
                                              start_new_session=True))  # fmt: skip
    try:
        while all(p.poll() is None for p in processes) and not wanted() and time.monotonic() < end:
            time.sleep(0.02)
        codes = [p.returncode for p in processes if p.returncode is not None]
        how = f"exit code {codes[0]}" if codes else f"no result after {timeout:g} s"
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its children
            process.wait()
    if not wanted():
        last = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").rstrip().split("\n")[-20:]
        raise RuntimeError("\n".join([shlex.join(command), *last, f"({how}; all of it: {log})"]))


def require_vllm(folder: str) -> None:
    """Requires vLLM in a folder; "": installed.

    Raises:
        ValueError: it is not there.
    """
    there = (Path(folder) / "vllm").is_dir() if folder else importlib.util.find_spec("vllm") is not None
    require(there, f"vllm_path = {folder!r}", "needs the package vllm there, or installed",
            "pip install --target FOLDER vllm, and --vllm_path FOLDER")  # fmt: skip


def vllm_environment(folder: str, multiprocessing: bool = False) -> dict[str, str]:
    """Environment variables of a process with vLLM.

    Args:
        folder: has vLLM and what it needs, in versions that our own process must not see; "": installed.
        multiprocessing: the engine runs in a process of its own.
    """
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would compile kernels at its start
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing)),
            **({"PYTHONPATH": os.pathsep.join(paths)} if folder else {})}  # fmt: skip


def attempt(function: Callable[..., dict], *arguments: Any) -> dict[str, Any]:
    """Returns what the function returns; prints an error and returns {"error": text}."""
    try:
        return function(*arguments)
    except Exception as error:
        traceback.print_exception(error)
        return {"error": f"{type(error).__name__}: {error}"}


def as_options(values: dict[str, Any]) -> list[str]:
    """{"steps": 3} as ["--steps", "3"]."""
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def card(device: str = "auto") -> str:
    """Name of the GPU, or "CPU" and the processor's name."""
    if pick_device(device).type == "cuda":
        return torch.cuda.get_device_name(0)
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in about.splitlines() if line.startswith("model name")]
    return f"CPU, {names[0] if names else platform.machine()}"


def machine() -> dict[str, Any]:
    """Card, versions and commit, without which measurements cannot be compared."""
    git = {"commit": ["rev-parse", "HEAD"], "changes": ["status", "--porcelain"]}
    for name, arguments in git.items():
        command = ["git", "-C", str(ROOT), *arguments] if shutil.which("git") else ["false"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
        git[name] = done.stdout.strip() if done.returncode == 0 else None  # None outside a repository
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "card": card(), "gpu_memory_gib": round(gpu.total_memory / devices.GIB, 1) if gpu else None,
        "cpus": len(os.sched_getaffinity(0)), "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "commit": git["commit"], "dirty": None if git["changes"] is None else bool(git["changes"]),
    }  # fmt: skip


def shown(value: float | None, form: str = ".3g") -> str:
    """A number as text, "-" for None."""
    return "-" if value is None else format(value, form)


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table, the first row its head."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])
