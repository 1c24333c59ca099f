"""Tries every causal family of transformers, as a tiny random model, and writes the table of docs/models.md.

Run: python scripts/dev/sweep_models.py qwen3 jamba     (or no names: all families and variants)
     python scripts/dev/sweep_models.py --write

Paths are chosen as in a run. Then rollouts, log-probabilities and gradients are compared with a
second copy of the model that the toolkit never touched: each finished row goes through
`model(row).logits` alone.
"""

import argparse
import contextlib
import copy
import dataclasses
import inspect
import io
import math
import re
import statistics
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.generation.batches import RolloutBatch
from common.generation.rollout import Sampler
from common.model import head, lora_targets, models
from common.model.logprobs import LogProbs
from common.model.modes import train_mode
from scripts.dev import families

PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- table: python scripts/dev/sweep_models.py --write -->", "<!-- end of the table -->"
PROMPT_LENGTHS, GROUP_SIZE, NEW_TOKENS = (1, 20, 6, 3, 13), 3, 12
WINDOW, WINDOW_PROMPT_LENGTHS = 24, (1, 40, 6, 3, 25)  # a sliding window that the probes at load do not reach
AT_ONCE = 9  # rows decoded at once: two prompts wait
END_EVERY = 11  # every eleventh token ends a completion, so that rows end early
TOLERANCE = 1e-4  # of the spread of the logits
GRADIENT_TOLERANCE = 1e-3  # of the size of the gradients of all weights
SPEED_ROWS, SPEED_TOKENS, SPEED_REPEATS = 16, 32, 3


@dataclasses.dataclass
class Row:
    """What one model did.

    Attributes:
        name: a family or variant of families.py.
        kind: of its layers.
        cls: name of its class.
        training: layout of rows in training.
        rollout: the decode path.
        reason: why no faster path serves.
        refused: the message, if the model is refused.
        sampled: largest difference of a sampled token's log-probability from the untouched model,
            nats.
        trained: the same of the log-probabilities that the losses see.
        spread: standard deviation of the logits of a token.
        gradients: relative difference of all gradients from those of the untouched model.
        checkpointing: what gradient checkpointing changes: "same", "none" for lack of support, or
            why it is refused.
        saved: largest difference of a logit after saving and loading.
        without_adapters: matrices that LoRA on `all-linear` leaves out.
        speed: tokens per second over those of `model.generate`.
        exact_up_to: field of the configuration with the number of tokens beyond which
            log-probabilities differ, or "".
        faults: what must not be.
    """

    name: str
    kind: str = ""
    cls: str = ""
    training: str = ""
    rollout: str = ""
    reason: str = ""
    refused: str = ""
    sampled: float | None = None
    trained: float | None = None
    spread: float | None = None
    gradients: float | None = None
    checkpointing: str = ""
    saved: float | None = None
    without_adapters: str = ""
    speed: float | None = None
    exact_up_to: str = ""
    faults: list[str] = dataclasses.field(default_factory=list)

    def cells(self) -> dict[str, str]:
        """Cells of the table of the page by column, but for `MEASURED`, which differ between machines."""
        training = "refused" if self.refused else self.training
        bound = f", to {self.exact_up_to}" if self.exact_up_to else ""
        return {"model": self.name, "class": self.cls, "layers": self.kind, "training": training + bound,
                "rollout": self.rollout or "-", "checkpointing": self.checkpointing or "-",
                "faults": str(len(self.faults) or "-")}  # fmt: skip

    def line(self) -> str:
        """Line of the table of the page."""
        measured = [_digit(x) for x in (self.sampled, self.trained, self.gradients, self.saved)]
        speed = "-" if self.speed is None else f"{self.speed:.1f} x"
        return f"| {' | '.join([*self.cells().values(), *measured, speed])} |"


MEASURED = ("sampled", "trained", "gradients", "saved", "speed")
# Fields of configurations: how many positions, or blocks of them, a token attends to
SELECTIONS = ("index_topk", "index_topk_blocks", "indexer_budget")


def _digit(value: float | None) -> str:
    return "-" if value is None else "fails" if value != value else f"{value:.0e}" if value else "0"


def kind_of(model: PreTrainedModel) -> str:
    """What a model's layers are, read from its modules and its cache.

    Args:
        model: a causal language model.
    """
    text = model.config.get_text_config(decoder=True)
    names = [name for name, _ in model.named_modules()]
    experts = any(re.search(r"(^|\.)(?!shared)\w*experts$|(^|\.)ffn\.experts\.", name) for name in names)
    arguments = set(inspect.signature(model.forward).parameters)
    own_cache = arguments & {"state", "cache_params"} and not arguments & {"past_key_values", "cache"}
    if own_cache or not any(re.search("[Aa]ttention|MLA", type(m).__name__) for m in model.modules()):
        layers = "states"
    elif hasattr(text, "num_hidden_layers"):
        cache = DynamicCache(config=text).layers
        keep = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache]
        attend = [isinstance(layer, DynamicLayer) for layer in cache]
        layers = "attention" if not any(keep) else "hybrid" if any(attend) else "states"
    else:
        layers = "attention"
    return f"{layers}, experts" if experts else layers


def _prompts(model: PreTrainedModel, lengths: Iterable[int]) -> list[list[int]]:
    vocabulary = min(model.get_input_embeddings().weight.shape[0], model.get_output_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def _rows(batch: RolloutBatch) -> list[tuple[list[int], int]]:
    """Tokens of each row without padding, and how many of them are its prompt."""
    completions = batch.completions
    return [(torch.cat([p, c]).tolist(), len(p)) for p, c in zip(batch.prompts, completions, strict=True)]


def _plain_logps(model: PreTrainedModel, batch: RolloutBatch) -> tuple[list[torch.Tensor], float]:
    """Log-probabilities of each completion from `model(row).logits`, and the spread of the logits."""
    logps, spreads = [], []
    for tokens, n in _rows(batch):
        ids = torch.tensor([tokens])
        logits = model(ids, use_cache=False).logits[0, n - 1 : -1].float()
        logps.append(logits.log_softmax(-1).gather(-1, ids[0, n:, None]).squeeze(-1))
        spreads.append(logits.detach().std(-1).mean())
    return logps, torch.stack(spreads).mean().item()


def _difference(found_BC: torch.Tensor, expected: list[torch.Tensor]) -> float:
    """Largest difference of a token; NaN if one is not finite."""
    return torch.stack([(x[: len(y)] - y).abs().amax() for x, y in zip(found_BC, expected, strict=True)]).amax().item()


def _backward(policy: LogProbs, batch: RolloutBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Log-probabilities of a batch, and the gradients of their sum."""
    policy.zero_grad(set_to_none=True)
    logps_BC, _ = policy(*batch.tokens)
    logps_BC.sum().backward()
    return logps_BC.detach(), {name: p.grad for name, p in policy.model.named_parameters()}


def _compare_gradients(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> float:
    """Relative difference over all weights; NaN if a gradient is not finite."""
    zero = torch.zeros(())
    errors, sizes = [], []
    for name, right in expected.items():
        x, y = (zero if g is None else g for g in (found[name], right))
        errors.append((x - y).norm())
        sizes.append(y.norm())
    return (torch.stack(errors).norm() / torch.stack(sizes).norm()).item()


def _measure(row: Row, changes: dict[str, int], speed: bool) -> None:
    """Fills in a row."""
    model = families.build(row.name, **changes)
    untouched = copy.deepcopy(model)
    row.cls, row.kind = type(model).__name__, kind_of(model)
    models._disable_dropout(model)  # as when a model is loaded
    head.check(model)
    train_mode(model)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        policy = LogProbs(model, 1.0)
        row.training = "packed" if policy.packed else "alone" if policy.alone else "padded"
        vocabulary = model.get_output_embeddings().weight.shape[0]
        sampler = Sampler(
            [model], end_ids=range(2, vocabulary, END_EVERY), pad_id=0, max_new_tokens=NEW_TOKENS,
            rollout_batch=AT_ONCE, trained=policy,
        )  # fmt: skip
    row.rollout, row.reason = _path(sampler, said.getvalue())
    prompts = _prompts(model, WINDOW_PROMPT_LENGTHS if row.name.endswith("-window") else PROMPT_LENGTHS)
    with torch.no_grad(), contextlib.redirect_stderr(said):
        greedy = sampler.generate(prompts, group_size=GROUP_SIZE, temperature=0.0)
        expected, _ = _plain_logps(untouched, greedy)
    batch = sampler.generate(prompts, group_size=GROUP_SIZE, temperature=1.0)
    row.sampled = _difference(greedy.rollout_logps, expected)
    expected, row.spread = _plain_logps(untouched, batch)
    row.sampled = max(row.sampled, _difference(batch.rollout_logps, [x.detach() for x in expected]))
    torch.cat(expected).sum().backward()
    plain = {key: p.grad for key, p in untouched.named_parameters()}
    logps_BC, gradients = _backward(policy, batch)
    row.trained = _difference(logps_BC, [x.detach() for x in expected])
    row.gradients = _compare_gradients(gradients, plain)
    nothing = {key for key, g in plain.items() if g is None or not g.any()}
    if lost := [key for key, g in gradients.items() if key not in nothing and (g is None or not g.any())]:
        row.faults.append(f"no gradient of {', '.join(lost[:3])}")
    for what, value, limit in (
        ("sampled", row.sampled, TOLERANCE * row.spread), ("trained", row.trained, TOLERANCE * row.spread),
        ("gradients", row.gradients, GRADIENT_TOLERANCE),
    ):  # fmt: skip
        if not value <= limit:  # true for NaN
            row.faults.append(f"{what} {value:.1e}")
    with torch.no_grad():
        ids = torch.tensor([max((tokens for tokens, _ in _rows(batch)), key=len)])
        logits = untouched(ids, use_cache=False).logits
    try:
        row.saved = _saved(untouched, ids, logits)
    except ValueError as error:  # AutoModelForCausalLM does not know its configuration
        row.saved = math.nan
        row.faults.append(f"saved, but not loaded: {_short(error)}")
    if row.saved > TOLERANCE * row.spread:
        row.faults.append(f"saved and loaded: logits differ by {row.saved:.1e}")
    if speed:
        row.speed = _speed(sampler, untouched)
    row.checkpointing = _checkpointed(model, batch, logps_BC, gradients)
    if row.checkpointing.startswith("differs"):
        row.faults.append(f"gradient checkpointing {row.checkpointing}")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        lora_targets.report(untouched, lora_targets.targets(untouched, lora_targets.ALL))
    row.without_adapters = said.getvalue().strip().partition("without: ")[2]


def _path(sampler: Sampler, said: str) -> tuple[str, str]:
    """Name of the decode path, and why it is no faster one, from what the log says."""
    path = sampler.path
    if not path.cached:
        name = "no cache"
    else:
        name = "engine" if path.engine else "cache"
        name += ", states" if path.engine and sampler.engines[0].runner.states.kept else ""
        name += "" if path.left_padding else ", by length"
    line = next(line for line in said.splitlines() if line.startswith("rollout: "))
    found = re.search(r"(?:, because (?P<why>.*))?; \S+ nats from the plain forward pass", line)
    return name, found["why"] or ""


def _saved(model: PreTrainedModel, ids: torch.Tensor, logits: torch.Tensor) -> float:
    """Largest difference of a logit after `save_pretrained` and `from_pretrained`."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        return (again(ids, use_cache=False).logits - logits).abs().max().item()


def _checkpointed(model: PreTrainedModel, batch: RolloutBatch, logps_BC: torch.Tensor, gradients: dict) -> str:
    """What gradient checkpointing changes."""
    # renamed in transformers 5.24
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    gradients = {name: None if g is None else g.clone() for name, g in gradients.items()}
    try:
        enable({"use_reentrant": False})
    except ValueError:
        return "none"
    try:
        policy = LogProbs(train_mode(model), 1.0)
    except ValueError as error:
        return "refused" if "random numbers" in str(error) else f"refused: {error}"
    again_BC, again = _backward(policy, batch)
    error = max((again_BC - logps_BC).abs().max().item(), _compare_gradients(again, gradients))
    return "same" if error <= TOLERANCE else f"differs by {error:.0e}"


def _speed(sampler: Sampler, untouched: PreTrainedModel) -> float | None:
    """Tokens per second of the sampler over those of `model.generate`, without end tokens; None if that fails."""
    groups = 4
    prompts = _prompts(untouched, [8] * groups)
    sampler.max_new_tokens, sampler.rollout_batch = SPEED_TOKENS, 0
    sampler.sampling = dataclasses.replace(sampler.sampling, min_new_tokens=SPEED_TOKENS)
    size = SPEED_ROWS // groups
    ids = torch.tensor(prompts).repeat_interleave(size, 0)

    def ours() -> None:
        batch = sampler.generate(prompts, group_size=size, temperature=1.0)
        assert batch.lengths.sum() == SPEED_ROWS * SPEED_TOKENS

    def theirs() -> None:
        out = untouched.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=SPEED_TOKENS,
            min_new_tokens=SPEED_TOKENS, eos_token_id=None, pad_token_id=0, top_k=0, top_p=1.0, temperature=1.0,
        )  # fmt: skip
        assert out.shape[1] == ids.shape[1] + SPEED_TOKENS

    def seconds(work: Callable[[], None]) -> float:
        start = time.perf_counter()
        with contextlib.redirect_stderr(io.StringIO()):
            work()
        return time.perf_counter() - start

    try:
        seconds(theirs)
    except Exception:  # its own code: there is nothing to compare with
        return None
    times = [(seconds(ours), seconds(theirs)) for _ in range(SPEED_REPEATS)]
    return statistics.median(t for _, t in times) / statistics.median(t for t, _ in times)


def _short(error: Exception) -> str:
    """The first clauses of a message, on one line."""
    return textwrap.shorten(str(error), 160, placeholder=" ...")


def sweep(name: str, speed: bool = True) -> Row:
    """Tries one model; whatever it raises is in the row.

    Args:
        name: a family or variant of families.py.
        speed: also compare with `model.generate`.
    """
    changes = {}
    if name.endswith("-window"):
        changes = {field: WINDOW for field, value in families.VARIANTS[name][1].items() if value == 8}
    row = _try(name, changes, speed)
    text = families.config(name).get_text_config(decoder=True)
    for field in SELECTIONS:
        if row.faults and getattr(text, field, None):
            again = _try(name, changes | {field: 256}, speed)  # more than there are tokens
            if not again.faults:
                return dataclasses.replace(again, exact_up_to=field)
    return row


def _try(name: str, changes: dict[str, int], speed: bool) -> Row:
    row = Row(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _measure(row, changes, speed)
        except Exception as error:  # a model that fails must not end the sweep
            if row.rollout:
                row.faults.append(f"{type(error).__name__}: {_short(error)}")
            else:
                row.refused = str(error)
    return row


def table(rows: list[Row]) -> str:
    """The part of the page between the markers.

    Args:
        rows: of all models.
    """
    heads = [*rows[0].cells(), *MEASURED]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(row.line() for row in rows)]
    counts = Counter("refused" if row.refused else row.rollout for row in rows)
    said = ", ".join(f"{name}: {count}" for name, count in counts.most_common())
    first = f"{len(rows)} models, transformers {transformers.__version__}. Rollouts by path: {said}."
    parts = [textwrap.fill(first, 100), "\n".join(lines)]
    parts += ["### Why no faster path", _listed((why, row.name) for row in rows for why in _reasons(row))]
    parts += ["### Why refused", _listed((_refusal(row), row.name) for row in rows if row.refused)]
    if any(row.faults for row in rows):
        parts += ["### What differs", _listed((fault, row.name) for row in rows for fault in row.faults)]
    left = ((f"`{row.without_adapters}`", row.name) for row in rows if row.without_adapters)
    parts += ["### What `all-linear` leaves without adapters", _listed(left)]
    return "\n\n".join(parts)


def _listed(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of what models share."""
    shared: dict[str, list[str]] = {}
    for what, name in pairs:
        shared.setdefault(what, []).append(name)
    lines = (f"- {what}: {', '.join(f'`{name}`' for name in names)}" for what, names in shared.items())
    return "\n".join(
        textwrap.fill(line, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in lines
    )


def _reasons(row: Row) -> list[str]:
    """Why no faster path serves."""
    text = re.sub(r"\bN of its N\b", "not all", _without_numbers(row.reason))
    text = text.replace(" by N nats from it, where rounding explains N", " from the plain forward pass")
    return [textwrap.shorten(text.replace(" by N of their size", ""), 140, placeholder=" ...")] if text else []


def _refusal(row: Row) -> str:
    """The message without the name of the class and the remedy."""
    text = _without_numbers(row.refused.removeprefix(f"{row.cls}: "))
    return textwrap.shorten(re.split(r"; |, which is", text)[0], 200, placeholder=" ...")


def _without_numbers(text: str) -> str:
    """A message with N for numbers, which depend on the weights, as shared by several models."""
    return re.sub(r"(?<![\w.])\d[\d.e+-]*\d|(?<![\w.])\d", "N", text)


def page(rows: list[Row], text: str) -> str:
    """The page with another table.

    Args:
        rows: of all models.
        text: of the page now.
    """
    before, rest = text.split(START)
    return f"{before}{START}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}"


def main(argv: list[str] | None = None) -> int:
    """Sweeps and prints; returns 1 if a model that is not refused differs from its plain forward pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="families or variants of families.py (default: all)")
    parser.add_argument("--speed", choices=("true", "false"), default="true", help="compare with model.generate")
    parser.add_argument("--write", action="store_true", help=f"write the table of {PAGE.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    if args.write and args.names:
        parser.error("--write takes all models: leave out the names")
    if unknown := set(args.names) - {*families.names(), *families.VARIANTS}:
        parser.error(f"unknown {', '.join(sorted(unknown))}: see names() and VARIANTS of scripts/dev/families.py")
    rows = []
    for name in args.names or [*families.names(), *families.VARIANTS]:
        start = time.perf_counter()
        rows.append(sweep(name, args.speed == "true"))
        print(f"{rows[-1].line()} {time.perf_counter() - start:.1f} s", flush=True)
        for what in (rows[-1].reason, rows[-1].refused, *rows[-1].faults):
            if what:
                print(f"    {what}", flush=True)
    if args.write:
        PAGE.write_text(page(rows, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return int(any(row.faults for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors are too small for threads to pay off
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sys.exit(main())
