r"""Rewards: read the answer out of a completion, compare it with the gold answer, check every value that comes back.

A reward function is `f(completions: list[str], answers: list[str], **columns: list) -> list[float]`, one value per
completion. `columns` are the other columns of the data, and `completion_tokens`: sampled tokens per row, end token
included. NaN means "this row cannot be scored": it is dropped from the loss and counted. Any other failure raises.

Where the answer is (`extract_answer`), first rule that applies:
  1. only text after the last </think> counts; thinking that never closes has no answer
  2. inside the last <answer>...</answer>, where rules 3 to 5 apply
  3. the last balanced \boxed{...} or \fbox{...}; it holds mathematics, so units in it need \text{...}
  4. after the last ####, on that line: the expression it starts with, or if it starts with words its first number
  5. an <answer>, or a one-line completion without prose, is read like the line of rule 4
  6. the last number
A marker left empty or open means "no answer"; the rules below it are not tried.

When answers are equal (`answers_match`): same text; or the same exact number, where 1,234 = 1234.00, 1/2 = 0.5 and
60% = 0.6, but 60% != 60 and 0.33 != 1/3; or lists with the same brackets and equal elements, in order for (...) and
[...], in any order for \{...\} and bare lists; or equal mathematics according to Math-Verify. "x = 4" answers 4.
"""

import functools
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import Any

import torch

_PLAIN = str.maketrans("\N{MINUS SIGN}\N{EN DASH}-0123456789%。,!()", "---0123456789%.,!()")
_DELETED = re.compile(r"\\?[$€£¥]|(?<!\\)\\(?:(?:left|right)(?![a-zA-Z])|[()\[\],!])")  # currency, delimiters, spacing
_AND_OR = re.compile(r",? ?\\text\{ ?(?:and|or) ?\} ?|,? (?:and|or) ")
_TEXT_WORD = re.compile(r"^\\(?:text|textbf|mathrm|mathbf)\{ ?([^{} ]*) ?\}$")
_PROSE = re.compile(r"(?<![\w\\{])[^\W\d_]{2,}(?=[\s.,;:!?*\"')]|$)|[\u3040-\u9fff\uac00-\ud7af]")  # a word, or CJK
_EXPRESSION_END = re.compile(rf"{_PROSE.pattern}|[.!?](?=\s|$)")
_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?: *(?P<box>\{)|\s+(?P<bare>[^\s{}$\\]+))|\\.|[{}]", re.DOTALL)
_BRACKETED = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})")
_LATEX_FRACTION = re.compile(r"(\d ?)?\\frac ?(?:\{ ?(-?\d+) ?\}|(\d)) ?(?:\{ ?(\d+) ?\}|(\d))")
_NUMBER = re.compile(
    r"""(?:(?<![\w)\]}.])[-+])?                                     # after a digit, letter or bracket it is an operator
    (?: (?:\d+\ )? (?<!/)\d+/\d+ (?!\d|/\d|\.\d)                    # 1/2 and 2 1/2, but no date
      | (?: (?<!\d,)\d{1,3}(?:,\d{3})+(?!,?\d) | \d+ ) (?:\.\d+)? (?:[eE][-+]?\d{1,3}(?!\d))?    # 1,234.5 but not 1,23
      | (?<![\w.])\.\d+ )
    (?:\ ?%)?""",
    re.VERBOSE,
)
_MAX_NUMBER_LENGTH = 1000  # characters; int() refuses huge texts, so a longer number is compared as text
_FP32_MAX = torch.finfo(torch.float32).max


# Reading an answer


def clean(text: str) -> str:
    r"""Normal form of an answer: no currency, math delimiters or markup; `\dfrac` as `\frac`; "a and b" as "a, b"."""
    text = _DELETED.sub("", " ".join(text.translate(_PLAIN).split()))
    text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace("{,}", ",").replace("\\%", "%")
    if not _PROSE.search(listed := _AND_OR.sub(", ", text)):
        text = listed
    text = text.strip(" *`,;:").rstrip(" *`,;:.")
    text = _TEXT_WORD.sub(r"\1", text)
    is_wrapped = text.startswith("(") and text.endswith(")") and len(_split_commas(text[1:-1])) == 1
    return text[1:-1].strip() if is_wrapped else text


def _numbers(text: str) -> tuple[str, list[re.Match]]:
    r"""The text with \frac{1}{2} as 1/2, and the numbers in it."""
    text = _LATEX_FRACTION.sub(lambda m: f"{m[1] or ''} {m[2] or m[3]}/{m[4] or m[5]} ".lstrip(), clean(text))
    text = " ".join(text.split())
    return text, list(_NUMBER.finditer(text))


def _plain_number(match: re.Match) -> str:
    return match[0].replace(",", "").replace(" %", "%").lstrip("+")


def to_fraction(text: str) -> Fraction | None:
    """Exact value of a text that is one number and nothing else; None for any other text."""
    text, numbers = _numbers(text) if len(text) <= _MAX_NUMBER_LENGTH else (text, [])
    if len(numbers) != 1 or numbers[0][0] != text:
        return None
    number = _plain_number(numbers[0])
    try:
        size = sum(Fraction(part) for part in number.strip("-%").split())  # two parts in 2 1/2
    except ZeroDivisionError:
        return None
    return size * (-1 if number.startswith("-") else 1) / (100 if number.endswith("%") else 1)


def last_number(text: str) -> str | None:
    """Last number of a text: digits as written, without thousands separators or plus sign; `a/b` and `%` are kept."""
    _, numbers = _numbers(text)
    return _plain_number(numbers[-1]) if numbers else None


def last_boxed(text: str) -> str | None:
    r"""Contents of the last balanced \boxed{...}, \fbox{...} or `\boxed 42`; None if there is none."""
    starts, last = [], (-1, -1)  # where the contents of each open brace start; -1 if it is no box
    for token in _BOX_TOKEN.finditer(text):
        if token["bare"]:
            last = max(last, token.span("bare"))
        elif token["box"] or token[0] == "{":
            starts.append(token.end() if token["box"] else -1)
        elif token[0] == "}" and starts:
            last = max(last, (starts.pop(), token.start()))
    return text[slice(*last)] if last[0] >= 0 else None


def extract_answer(text: str) -> str | None:
    """Answer of a completion in the normal form of `clean`, by the rules at the top of this file; None without one."""
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    has_tag = "<answer>" in text
    if has_tag:
        text = text[: max(text.rfind("</answer>"), 0)].rpartition("<answer>")[2]
    if "\\boxed" in text or "\\fbox" in text:
        return clean(last_boxed(text) or "") or None
    if "####" in text:
        return _leading_expression(text.rpartition("####")[2].strip().partition("\n")[0])
    line = clean(text)
    has_prose = "\n" in text.strip() or (_PROSE.search(line) and not line.isalpha())
    return _leading_expression(text) if has_tag or not has_prose else last_number(text)


def _leading_expression(text: str) -> str | None:
    text = clean(text)
    if head := clean(_EXPRESSION_END.split(text, maxsplit=1)[0].rstrip(" ,;:(*=-")):
        return head
    _, numbers = _numbers(text)
    return (_plain_number(numbers[0]) if numbers else text) or None


# Comparing two answers


def answers_match(completion: str, answer: str, *, limit: float = 5.0) -> float:
    """Compare the answer of a completion with the gold answer.

    Args:
        completion: text of the model.
        answer: gold answer: a bare value, or a worked solution that marks it with ####, a box or <answer>.
        limit: time for one evaluation by Math-Verify, in seconds; an answer that needs longer is wrong.

    Returns:
        1.0 or 0.0. NaN, whatever the completion, if the gold answer is prose or cannot be parsed; and NaN if the
        Math-Verify process died of anything but its time limit. For gold answers in words use `exact_match`.
    """
    gold = _gold(answer)
    try:
        if gold is None or not _is_gradable(gold, limit):
            return math.nan
        found = extract_answer(completion)
        return float(found is not None and _same(found, gold, limit))
    except ChildProcessError:
        return math.nan


def _gold(answer: str) -> str | None:
    is_marked = any(marker in answer for marker in ("<answer>", "####", "\\boxed", "\\fbox"))
    gold = extract_answer(answer) if is_marked else clean(answer)
    if not gold or (not gold.isalpha() and any(len(word) > 2 for word in _PROSE.findall(gold))):
        return None  # empty, or prose such as "see figure", which Math-Verify would read as a product of letters
    return gold


def _is_gradable(gold: str, limit: float) -> bool:
    if gold_list := _as_list(gold):
        return all(_is_gradable(element, limit) for element in gold_list[1])
    return to_fraction(gold) is not None or gold.isalpha() or _math_verify(gold, None, limit)


def _same(found: str, gold: str, limit: float) -> bool:
    if found == gold:
        return True
    found_list, gold_list = _as_list(found), _as_list(gold)
    if found_list or gold_list:
        return bool(found_list and gold_list) and _same_list(found_list, gold_list, limit)
    found = found if "=" in gold else _right_side(found)
    if gold.isalpha() or not found:
        return found == gold
    found_number, gold_number = to_fraction(found), to_fraction(gold)
    if found_number is not None and gold_number is not None:
        return found_number == gold_number
    # Math-Verify takes 1,234 for a set and 5% for 5, so a number reaches it as an exact fraction.
    found = found if found_number is None else str(found_number)
    gold = gold if gold_number is None else str(gold_number)
    return _math_verify(gold, found, limit)


def _same_list(found: tuple[str, list[str], str], gold: tuple[str, list[str], str], limit: float) -> bool:
    if (found[0], len(found[1]), found[2]) != (gold[0], len(gold[1]), gold[2]):
        return False
    is_ordered, unmatched = gold[0] in ("(", "["), list(gold[1])
    for element in found[1]:
        candidates = unmatched[:1] if is_ordered else unmatched
        match = next((other for other in candidates if _same(element, other, limit)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _as_list(text: str) -> tuple[str, list[str], str] | None:
    """Opening bracket, elements, closing bracket of a tuple, interval, set or bare list; None for any other text."""
    if (bracketed := _BRACKETED.fullmatch(text)) and (elements := _split_commas(bracketed[2])):
        return bracketed[1], [clean(element) for element in elements], bracketed[3]
    elements = _split_commas(text)
    is_list = len(elements) > 1 and to_fraction(text) is None
    return ("", [clean(element) for element in elements], "") if is_list else None


def _split_commas(text: str) -> list[str]:
    """Parts between the commas outside all brackets; nothing if a bracket closes that was not opened."""
    depth, cuts = 0, [-1]
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return []
        if char == "," and depth == 0:
            cuts.append(i)
    return [text[start + 1 : end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _right_side(text: str) -> str:
    return re.split(r"(?<![<>!])=", text)[-1].strip()


# Math-Verify, in a process that can be killed (POSIX)


def _grade_lines() -> None:
    """Main loop of the Math-Verify process: one JSON line [gold, found, seconds] in, true or false out.

    The process runs the source of this function and nothing else. The timer has its default action, so the kernel
    ends the process inside any computation, also when the trainer is gone; an idle one ends with its input.
    """
    import sys

    sys.path[:] = [folder for folder in sys.path if folder]  # no file in the working folder may pose as a package
    import contextlib
    import json
    import resource
    import signal

    from math_verify import LatexExtractionConfig, parse, verify

    def expression(text: str) -> list:
        # First match and no fallback: anything else would be a part of the text, and a part must earn nothing.
        options = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": None}
        return parse(f"${text}$", [LatexExtractionConfig()], **options)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # where the system sets its own limit
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # bytes, or a power tower takes the host's memory
    replies, sys.stdout = sys.stdout, sys.stderr  # what a parser prints must not pass for a reply
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        gold, found, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        parsed = expression(gold)
        reply = bool(parsed) and (found is None or bool(verify(parsed, expression(found), timeout_seconds=None)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


class _Grader:
    """The one Math-Verify process of this process: started by the first question, and again after it has ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: subprocess.Popen | None = None

    def start(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("comparing expressions needs the package math-verify: pip install math-verify")
        # A fresh interpreter, since multiprocessing would run the user's script again; in a session of its own, since
        # Ctrl-C is for the trainer only.
        code = f"{inspect.getsource(_grade_lines)}\n_grade_lines()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes)
        if not self.child.stdout.readline():
            status = self.child.wait()
            raise RuntimeError(f"Math-Verify process ended at its start, status {status}: try `import math_verify`")

    def ask(self, gold: str, found: str | None, limit: float) -> bool:
        """Whether `found` equals `gold` as mathematics or, if `found` is None, whether `gold` can be parsed."""
        if not 0 < limit < math.inf:
            raise ValueError(f"limit = {limit} seconds: must be positive and finite; 5.0 suits most answers")
        with self.lock:
            if self.child is None or self.child.poll() is not None:
                self.start()
            reply = ""
            try:
                print(json.dumps([gold, found, limit]), file=self.child.stdin, flush=True)
                reply = self.child.stdout.readline()
            except BrokenPipeError:
                pass  # ended since poll(); the status below says why
            finally:
                if not reply:  # on Ctrl-C too, or the late reply would answer the next question
                    self.child.kill()
                    self.child.wait()
            if not reply and self.child.returncode != -signal.SIGALRM:
                raise ChildProcessError(f"Math-Verify process ended with status {self.child.returncode}")
        return reply == "true\n"


_grader = _Grader()
os.register_at_fork(after_in_child=_grader.__init__)  # two processes on one pipe would read each other's replies


@functools.lru_cache(maxsize=4096)  # a gold answer comes back with every completion of its group
def _math_verify(gold: str, found: str | None, limit: float) -> bool:
    return _grader.ask(gold, found, limit)


# Reward functions


def math_match(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 if the answer of a completion matches the gold answer, else 0; NaN for a gold answer that cannot be graded."""
    return [answers_match(completion, answer) for completion, answer in zip(completions, answers, strict=True)]


def numeric_match(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 if both answers are the same exact number, else 0; NaN for a gold answer that is not a number."""
    golds = [to_fraction(_gold(answer) or "") for answer in answers]
    found = [to_fraction(_right_side(extract_answer(completion) or "")) for completion in completions]
    return [math.nan if gold is None else float(f == gold) for f, gold in zip(found, golds, strict=True)]


def exact_match(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 if the whole completion is the gold answer, apart from white space at both ends, else 0."""
    return [float(text.strip() == answer.strip()) for text, answer in zip(completions, answers, strict=True)]


def format_reward(completions: list[str], answers: list[str], **columns: list) -> list[float]:
    """1 for <think>...</think> <answer>...</answer>, each tag once and nothing but white space around them, else 0.

    A prompt that already opens <think> takes this reward away from every completion.
    """
    pattern = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return [float(all(text.count(tag) == 1 for tag in tags) and bool(pattern.fullmatch(text))) for text in completions]


def length_reward(target: int, width: int | None = None, tokenizer: Any = None) -> Callable[..., list[float]]:
    """Make a reward function that is 1 at `target` tokens and falls in a straight line to 0, `width` tokens away.

    Args:
        target: best length in tokens, end token included.
        width: distance from `target`, in tokens to either side, at which the reward reaches 0; default `target`.
        tokenizer: counts the tokens if the column `completion_tokens` is missing.

    Raises:
        ValueError: target or width below 1; when called, neither the column nor a tokenizer.
    """
    width = target if width is None else width
    if target < 1 or width < 1:
        raise ValueError(f"target = {target}, width = {width}: both are numbers of tokens, at least 1")

    def length_reward(
        completions: list[str], answers: list[str], completion_tokens: list[int] | None = None, **columns: list
    ) -> list[float]:
        if completion_tokens is None and tokenizer is None:
            raise ValueError("no column completion_tokens: lengths are tokens, so pass the column or a tokenizer")
        if completion_tokens is None:
            completion_tokens = [len(tokenizer.encode(text, add_special_tokens=False)) for text in completions]
        return [max(0.0, 1.0 - abs(length - target) / width) for length in completion_tokens]

    return length_reward


# Scoring a batch


def score(
    functions: Sequence[tuple[Callable[..., Any], float]],
    completions: list[str],
    answers: list[str],
    columns: Mapping[str, list],
    extra: Mapping[str, tuple[Any, float]] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Call every reward function, check what it returns and add up the weighted values.

    Args:
        functions: pairs (reward function, weight); weight 0 only reports.
        completions: B texts.
        answers: B gold answers.
        columns: other columns by name, B values each.
        extra: scores of reward models by name, as pairs (B values, weight).

    Returns:
        Weighted sum, fp32 [B], and the values by `__name__`, fp32 [B] each; on CPU, NaN = unscored.

    Raises:
        ValueError: wrong number of values; a value that is no finite fp32 number; a name used twice; nothing to score
            with; every row unscored.
        RuntimeError: a reward function raised; the error is its cause.
    """
    rewards = [(getattr(function, "__name__", repr(function)), function, weight) for function, weight in functions]
    rewards += [(name, values, weight) for name, (values, weight) in (extra or {}).items()]
    names = [name for name, _, _ in rewards]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"rewards {names}: at least one, each with its own name; set function.__name__")
    for name, column in {"answers": answers, **columns}.items():
        if len(column) != len(completions):
            raise ValueError(
                f"column {name} has {len(column)} values for {len(completions)} completions: pass one each"
            )

    total_B, scores = torch.zeros(len(completions)), {}
    for name, reward, weight in rewards:
        if not math.isfinite(weight):
            raise ValueError(f"reward {name} has weight {weight}: must be finite; 0 only reports it")
        values = _call(reward, name, completions, answers, columns) if callable(reward) else reward
        scores[name] = _checked(name, values, completions)
        total_B += weight * scores[name] if weight else 0.0
    for name, scores_B in {**scores, "weighted sum": total_B}.items():
        if len(completions) and scores_B.isnan().all():
            raise ValueError(
                f"reward {name} is NaN in all {len(completions)} rows: check the answers, {answers[:2]} ..."
            )
    return total_B, scores


def _call(
    function: Callable[..., Any], name: str, completions: list[str], answers: list[str], columns: Mapping[str, list]
) -> Any:
    try:
        return function(completions, answers, **columns)
    except Exception as error:
        rows = f"rows 0 to {len(completions) - 1}"
        raise RuntimeError(f"reward {name} raised {type(error).__name__} on {rows}: {error}") from error


def _checked(name: str, values: Any, completions: list[str]) -> torch.Tensor:
    """Values of one reward as fp32 [B] on CPU, or a ValueError that names the reward and the row."""
    values = values.tolist() if hasattr(values, "tolist") else values  # a tensor or an array
    if not isinstance(values, (list, tuple)) or len(values) != len(completions):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"one {type(values).__name__}"
        raise ValueError(
            f"reward {name} returned {got}, expected {len(completions)}: return a list, one per completion"
        )
    values = [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
    for row, value in enumerate(values):
        if not isinstance(value, Real) or abs(value) > _FP32_MAX:
            excerpt = f"row {row}, {completions[row][:80]!r}"
            raise ValueError(f"reward {name} is {value!r} in {excerpt}: must be a finite number, or NaN for unscored")
    return torch.tensor([float(value) for value in values], dtype=torch.float32)


# Reward models


class RewardModel:
    """A sequence classifier with a single output, which is the score of a conversation.

    Args:
        name_or_folder: hub id or local folder.
        device: where it runs.
        dtype: of the weights; scores are fp32 in any case.

    Raises:
        ValueError: more than one label, weights missing in the checkpoint, or no token to pad with.
    """

    def __init__(
        self, name_or_folder: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        safe = {"trust_remote_code": False}  # unset, transformers would ask on the terminal
        labels = AutoConfig.from_pretrained(name_or_folder, **safe).num_labels
        if labels != 1:
            raise ValueError(f"{name_or_folder} has {labels} labels: a reward model has one; choose another checkpoint")
        self.tokenizer = AutoTokenizer.from_pretrained(name_or_folder, padding_side="right", **safe)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            name_or_folder, dtype=dtype, output_loading_info=True, **safe
        )
        if missing := sorted(loading["missing_keys"]):  # transformers fills them with random numbers
            raise ValueError(f"{name_or_folder} lacks the weights {missing}: choose a trained reward model")
        self.model = model.to(device).eval()
        config = self.model.config.get_text_config()
        self.max_tokens = min(self.tokenizer.model_max_length, getattr(config, "max_position_embeddings", math.inf))
        _pad_alike(self.tokenizer, config)

    def scores(
        self, prompts: Sequence[str | list[dict]], completions: Sequence[str], batch_size: int = 16
    ) -> torch.Tensor:
        """Score each completion as the answer to its prompt, in the model's own chat template if it has one.

        Args:
            prompts: B user texts or message lists, without the chat template of the policy.
            completions: B texts.
            batch_size: conversations in one forward; does not change the scores.

        Returns:
            Scores, fp32 [B] on CPU.

        Raises:
            ValueError: a conversation without tokens or longer than the model reads, or a score that is not finite.
        """
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        parts = [self._forward(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]
        scores_B = torch.cat([torch.zeros(0), *parts])
        for row, value in enumerate(scores_B.tolist()):
            if not math.isfinite(value):
                raise ValueError(f"reward model scores {value} in row {row}, {texts[row][:80]!r}: try dtype float32")
        return scores_B

    def _text(self, prompt: str | list[dict], completion: str) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.tokenizer.chat_template:
            messages = [*messages, {"role": "assistant", "content": completion}]
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        return "\n".join(message["content"] for message in messages) + completion

    @torch.inference_mode()
    def _forward(self, texts: list[str]) -> torch.Tensor:
        # A chat template writes the start token itself: a second one would be a text the model has never seen.
        add_start = not self.tokenizer.chat_template
        batch = self.tokenizer(texts, add_special_tokens=add_start, padding=True, return_tensors="pt")
        lengths = batch["attention_mask"].sum(1)
        if lengths.min() < 1 or lengths.max() > self.max_tokens:
            span = f"{lengths.min()} to {lengths.max()}"
            raise ValueError(f"conversations of {span} tokens: the reward model reads 1 to {self.max_tokens}; cut them")
        device = self.model.device
        logits = self.model(batch["input_ids"].to(device), attention_mask=batch["attention_mask"].to(device)).logits
        return logits.squeeze(-1).float().cpu()


def _pad_alike(tokenizer: Any, config: Any) -> None:
    """Give the reward tokenizer a pad token and tell the model: its head reads the last token that is not padding."""
    if tokenizer.pad_token_id is None:
        # The end token is the last choice: as padding, it would hide the one that closes the text.
        ids = (config.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        pad_id = next((i for i in ids if i is not None and i >= 0), None)
        if pad_id is None:
            raise ValueError("reward tokenizer has no pad, unknown, start or end token: set its pad_token and save it")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
        print(f"reward tokenizer has no pad token: padding with {tokenizer.pad_token!r}, id {pad_id}")
    config.pad_token_id = tokenizer.pad_token_id
