"""Time of an update and of a pass of log-probabilities, where a prompt is computed once per group and per completion.

Run: python scripts/dev/benchmark_shared_prompts.py
     python scripts/dev/benchmark_shared_prompts.py --shape tiny --device cpu --prompts 2 --scale 16

Every row has all its tokens. `tokens` are those of all forward passes; seconds are those of the second call.
"""

import argparse
import sys
from itertools import chain
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
from benchmark_models import build, seconds

from common.generation.batches import RolloutBatch, assemble
from common.model import logprobs, passes
from common.model.modes import train_mode

GROUP_SIZE, MICRO_BATCH_TOKENS = 8, 16384
CASES = ((128, 256, 1), (128, 256, 4), (1024, 256, 1), (1024, 256, 4))  # prompt and new tokens, minibatches


def measure(policy: logprobs.LogProbs, batch: RolloutBatch, num_minibatches: int) -> str:
    """Tokens of an update, and the seconds of it and of a pass without gradients.

    Args:
        policy: of the model.
        batch: of GROUP_SIZE completions per prompt.
        num_minibatches: optimizer steps.
    """
    micros = list(chain(*batch.minibatches(num_minibatches, MICRO_BATCH_TOKENS, packed=True)))
    device = policy.model.device

    def update() -> None:
        for micro in micros:
            policy(*micro.tokens)[0].sum().backward()
        policy.zero_grad()

    def fill() -> None:
        passes.fill(micros, "old_logps", policy, device, MICRO_BATCH_TOKENS)

    return f"{sum(micro.size for micro in micros):9,} | {seconds(update, device):8.3f} | {seconds(fill, device):8.3f}"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen0.5b", help="of benchmark.py")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=16, help="in a batch")
    parser.add_argument("--scale", type=int, default=1, help="divides all lengths")
    args = parser.parse_args()
    device = torch.device(args.device)
    print("compiled | prompt + new, minibatches | shared |    tokens |   update | log-probabilities")
    for compile in (False, True) if device.type == "cuda" else (False,):
        policy = logprobs.LogProbs(train_mode(build(args.shape, device)), 1.0, compile)
        for Q, C, num_minibatches in CASES:
            tokens = torch.randint(3, 60, (args.prompts * GROUP_SIZE, C // args.scale), device=device)
            prompts = torch.randint(3, 60, (args.prompts, Q // args.scale)).tolist()
            batch = assemble(prompts, GROUP_SIZE, tokens, torch.zeros(tokens.shape, device=device), 0, [2])
            for shared in (False, True):
                if not shared:
                    batch.group = torch.arange(len(batch))
                else:
                    batch.group = torch.arange(args.prompts).repeat_interleave(GROUP_SIZE)
                line = f"{compile!s:8} | {Q:6} + {C:3}, {num_minibatches:12} | {shared!s:6} | "
                print(line + measure(policy, batch, num_minibatches), flush=True)


if __name__ == "__main__":
    main()
