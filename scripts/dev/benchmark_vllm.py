"""Times vLLM's rollouts for `scripts/dev/benchmark_rollout.py --peer vllm`, which starts this as a process of its own.

Run:   python scripts/dev/benchmark_vllm.py --work work.json --out vllm.json
       VLLM_ENABLE_V1_MULTIPROCESSING=0      the engine in this process, as TRL has it; 1: in one of its own
Every completion has the length that our side sampled: its `max_tokens`, with end tokens ignored. A group of equal
lengths is one request with n completions. The cache of prompts is emptied before each rollout, as new weights would
require. Text is not decoded. Log-probabilities are those of the sampled tokens, in vLLM's flat layout, the faster.
Results stay vLLM's objects: making tensors of them is not counted. Tested with vLLM 0.26 and torch 2.11.
"""

import time

BEGAN = time.perf_counter()  # the imports are part of the start
import argparse
import json
import os
from pathlib import Path
from typing import Any

try:
    import vllm
except ImportError as error:
    raise ImportError(f"benchmark_vllm.py measures the package vllm: pip install vllm ({error})") from error


def rollout(llm: vllm.LLM, prompts: list[list[int]], lengths: list[int], logprobs: int | None) -> float:
    """Seconds for one completion of each length, the completions of a prompt side by side.

    Args:
        llm: the engine.
        prompts: token ids of P prompts.
        lengths: of P * G completions.
        logprobs: 0: of sampled tokens; None: none.

    Raises:
        RuntimeError: a completion has another length, or no log-probabilities.
    """
    group_size = len(lengths) // len(prompts)
    options: dict[str, Any] = dict(temperature=1.0, top_p=1.0, top_k=-1, ignore_eos=True, detokenize=False,
                                   logprobs=logprobs, flat_logprobs=logprobs is not None)  # fmt: skip
    if len(set(lengths)) == 1:
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        sampling = [vllm.SamplingParams(n=group_size, max_tokens=lengths[0], **options) for _ in prompts]
    else:
        requests = [{"prompt_token_ids": ids} for ids in prompts for _ in range(group_size)]
        sampling = [vllm.SamplingParams(max_tokens=length, **options) for length in lengths]
    llm.reset_prefix_cache()
    began = time.perf_counter()
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    completions = [completion for output in outputs for completion in output.outputs]
    if [len(completion.token_ids) for completion in completions] != lengths:
        raise RuntimeError("vLLM's completions do not have the lengths that they were to have: not the same work")
    if logprobs is not None and [len(completion.logprobs) for completion in completions] != lengths:
        raise RuntimeError("vLLM gave a completion without log-probabilities of all tokens: not the same work")
    return seconds


def main(argv: list[str] | None = None) -> None:
    """Writes the seconds of every rollout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="JSON file: model, and the works with prompts and lengths")
    parser.add_argument("--out", required=True, help="JSON file: seconds of the rollouts")
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.5, help="share (default: %(default)s)")
    args = parser.parse_args(argv)
    spec = json.loads(Path(args.work).read_text(encoding="utf-8"))
    works = spec["works"]
    longest = max(len(ids) for work in works for prompts in work["prompts"] for ids in prompts)
    longest += max(length for work in works for lengths in work["lengths"] for length in lengths)
    llm = vllm.LLM(
        model=spec["model"], skip_tokenizer_init=True, dtype=spec["dtype"], seed=0, trust_remote_code=False,
        gpu_memory_utilization=args.gpu_memory_utilization, max_model_len=longest, disable_log_stats=True,
        max_num_seqs=max(len(lengths) for work in works for lengths in work["lengths"]),
    )  # fmt: skip
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    measured = {"vllm": vllm.__version__, "async_scheduling": scheduler.async_scheduling,
                "start": time.perf_counter() - BEGAN, "works": {}}  # fmt: skip
    for work in works:
        rollouts = [*zip(work["prompts"], work["lengths"], strict=True)]
        measured["works"][work["name"]] = {
            name: [rollout(llm, *one, logprobs) for one in rollouts]
            for name, logprobs in (("tokens", None), ("tokens_and_logprobs", 0))
        }
    unfinished = Path(args.out).with_suffix(".part")
    unfinished.write_text(json.dumps(measured) + "\n", encoding="utf-8")
    os.replace(unfinished, args.out)


if __name__ == "__main__":
    main()
