"""Where the time of a step goes: the torch profiler over a few steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from common.base import distributed

SKIPPED = 2  # steps before the trace: compilation and the first look at everything
SHOWN = 40  # rows of the table


@contextmanager
def trace(out_dir: str, steps: int) -> Iterator[Callable[[], None]]:
    """Traces some steps on rank 0: trace.json.gz is for https://ui.perfetto.dev, table.txt sums it up.

    Args:
        out_dir: of the run; the files go into its folder `profile`.
        steps: steps to trace, after the first two; 0: none.

    Returns:
        A function to be called at the end of every step.
    """
    if steps == 0 or distributed.rank() != 0:
        yield lambda: None
        return
    folder = Path(out_dir) / "profile"
    folder.mkdir(parents=True, exist_ok=True)

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        on_gpu = torch.cuda.is_available()
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        (folder / "table.txt").write_text(profiler.key_averages().table(sort_by=order, row_limit=SHOWN))

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    plan = schedule(skip_first=SKIPPED - 1, wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=kinds, schedule=plan, on_trace_ready=write) as profiler:
        yield profiler.step
