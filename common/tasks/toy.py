"""The built-in task and policy, a small decoder that sorts digits: scripts run without downloads.

Task:    the prompt "sort 7 3 1 9 4" has the answer "13479", a number that a reward function can
         check.
Policy:  an ordinary transformers folder with 1.0 M parameters. It is trained on demonstrations of
         which 7 in 16 sort upwards and 9 in 16 downwards, so that samples at temperature 1 are
         right about 3 times in 10. Only the reward tells the direction: RL has to reverse the
         policy's preference, and then make it precise.
Teacher: a larger model for distillation, 1.7 M parameters, trained on upward demonstrations only;
         right 98 times in 100.
"""

import hashlib
import itertools
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common.base import storage

NUM_DIGITS = 5  # of a prompt; they differ and exclude zero, so that answers have no ties and no leading zero
NUM_ROWS = {"train": 4096, "test": 256}

SPECIALS = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
WORDS = ["system", "user", "assistant", "sort"]  # one token each; any other text is spelled out by character
CHARACTERS = list("\n 0123456789abcdefghijklmnopqrstuvwxyz.,:?!+-*/=()")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SEED = 1
STEPS = {"toy": 150, "toy-teacher": 150}
# hidden and intermediate size, peak learning rate, demonstrations upwards and downwards in one batch
RECIPES = {"toy": (192, 640, 1e-3, 7, 9), "toy-teacher": (256, 768, 2e-3, 16, 0)}
MAX_GRAD_NORM = 1.0


def rows(split: str) -> list[dict[str, str]]:
    """Returns the prompts and answers of one split; splits share no prompt and never change.

    Args:
        split: "train" (4096 rows) or "test" (256 rows).

    Returns:
        Rows such as {"prompt": "sort 7 3 1 9 4", "answer": "13479"}.

    Raises:
        ValueError: there is no such split.
    """
    if split not in NUM_ROWS:
        raise ValueError(f"split={split!r} is not a split of the built-in task; use one of {sorted(NUM_ROWS)}")
    every_prompt = list(itertools.permutations("123456789", NUM_DIGITS))
    chosen = random.Random(SEED).sample(every_prompt, sum(NUM_ROWS.values()))
    chosen = chosen[: NUM_ROWS["train"]] if split == "train" else chosen[NUM_ROWS["train"] :]
    return [{"prompt": "sort " + " ".join(digits), "answer": "".join(sorted(digits))} for digits in chosen]


def folder(name: str = "toy") -> Path:
    """Returns the folder of a built-in model; the first call trains it (about 10 s on one core).

    The cache is `$RL_HAND_CACHE`, or `~/.cache/rl_hand`. Processes may call this concurrently: each
    builds in a temporary folder, the first to finish renames it, and all return that one.

    Args:
        name: "toy", the policy, or "toy-teacher".

    Returns:
        A folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.
    """
    cache = Path(os.environ.get("RL_HAND_CACHE") or "~/.cache/rl_hand").expanduser()
    # The name holds a hash of this file, so that a model of another recipe is never used.
    target = cache / f"{name}-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    title = {"toy": "built-in policy", "toy-teacher": "built-in teacher"}[name]
    print(f"{title}: training {STEPS[name]} steps once, cached in {target}", flush=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=cache) as scratch:
        unfinished = Path(scratch) / target.name
        tokenizer = _tokenizer()
        _warm_started(tokenizer, STEPS[name], *RECIPES[name]).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        storage.publish(unfinished, target)
    return target


def _tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer by word and character; decoding restores all known characters."""
    vocabulary = {token: index for index, token in enumerate(SPECIALS + WORDS + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*WORDS, r"[\s\S]"])), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decoding joins tokens with spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _warm_started(
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    hidden_size: int,
    intermediate_size: int,
    learning_rate: float,
    upwards: int,
    downwards: int,
) -> LlamaForCausalLM:
    """Trains a model on the demonstrations, with cross-entropy over answer and end token."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    rng = random.Random(SEED)
    demonstrations = rows("train")
    with undisturbed():
        policy = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
        for step in range(steps):
            # warm-up over 10 steps, constant, then linear decay to 0 over the second half
            optimizer.param_groups[0]["lr"] = learning_rate * min(1, (step + 1) / 10, 2 - 2 * step / steps)
            texts = []
            for index, row in enumerate(rng.sample(demonstrations, upwards + downwards)):
                messages = [{"role": "user", "content": row["prompt"]}]
                prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                answer = row["answer"] if index < upwards else row["answer"][::-1]
                texts.append(prompt + answer + tokenizer.eos_token)
            ids = tokenizer(texts, return_tensors="pt").input_ids  # of equal length: no padding
            labels = ids.clone()
            labels[:, : -(NUM_DIGITS + 1)] = -100  # the prompt
            policy(input_ids=ids, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return policy


@contextmanager
def undisturbed() -> Iterator[None]:
    """Makes training reproducible; restores random state, thread count and gradient mode."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads gain little at this size, and may have to wait for a core
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.default_generator.manual_seed(SEED)  # torch.manual_seed would also seed the GPUs
            yield
    finally:
        torch.set_num_threads(threads)
