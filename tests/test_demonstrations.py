"""Tests of common/tasks/demonstrations.py: which tokens of a conversation are learned, and behind which.

Texts are written as tokens with a blank between them, so what is expected stands here word for word.
"""

import itertools
import json

import pytest
from conftest import TEMPLATE, build_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.tasks import demonstrations
from common.tasks.data import PromptStream
from common.tasks.prompt_encoding import encode_prompts

MORE = ["<think>", "</think>", "<turn_end>", "system", "tool", "call", "tools"]
END, THINK, TURN_END = 3, 55, 57  # ids of <im_end>, <think>, <turn_end>
DROPS = TEMPLATE.replace(  # as Qwen3: thoughts of earlier turns are left out
    "m['content']", "(m['content'] if loop.last else m['content'].split('</think>') | last)"
)
STRIPS = TEMPLATE.replace("{{ m['content'] }} <im_end>", "{{ m['content'] | trim }}<im_end>")
OTHER_END = TEMPLATE.replace("<im_end>", "<turn_end>")
NO_END = TEMPLATE.replace(" <im_end>", "")
OPENS = TEMPLATE.replace("assistant {% endif", "assistant <think> {% endif")  # a thought, in the prompt
OPENS_AND_DROPS = DROPS.replace("assistant {% endif", "assistant <think> {% endif")
COUNTS = "{{ messages | length }} " + TEMPLATE  # the beginning tells what follows
WITH_TOOLS = (
    "{% for t in tools or [] %}tools {{ t.function.name }} {% endfor %}{% for m in messages %}<im_start> {{ m.role }} "
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %} call {{ c.function.name }}"
    "{% for name, value in c.function.arguments.items() %} {{ name }} {{ value }}{% endfor %}{% endfor %} <im_end> "
    "{% endfor %}{% if add_generation_prompt %}<im_start> assistant {% endif %}"
)
ADD = {"type": "function", "function": {"name": "+", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "+", "arguments": {"1": 2}}}


def make(template=TEMPLATE):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(MORE)
    tokenizer.chat_template = template
    assert tokenizer.convert_tokens_to_ids(["<im_end>", "<turn_end>"]) == [END, TURN_END]
    return tokenizer


def turns(*contents, **last):
    """A chat that begins with a user."""
    chat = [{"role": role, "content": text} for role, text in zip(itertools.cycle(["user", "assistant"]), contents,
                                                                  strict=False)]  # fmt: skip
    chat[-1] |= last
    return chat


def load(folder, rows, tokenizer, end_ids=(END,), max_tokens=64, **options):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return demonstrations.load(str(path), tokenizer, end_ids, max_tokens, **options)


def spelled(tokenizer, rows):
    """Of each row the prompt, and its completion with what is learned in brackets."""

    def text(ids):
        return " ".join(tokenizer.convert_ids_to_tokens(list(ids)))

    found = []
    for row in rows:
        assert len(row.completion_ids) == len(row.learned) and row.learned[0] and row.learned[-1]
        parts = itertools.groupby(zip(row.completion_ids, row.learned, strict=True), key=lambda pair: pair[1])
        written = [(learned, text(token for token, _ in pairs)) for learned, pairs in parts]
        found.append((text(row.prompt_ids), " ".join(f"[{part}]" if learned else part for learned, part in written)))
    return found


def learned(folder, row, template=TEMPLATE, **options):
    tokenizer = make(template)
    return spelled(tokenizer, load(folder, [row], tokenizer, **options))


FIRST = "<im_start> user 1 + 2 <im_end> <im_start> assistant"
AGAIN = "<im_start> user 4 + 5 <im_end> <im_start> assistant"
TWO = turns("1 + 2", "3", "4 + 5", "9")


@pytest.mark.parametrize("row", [
    {"messages": turns("1 + 2", "3")}, {"prompt": turns("1 + 2", "3"), "answer": "4"},
    {"prompt": "1 + 2", "completion": "3"}, {"prompt": "1 + 2", "completion": "3", "answer": "4"},
    {"prompt": turns("1 + 2"), "completion": [{"role": "assistant", "content": "3"}], "answer": "4"},
    {"prompt": "1 + 2", "completion": [{"role": "assistant", "content": [{"type": "text", "text": "3"}]}]},
    {"prompt": turns("1 + 2", "3"), "completion": "5", "answer": "4"},  # the chat's reply comes first
    {"question": "1 + 2", "answer": "3"}, {"question": "1 + 2", "answer": 3.0}, {"prompt": "1 + 2", "answer": "3"},
    {"prompt": "1 + 2", "completion": " ", "answer": "3"}, {"prompt": "1 + 2", "completion": None, "answer": "3"},
])  # fmt: skip
def test_the_reply_is_that_of_the_chat_else_the_completion_else_the_answer(tmp_path, row):
    assert learned(tmp_path, row) == [(FIRST, "[3 <im_end>]")]


def test_a_chat_is_one_row_that_learns_every_reply(tmp_path):
    assert learned(tmp_path, {"messages": TWO}) == [(FIRST, f"[3 <im_end>] {AGAIN} [9 <im_end>]")]
    assert learned(tmp_path, {"messages": TWO}, last_turn_only=True) == [
        (f"{FIRST} 3 <im_end> {AGAIN}", "[9 <im_end>]")
    ]
    with_completion = {"prompt": TWO[:3], "completion": "9"}
    assert learned(tmp_path, with_completion) == [(FIRST, f"[3 <im_end>] {AGAIN} [9 <im_end>]")]
    [row] = load(tmp_path, [{"messages": TWO}], make())
    assert row.prompt_ids == [2, 4, 16, 7, 17, 3, 2, 5]  # places in WORDS of conftest.py
    assert list(row.completion_ids) == [18, 3, 2, 4, 19, 7, 20, 3, 2, 5, 24, 3]
    assert list(row.learned) == [1, 1] + [0] * 8 + [1, 1] and row.tokens == 20
    assert row.prompt == TWO[:3] and row.answer == "9"  # what an evaluation asks, and the right answer


def test_a_first_turn_of_the_assistant_answers_nothing_and_is_not_learned(tmp_path):
    chat = [{"role": "assistant", "content": "what"}, *turns("1 + 2", "3")]
    assert learned(tmp_path, {"messages": chat}) == [(f"<im_start> assistant what <im_end> {FIRST}", "[3 <im_end>]")]


@pytest.mark.parametrize(("template", "end_ids", "end"), [
    (OTHER_END, (END, TURN_END), "<turn_end>"), (OTHER_END, (TURN_END,), "<turn_end>"), (STRIPS, (END,), "<im_end>"),
])  # fmt: skip
def test_a_reply_ends_with_what_the_template_writes_if_that_ends_generation(tmp_path, template, end_ids, end):
    chat = turns("1 + 2", " 3 ", "4 + 5", "9 ")
    first, again = (text.replace("<im_end>", end) for text in (FIRST, AGAIN))
    assert learned(tmp_path, {"messages": chat}, template, end_ids=end_ids) == [(first, f"[3 {end}] {again} [9 {end}]")]


@pytest.mark.parametrize(("template", "written"), [(OTHER_END, "<turn_end>"), (NO_END, "")])
def test_a_reply_ends_with_eos_where_the_template_writes_nothing_that_ends_generation(
    tmp_path, capsys, template, written
):
    first, again = (" ".join(text.replace("<im_end>", written).split()) for text in (FIRST, AGAIN))
    assert learned(tmp_path, {"messages": TWO}, template) == [
        (first, "[3 <im_end>]"), (" ".join(f"{first} 3 {written} {again}".split()), "[9 <im_end>]"),
    ]  # fmt: skip
    assert "1 of 1 chats have a row for each reply" in capsys.readouterr().out


def test_where_a_template_rewrites_earlier_turns_each_reply_stands_behind_its_own_prompt(tmp_path, capsys):
    thought = turns("1 + 2", "<think> 1 </think> 3", "4 + 5", "<think> 2 </think> 9")
    assert learned(tmp_path, {"messages": thought}, DROPS) == [
        (FIRST, "[<think> 1 </think> 3 <im_end>]"),
        (f"{FIRST} 3 <im_end> {AGAIN}", "[<think> 2 </think> 9 <im_end>]"),
    ]
    assert "1 of 1 chats have a row for each reply" in capsys.readouterr().out
    assert learned(tmp_path, {"messages": thought}, DROPS, last_turn_only=True) == [
        (f"{FIRST} 3 <im_end> {AGAIN}", "[<think> 2 </think> 9 <im_end>]")
    ]
    # what has no thoughts to drop is appended, by the same template; rows of both kinds keep their order
    assert learned(tmp_path, {"messages": TWO}, DROPS) == [(FIRST, f"[3 <im_end>] {AGAIN} [9 <im_end>]")]
    tokenizer = make(DROPS)
    rows = load(tmp_path, [{"messages": chat} for chat in (TWO, thought, TWO)], tokenizer)
    assert [row.index for row in rows] == [0, 1, 1, 2]


def test_where_a_template_rewrites_what_stands_before_a_turn_each_reply_has_a_row(tmp_path):
    assert learned(tmp_path, {"messages": TWO}, COUNTS) == [
        (f"1 {FIRST}", "[3 <im_end>]"), (f"3 {FIRST} 3 <im_end> {AGAIN}", "[9 <im_end>]"),
    ]  # fmt: skip


@pytest.mark.parametrize(("template", "rows"), [(OPENS, 1), (OPENS_AND_DROPS, 2)])
def test_a_thought_that_a_prompt_opens_is_not_learned_again(tmp_path, capsys, template, rows):
    chat = turns("1 + 2", "<think> 1 </think> 3", "4 + 5", "<think> 2 </think> 9")
    found = learned(tmp_path, {"messages": chat}, template)
    first, last = "[1 </think> 3 <im_end>]", "[2 </think> 9 <im_end>]"
    if rows == 1:
        assert found == [(f"{FIRST} <think>", f"{first} {AGAIN} <think> {last}")]
    else:
        assert found == [(f"{FIRST} <think>", first), (f"{FIRST} 3 <im_end> {AGAIN} <think>", last)]
    assert "warning" not in capsys.readouterr().out


def test_replies_that_leave_a_thought_open_are_warned_of(tmp_path, capsys):
    rows = [{"prompt": "1 + 2", "completion": text} for text in ("1 </think> 3", "3")]
    tokenizer = make(OPENS)
    assert spelled(tokenizer, load(tmp_path, rows, tokenizer)) == [
        (f"{FIRST} <think>", "[1 </think> 3 <im_end>]"), (f"{FIRST} <think>", "[3 <im_end>]"),
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "warning" in said and "1 rows, such as row 1" in said and "enable_thinking" in said


def test_an_end_token_at_the_end_of_a_reply_is_not_doubled(tmp_path):
    row = {"prompt": "1 + 2", "completion": "3 <im_end>"}  # one, not two
    assert learned(tmp_path, row) == [(FIRST, "[3 <im_end>]")]


def test_calls_of_tools_are_learned_as_the_template_writes_them(tmp_path):
    asked = turns("1 + 2", None, tool_calls=[CALL])
    row = {"messages": [*asked, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3"}],
           "tools": [ADD]}  # fmt: skip
    first, call = f"tools + {FIRST}", "call + 1 2 <im_end>"
    assert learned(tmp_path, row, WITH_TOOLS) == [
        (first, f"[{call}] <im_start> tool 3 <im_end> <im_start> assistant [3 <im_end>]")
    ]
    for last in (None, "what"):  # the call is the last turn, alone or behind a text
        row = {"messages": turns("1 + 2", last, tool_calls=[CALL]), "tools": [ADD]}
        assert learned(tmp_path, row, WITH_TOOLS) == [(first, f"[{'what ' if last else ''}{call}]")]
    row = {"prompt": "1 + 2", "completion": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    assert learned(tmp_path, row, WITH_TOOLS) == [(FIRST, f"[{call}]")]


def test_calls_that_cannot_be_learned_are_refused_with_row_and_remedy(tmp_path):
    rewrites = WITH_TOOLS.replace("m.content or ''", "m.content or '' if loop.last else '.'")
    chat = [*turns("1 + 2", None, tool_calls=[CALL]), {"role": "tool", "content": "3"}]
    row = {"messages": [*chat, {"role": "assistant", "content": "3"}], "tools": [ADD]}
    with pytest.raises(ValueError, match=r"row 0: .*rewrites.*set turns to 'last'"):
        learned(tmp_path, row, rewrites)
    assert len(learned(tmp_path, row, rewrites, last_turn_only=True)) == 1
    with pytest.raises(ValueError, match=r"row 0: .*tool calls of the last turn.*or remove the row"):
        learned(tmp_path, {"messages": chat[:2], "tools": [ADD]}, rewrites)


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": "1 + 2"}, "no reply to learn; end `messages` with an assistant turn, or add a column `completion`"),
    ({"messages": turns("1 + 2")}, "no reply to learn"),
    ({"prompt": "1 + 2", "completion": 3}, "`completion` is int, expected text"),
    ({"prompt": "1 + 2", "completion": TWO}, "`completion` holds 4 turns, expected one .*`messages`"),
    ({"prompt": "1 + 2", "completion": turns("3")}, "`completion` holds 1 turns, expected one of the assistant"),
    ({"prompt": "1 + 2", "completion": []}, "`completion` holds 0 turns"),
    ({"prompt": "1 + 2", "completion": [{"role": "assistant"}]}, "needs the keys `role` and `content`"),
])  # fmt: skip
def test_a_row_without_one_reply_is_an_error_with_row_and_remedy(tmp_path, row, message):
    rows = [{"prompt": "1 + 2", "answer": "3"}, row]
    with pytest.raises(ValueError, match=f"rows.jsonl, row 1: .*{message}"):
        load(tmp_path, rows, make())


def test_a_system_prompt_opens_every_chat_without_one(tmp_path):
    system = "<im_start> system . <im_end>"
    again = f"[3 <im_end>] {AGAIN} [9 <im_end>]"
    assert learned(tmp_path, {"messages": TWO}, system_prompt=".") == [(f"{system} {FIRST}", again)]
    own = [{"role": "system", "content": "="}, *TWO]
    assert learned(tmp_path, {"messages": own}, system_prompt=".") == [(f"{system} {FIRST}".replace(".", "="), again)]


@pytest.mark.parametrize(("template", "options"), [(None, {}), (TEMPLATE, dict(apply_chat_template=False))])
def test_text_without_a_template_ends_with_eos(tmp_path, template, options):
    row = {"prompt": "1 + 2 =", "completion": "3"}
    assert learned(tmp_path, row, template, **options) == [("1 + 2 =", "[3 <im_end>]")]
    with pytest.raises(ValueError, match="row 0: chat messages need a chat template"):
        learned(tmp_path, {"messages": TWO}, template, **options)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    tokenizer = make()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no end token.*set eos_token"):
        load(tmp_path, [{"prompt": "1 + 2", "answer": "3"}], tokenizer)


def test_longer_conversations_are_dropped_and_counted(tmp_path, capsys):
    rows = [{"prompt": "1 + 2", "answer": "3" + " 3" * more} for more in range(5)]  # 10 tokens, 11, ...
    tokenizer = make()
    kept = load(tmp_path, rows, tokenizer, max_tokens=12)
    assert [row.index for row in kept] == [0, 1, 2] and [row.tokens for row in kept] == [10, 11, 12]
    said = capsys.readouterr().out
    assert "dropped 2 of 5" in said and "max_tokens" in said and "12" in said
    with pytest.raises(ValueError, match=r"5 of 5 .*9 tokens \(max_tokens\).*raise it to 10, the shortest"):
        load(tmp_path, rows, tokenizer, max_tokens=9)
    long = [{"prompt": "1" + " + 2" * more, "answer": "3"} for more in range(3)]  # prompts of 6 tokens, 8, 10
    assert [row.index for row in load(tmp_path, long, tokenizer, max_prompt_tokens=8)] == [0, 1]
    assert "dropped 1 of 3 prompts longer than 8 tokens (max_prompt_tokens)" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"longer than 5 tokens \(max_tokens\)"):
        load(tmp_path, long, tokenizer, max_tokens=5)
    # a row that was divided may lose its longer part only
    thought = {"messages": turns("1 + 2", "<think> 1 </think> 3", "4 + 5", "9")}
    tokenizer = make(DROPS)
    for most, count in ((20, 2), (19, 1)):
        assert len(load(tmp_path, [thought], tokenizer, max_tokens=most)) == count


def test_another_reply_is_another_data_set(tmp_path):
    def fingerprint(*chats, **options):
        rows = load(tmp_path, [{"messages": chat, "answer": "1"} for chat in chats], make(), **options)
        return PromptStream(rows, 1, 0).fingerprint

    first = fingerprint(TWO)
    assert first == fingerprint(TWO)
    others = [fingerprint(turns("1 + 2", "3", "4 + 5", "8")), fingerprint(turns("1 + 2", "2", "4 + 5", "9")),
              fingerprint(TWO, last_turn_only=True)]  # fmt: skip
    assert len({first, *others}) == 4


REPLIES = st.lists(st.sampled_from(["1", "+", "<think>", "</think>", "."]), max_size=4)
EXCHANGES = st.tuples(st.sampled_from(["1", "2 + 2", "."]), REPLIES.map(lambda words: " ".join([*words, "1"])))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chats=st.lists(st.lists(EXCHANGES, min_size=1, max_size=3), min_size=1, max_size=4),
    template=st.sampled_from([TEMPLATE, DROPS, STRIPS, NO_END, OPENS, OPENS_AND_DROPS, COUNTS]),
)
def test_what_stands_before_a_reply_is_what_the_policy_would_see_there(tmp_path, chats, template):
    chats = [list(itertools.chain(*chat)) for chat in chats]
    tokenizer = make(template)
    rows = load(tmp_path, [{"messages": turns(*chat)} for chat in chats], tokenizer, max_tokens=1000)
    expected = {}
    for number, chat in enumerate(chats):
        prompts = [turns(*chat[: k + 1]) for k in range(0, len(chat), 2)]
        expected[number] = list(zip(encode_prompts(prompts, "", tokenizer), chat[1::2], strict=True))
    for row in rows:
        ids = [*row.prompt_ids, *row.completion_ids]
        mask = [0] * len(row.prompt_ids) + list(row.learned)
        starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
        for start in starts:
            prompt, reply = expected[row.index].pop(0)
            stop = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            assert ids[:start] == prompt
            reply = reply.removeprefix("<think> ") if prompt[-1] == THINK else reply
            text = tokenizer(reply.strip(), add_special_tokens=False)["input_ids"]
            assert ids[start:stop] == [*text, END]
    assert not any(expected.values())  # each reply is learned, once
