"""Supervised fine-tuning of a poster policy, so that RL starts with completions that parse as JSON.

Run:   python grpo/poster/supervised.py        built-in policy and posters, seconds on a CPU
       python grpo/poster/supervised.py --policy_model Qwen/Qwen2.5-0.5B-Instruct \
           --train_data synthetic:1 --learning_rate 1e-5 --steps 300
       then train on with --policy_model runs/supervised/policy
Dims:  P posters per step, m posters in one forward, C completion tokens

The targets are the ground-truth posters of the records. A vision-language model sees the input
images; its vision tower stays frozen.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import ProcessorMixin, PreTrainedTokenizerBase

sys.path.insert(0, str(next(p for p in Path(__file__).resolve().parents if (p / "common/maths/losses.py").is_file())))
from common.base import checks, config, storage
from common.base.checks import require
from common.distill import offpolicy
from common.model import images, logprobs, models, sources
from common.run import interrupts, metrics, random_state
from common.tasks import data
from common.training import optim
from grpo.poster import records, synthetic, toys


@dataclass(frozen=True)
class Config:
    """Supervised fine-tuning for posters. Editing a line and passing --name value are the same."""

    policy_model: str = "toy-poster"  # built-in, or toy-poster-vlm; or a hub id or folder, with or without vision
    train_data: str = "synthetic:0"  # "synthetic:LEVEL", or a .jsonl file of records
    steps: int = 200  # optimizer steps
    batch_size: int = 16  # P, posters per step
    micro_batch_tokens: int = 8192  # prompt and poster tokens in one forward pass; affects memory and speed only
    max_tokens: int = 8192  # of prompt and poster; longer records are dropped and counted
    max_pixels: int = 0  # area above which an image is downscaled; 0: the limit of the model
    learning_rate: float = 1e-3  # for the built-in policies; 1e-5 from 0.5 B parameters up
    warmup_steps: int = 10  # steps of linear warm-up; over the second half of the steps the rate decays to 0
    weight_decay: float = 0.0  # decoupled
    max_grad_norm: float = 1.0  # gradient clipping; inf: none
    dtype: str = "auto"  # "bf16" and "fp16" with fp32 master weights, "fp32"; "auto": bf16 on a GPU, fp32 on the CPU
    device: str = "auto"  # "cuda", "cpu"; "auto": the first GPU if there is one
    gradient_checkpointing: bool = False  # recompute activations: less memory, more time
    seed: int = 0  # for the order of the posters
    out_dir: str = "runs/supervised"  # policy/, metrics.jsonl, tensorboard/

    def __post_init__(self):
        checks.at_least(self, 1, "steps", "batch_size", "micro_batch_tokens", "max_tokens")
        checks.at_least(self, 0, "max_pixels", "learning_rate", "warmup_steps", "weight_decay")
        checks.above_zero(self, "max_grad_norm")
        checks.one_of(self, dtype=("auto", *sources.DTYPES), device=("auto", "cuda", "cpu"))
        taken = (Path(self.out_dir) / "policy").exists()
        require(not taken, f"out_dir = {self.out_dir!r}", "holds a policy already", "choose another folder")


def encode(
    rows: list[dict[str, Any]], reader: PreTrainedTokenizerBase | ProcessorMixin, folder: Path
) -> list[tuple[list[int], list[int]]]:
    """Token ids of the prompt and of the target poster of every record, including the end token.

    Args:
        rows: from `records.read`.
        reader: the tokenizer of a text model; the processor of a vision-language model.
        folder: of the images.
    """
    has_vision = isinstance(reader, ProcessorMixin)
    tokenizer = reader.tokenizer if has_vision else reader
    chats = [records.messages(row, has_vision) for row in rows]
    if has_vision:
        sizes = [[records.image_size(ref, folder) for ref in row["images"]] for row in rows]
        prompts = [images.encode(reader, chat, own) for chat, own in zip(chats, sizes, strict=True)]
    else:
        prompts = data.encode_prompts(chats, "train_data", tokenizer, True, "")
    golds = tokenizer([synthetic.gold(row) for row in rows], add_special_tokens=False, verbose=False)["input_ids"]
    return [(prompt, [*gold, tokenizer.eos_token_id]) for prompt, gold in zip(prompts, golds, strict=True)]


def main(cfg: Config) -> None:
    """Trains and saves the policy; a step is one batch of posters."""
    on_gpu = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    home = torch.device("cuda:0" if on_gpu else "cpu")
    storage.claim(cfg.out_dir)  # two runs must not write the same policy
    random_state.seed(cfg.seed)
    source = toys.find(cfg.policy_model)
    tokenizer, model = models.load_policy(source, home, cfg.dtype, cfg.gradient_checkpointing)
    models.warn_learning_rate(cfg.learning_rate, model, 1e-4, "on demonstrations: 1e-5")
    has_vision = images.is_vlm(model.config)
    reader = images.load_processor(source, cfg.max_pixels) if has_vision else tokenizer
    if has_vision:
        images.freeze_vision(model)
    policy = logprobs.LogProbs(model, 1.0)
    optimizer = optim.AdamW(model, cfg.learning_rate, weight_decay=cfg.weight_decay)
    rows, folder = records.read(cfg.train_data), records.folder_of(cfg.train_data)
    pairs = encode(rows, reader, folder)
    usable = [i for i, (prompt, gold) in enumerate(pairs) if len(prompt) + len(gold) <= cfg.max_tokens]
    fit = f"{cfg.train_data}: {len(usable)} of {len(rows)} records fit into max_tokens = {cfg.max_tokens}"
    enough = len(usable) >= cfg.batch_size
    require(enough, fit, f"must be at least batch_size = {cfg.batch_size}", "lower it, or raise max_tokens")
    print(fit)
    log = metrics.Log(cfg.out_dir, 0, cfg.steps, [home] if on_gpu else [])
    config.save(cfg, cfg.out_dir)
    end_ids, rng = sources.end_token_ids(tokenizer, model), random.Random(cfg.seed)
    for step in range(1, cfg.steps + 1):
        chosen = rng.sample(usable, cfg.batch_size)
        prompts, golds = zip(*(pairs[i] for i in chosen), strict=True)
        batch = offpolicy.batch(prompts, golds, tokenizer.pad_token_id, end_ids, home)
        if has_vision:
            pictures = [[records.open_image(ref, folder) for ref in rows[i]["images"]] for i in chosen]
            batch.images = images.Images.of(model, reader, prompts, pictures)
        (micros,) = batch.minibatches(1, cfg.micro_batch_tokens, policy.packs(batch.longest))
        decay = min(1.0, 2 - 2 * (step - 1) / cfg.steps)
        optimizer.learning_rate = cfg.learning_rate * decay * optim.schedule(step, cfg.steps, cfg.warmup_steps)
        with log.time("update"):
            for micro in micros:
                logps_mC, _ = policy(*micro.tokens)
                loss = -(logps_mC * micro.completion_mask).sum() / batch.num_tokens
                optimizer.scale(loss).backward()
                log.add(micro.num_tokens, loss=loss.detach() * batch.num_tokens / micro.num_tokens)
            log.add(grad_norm=optimizer.step(cfg.max_grad_norm))
        with interrupts.keep_batch(cfg.out_dir, step, micros):
            log.add(overflows=optimizer.check())  # raises if a loss or gradient is not finite
        log.add_batch(batch)
        log.end_step(step, learning_rate=optimizer.learning_rate)
    log.close()
    policy_folder = Path(cfg.out_dir) / "policy"
    model.save_pretrained(policy_folder)
    reader.save_pretrained(policy_folder)
    print(f"saved to {policy_folder}")


if __name__ == "__main__":
    main(config.parse(Config))
