"""Fuzzes everything that reads foreign text, guided by coverage, for as long as you like.

    pip install atheris
    python scripts/dev/fuzz.py answers --seconds 600     also: data, posters, rewards, teacher

An input that crashes the reader, takes over a second, or gets a score it must not get is written to the working folder
as crash-*, and the exit code is 77. tests/test_fuzz_*.py does the same without coverage, on fewer inputs.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

try:
    import atheris
except ImportError as error:
    raise SystemExit("fuzz.py needs the package atheris: pip install atheris") from error

with atheris.instrument_imports(include=["common.tasks", "common.base.service",
                                         "common.distill.teacher_worker", "grpo.poster"]):  # fmt: skip
    from common.base import service
    from common.distill import teacher_worker
    from common.tasks import answer_numbers, answers, data_sources, rewards
    from grpo.poster import items, layout, reward
    from grpo.poster.fonts import Fonts

LIMIT = 1.0  # seconds for one input
BOX = {"x": 10, "y": 10, "width": 50, "height": 20}
POSTER = {"canvas": {"width": 100, "height": 80}, "layers": [{"type": "text", "text": "Night Market", **BOX}]}
TEACHER = SimpleNamespace(info={"vocabulary_size": 64, "max_tokens": 512, "max_top_k": 64},
                          cfg=SimpleNamespace(deadline_seconds=1.0))  # fmt: skip
FONTS, FOLDER = Fonts(), Path(tempfile.mkdtemp())


def read_data(content: bytes) -> None:
    """Reads a data file: all rows, or an error that names the file."""
    path = FOLDER / "rows.jsonl"
    path.write_bytes(content)
    try:
        rows = data_sources.read_json_lines(path)
    except ValueError as error:
        assert str(path) in str(error)
        return
    assert all(isinstance(row, dict) for row in rows)


def read_answers(content: bytes) -> None:
    """Scores a completion: 0 or 1, and 1 only if it contains the digits of the gold answer."""
    text = content.decode(errors="surrogateescape")
    for read in (rewards.extract_answer, rewards.last_boxed, rewards.last_number, answers.normal_answer):
        assert read(text) is None or isinstance(read(text), str)
    (score,) = rewards.numeric_match([text], ["7316"])
    assert score in (0.0, 1.0)
    assert (
        score == 0.0
        or all(digit in answer_numbers.clean(text) for digit in "7316")
        or "/" in text
        or "e" in text.lower()
    )
    assert rewards.format_reward([text], [""])[0] in (0.0, 1.0)
    assert math.isnan(answers.numbers_match("1", text)) or answers.numbers_match("", text) == 0.0


def read_posters(content: bytes) -> None:
    """Scores a poster: a finite score, or 0 if it is malformed."""
    text = content.decode(errors="surrogateescape")
    found = reward.score(text, json.dumps(POSTER), fonts=FONTS)
    json.dumps(found, allow_nan=False)
    assert 0 <= found["score"] <= 1 and (found["parse_ok"] or found["score"] == 0)
    try:
        layout.parse(text, layout.ground_truth(json.dumps(POSTER)))
    except layout.Malformed:
        assert found["score"] == 0


def read_rewards(content: bytes) -> None:
    """Reads a request to the reward server: items, or a refusal with a reason."""
    for many in (False, True):
        try:
            assert all(isinstance(item.solution, str) for item in items.read(content, many))
        except items.Refused as refused:
            assert refused.text


def read_teacher(content: bytes) -> None:
    """Reads a request to the teacher server: a job, or a refusal with a reason."""
    for path in ("/topk_logprobs", "/generate"):
        try:
            teacher_worker.read(path, content, TEACHER)
        except (teacher_worker.Refused, ValueError) as refused:  # the server answers both with a status of 4xx
            assert str(refused)


TARGETS = {"data": read_data, "answers": read_answers, "posters": read_posters, "rewards": read_rewards,
           "teacher": read_teacher}  # fmt: skip
ROW = {"prompt": [{"role": "user", "content": "1+1=?"}], "answer": 2.0}
ITEM = {"id": "0", "solution_str": json.dumps(POSTER), "ground_truth": json.dumps(POSTER), "extra_info": {}}
JOB = {"tokens": torch.arange(4, 9, dtype=torch.int32), "prompt_lengths": torch.tensor([2], dtype=torch.int32),
       "completion_lengths": torch.tensor([3], dtype=torch.int32)}  # fmt: skip
SEEDS = {
    "data": [f'{json.dumps(ROW)}\n\n{{"prompt": "a", "answer": "2"}}\r\n'.encode()],
    "answers": [
        rb"<think>a</think><answer>\boxed{\frac{1}{2}}</answer> #### 7,316.00%",
        rb"(1, 2] = 1.5\times10^3",
        b"7316",
    ],
    "posters": [json.dumps(POSTER).encode(), b"```json\n" + json.dumps(POSTER).encode() + b"\n```"],
    "rewards": [json.dumps(ITEM).encode(), json.dumps({"items": [ITEM]}).encode()],
    "teacher": [service.pack(JOB, {"top_k": 4, "temperature": 1.0})],
}


def main() -> None:
    """Runs until the time is up or an input fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60, help="how long (default: %(default)s)")
    args = parser.parse_args()

    def one_input(content: bytes) -> None:
        began = time.monotonic()
        TARGETS[args.target](content)
        taken = time.monotonic() - began
        assert taken < LIMIT, f"{len(content)} bytes took {taken:.1f} s"

    corpus = Path(tempfile.mkdtemp())
    for number, seed in enumerate(SEEDS[args.target]):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([sys.argv[0], f"-max_total_time={args.seconds}", "-max_len=2000", str(corpus)], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
