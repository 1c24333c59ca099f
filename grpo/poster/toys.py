"""Built-in poster policies, so that every poster script runs without downloads.

toy-poster      writes level-0 posters from text: a Llama of 0.6 M parameters.
toy-poster-vlm  also sees the input image: a Qwen2.5-VL of 0.6 M parameters, including the vision tower.
Both are ordinary transformers folders with the same byte-level tokenizer of 512 tokens (single digits, whole colours).
They are trained on good posters of level 0, but only briefly: most samples parse, many have wrong numbers and most have
wrong words, which is left to RL.
"""

import hashlib
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

from common.base import storage
from common.model import images
from common.tasks import toy
from grpo.poster import records, synthetic

VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION]
NUM_TOKENS = 512
PIECES = r"\d|#[0-9A-F]{6}| ?[A-Z][a-z]+|[^0-9A-Z#]+|."  # BPE merges stay inside a piece
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SEED = 1
STEPS = {"toy-poster": 150, "toy-poster-vlm": 130}
LEARNING_RATE = 5e-3
BATCH_SIZE = 8
NUM_RECORDS = 1000
SOURCES = [Path(__file__), Path(synthetic.__file__), Path(records.__file__)]


def find(name: str) -> str:
    """The folder of a built-in poster model; any other name is returned unchanged.

    Args:
        name: "toy-poster", "toy-poster-vlm", or what `common.model.models.load_policy` accepts.
    """
    return str(folder(name)) if name in STEPS else name


def folder(name: str = "toy-poster") -> Path:
    """The folder of a built-in model; the first call trains it (about 15 s on one core).

    The cache is `$RL_HAND_CACHE`, or `~/.cache/rl_hand`. Concurrent calls are safe: each process trains in a folder of
    its own, the first to finish renames it to the final name, and all return that one.

    Args:
        name: "toy-poster" or "toy-poster-vlm".

    Returns:
        A folder for `common.model.models.load_policy` (and `common.model.images.load_processor`).

    Raises:
        ValueError: there is no such model.
    """
    if name not in STEPS:
        raise ValueError(f"{name!r} is no built-in poster model: use one of {sorted(STEPS)}")
    cache = Path(os.environ.get("RL_HAND_CACHE") or "~/.cache/rl_hand").expanduser()
    # the name has a hash of the sources: after a change, the model is trained again
    target = cache / f"{name}-{hashlib.sha256(b''.join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    print(f"built-in {name}: training {STEPS[name]} steps once, cached in {target}", flush=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=cache) as scratch:
        unfinished = Path(scratch) / target.name
        tokenizer = build_tokenizer()
        processor = build_processor(tokenizer) if name == "toy-poster-vlm" else None
        with toy.undisturbed():
            model = build_llama(tokenizer) if processor is None else build_qwen_vl(tokenizer)
            _warm_start(model, processor or tokenizer, STEPS[name])
        model.save_pretrained(unfinished)
        (processor or tokenizer).save_pretrained(unfinished)
        storage.publish(unfinished, target)
    return target


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer on prompts and posters of level 0, in about a second."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rows = synthetic.records(0, "train", NUM_RECORDS)
    texts = [text for row in rows for text in ("user\nassistant\n", row["prompt"], synthetic.gold(row))]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", *VISION],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def build_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained text model."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            **_ids(tokenizer),
        )
    )


def _ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def build_qwen_vl(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained vision-language model with all parts of a large one."""
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    vision_ids = dict(zip(names, tokenizer.convert_tokens_to_ids(VISION), strict=True))
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        tie_word_embeddings=True,
        **_ids(tokenizer),
    )
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        patch_size=14,
        spatial_merge_size=2,
        temporal_patch_size=2,
        window_size=56,
        out_hidden_size=128,
        fullatt_block_indexes=[1],
    )
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **vision_ids)
    return Qwen2_5_VLForConditionalGeneration(config)


def build_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    """The processor of the vision-language model: images become 4 to 16 tokens."""
    pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 16 * 28 * 28})  # areas
    return images.image_only(Qwen2_5_VLProcessor)(pixels, tokenizer, chat_template=CHAT_TEMPLATE)


def _warm_start(model: PreTrainedModel, processor: ProcessorMixin | PreTrainedTokenizerFast, steps: int) -> None:
    """Trains on good posters, with cross-entropy over the poster and its end token."""
    rng = random.Random(SEED)
    rows = synthetic.records(0, "train", NUM_RECORDS)
    has_vision = isinstance(processor, ProcessorMixin)
    tokenizer = processor.tokenizer if has_vision else processor
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(steps):
        # warm-up over 10 steps, constant, then linear decay to 0 over the second half
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / 10, 2 - 2 * step / steps)
        batch = rng.sample(rows, BATCH_SIZE)
        chats = [records.messages(row, has_vision) for row in batch]
        prompts = processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        golds = [synthetic.gold(row) + tokenizer.eos_token for row in batch]
        texts = [prompt + gold for prompt, gold in zip(prompts, golds, strict=True)]
        pictures = {"images": [[synthetic.image(ref) for ref in row["images"]] for row in batch]} if has_vision else {}
        inputs = processor(text=texts, padding=True, return_tensors="pt", **pictures)
        labels = torch.full_like(inputs["input_ids"], -100)
        # padded on the left, so the poster is at the end; no token spans prompt and poster, since the tokenizer was
        # trained on them separately
        for i, gold in enumerate(golds):
            length = len(tokenizer(gold)["input_ids"])
            labels[i, -length:] = inputs["input_ids"][i, -length:]
        model(**inputs, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
