"""Turns poster records into examples of a training script, and opens their input images."""

import json
from collections.abc import Sequence
from typing import Any

from PIL import Image

from common.base.checks import require
from common.base.distributed import print_main
from common.model import images
from common.tasks import demonstrations, prompt_encoding
from common.tasks.data import Example
from common.tasks.demonstrations import Demonstration
from grpo.poster import records


def load_examples(cfg: Any, source: str, split: str, tokenizer: Any, processor: Any | None) -> list[Example]:
    """Reads records and drops those with too long prompts or too many images.

    With a processor, prompts contain the placeholder tokens of their images.

    Args:
        cfg: Config of grpo/poster/poster_grpo.py.
        source: "synthetic:LEVEL", or a .jsonl file of records.
        split: "train" or "test", for synthetic records.
        tokenizer: of the policy.
        processor: of a vision-language policy; None: a text policy.

    Raises:
        ValueError: no prompt is within `max_prompt_tokens` and `max_images`.
    """
    rows, folder = records.read(source, split), records.folder_of(source)
    kept = [i for i, row in enumerate(rows) if processor is None or len(row["images"]) <= cfg.max_images]
    if processor is None:
        chats = [records.messages(rows[i], with_images=False) for i in kept]
        ids, starts = prompt_encoding.encode(chats, source, tokenizer)
    else:
        sizes = [[records.image_size(ref, folder) for ref in rows[i]["images"]] for i in kept]
        ids = [images.encode(processor, records.messages(rows[i], with_images=True), own)
               for i, own in zip(kept, sizes, strict=True)]  # fmt: skip
        starts = [""] * len(ids)
    examples = []
    for i, prompt_ids, start in zip(kept, ids, starts, strict=True):
        columns = {name: rows[i][name] for name in ("id", "images", "extra_info")}
        truth = rows[i]["ground_truth"]
        truth = truth if isinstance(truth, str) else json.dumps(truth)
        if len(prompt_ids) <= cfg.max_prompt_tokens:
            examples.append(Example(i, rows[i]["prompt"], prompt_ids, truth, columns, start))
    limits = f"max_prompt_tokens = {cfg.max_prompt_tokens}, max_images = {cfg.max_images}"
    remedy = f"the shortest has {min(map(len, ids), default=0)} tokens; raise one, or lower max_pixels"
    require(bool(examples), limits, f"no prompt of {source} fits", remedy)
    if dropped := len(rows) - len(examples):
        print_main(f"{source}: dropped {dropped} of {len(rows)} prompts: too long, or too many images")
    return examples


def load_demonstrations(cfg: Any, tokenizer: Any, processor: Any | None) -> list[Demonstration]:
    """Training records with the posters to learn: their ground truth.

    Args:
        cfg: Config of grpo/poster/supervised.py.
        tokenizer: as in `load_examples`.
        processor: as in `load_examples`.

    Raises:
        ValueError: no record is within the limits.
    """
    examples = load_examples(cfg, cfg.train_data, "train", tokenizer, processor)
    posters = [json.dumps(json.loads(e.answer), ensure_ascii=False, separators=(",", ":")) for e in examples]
    rows = demonstrations.of_texts(examples, posters, tokenizer, tokenizer.eos_token_id, cfg.train_data)
    kept = [row for row in rows if row.tokens <= cfg.max_tokens]
    fit = f"{cfg.train_data}: {len(kept)} of {len(rows)} records fit into max_tokens = {cfg.max_tokens}"
    require(len(kept) >= cfg.batch_size, fit, f"must be at least batch_size = {cfg.batch_size}",
            "lower it, or raise max_tokens")  # fmt: skip
    print_main(fit)
    return kept


def open_images(examples: Sequence[Example], source: str, processor: Any | None) -> list[list[Image.Image | None]]:
    """Opens the input images of every example.

    Args:
        examples: P records.
        source: of the records.
        processor: of a vision-language policy; None: synthetic images are None, since the reward
            service draws them itself.
    """
    folder = records.folder_of(source)

    def open_image(ref: str) -> Image.Image | None:
        return records.open_image(ref, folder) if processor or not ref.startswith("synthetic:") else None

    return [[open_image(ref) for ref in example.columns["images"]] for example in examples]
