"""Embeddings of responses: sentence-transformers models, loaded when first used, or one that is built in.

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

HUB_TIMEOUT = 4.0  # seconds; the hub's own functions would wait for minutes
UNUSED_FILES = ["onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.jpg", "*.jpeg", "*.png"]
UNUSED_FILES += ["*.gif", "*.webp", "*.svg"]
PARTS = {"weights": ("*.safetensors", "*.bin"), "tokenizer": ("*tokenizer*", "*vocab*", "*.model")}


def answer_part(text: str) -> str:
    """The text after the last </think>, all of it if there is none, without white space at both ends."""
    return text.rpartition("</think>")[2].strip()


def fetch(name: str) -> str:
    """Makes sure that an embedding model is on this machine: to be called before the first rollout.

    Args:
        name: "ngrams" (built in), a folder, or a hub id such as "BAAI/bge-m3", which is downloaded.

    Returns:
        What `Embedder` takes: "ngrams" or a folder.

    Raises:
        ValueError: no such folder, a folder without a model or with a part of one, a model that brings its own code, or
            a hub id that can neither be downloaded nor found in the cache.
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
    """Embeds the answer parts of responses; nothing is imported or loaded before the first call.

    Args:
        name: what `fetch` returned.
        devices: each gets a copy of the model, fp16 on a GPU, fp32 on the CPU.
        max_tokens: longer texts are cut at this or at the model's own limit, whichever is smaller; "ngrams" cuts none.
        batch_size: texts in one forward.
        offload: between calls the models wait in the memory of the CPU.

    Attributes:
        seconds: what the last call took.
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
        self.seconds_created, self.seconds, self.said, self.said_cut = math.nan, math.nan, False, False

    def load(self) -> None:
        """Creates the models, if they are not there yet; a first call does it too.

        Not for a thread beside the training: loading changes torch's default dtype for a moment, in all threads.

        Raises:
            ValueError: the model cannot be loaded.
        """
        if not self.models:
            start = time.perf_counter()
            self.models = [_load(self.name, device, self.max_tokens) for device in self.devices]
            self.seconds_created = time.perf_counter() - start

    def __call__(self, texts: list[str], group_size: int) -> torch.Tensor:
        """Embeds the responses of a batch; equal answer parts get the same vector, bit for bit.

        Args:
            texts: P x G responses, those to one prompt next to one another.
            group_size: G.

        Returns:
            [P, G, D] fp32 on the CPU, of length 1; zeros for an empty answer part.

        Raises:
            ValueError: incomplete groups; embeddings of another number or width than they must be; at the first call,
                a model that cannot be loaded.
            FloatingPointError: an embedding that is not finite or has length 0.
        """
        if len(texts) % group_size:
            raise ValueError(f"{len(texts)} texts: must be complete groups of group_size = {group_size}")
        self.load()
        start = time.perf_counter()

        rows_of: dict[str, list[int]] = {}
        for row, text in enumerate(map(answer_part, texts)):
            rows_of.setdefault(text, []).append(row)
        rows_of.pop("", None)
        # By prompt: what is compared comes from one device. A text of several prompts goes with the first of them.
        shares = [
            [text for text, rows in rows_of.items() if rows[0] // group_size % len(self.models) == i]
            for i in range(len(self.models))
        ]
        others = [background.start(self._encode, i, shares[i]) for i in range(1, len(shares))]
        parts = [self._encode(0, shares[0]), *(other.result() for other in others)]
        if not self.said_cut:
            self._warn_cut(list(rows_of))

        width_of = getattr(self.models[0], "get_embedding_dimension", None)  # older versions: the other name
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
        if not self.said:
            self.said = True
            dtype = next((p.dtype for p in self.models[0].parameters()), torch.float32)
            print_main(
                f"similarity: {_readable(self.name)} created on {', '.join(map(str, self.devices))} "
                f"({str(dtype).removeprefix('torch.')}) in {self.seconds_created:.1f} s; "
                f"{len(texts)} texts embedded in {self.seconds:.2f} s"
            )
        return vectors.view(len(texts) // group_size, group_size, vectors.shape[-1])

    def _warn_cut(self, texts: list[str]) -> None:
        """Says once that there are texts whose ends the model does not read: they are alike if their beginnings are."""
        limit, tokenizer = (getattr(self.models[0], name, None) for name in ("max_seq_length", "tokenizer"))
        if limit is None or not math.isfinite(limit) or not callable(tokenizer):
            return
        # a token has a byte at least; and some are added to each text
        texts = [text for text in texts if len(text.encode("utf-8", "surrogatepass")) + 8 > limit]
        ids = tokenizer(texts, truncation=False, verbose=False)["input_ids"] if texts else []
        if cut := sum(len(tokens) > limit for tokens in ids):
            self.said_cut = True
            remedy = "raise similarity_max_tokens" if limit == self.max_tokens else "choose a model that reads more"
            print(  # by the rank that has them
                f"warning: {cut} responses have more tokens than the {limit} that {_readable(self.name)} reads: their "
                f"ends are not compared; {remedy}"
            )

    def _encode(self, number: int, texts: list[str]) -> torch.Tensor:
        """Embeddings of the texts by one of the models, fp32 on the CPU, not yet of length 1."""
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
    """The first and only module of the built-in embedder: counts of a text's character 1- to 3-grams, hashed.

    It measures how alike texts look, not what they mean. The methods are those sentence-transformers calls.
    """

    width = 1024

    def preprocess(self, texts: list[str], **kwargs: Any) -> dict[str, torch.Tensor]:
        """Counts [B, 1024] of each text, with a mark at its beginning and its end."""
        counts = torch.zeros(len(texts), self.width)
        for row, text in zip(counts.numpy(), texts, strict=True):
            text = f"\x02{text}\x03"
            grams = Counter(text[i : i + n] for n in (1, 2, 3) for i in range(len(text) - n + 1))
            for gram, count in grams.items():
                # crc32, since Python's hash differs from process to process
                row[zlib.crc32(gram.encode("utf-8", "surrogatepass")) % self.width] += count
        return {"counts": counts}

    tokenize = preprocess  # its name in older sentence-transformers

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Adds `sentence_embedding`, fp32 [B, 1024] of length 1: a tenth copy says less than a first."""
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
    except Exception as error:  # of the hub, of its transport, of the name; the model may be in the cache all the same
        reason = error

    def snapshot(*ignored: str) -> Path:
        ignored = [*UNUSED_FILES, *ignored]
        return Path(huggingface_hub.snapshot_download(name, ignore_patterns=ignored, local_files_only=bool(reason)))

    try:
        folder = snapshot("pytorch_model*.bin")  # in most repositories a second copy of the weights
        return folder if any(folder.glob("*.safetensors")) else snapshot()
    except Exception as error:
        raise ValueError(
            f"similarity_model {name!r} cannot be downloaded and is not in the hub's cache ({reason or error}): on a "
            f"machine with a network, `hf download {name} --local-dir {name.split('/')[-1]}`, copy the folder here and "
            "set similarity_model to it; or set similarity_model = 'ngrams'"
        ) from error


def _check_folder(name: str, folder: Path) -> None:
    """Refuses a folder without a model or with a part of one, and one whose modules are its own code."""
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        raise ValueError(f"similarity_model {name!r}: no config.json or modules.json in it; give the folder of a model")
    if (folder / "modules.json").is_file():
        types = [module["type"] for module in json.loads((folder / "modules.json").read_text(encoding="utf-8"))]
        # checked here, because sentence-transformers 5 trusts every local folder
        if foreign := [kind for kind in types if not kind.startswith("sentence_transformers.")]:
            raise ValueError(
                f"similarity_model {name!r} brings its own code, {foreign}, which is not run: choose another model"
            )
    for what, patterns in PARTS.items():  # or a download that was broken off would be found out after a rollout
        if not any(any(folder.rglob(pattern)) for pattern in patterns):
            raise ValueError(
                f"similarity_model {name!r}: no {what} ({', '.join(patterns)}) in {folder}; download all of the model"
            )
    for path in folder.rglob("*.safetensors"):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:  # cut off, or what Git LFS puts in place of a file
            raise ValueError(f"similarity_model {name!r}: {path} is damaged ({error}); download it again") from error


def _load(name: str, device: torch.device, max_tokens: int) -> Any:
    """A SentenceTransformer in eval mode on the device; what it would say while loading is dropped."""
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
        with torch.random.fork_rng(devices=[]):  # modules draw weights before they load theirs
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
    # filled with random numbers; the pooler of a BERT has no part in the embedding, and is often left out
    if missing := [line.split("|")[0].strip() for line in lines if "pooler" not in line]:
        raise ValueError(f"similarity_model {name!r} lacks the weights {missing}: give a complete model")
    limit = model.max_seq_length
    if limit is None or math.isfinite(limit):  # a model without attention has no limit, and none can be set
        model.max_seq_length = min(limit or max_tokens, max_tokens)
    return model.eval().requires_grad_(False)
