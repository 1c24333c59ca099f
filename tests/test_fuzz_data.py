"""Any file is read, or refused with its name: the rows of common/tasks/data.py, with content from hypothesis."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import CHAT_TEMPLATE, make_tokenizer

from common.tasks import data_sources, rewards, scoring
from common.tasks.data import ROLES, collate_columns, load_examples

# derandomized: a failure comes from a change, not from the day
pytestmark = pytest.mark.fuzz
FUZZ = dict(deadline=None, derandomize=True, database=None)
TOKENIZERS = [make_tokenizer(), make_tokenizer(template=None), make_tokenizer(template="<bos>" + CHAT_TEMPLATE)]
TOKENIZERS += [make_tokenizer(template="{{ tools }}" + CHAT_TEMPLATE + "<think>")]
PLACE = re.compile(r"rows\.jsonl(, line \d+: |: byte \d+ is not UTF-8 text \(line \d+\); )")
NAMED = re.compile(r"rows\.jsonl(, row \d+: |: columns .*reward functions)")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "rows.jsonl"


def rows_of(path, content: bytes) -> list[dict] | None:
    """The rows of a file, or None where it is refused; every refusal names file and place."""
    path.write_bytes(content)
    try:
        return data_sources.read_json_lines(path)
    except ValueError as error:
        assert PLACE.search(str(error)), error


TEXT = st.text('aé\u2028\x85\t\\"{}[]:,1-e\ud83d', max_size=4)
SCALAR = st.sampled_from([None, True, 8, -0.0, 1e300, float("nan"), float("inf"), 10**4000]) | TEXT
FIELDS = st.dictionaries(TEXT, SCALAR | st.lists(SCALAR, max_size=2) | st.dictionaries(TEXT, SCALAR), max_size=3)
RAW = FIELDS.map(lambda fields: json.dumps(fields, ensure_ascii=False).replace("\ud83d", "e"))
WHOLE = FIELDS.map(json.dumps) | RAW
DAMAGED = st.builds(lambda text, cut, new: text[:cut] + new + text[cut + 1 :], WHOLE, st.integers(0, 30), TEXT)
ODD = st.sampled_from(
    ["", " \t", "\ufeff", "\xa0", "[" * 2000, '{"a":' + "1" * 5000 + "}", '{"a":1,"a":1}', "NaN", "[]"]
)
LINE = st.builds(lambda text: text.encode("utf-8", "surrogatepass"), WHOLE | DAMAGED | ODD)
LINES = st.lists(st.builds(str.encode, WHOLE | st.sampled_from(["", " \t", "\ufeff"])), max_size=4)


FILES = LINES | st.lists(LINE | st.binary(max_size=4), max_size=4)


@settings(max_examples=100, **FUZZ)
@given(lines=FILES, end=st.sampled_from([b"\n", b"\r\n"]), mark=st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_every_line_is_a_row_or_an_error_with_its_place(path, lines, end, mark):
    content = mark + end.join(lines)
    rows = rows_of(path, content)
    if rows is not None:
        kept = [line.strip().lstrip("\ufeff").strip() for line in content.decode().split("\n")]
        assert json.dumps(rows) == json.dumps([json.loads(line, strict=False) for line in kept if line])


@settings(max_examples=100, **FUZZ)
@given(content=st.binary(max_size=30))
def test_any_bytes_are_rows_or_an_error_with_its_place(path, content):
    rows = rows_of(path, content)
    assert rows is None or len(rows) == sum(
        bool(line.strip().strip("\ufeff").strip()) for line in content.decode().split("\n")
    )


@settings(max_examples=40, **FUZZ)
@given(rows=st.lists(FIELDS, min_size=1, max_size=3), cut=st.integers(1, 200))
def test_no_row_of_a_file_that_was_cut_off_is_lost_in_silence(path, rows, cut):
    content = "\n".join(map(json.dumps, rows)).encode()
    assert json.dumps(rows_of(path, content)) == json.dumps(rows)
    found = rows_of(path, content[:-cut])
    assert found is None or json.dumps(found) == json.dumps(rows[: len(found)])


TEMPLATED = "<im_start>user\nhi<im_end>\n<im_start>assistant\n"
WORDS = st.sampled_from(["", " ", "hi", "2+2=?", "<pad>", "a <im_end> b", "<think>", TEMPLATED, "\ud800"])
CONTENT = WORDS | st.sampled_from([None, 5, [{"type": "text", "text": "hi"}], [{"type": "image"}], [5]])
TURN = st.fixed_dictionaries({"role": st.sampled_from([*ROLES[:5], "gpt", None, 5]), "content": CONTENT},
                             optional={"tool_calls": st.sampled_from([None, [], [{"type": "function"}]])})  # fmt: skip
GOOD = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.just("hi")})
CHAT = st.builds(lambda turns: [*turns, {"role": "user", "content": "hi"}], st.lists(GOOD, max_size=2))
CHAT |= st.lists(GOOD, max_size=3) | st.lists(TURN, max_size=3)
NUMBERS = st.sampled_from([8, 8.0, -0.0, 1e16, 1e300, 0.1 + 0.2])
ANSWER = NUMBERS | st.just("8") | WORDS | st.sampled_from([None, True, float("nan"), float("inf"), ["8"], {}])
PROMPT = st.sampled_from(["hi", "2+2=?"]) | CHAT
TOOLS = st.sampled_from([None, [], [{"name": "a"}], '[{"name": "a"}]', "a", [5]])
COLUMNS = {"question": WORDS, "messages": CHAT, "": SCALAR, "level": SCALAR, "tools": TOOLS, "images": SCALAR}
ROW = st.fixed_dictionaries({"prompt": PROMPT, "answer": ANSWER}, optional=COLUMNS)
ODD_ROW = st.fixed_dictionaries({}, optional={"prompt": PROMPT | WORDS | SCALAR, "answer": ANSWER, **COLUMNS})
NAMES = st.sampled_from(["completions", "answers", "completion_tokens", "self"])
SHADOWED = st.builds(lambda row, name: {**row, name: 5}, ROW, NAMES)


def judge(completions, answers, **columns):
    """A reward function like those of users: it relies on what the top of common/tasks/data.py promises."""
    assert all(isinstance(answer, str) and answer.strip() for answer in answers)
    assert all(len(values) == len(completions) for values in columns.values())
    return [0.0] * len(completions)


ROWS = st.lists(ROW, min_size=1, max_size=2) | st.lists(ROW | ODD_ROW | SHADOWED, min_size=1, max_size=2)


@settings(max_examples=150, **FUZZ)
@given(rows=ROWS, tokenizer=st.sampled_from(TOKENIZERS))
def test_every_row_is_fit_for_the_loop_or_an_error_with_its_number(path, rows, tokenizer):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        examples = load_examples(str(path), tokenizer, max_prompt_tokens=10**6)
    except ValueError as error:
        assert NAMED.search(str(error)), error
        return
    assert [example.index for example in examples] == list(range(len(rows)))
    assert all(example.prompt_ids for example in examples)
    # the reply of the data is in no prompt
    chats = [example.prompt for example in examples if isinstance(example.prompt, list)]
    assert all(chat[-1]["role"] != "assistant" for chat in chats)
    answers, columns = collate_columns(examples, 2)
    arguments = {"completions": ["8"] * len(answers), "answers": answers, **columns}
    scoring.score([(judge, 1.0), (rewards.exact_match, 1.0)], arguments)
