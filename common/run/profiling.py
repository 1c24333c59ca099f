"""Profiles a few steps with the torch profiler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from common.base import distributed, storage

SKIPPED = 2  # steps before the trace: compilation and first allocations
TABLE_ROWS = 40


@contextmanager
def trace(out_dir: str, steps: int) -> Iterator[Callable[[], None]]:
    """Traces steps on rank 0: trace.json.gz for https://ui.perfetto.dev, table.txt as a summary.

    Args:
        out_dir: folder of the run; the files go to its subfolder `profile`.
        steps: number of steps to trace, after the first two; 0: none.

    Yields:
        A function to call at the end of every step.
    """
    if steps == 0 or distributed.rank() != 0:
        yield lambda: None
        return
    folder = Path(out_dir) / "profile"

    def write(profiler: profile) -> None:
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=TABLE_ROWS)
        with storage.optional(f"{folder} could not be written", "the run goes on without its profile; mend that"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "table.txt").write_text(table, encoding="utf-8")
            profiler.export_chrome_trace(str(folder / "trace.json.gz"))

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    plan = schedule(skip_first=SKIPPED - 1, wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=kinds, schedule=plan, on_trace_ready=write) as profiler:
        yield profiler.step
