"""Calls reward functions: what they are given, and what they may return.

Arguments go by name. A function gets those that it names; with **kwargs it gets all others, too:
    prompts            text, or chat messages as in the data
    completions        the replies as text, with the part that the prompt opens, such as "<think>"
    answers, answer    gold answers as text, under either name; None in rows without one
    completion_tokens  number of sampled tokens, end token included
    completion_ids     lists of token ids, only for a function that names it
    step               the training step, one int; in an evaluation the steps done
    any column         every other column of the data; None in rows that lack it
All but `step` are lists with one entry per completion. A function returns such a list of numbers:
None where it does not apply, so that the other functions decide; NaN where a row cannot be scored,
so that the row is left out of the loss and counted. The values of an `async def` are awaited
together with those of the others.
"""

import asyncio
import copy
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

ARGUMENTS = ("prompts", "completions", "answers", "answer", "completion_tokens", "completion_ids", "step")
IF_NAMED = frozenset({"completion_ids"})  # not part of **kwargs: lists of lists, which hardly any function needs
MISSING = {  # arguments that functions for other toolkits ask for
    "trainer_state": "`step` is its global_step",
    "log_metric": "a second function with weight 0 reports a metric",
    "log_extra": "a second function with weight 0 reports a value for every sample",
    "solution_str": "`completions` is a list of them",
    "ground_truth": "`answers` is a list of them, unless the data have this column",
    "solution": "`answers` is a list of them, unless the data have this column",
    "completion": "`completions` is a list of them",
    "prompt": "`prompts` is a list of them",
}
_FP32_MAX = torch.finfo(torch.float32).max

Functions = Sequence[tuple[Callable[..., Any], float]]


@dataclass
class Scored:
    """Completions with their rewards.

    Attributes:
        completions: B texts.
        rewards: [B] fp32 on the CPU, NaN = unscored.
        by_function: unweighted values [B] fp32 of each reward function and reward model, by name;
            NaN where there is none.
    """

    completions: list[str]
    rewards: torch.Tensor
    by_function: dict[str, torch.Tensor]

    def put(self, rows: Sequence[int], other: "Scored") -> None:
        """Replaces some rows by those of another, in place.

        Args:
            rows: b row numbers.
            other: b completions.
        """
        for row, completion in zip(rows, other.completions, strict=True):
            self.completions[row] = completion
        self.rewards[rows] = other.rewards
        # a service may report a number for some completions only
        for name in dict.fromkeys([*self.by_function, *other.by_function]):
            values = self.by_function.setdefault(name, torch.full_like(self.rewards, math.nan))
            values[rows] = other.by_function.get(name, torch.full_like(other.rewards, math.nan))


def names(functions: Iterable[Callable[..., Any]]) -> list[str]:
    """Names of reward functions, which are the same in every process and run.

    A function has its own name, a functools.partial that of its function, any other object that of
    its class; the second of a name becomes name_2.
    """
    found: list[str] = []
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        name = getattr(function, "__name__", None)
        name = name.strip("<>") if isinstance(name, str) else type(function).__name__  # <lambda>
        numbered, count = name, 1
        while numbered in found:
            count += 1
            numbered = f"{name}_{count}"
        found.append(numbered)
    return found


def check(functions: Functions, columns: Iterable[str]) -> None:
    """Refuses reward functions that cannot be called.

    Args:
        functions: pairs of reward function and weight.
        columns: names of the other columns of the data.

    Raises:
        ValueError: these are no pairs; an argument without default has a name that does not exist,
            or goes by position only; a signature cannot be read; a weight is not a finite number.
    """
    require_pairs(functions)
    known = list(dict.fromkeys([*ARGUMENTS, *columns]))
    for name, (function, weight) in zip(names(f for f, _ in functions), functions, strict=True):
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise ValueError(f"reward {name} has weight {weight!r}: must be a finite number; 0 only reports it")
        for parameter in _parameters(function, name):
            optional = parameter.default is not parameter.empty or parameter.kind in (
                parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)  # fmt: skip
            if optional or (parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY):
                continue
            hint = f"{MISSING[parameter.name]}; or" if parameter.name in MISSING else "rename it, or"
            raise ValueError(
                f"reward {name} has an argument {parameter.name!r}: arguments go by name, and these exist: "
                f"{', '.join(known)}; {hint} give it a default"
            )


def require_pairs(functions: Any) -> None:
    """Refuses rewards that are no pairs of function and weight.

    Raises:
        ValueError: they are none.
    """
    pairs = list(functions) if isinstance(functions, (list, tuple)) else [None]
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 and callable(pair[0]) for pair in pairs):
        raise ValueError(
            f"rewards are {functions!r:.200}: expected pairs of function and weight; write ((f, 1.0), (g, 0.5)), and "
            "((f, 1.0),) with its last comma for a single one"
        )


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward {name}: its arguments cannot be read ({error}); call it in a function of your own"
        ) from error


def score(
    functions: Functions, arguments: Mapping[str, Any], extra: Mapping[str, tuple[Any, float]] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Calls every reward function, checks its values and sums them with their weights.

    Args:
        functions: pairs (reward function, weight); weight 0 only reports.
        arguments: by name, as at the top of this file: lists of B values, and `step`.
        extra: scores of reward models by name, as pairs (B values, weight).

    Returns:
        Weighted sum, fp32 [B], and the values by name, fp32 [B] each; on the CPU, NaN = unscored.
        A value of None counts as 0 in the sum; a row in which no function with a weight applies is
        unscored.

    Raises:
        ValueError: a wrong number of values; a value or sum that is not a finite fp32 number; no
            rewards; as in `check`.
        RuntimeError: a reward function raised or exited; the error is its cause.
    """
    completions = arguments["completions"]
    for name, column in arguments.items():
        if isinstance(column, list) and len(column) != len(completions):
            raise ValueError(
                f"column {name} has {len(column)} values for {len(completions)} completions: pass one each"
            )
    check(functions, arguments)
    extra = extra or {}
    if clash := extra.keys() & set(names(function for function, _ in functions)):
        raise ValueError(f"reward {min(clash)}: a reward model or service reports under this name; rename the function")
    found = _call_all(functions, arguments) | dict(extra)
    if not found:
        raise ValueError("rewards: there are none; give at least one function, or a reward model")
    total_B, by_name = torch.zeros(len(completions)), {}
    applies_B = torch.tensor([not any(weight for _, weight in found.values())] * len(completions), dtype=torch.bool)
    for name, (values, weight) in found.items():
        by_name[name], applicable_B = _checked(name, values, completions)
        if not weight:
            continue
        total_B += weight * torch.where(applicable_B, by_name[name], 0.0)
        applies_B |= applicable_B
        if total_B.isinf().any():
            row = int(total_B.isinf().nonzero()[0])
            raise ValueError(f"reward {name} times weight {weight} exceeds fp32 in the sum of row {row}: scale it down")
    return torch.where(applies_B, total_B, math.nan), by_name


def _call_all(functions: Functions, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, float]]:
    """What the functions return, and their weights, by name."""
    called = names(function for function, _ in functions)
    rows = f"rows 0 to {len(arguments['completions']) - 1}"
    results: list[Any] = []
    try:
        for name, (function, _) in zip(called, functions, strict=True):
            results.append(_call(function, name, arguments, rows))
        waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
        if waiting:
            # in a thread of its own: a notebook has an event loop at work in this one
            with ThreadPoolExecutor(1) as thread:
                values = thread.submit(asyncio.run, _gather([results[i] for i in waiting])).result()
            for i, (value, error) in zip(waiting, values, strict=True):
                if error is not None:
                    raise _failed(called[i], error, arguments, rows) from error
                results[i] = value
    finally:
        for result in results:  # after an error of another function: never awaited
            if inspect.iscoroutine(result):
                result.close()
    weights = [weight for _, weight in functions]
    return dict(zip(called, zip(results, weights, strict=True), strict=True))


async def _gather(waiting: Sequence[Awaitable]) -> list[tuple[Any, BaseException | None]]:
    """Values and errors; an event loop would let a SystemExit through, which ends the run without an error."""

    async def settled(result: Awaitable) -> tuple[Any, BaseException | None]:
        try:
            return await result, None
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return None, error

    return await asyncio.gather(*map(settled, waiting))


def _call(function: Callable[..., Any], name: str, arguments: Mapping[str, Any], rows: str) -> Any:
    given = {**arguments, "answer": arguments["answers"]} if "answers" in arguments else dict(arguments)
    parameters = _parameters(function, name)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        named |= given.keys() - IF_NAMED
    if isinstance(function, functools.partial):  # what it was given stays, also beside a column of that name
        named -= function.keywords.keys()
    try:
        return function(**{key: _copy(value) for key, value in given.items() if key in named})
    except (Exception, SystemExit) as error:  # SystemExit would end the run without an error
        raise _failed(name, error, arguments, rows) from error


def _copy(value: Any) -> Any:
    """A copy, because a function may change it: it is logged, and passed to the next function."""
    return [copy.deepcopy(x) if isinstance(x, (list, dict)) else x for x in value] if isinstance(value, list) else value


def _failed(name: str, error: BaseException, arguments: Mapping[str, Any], rows: str) -> RuntimeError:
    hint = ""
    if isinstance(error, KeyError):
        hint = f" (arguments that exist: {', '.join(arguments)})"
    elif isinstance(error, (TypeError, IndexError)) and "string ind" in str(error):  # IndexError: of an empty text
        hint = " (a completion is text, not a list of chat messages: use it without [0]['content']; "
        hint += "a prompt is what the data hold)"
    return RuntimeError(f"reward {name} raised {type(error).__name__} on {rows}: {error}{hint}")


def _checked(name: str, values: Any, completions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of one reward, fp32 [B] on the CPU, and which of them are not None, bool [B]."""
    values = values.tolist() if hasattr(values, "tolist") else values  # a tensor or an array
    if not isinstance(values, (list, tuple)) or len(values) != len(completions):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"one {type(values).__name__}"
        raise ValueError(
            f"reward {name} returned {got}, expected {len(completions)}: return a list, one per completion"
        )
    values = [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
    for row, value in enumerate(values):
        if value is not None and (not isinstance(value, Real) or abs(value) > _FP32_MAX):
            excerpt = f"row {row}, {completions[row][:80]!r}"
            raise ValueError(
                f"reward {name} is {value!r} in {excerpt}: must be a finite number, NaN for unscored, or None where "
                "it does not apply"
            )
    applicable_B = torch.tensor([value is not None for value in values], dtype=torch.bool)
    return torch.tensor([math.nan if x is None else float(x) for x in values], dtype=torch.float32), applicable_B
