"""Decoding speed of real shapes with random weights, beside `model.generate`: a table for docs/models.md.

Run: python scripts/dev/benchmark_models.py qwen3.5-0.8b dense-0.8b qwen3-30b-a3b-6
     python scripts/dev/benchmark_models.py tiny --device cpu --rows 4 --new_tokens 8

Every row has --new_tokens tokens; prompts have 60 to 127. A rollout is timed after one that compiles and captures.
`mismatch` is the mean difference of a token's log-probability between rollout and training, in nats.
"""

import argparse
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
import benchmark_base

from common.base import devices
from common.generation.rollout import Sampler
from common.model.logprobs import LogProbs

GROUP_SIZE = 8
PLAIN_TOKENS = 64  # of generate, which is slow


def build(shape: str, device: torch.device) -> PreTrainedModel:
    """A model of a shape of benchmark.py, bf16 on a GPU and fp32 on the CPU, in eval mode."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        settings = benchmark_base.config_of(shape)
        return AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=False).eval()


def seconds(work: Callable[[], object], device: torch.device, repetitions: int = 1) -> float:
    """Median time of calls after the first, which may compile."""
    took = []
    for _ in range(1 + repetitions):
        devices.synchronize([device])
        start = time.perf_counter()
        work()
        devices.synchronize([device])
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])


def measure(shape: str, device: torch.device, rows: int, new_tokens: int, plain: bool) -> str:
    """A line of the table.

    Args:
        shape: of benchmark.py.
        device: where it runs.
        rows: completions decoded together.
        new_tokens: of each.
        plain: also measure generate, with rows of PLAIN_TOKENS tokens.
    """
    model = build(shape, device)
    end, size = model.config.eos_token_id, sum(p.numel() for p in model.parameters())
    sampler = Sampler([model], end_ids=[end], pad_id=0, max_new_tokens=new_tokens, suppressed_ids=[end])
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(60, 128, (max(1, rows // GROUP_SIZE),), generator=generator).tolist()
    prompts = [torch.randint(3, model.config.vocab_size - 3, (n,), generator=generator).tolist() for n in lengths]
    group = min(GROUP_SIZE, rows)
    batch = sampler.generate(prompts, group_size=group, temperature=1.0)
    took = seconds(lambda: sampler.generate(prompts, group_size=group, temperature=1.0), device)
    policy = LogProbs(model, 1.0, suppressed_ids=[end])
    with torch.no_grad():
        differences = [
            (policy(*micro.tokens)[0] - micro.rollout_logps).abs()[micro.completion_mask]
            for micro in batch.minibatches(1, 8192, policy.packs(batch.longest))[0]
        ]
    speeds = [f"{len(batch) * new_tokens / took:,.0f}", "-", "-"]
    if plain:
        sampler.release()
        ids = pad_sequence([torch.tensor(p) for p in prompts for _ in range(group)], True, 0, padding_side="left")
        inputs = dict(input_ids=ids.to(device), attention_mask=(ids != 0).long().to(device), do_sample=True)
        length = min(PLAIN_TOKENS, new_tokens)
        inputs |= dict(min_new_tokens=length, max_new_tokens=length, pad_token_id=0)
        theirs = len(batch) * length / seconds(lambda: model.generate(**inputs), device)
        speeds[1:] = f"{theirs:,.0f}", f"{len(batch) * new_tokens / took / theirs:.1f} x"
    mismatch = torch.cat(differences).mean().item()
    return f"| {' | '.join([shape, f'{size / 1e9:.2f} B', str(len(batch)), *speeds, f'{mismatch:.4f}'])} |"


def main() -> None:
    """Prints the table, and what it was measured with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=list(benchmark_base.SHAPES), help="of benchmark.py")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="completions decoded together")
    parser.add_argument("--new_tokens", type=int, default=256, help="tokens of each")
    args = parser.parse_args()
    device = torch.device(args.device)
    warnings.filterwarnings("ignore")
    print("| shape | parameters | rows | tokens/s | generate | | mismatch |\n|---|---|---|---|---|---|---|")
    for shape in args.shapes:
        for rows in args.rows:
            print(measure(shape, device, rows, args.new_tokens, plain=rows == args.rows[0]), flush=True)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    print(f"\n{card}, torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
