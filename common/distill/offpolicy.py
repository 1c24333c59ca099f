"""Completions that the student did not sample: answers of the data set, or a teacher's own.

GKD (arXiv 2306.13649, Eq. 4) mixes them with on-policy ones; `draw` decides per step, alike on all ranks.
"""

import fcntl
import hashlib
import json
import os
import random
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from common.base import distributed, storage
from common.base.checks import require
from common.generation import batches
from common.generation.batches import RolloutBatch
from common.tasks.data import Example


def share(step: int, lmbda: float, ramp_steps: int) -> float:
    """Probability that a step is on-policy.

    Args:
        step: from 1.
        lmbda: at the end of the ramp.
        ramp_steps: steps of a linear ramp from 0; 0: none.
    """
    return lmbda * min(1.0, step / ramp_steps) if ramp_steps else lmbda


def draw(seed: int, step: int, share: float) -> bool:
    """Whether a step is on-policy: a pure function, so that all ranks and every resume agree.

    Args:
        seed: of the run.
        step: from 1.
        share: the probability of True.
    """
    return random.Random(f"{seed}, step {step}").random() < share


def batch(
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    pad_id: int,
    end_ids: Sequence[int],
    device: torch.device,
) -> RolloutBatch:
    """A batch of completions that were not sampled here, one per prompt; their `rollout_logps` are 0.

    Args:
        prompts: token ids.
        completions: token ids, at least one each, end token included; cut off after the first end token.
        pad_id: fills the rows up.
        end_ids: every token that ends a completion.
        device: of the student.
    """
    cuts = [next((t for t, token in enumerate(ids, 1) if token in end_ids), len(ids)) for ids in completions]
    kept = [torch.tensor(ids[:cut]) for ids, cut in zip(completions, cuts, strict=True)]
    tokens_BC = pad_sequence(kept, True, -1).to(device)
    return batches.assemble(prompts, 1, tokens_BC, torch.zeros(tokens_BC.shape, device=device), pad_id, end_ids)


def answers(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, shared: int
) -> list[list[int]]:
    """Answers of the data as completions: their tokens and the end token, cut off at the limit.

    An answer may repeat the thought that its prompt opens.

    Args:
        examples: rows with an answer.
        tokenizer: the student's.
        max_new_tokens: tokens after which a completion is cut off.
        shared: number of the first token ids that student and teacher share.

    Raises:
        ValueError: an answer holds another id, or the tokenizer has no end token.
    """
    require(tokenizer.eos_token_id is not None, "the tokenizer has no end token", "an answer of the data ends with it",
            "set eos_token and save the tokenizer with the student")  # fmt: skip
    texts = [example.answer.removeprefix(example.reply_start) for example in examples]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    completions = [[*tokens, tokenizer.eos_token_id][:max_new_tokens] for tokens in ids]
    for example, tokens in zip(examples, completions, strict=True):
        if max(tokens) >= shared:
            raise ValueError(
                f"row {example.index}: its answer holds token id {max(tokens)}, which is not among the first {shared} "
                "ids that student and teacher share; take that special token out of the data"
            )
    return completions


def recipe(
    teacher: Any, examples: Sequence[Example], seed: int, temperature: float, max_new_tokens: int
) -> dict[str, Any]:
    """Everything that a teacher's completions of a data set depend on.

    Args:
        teacher: a `LocalTeacher` or a `RemoteTeacher`, after `teachers.agree`.
        examples: all rows; their tokens are hashed, since a file or a template may change under its name.
        seed: of the run.
        temperature: of sampling; 0 takes the most likely token.
        max_new_tokens: tokens after which a completion is cut off.
    """
    digest = hashlib.sha256()
    for example in examples:
        digest.update(array("q", [example.index, len(example.teacher_ids), *example.teacher_ids]).tobytes())
    return dict(teacher=teacher.name, weights=teacher.weights, shared=teacher.shared, prompts=digest.hexdigest(),
                seed=seed, temperature=temperature, max_new_tokens=max_new_tokens)  # fmt: skip


class TeacherAnswers:
    """A teacher's completions of training prompts, generated on first use and cached in a file.

    They depend on the row and the seed only, so a run that is resumed, or that has another number of ranks, trains on
    the same ones. Each rank writes its own file and reads those of all. Every row carries a checksum, and a damaged one
    is generated again. Runs of the same recipe may share a folder at the same time.
    """

    def __init__(self, folder: str, teacher: Any, recipe: dict[str, Any]):
        """Reads the cache.

        Args:
            folder: of the files.
            teacher: a `LocalTeacher` or a `RemoteTeacher`.
            recipe: from `recipe`.

        Raises:
            ValueError: a file has another recipe.
        """
        self.teacher, self.recipe, self.known = teacher, recipe, {}
        self.path = Path(folder) / f"teacher_answers-rank{distributed.rank()}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.path.parent.glob("teacher_answers-rank*.jsonl")):
            lines = path.read_bytes().split(b"\n")[:-1]  # a kill may have cut off the last line
            if lines:
                self._require_own(path, lines[0])
            rows = [row for row in map(_parsed, lines[1:]) if row.get("check") == self._check(row)]
            self.known |= {row["index"]: row["completion_ids"] for row in rows}
            if len(rows) < len(lines) - 1:
                distributed.print_main(f"warning: {path}: {len(lines) - 1 - len(rows)} rows are damaged, or were "
                                       "edited: those are generated again")  # fmt: skip

    def get(self, examples: Sequence[Example]) -> list[list[int]]:
        """Completions of these rows; the teacher generates those that are not cached.

        Args:
            examples: rows of the training data.

        Returns:
            Token ids, end tokens included.

        Raises:
            ValueError: another run has meanwhile begun the file with another recipe.
        """
        missing = list({e.index: e for e in examples if e.index not in self.known}.values())
        if missing:
            generated = self.teacher.generate(
                [e.teacher_ids for e in missing],
                [e.index for e in missing],
                seed=self.recipe["seed"],
                temperature=self.recipe["temperature"],
                max_new_tokens=self.recipe["max_new_tokens"],
            )
            rows = [{"index": e.index, "completion_ids": ids} for e, ids in zip(missing, generated, strict=True)]
            with storage.optional(f"{self.path} could not be written", "the run goes on, and these are generated again "
                                  "after a resume; mend that"):  # fmt: skip
                self._append([row | {"check": self._check(row)} for row in rows])
            self.known |= {row["index"]: row["completion_ids"] for row in rows}
        return [self.known[e.index] for e in examples]

    def _append(self, rows: list[dict[str, Any]]) -> None:
        """Appends rows; another run may append at the same time."""
        with open(self.path, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, so that lines do not mix
            except OSError as error:
                if error.errno not in storage.NO_LOCKS:  # without locks, mixed lines are generated again
                    raise
            end = file.seek(0, os.SEEK_END)
            file.seek(0)
            head = file.readline()
            if head.endswith(b"\n"):
                self._require_own(self.path, head)
                file.seek(end - 1)
                if file.read() != b"\n":  # a kill left a partial row
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            else:
                file.truncate(0)
                rows = [self.recipe, *rows]
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())

    def _check(self, row: dict[str, Any]) -> int:
        """Checksum of a row and the recipe."""
        return zlib.crc32(json.dumps([self.recipe, row.get("index"), row.get("completion_ids")]).encode())

    def _require_own(self, path: Path, head: bytes) -> None:
        """Refuses a file of another recipe."""
        was = _parsed(head)
        changed = [f"{name} {was.get(name)!r} -> {new!r}" for name, new in self.recipe.items() if was.get(name) != new]
        if changed:
            raise ValueError(
                f"{path} was generated otherwise ({', '.join(changed)}): delete it, or give another seq_kd_cache"
            )


def _parsed(line: bytes) -> dict[str, Any]:
    """A row as JSON; empty if the line is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return {}
    return row if isinstance(row, dict) else {}
