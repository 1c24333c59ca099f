"""Chooses how a model decodes: the first path whose log-probabilities are those of the plain forward pass."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from common.fused import blocks
from common.generation import contract, delta_rule, fallback
from common.generation.engine import Engine
from common.generation.recompute import Recompute
from common.model import attention

CHECK_EVERY = 2  # decode steps between host checks while a path is tried


@dataclasses.dataclass(frozen=True)
class Path:
    """A way to decode.

    Attributes:
        engine: with the engine; or over the cache of transformers.
        cached: with a cache of either kind.
        left_padding: prompts of different lengths are read together, where padding can matter.
        graphs: decode steps are CUDA graphs, on a GPU.
        kernels: steps of linear attention are those of delta_rule.py, on a GPU.
        fused: decode steps are the kernels of common/fused/, on a GPU.
    """

    engine: bool = False
    cached: bool = True
    left_padding: bool = True
    graphs: bool = True
    kernels: bool = False
    fused: bool = False

    def __str__(self) -> str:
        if not self.cached:
            return Recompute.name
        name = "engine" if self.engine else "over the cache of transformers"
        name += " with fused kernels" if self.kernels else " with fused blocks" if self.fused else ""
        return name if self.left_padding else f"{name}, prompts of one length at a time"

    def decoder(
        self,
        model: PreTrainedModel,
        support: attention.Support,
        end_ids: Sequence[int],
        suppressed_ids: Sequence[int],
        compile: bool,
    ) -> Engine | Recompute | None:
        """What decodes on this path; None for `fallback.decode`, which keeps nothing between rollouts.

        Args:
            model: a transformers causal language model.
            support: from `attention.install`.
            end_ids: every token that ends a completion.
            suppressed_ids: tokens that are never drawn.
            compile: compile the small operations of a step, on a GPU.
        """
        if not self.cached:
            return Recompute(model, end_ids, suppressed_ids)
        if not self.engine:
            return None
        options = self.left_padding, self.graphs, self.kernels, self.fused
        return Engine(model, support, end_ids, suppressed_ids, compile, *options)


def choose(
    model: PreTrainedModel, support: attention.Support, suppressed_ids: Sequence[int], beyond_window: int = 0
) -> tuple[Path, str]:
    """The fastest path that agrees with the plain forward pass.

    Args:
        model: a transformers causal language model.
        support: from `attention.install`.
        suppressed_ids: tokens that are never drawn.
        beyond_window: a sliding window that rows may be longer than, which the engine does not serve; 0: none.

    Returns:
        The path, and a clause that says why it is no faster one, and how well it agrees.

    Raises:
        ValueError: no path agrees.
    """
    reason = support.not_cached
    if not reason and beyond_window:
        reason = f"sequences may be longer than its sliding windows of {beyond_window} tokens"
    paths = [Path(), Path(left_padding=False), Path(cached=False)]
    why = [reason] if reason else []
    if not reason:
        engine = Path(engine=True)
        engines = [engine, dataclasses.replace(engine, left_padding=False)] if support.kept else [engine]
        if support.kept and delta_rule.serves(model):
            engines = [*(dataclasses.replace(path, kernels=True) for path in engines), *engines]
        if model.device.type == "cuda" and not support.kept:
            if against := blocks.reason_against(model, support):
                why.append(f"fused blocks do not serve it ({against})")
            else:
                engines = [dataclasses.replace(engine, fused=True), *engines]
        paths = [*engines, *paths]
    for path in paths:
        path, failure, error = check(path, model, support, suppressed_ids, longest=beyond_window)
        if not failure:
            because = f", because {why[-1]}" if why else ""
            found = "not finite" if math.isnan(error) else f"{error:.1g} nats from the plain forward pass"
            return path, f"{because}; {found}"
        why.append(f"{path}: {failure}")
    raise ValueError(
        f"{type(model).__name__}: sampled tokens must have the log-probabilities of the plain forward pass, but "
        f"{'; '.join(why)}. Use another model, or a version of transformers that decodes this one right"
    )


def check(
    path: Path, model: PreTrainedModel, support: attention.Support, suppressed_ids: Sequence[int], longest: int = 0
) -> tuple[Path, str, float]:
    """Compares a path with the plain forward pass.

    Args:
        path: to be tried.
        model: a transformers causal language model.
        support: from `attention.install`.
        suppressed_ids: tokens that are never drawn.
        longest: tokens of the longest prompt; 0: a few.

    Returns:
        The path, without graphs if decode steps wait for the host; what is wrong with it, or "";
        and the difference in nats.
    """
    ends = contract.end_ids(model)
    try:
        eager = dataclasses.replace(path, graphs=False)
        decoder = eager.decoder(model, support, ends, suppressed_ids, compile=False)
        if path.engine:
            decoder.check_every = CHECK_EVERY
            if path.graphs and model.device.type == "cuda":
                decoder.runner._step = contract.forbid_syncs(decoder.runner._step)
        ids = dict(end_ids=ends, suppressed_ids=suppressed_ids, left_padding=path.left_padding)
        decode = decoder.decode if decoder else functools.partial(_fallback, model, ids)
        with torch.compiler.set_stance("force_eager"):
            error, allowed = contract.differ(model, decode, suppressed_ids, longest)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # of a model's own code: this path does not fit it
        if path.engine and path.graphs and "synchroniz" in str(failure):
            return check(dataclasses.replace(path, graphs=False), model, support, suppressed_ids, longest)
        return path, f"{type(failure).__name__} ({str(failure).partition(chr(10))[0][:100]})", float("nan")
    if error > allowed:  # false for NaN: a model with broken weights stops at its first rollout, and says so
        return path, f"differs by {error:.2g} nats from it, where rounding explains {allowed:.2g}", error
    return path, "", error


def _fallback(model, ids, prompts, group_size, uniforms, sampling, max_rows):
    return fallback.decode(model, prompts, group_size, uniforms, sampling, max_rows=max_rows, **ids)
