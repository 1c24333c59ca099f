"""Embeddings of responses, by sentence-transformers models or a built-in one.

Dims: P prompts, G completions per prompt, D embedding width.
"""

import json
import logging
import math
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from common.base import background
from common.base.distributed import print_main

HUB_TIMEOUT = 4.0  # seconds; huggingface_hub would wait for minutes
UNUSED_FILES = ["onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.jpg", "*.jpeg", "*.png"]
UNUSED_FILES += ["*.gif", "*.webp", "*.svg"]
PARTS = {"weights": ("*.safetensors", "*.bin"), "tokenizer": ("*tokenizer*", "*vocab*", "*.model")}


def answer_part(text: str) -> str:
    """The text after the last </think>, or all of it without one, stripped of white space."""
    return text.rpartition("</think>")[2].strip()


def fetch(name: str) -> str:
    """Downloads an embedding model if needed, and checks it; call it before the first rollout.

    Args:
        name: "ngrams" (built in), a folder, or a hub id such as "BAAI/bge-m3".

    Returns:
        "ngrams" or a folder, for `Embedder`.

    Raises:
        ValueError: the folder does not exist or holds no complete model, the model needs code of
            its own, or the hub id can neither be downloaded nor found in the cache.
    """
    if name == "ngrams":
        return name
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
            raise ValueError(
                f"similarity_model {name!r}: no such folder; give an existing folder, a hub id, or 'ngrams'"
            )
        folder = _download(name)
    _check_folder(name, folder)
    return str(folder)


class Embedder:
    """Embeds the answer parts of responses; imports and loads its models at the first call.

    Args:
        name: from `fetch`.
        devices: each gets a copy of the model, fp16 on a GPU, fp32 on the CPU.
        max_tokens: texts are truncated to this or to the model's own limit; "ngrams" truncates
            nothing.
        batch_size: texts in one forward pass.
        offload: keep the models in CPU memory between calls.

    Attributes:
        seconds: duration of the last call.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str | torch.device],
        max_tokens: int = 1024,
        batch_size: int = 64,
        offload: bool = False,
    ) -> None:
        self.name, self.devices = name, [torch.device(device) for device in devices]
        self.max_tokens, self.batch_size, self.offload = max_tokens, batch_size, offload
        self.models: list[Any] = []
        self.seconds, self._seconds_to_load = math.nan, math.nan
        self._reported, self._warned_truncation = False, False

    def load(self) -> None:
        """Loads the models, if that has not been done; the first call does it too.

        Do not call it in a thread beside the training: loading briefly changes torch's default
        dtype in all threads.

        Raises:
            ValueError: the model cannot be loaded.
        """
        if not self.models:
            start = time.perf_counter()
            self.models = [_load(self.name, device, self.max_tokens) for device in self.devices]
            self._seconds_to_load = time.perf_counter() - start

    def __call__(self, texts: list[str], group_size: int) -> torch.Tensor:
        """Embeds the responses of a batch; equal answer parts get equal vectors, bit for bit.

        Args:
            texts: P x G responses, grouped by prompt.
            group_size: G.

        Returns:
            [P, G, D] fp32 on the CPU, of length 1; zeros for an empty answer part.

        Raises:
            ValueError: incomplete groups; the model returns a wrong number or width of embeddings,
                or cannot be loaded.
            FloatingPointError: an embedding is not finite or has length 0.
        """
        if len(texts) % group_size:
            raise ValueError(f"{len(texts)} texts: must be complete groups of group_size = {group_size}")
        self.load()
        start = time.perf_counter()

        rows_of: dict[str, list[int]] = {}
        for row, text in enumerate(map(answer_part, texts)):
            rows_of.setdefault(text, []).append(row)
        rows_of.pop("", None)
        # Dealt by prompt, so that one device embeds all texts that are compared; a repeated text
        # goes with its first prompt.
        shares = [
            [text for text, rows in rows_of.items() if rows[0] // group_size % len(self.models) == i]
            for i in range(len(self.models))
        ]
        others = [background.start(self._encode, i, shares[i]) for i in range(1, len(shares))]
        parts = [self._encode(0, shares[0]), *(other.result() for other in others)]
        if not self._warned_truncation:
            self._warn_truncation(list(rows_of))

        width_of = getattr(self.models[0], "get_embedding_dimension", None)  # its name in older versions is below
        width = width_of() if width_of else self.models[0].get_sentence_embedding_dimension()
        vectors = torch.zeros(len(texts), width)
        for share, part in zip(shares, parts, strict=True):
            if share and part.shape != (len(share), width):
                raise ValueError(
                    f"similarity_model {_readable(self.name)!r}: embeddings of shape {list(part.shape)} for "
                    f"{len(share)} texts, must be {[len(share), width]}; set it to another one or to 'ngrams'"
                )
            lengths = part.norm(dim=-1)
            for text, vector, length in zip(share, part, lengths[: len(share)], strict=True):
                if not length.isfinite() or length == 0:
                    wrong = "has length 0" if length == 0 else "is not finite"
                    raise FloatingPointError(
                        f"similarity embedding {wrong} in row {rows_of[text][0]}, {text[:80]!r}: the model "
                        f"{_readable(self.name)!r} overflows in float16 or is broken; set similarity_model to another "
                        "one or to 'ngrams'"
                    )
                vectors[rows_of[text]] = vector / length
        self.seconds = time.perf_counter() - start
        if not self._reported:
            self._reported = True
            dtype = next((p.dtype for p in self.models[0].parameters()), torch.float32)
            print_main(
                f"similarity: {_readable(self.name)} created on {', '.join(map(str, self.devices))} "
                f"({str(dtype).removeprefix('torch.')}) in {self._seconds_to_load:.1f} s; "
                f"{len(texts)} texts embedded in {self.seconds:.2f} s"
            )
        return vectors.view(len(texts) // group_size, group_size, vectors.shape[-1])

    def _warn_truncation(self, texts: list[str]) -> None:
        """Warns once about texts that are truncated: those that start alike count as alike."""
        limit, tokenizer = (getattr(self.models[0], name, None) for name in ("max_seq_length", "tokenizer"))
        if limit is None or not math.isfinite(limit) or not callable(tokenizer):
            return
        # a token has at least one byte, and special tokens are added to each text
        texts = [text for text in texts if len(text.encode("utf-8", "surrogatepass")) + 8 > limit]
        ids = tokenizer(texts, truncation=False, verbose=False)["input_ids"] if texts else []
        if truncated := sum(len(tokens) > limit for tokens in ids):
            self._warned_truncation = True
            remedy = "raise similarity_max_tokens" if limit == self.max_tokens else "choose a model that reads more"
            print(  # on the rank that has them
                f"warning: {truncated} responses have more tokens than the {limit} that {_readable(self.name)} reads: "
                f"their ends are not compared; {remedy}"
            )

    def _encode(self, number: int, texts: list[str]) -> torch.Tensor:
        """Embeddings of the texts by one of the models, fp32 on the CPU, before normalisation."""
        model, device = self.models[number], self.devices[number]
        found = torch.zeros(0, 1)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if texts:
                options = dict(batch_size=self.batch_size, show_progress_bar=False, convert_to_tensor=True)
                found = model.encode(texts, device=str(device), **options).float().cpu()
            if self.offload and device.type == "cuda":
                model.to("cpu")
                torch.cuda.empty_cache()
        return found


class Ngrams(nn.Module):
    """The built-in embedder: hashed counts of character 1- to 3-grams, which compare spelling.

    The methods are those that sentence-transformers calls.
    """

    width = 1024

    def preprocess(self, texts: list[str], **kwargs: Any) -> dict[str, torch.Tensor]:
        """Counts [B, 1024], with markers at the start and end of each text."""
        counts = torch.zeros(len(texts), self.width)
        for row, text in zip(counts.numpy(), texts, strict=True):
            text = f"\x02{text}\x03"
            grams = Counter(text[i : i + n] for n in (1, 2, 3) for i in range(len(text) - n + 1))
            for gram, count in grams.items():
                # crc32, because Python's hash differs between processes
                row[zlib.crc32(gram.encode("utf-8", "surrogatepass")) % self.width] += count
        return {"counts": counts}

    tokenize = preprocess  # its name in older versions of sentence-transformers

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Adds `sentence_embedding`, fp32 [B, 1024] of length 1, from logarithms of the counts."""
        return {**features, "sentence_embedding": nn.functional.normalize(features["counts"].log1p(), dim=-1)}

    def get_embedding_dimension(self) -> int:
        """D."""
        return self.width

    get_sentence_embedding_dimension = get_embedding_dimension


def _readable(name: str) -> str:
    """The hub id of a folder in the hub's cache; other names as they are."""
    hub = [part for part in Path(name).parts if part.startswith("models--")]
    return hub[-1].removeprefix("models--").replace("--", "/") if hub else name


def _download(name: str) -> Path:
    import huggingface_hub

    reason = None
    try:
        huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except Exception as error:  # of hub, network or name; the model may still be in the cache
        reason = error

    def snapshot(*ignored: str) -> Path:
        ignored = [*UNUSED_FILES, *ignored]
        return Path(huggingface_hub.snapshot_download(name, ignore_patterns=ignored, local_files_only=bool(reason)))

    try:
        folder = snapshot("pytorch_model*.bin")  # usually a second copy of the weights
        return folder if any(folder.glob("*.safetensors")) else snapshot()
    except Exception as error:
        raise ValueError(
            f"similarity_model {name!r} cannot be downloaded and is not in the hub's cache ({reason or error}): on a "
            f"machine with a network, `hf download {name} --local-dir {name.split('/')[-1]}`, copy the folder here and "
            "set similarity_model to it; or set similarity_model = 'ngrams'"
        ) from error


def _check_folder(name: str, folder: Path) -> None:
    """Refuses a folder without a complete model, and a model that needs code of its own."""
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        raise ValueError(f"similarity_model {name!r}: no config.json or modules.json in it; give the folder of a model")
    if (folder / "modules.json").is_file():
        types = [module["type"] for module in json.loads((folder / "modules.json").read_text(encoding="utf-8"))]
        # sentence-transformers 5 would run the code in any local folder
        if foreign := [kind for kind in types if not kind.startswith("sentence_transformers.")]:
            raise ValueError(
                f"similarity_model {name!r} brings its own code, {foreign}, which is not run: choose another model"
            )
    for what, patterns in PARTS.items():  # detect a partial download now, not after the first rollout
        if not any(any(folder.rglob(pattern)) for pattern in patterns):
            raise ValueError(
                f"similarity_model {name!r}: no {what} ({', '.join(patterns)}) in {folder}; download all of the model"
            )
    for path in folder.rglob("*.safetensors"):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:  # truncated, or a Git LFS pointer
            raise ValueError(f"similarity_model {name!r}: {path} is damaged ({error}); download it again") from error


def _load(name: str, device: torch.device, max_tokens: int) -> Any:
    """Loads a SentenceTransformer in eval mode; its messages while loading are suppressed."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    if name == "ngrams":
        return SentenceTransformer(modules=[Ngrams()], device=str(device)).eval()
    _check_folder(name, Path(name))
    transformers_logging.disable_progress_bar()
    reports: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        return reports.append(record.getMessage()) or False

    loader = logging.getLogger("transformers.modeling_utils")
    loader.addFilter(keep)
    try:
        with torch.random.fork_rng(devices=[]):  # modules draw random weights before they load theirs
            model = SentenceTransformer(
                name,
                device=str(device),
                trust_remote_code=False,
                local_files_only=True,
                model_kwargs={"dtype": torch.float16 if device.type == "cuda" else torch.float32},
            )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise ValueError(
            f"similarity_model {name!r} cannot be loaded: {error}. Code that comes with a model is never run; give the "
            "folder of another model, or 'ngrams'"
        ) from error
    finally:
        loader.removeFilter(keep)
    lines = [line for report in reports for line in report.splitlines() if "MISSING" in line and "|" in line]
    # missing weights are random; the pooler of a BERT is often missing, and not used for embeddings
    if missing := [line.split("|")[0].strip() for line in lines if "pooler" not in line]:
        raise ValueError(f"similarity_model {name!r} lacks the weights {missing}: give a complete model")
    limit = model.max_seq_length
    if limit is None or math.isfinite(limit):  # a model without attention has no limit
        model.max_seq_length = min(limit or max_tokens, max_tokens)
    return model.eval().requires_grad_(False)
