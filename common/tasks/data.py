"""Rows of prompts and answers: read them, check them, tokenise each prompt once, hand them out in a resumable order.

Sources:  "toy" (built in) | rows.jsonl | a folder written by `datasets.save_to_disk` | a hub id "owner/name[:config]"
Columns:  the prompt is the first of `prompt`, `question`, `messages` that is not null: text, or chat messages.
          The ground truth is `answer`: text, or a number, which becomes text (8 and 8.0 become "8").
          Every other column reaches the reward functions; a row that lacks one holds None there. None may have the
          name of something else that they are given: `completions`, `answers`, `completion_tokens`, `self`.
Chat:     a last assistant turn is the reply to learn, not part of the prompt. It is removed, and is the answer where
          `answer` is missing or null, unless it calls tools. Contents are text; roles are those of ROLES.
Template: chat messages go through the tokenizer's chat template. So does text, as one user turn, if the tokenizer has
          a template and `apply_chat_template` is on, unless it holds a special token of the tokenizer, or ends as the
          template does: then it was templated before, and is used as it is. A chat message that was is refused.
          `system_prompt` opens every chat without a system turn of its own.
Length:   prompts over `max_prompt_tokens` are dropped and counted, never cut.
BOS:      a template decides, also for text that was templated before. Without a template, text gets the BOS that the
          tokenizer puts before text. Neither doubles one that the text begins with, and no EOS is ever appended.
Memory:   everything is kept in Python lists, once per process: 1.25 kB for a row of 30 prompt tokens and a short
          answer, 2.1 kB for a GSM8K row, as measured, and not more while loading. A million short rows on 8 ranks
          take 10 GB; cut larger data into several files, and train on one after the other.
"""

import functools
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import jinja2
import torch
from transformers import PreTrainedTokenizerBase

from common.base import distributed
from common.base.distributed import print_main

PROMPT_COLUMNS = ("prompt", "question", "messages")
PROMPT_LOOKALIKES = (*PROMPT_COLUMNS, "problem", "instruction", "query", "input", "text", "conversations")
RESERVED = ("completions", "answers", "completion_tokens", "self")  # names of what reward functions are given already
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
PROBE = "PROBE"  # a user text, to see what a template writes around one
ANSWER_LOOKALIKES = ("answer", "solution", "ground_truth", "final_answer", "target", "label", "output", "response")
HUB_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(:(?P<config>[\w.-]+))?")
SURROGATE = re.compile("[\ud800-\udfff]")
FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zst", ".zip")
ROWS_PER_CALL = 1000  # the tokenizer returns far more than ids; this bounds what is alive at once


@dataclass(frozen=True, slots=True)
class Example:
    """One row of the data, checked and tokenised."""

    index: int  # row number in the data, from 0
    prompt: str | list[dict]  # as in the data: text or chat messages (without a last assistant turn)
    prompt_ids: list[int]  # the tokens the policy sees, template applied once
    answer: str | None  # ground truth as text ("8" for the integer 8)
    columns: dict[str, Any]  # every other column, passed to the reward functions


def load_examples(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    *,
    split: str = "train",
    apply_chat_template: bool = True,
    system_prompt: str = "",
    need_answer: bool = True,
) -> list[Example]:
    """Reads a source and tokenises its prompts by the rules at the top of this file.

    Args:
        source: "toy", a .jsonl file, a saved dataset folder, or a hub id.
        tokenizer: The policy's `transformers` tokenizer.
        max_prompt_tokens: Longer prompts are dropped and counted on the console; tokens, template included.
        split: As in `read_rows`.
        apply_chat_template: Whether text prompts become a user turn, if the tokenizer has a template.
        system_prompt: System turn for chats without one; "" adds none.
        need_answer: Whether a row without a ground truth is an error.

    Returns:
        The rows that fit, in the order of the data.

    Raises:
        ValueError: A row is unusable (the message names it), or no prompt fits.
    """
    rows = read_rows(source, split)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if taken := [name for name in RESERVED if name in names]:
        raise ValueError(
            f"{source}: columns {', '.join(taken)}: reward functions get arguments of these names already; rename or "
            "remove them"
        )
    fields = [parse_row(row, names, f"{source}, row {i}", need_answer) for i, row in enumerate(rows)]
    prompts = [prompt for prompt, _, _ in fields]
    prompt_ids = encode_prompts(prompts, source, tokenizer, apply_chat_template, system_prompt)
    examples = [
        Example(index, prompt, ids, answer, columns)
        for index, ((prompt, answer, columns), ids) in enumerate(zip(fields, prompt_ids, strict=True))
        if len(ids) <= max_prompt_tokens
    ]
    num_dropped = len(rows) - len(examples)
    dropped = f"{num_dropped} of {len(rows)} prompts longer than {max_prompt_tokens} tokens (max_prompt_tokens)"
    if not examples:
        shortest = min(map(len, prompt_ids))
        raise ValueError(f"{source}: {dropped}, so none is left; raise it to {shortest}, the shortest prompt, or more")
    if num_dropped:
        print_main(f"{source}: dropped {dropped}")
    return examples


# ---- reading ----


def read_rows(source: str, split: str = "train") -> list[dict]:
    """Reads all rows of a source as dicts.

    Args:
        source: "toy", a .jsonl file, a saved dataset folder, or a hub id with an optional config after a colon.
        split: Part of the toy task, of a saved `DatasetDict` or of a hub data set; a file has no splits.

    Raises:
        FileNotFoundError: Nothing of that name exists.
        ValueError: A line or the whole source cannot be used; no row is ever skipped.
    """
    path = Path(source).expanduser()
    if source == "toy":
        from common.tasks import toy

        rows = toy.rows(split)
    elif path.is_dir():
        rows = read_saved(path, split)
    elif path.is_file():
        rows = read_json_lines(path)
    elif is_hub_id(source):
        rows = read_hub(source, split)
    else:
        raise FileNotFoundError(
            f"no data at {source!r}: there is no such file or folder (looked for {path.absolute()}), and it is no hub "
            'id of the form "owner/name" or "owner/name:config"; correct the path, or use "toy" for the built-in task'
        )
    if not rows:
        raise ValueError(f"{source}: no rows; training needs at least one batch")
    return rows


def is_hub_id(source: str) -> bool:
    """Whether a source that is not on disk may be asked for on the hub: a mistyped path must not go there."""
    is_path = source.lower().endswith(FILE_SUFFIXES) or Path(source).parent.is_dir()
    return HUB_ID.fullmatch(source) is not None and not is_path


def read_json_lines(path: Path) -> list[dict]:
    """Reads a UTF-8 file with one JSON object per line; byte-order marks, CRLF and blank lines are harmless."""
    rows, position = [], 0
    with open(path, "rb") as file:  # cut at line feeds alone: U+2028 and the like may stand inside a string
        for number, raw in enumerate(file, start=1):
            bad, text = raw.find(b"\0"), ""  # valid UTF-8, but in practice a sign of UTF-16
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                bad = error.start
            if bad >= 0:
                raise ValueError(
                    f"{path}: byte {position + bad} is not UTF-8 text (line {number}); save the file as UTF-8, "
                    "uncompressed, with one JSON object per line"
                )
            if line := text.strip().lstrip("\ufeff").strip():  # a mark also where files were joined
                rows.append(parse_line(line, f"{path}, line {number}"))
            position += len(raw)
    return rows


def parse_line(line: str, where: str) -> dict:
    """Returns the JSON object of one line."""
    wanted = f"{where}: expected one JSON object per line, got {line[:40]!r}"
    remedy = "write a JSON array or an indented file as one object per line, and complete a line that was cut off"
    try:  # not strict: a raw tab inside a string is accepted
        row = json.loads(line, strict=False, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"{wanted} ({error.msg} at column {error.colno}); {remedy}") from error
    except RecursionError as error:
        raise ValueError(f"{where}: lists and objects lie too deep inside one another; write them flatter") from error
    except ValueError as error:  # a key twice, or a number of too many digits
        raise ValueError(f"{where}: {error}; correct the line") from error
    if isinstance(row, dict):
        return row
    raise ValueError(f"{wanted}; {remedy}")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    """Returns a JSON object, whose keys must differ: the `json` module would keep the last value without a word."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return row


def read_saved(path: Path, split: str) -> list[dict]:
    """Reads a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`; only the latter has splits."""
    datasets = import_datasets(str(path))
    try:
        saved = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is a folder, but none that datasets.save_to_disk wrote; name a file in it") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ValueError(f"{path} has no split {split!r}; use one of: {', '.join(saved)}")
        saved = saved[split]
    return list(saved)


def read_hub(source: str, split: str) -> list[dict]:
    """Reads "owner/name" or "owner/name:config" from the hub, or from its local cache."""
    datasets = import_datasets(source)
    parts = HUB_ID.fullmatch(source)
    try:
        return list(datasets.load_dataset(parts["name"], parts["config"], split=split))  # runs no code from the hub
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"cannot load {source!r} (data set {parts['name']!r}, config {parts['config']!r}, split {split!r}) from "
            f"the hub, and there is no such file or folder here; check name, config, split and network: {error}"
        ) from error


def import_datasets(source: str):
    """Imports `datasets`, which neither the toy task nor a .jsonl file needs."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{source!r} needs the package `datasets`: pip install datasets; or use a .jsonl") from error
    return datasets


# ---- from a row to its fields ----


def parse_row(row: dict, names: list[str], where: str, need_answer: bool) -> tuple[str | list[dict], str | None, dict]:
    """Splits a row into prompt, answer and the other columns; `names` are the columns of the whole data set."""
    used = next((name for name in PROMPT_COLUMNS if not is_blank(row.get(name))), None)
    if used is None:
        raise ValueError(missing_field(row, "prompt", PROMPT_LOOKALIKES, where))
    prompt, reply = row[used], None
    if isinstance(prompt, list):
        prompt, reply = split_reply(prompt, where)
    elif not isinstance(prompt, str) or used == "messages":
        wanted = "a list of chat messages" if used == "messages" else "text or a list of chat messages"
        raise ValueError(f"{where}: `{used}` is {type(prompt).__name__}, expected {wanted}")
    answer = answer_text(row.get("answer"), where)
    answer = answer_text(reply, where) if answer is None else answer
    if need_answer and answer is None:
        raise ValueError(missing_field(row, "answer", ANSWER_LOOKALIKES, where))
    return prompt, answer, {name: row.get(name) for name in names if name not in (used, "answer")}


def split_reply(messages: list, where: str) -> tuple[list[dict], Any]:
    """Splits a chat into the turns before the reply, and the content of a last assistant turn (None without one)."""
    for turn in messages:
        check_turn(turn, where)
    prompt, reply = messages, None
    if messages and messages[-1]["role"] == "assistant":
        prompt = messages[:-1]
        reply = None if messages[-1].get("tool_calls") else messages[-1]["content"]
    last = prompt[-1] if prompt else {"role": "assistant"}
    if last["role"] == "assistant" or (last["role"] == "user" and is_blank(last["content"])):
        raise ValueError(
            f"{where}: the chat has no turn to answer; end it with a user turn, or one reply to such a turn"
        )
    return prompt, reply


def check_turn(turn: Any, where: str) -> None:
    """Refuses a chat message that templates would skip, or write in some form of their own."""
    if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
        raise ValueError(f"{where}: a chat message needs the keys `role` and `content`, got {turn!r:.80}")
    role, content = turn["role"], turn["content"]
    if role not in ROLES:  # a reply by another name would stay in the prompt
        raise ValueError(f"{where}: the role of a chat message is {role!r:.40}, expected one of {', '.join(ROLES)}")
    calls_tools = role == "assistant" and bool(turn.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and calls_tools):
        # many templates would write None or a list as Python shows it
        kind = type(content).__name__
        raise ValueError(f"{where}: the content of a chat message is {kind}, expected text; correct the row")


def is_blank(value: Any) -> bool:
    """Whether a value is null or text of nothing but white space."""
    return value is None or (isinstance(value, str) and not value.strip())


def answer_text(value: Any, where: str) -> str | None:
    """Returns a ground truth as text, or None for null, blank text, and NaN (how a table writes null)."""
    if is_blank(value) or (isinstance(value, float) and math.isnan(value)):
        return None
    match value:
        case str():
            if SURROGATE.search(value):
                raise ValueError(f"{where}: the answer holds half a character (surrogate); correct the row")
            return value
        case float() if math.isfinite(value):  # by its shortest digits: 1e23 is no whole number in binary
            return str(int(Decimal(repr(value)))) if value.is_integer() else str(value)
        case int() if not isinstance(value, bool):  # true: is "True", "true" or "yes" wanted?
            return str(value)
    kind = f"{value}" if isinstance(value, float) else type(value).__name__
    raise ValueError(f"{where}: the answer is {kind}, expected text or a finite number; correct or rename that column")


def missing_field(row: dict, field: str, lookalikes: tuple[str, ...], where: str) -> str:
    """Words the error for a row without `field`, with the column that is most likely meant."""
    names = [name for name in row if name != field and name.lower() in lookalikes and not is_blank(row[name])]
    meant = names[0] if names else None
    remedy = f"rename `{meant}` to `{field}`" if meant else f"add it, or rename the column that holds it to `{field}`"
    return f"{where}: `{field}` is missing or empty; columns found: {', '.join(row) or 'none'}; {remedy}"


# ---- from prompts to tokens ----


def encode_prompts(
    prompts: list[str | list[dict]],
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    apply_chat_template: bool,
    system_prompt: str,
) -> list[list[int]]:
    """Turns the prompts of a source into token ids, each with one template at most and one BOS."""
    use_template = apply_chat_template and bool(tokenizer.chat_template)
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
    frame = render(PROBE, tokenizer, "", source) if use_template else ""
    ending = frame.rpartition(PROBE)[2].strip()  # the header of the reply
    tells = any(map(str.isalnum, ending))  # not a mere colon, say
    special, written = pattern(tokens), pattern([token for token in tokens if token in frame])

    def templated(text: str, tokens: re.Pattern) -> bool:
        return bool(tokens.search(text)) or (tells and text.rstrip().endswith(ending))

    is_raw = [isinstance(prompt, str) and (not use_template or templated(prompt, special)) for prompt in prompts]
    if not use_template and not all(is_raw):
        raise ValueError(
            f"{source}, row {is_raw.index(False)}: chat messages need a chat template, and the tokenizer has none or "
            "apply_chat_template is off; use an instruct model, set tokenizer.chat_template, or give prompts as text"
        )
    if system_prompt and any(is_raw):
        raise ValueError(
            f"{source}, row {is_raw.index(True)}: system_prompt {system_prompt[:40]!r} has no place in a text that "
            "gets no chat template; leave it empty and write it into the prompts"
        )
    if use_template and any(is_raw):
        print_main(f"{source}: {sum(is_raw)} of {len(prompts)} prompts are templated already and get no chat template")
    for i, prompt in enumerate(prompts):
        turns = prompt if isinstance(prompt, list) else []  # of the assistant's, what a policy wrote is left as it is
        if any(templated(turn["content"], written) for turn in turns if turn["role"] != "assistant"):
            raise ValueError(
                f"{source}, row {i}: a chat message holds what the chat template writes around it, so it would be "
                "there twice; take it out, or give the whole templated text as `prompt`"
            )
    texts = [
        prompt if raw else render(prompt, tokenizer, system_prompt, f"{source}, row {i}")
        for i, (prompt, raw) in enumerate(zip(prompts, is_raw, strict=True))
    ]
    prompt_ids = tokenize(texts, tokenizer, source)
    if not use_template:
        bos = tokenizer_bos(texts[0], tokenizer)
    else:
        bos = [tokenizer.bos_token_id] if tokenizer.bos_token and frame.startswith(tokenizer.bos_token) else []
    return [ids if ids[: len(bos)] == bos else bos + ids for ids in prompt_ids]


def pattern(tokens: list[str]) -> re.Pattern:
    """Returns what finds any of these tokens in a text."""
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def render(prompt: str | list[dict], tokenizer: PreTrainedTokenizerBase, system_prompt: str, where: str) -> str:
    """Applies the chat template to one prompt, up to the header of the assistant's turn."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    # tables give every turn the keys of all, with null where it has none, and templates ask whether a key is there
    messages = [{k: v for k, v in turn.items() if v is not None or k == "content"} for turn in messages]
    if system_prompt and not any(turn["role"] in ("system", "developer") for turn in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: a template that joins a content which is not text
        raise ValueError(f"{where}: the chat template refuses these messages: {error}; correct the row") from error


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, source: str) -> list[list[int]]:
    """Tokenises texts as they are, without BOS or EOS, and refuses those that leave nothing or cannot be encoded."""
    prompt_ids: list[list[int]] = []
    shared: dict[int, int] = {}  # one object per token of the vocabulary, not one per token of the data: a fifth
    for start in range(0, len(texts), ROWS_PER_CALL):
        chunk = texts[start : start + ROWS_PER_CALL]
        broken = next((i for i, text in enumerate(chunk, start) if SURROGATE.search(text)), None)
        if broken is not None:
            raise ValueError(f"{source}, row {broken}: the prompt holds half a character (surrogate); correct the row")
        encoded = tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
        prompt_ids += [[shared.setdefault(token, token) for token in ids] for ids in encoded]
    if [] in prompt_ids:
        raise ValueError(f"{source}, row {prompt_ids.index([])}: the prompt has 0 tokens; remove the row or fill it")
    return prompt_ids


def tokenizer_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns what the tokenizer puts before a text: [bos_token_id], or [] for most."""
    bare = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer(text, verbose=False)["input_ids"]
    return next((full[:start] for start in range(len(full)) if full[start : start + len(bare)] == bare), [])


# ---- handing out ----


def collate_columns(examples: list[Example], group_size: int) -> tuple[list[str | None], dict[str, list]]:
    """Repeats answers and columns for the completions of each prompt.

    Args:
        examples: The P prompts of a step.
        group_size: G, completions per prompt.

    Returns:
        Answers and columns by name, each a list of P * G values in the order p0, p0, .., p1, p1, ..
    """
    repeated = [example for example in examples for _ in range(group_size)]
    names = dict.fromkeys(name for example in examples for name in example.columns)
    columns = {name: [example.columns.get(name) for example in repeated] for name in names}
    return [example.answer for example in repeated], columns


class PromptStream:
    """Endless batches of prompts; every epoch is a new permutation of all rows, and batches run on over its end.

    The whole state is `position`, the number of prompts handed out so far over all ranks: it means the same on any
    number of ranks, so a run that continues on fewer or more cards neither repeats nor skips a row of its epoch.
    """

    def __init__(
        self, examples: list[Example], batch_size: int, seed: int, position: int = 0, rank: int = 0, num_ranks: int = 1
    ):
        """Checks that batches can be made.

        Args:
            examples: All rows, the same on every rank.
            batch_size: P, prompts per step over all ranks.
            seed: Chooses the permutations, the same on every rank.
            position: Where to start, in prompts over all ranks; from a checkpoint.
            rank: This process, 0 <= rank < num_ranks.
            num_ranks: Processes that share every batch.

        Raises:
            ValueError: There are fewer rows than batch_size, the ranks cannot share a batch equally, or the rank or
                the position does not exist.
        """
        if not 1 <= batch_size <= len(examples):
            raise ValueError(f"{len(examples)} rows, batch_size {batch_size}: use a batch_size from 1 to the row count")
        if batch_size % num_ranks:
            below = batch_size // num_ranks * num_ranks
            usable = [str(size) for size in (below, below + num_ranks) if 0 < size <= len(examples)]
            raise ValueError(
                f"batch_size {batch_size} on {num_ranks} ranks: every rank takes the same number of prompts; "
                f"usable: {' or '.join(usable) or 'fewer ranks'}"
            )
        if not 0 <= rank < num_ranks or position < 0:
            raise ValueError(f"rank {rank} of {num_ranks}, position {position}: ranks and positions count from 0")
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self.position, self.rank, self.num_ranks = position, rank, num_ranks
        self._epoch, self._order, self._round = -1, [], 0

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the rows in their order: a position means nothing in other rows."""
        found = 0
        for example in self.examples:
            found = zlib.crc32(f"{example.prompt_ids} {example.answer!r}".encode(errors="backslashreplace"), found)
        return f"{len(self.examples)} rows, CRC-32 {found:08x}"

    def warn_if_changed(self, known: str | None) -> None:
        """Says that the data are not those that a resumed run has its position in.

        Args:
            known: their `fingerprint`; None: not known, or a new run.
        """
        if known not in (None, self.fingerprint):
            print_main(
                f"warning: the training data have changed since the checkpoint ({known}; now {self.fingerprint}): rows "
                "of this epoch may come twice, or not at all"
            )

    def next(self) -> list[Example]:
        """Returns this rank's prompts of the next batch, batch_size / num_ranks of them."""
        batch = [self._example_at(self.position + i) for i in range(self.batch_size)]
        self.position, self._round = self.position + self.batch_size, 0
        return batch[self.rank :: self.num_ranks]

    def replace(self, examples: list[Example], unwanted: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Puts new prompts in the places of some that `next` returned; a collective.

        The unwanted places of all ranks get the next rows in the order of the places in the whole batch: the same rows
        go to the same places on any number of ranks.

        Args:
            examples: This rank's part of the batch, changed in place.
            unwanted: One flag per example.

        Returns:
            The places that changed, and a number for each new prompt that no other prompt of the step has.
        """
        self._round += 1
        own = [place * self.num_ranks + self.rank for place, flag in enumerate(unwanted) if flag]
        everyones = sorted(place for part in distributed.gather_objects(own) for place in part)
        for i, place in enumerate(everyones):
            if place % self.num_ranks == self.rank:
                examples[place // self.num_ranks] = self._example_at(self.position + i)
        self.position += len(everyones)
        return [place // self.num_ranks for place in own], [self._round * self.batch_size + place for place in own]

    def _example_at(self, position: int) -> Example:
        epoch, offset = divmod(position, len(self.examples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(len(self.examples), self.seed, epoch)
        return self.examples[self._order[offset]]


def permutation(num_rows: int, seed: int, epoch: int) -> list[int]:
    """Returns the order of one epoch; it depends on nothing else, so that every rank and every resume agrees on it."""
    # The CPU generator reads the low 32 bits of a seed only; the odd factor keeps neighbouring seeds from sharing
    # the orders of neighbouring epochs, as seed + epoch would.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)
    return torch.randperm(num_rows, generator=generator).tolist()
