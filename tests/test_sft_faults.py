"""Conversations as people have them, and what a fine-tuning script says of those that it cannot learn."""

import pytest
from conftest import SCRIPTS, build_model
from test_data import CHAT_TEMPLATE, VOCABULARY, assistant, make_tokenizer, system, user, write_bytes, write_rows

from common.loop import supervised
from common.planning import layouts
from common.tasks import demonstrations

END = VOCABULARY["<im_end>"]
ASKING = CHAT_TEMPLATE + (  # as Qwen3.5 has it: a chat without a user is refused
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user') }}{% endif %}"
)
THOUGHTS = CHAT_TEMPLATE.replace("turn['content']", "turn['content'].split('=')[-1]").replace(
    "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
)  # earlier thoughts, which end with "=" here, are dropped, and the prompt opens one


def load(folder, rows, template=CHAT_TEMPLATE, **options):
    source = rows if isinstance(rows, str) else write_rows(folder, rows)
    return demonstrations.load(source, make_tokenizer(template=template), [END, VOCABULARY["<eos>"]], 64, **options)


def learned(row):
    return [token for token, flag in zip(row.completion_ids, row.learned, strict=True) if flag]


def ids(text):
    return [VOCABULARY[word] for word in text.split()]


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": "1", "completion": {"role": "assistant", "content": "2"}, "answer": "3"}, "`completion` is dict"),
    ({"prompt": "1", "completion": 0.5, "answer": "3"}, "`completion` is float.*rename a column that means something"),
    ({"prompt": "1", "output": "2"}, "no reply to learn.*rename `output` to `completion`"),
    ({"prompt": "1"}, "no reply to learn.*add a column `completion` or `answer`"),
    ({"messages": [user("1"), assistant("")]}, "row 1: a reply of the assistant is empty"),
    ({"messages": [user("1"), assistant("\n"), user("2"), assistant("3")]}, "row 1: a reply of the assistant is empty"),
    ({"prompt": "1", "completion": [assistant("")]}, "row 1: a reply of the assistant is empty"),
    ({"prompt": "1", "completion": "<im_end>"}, "row 1: a reply of the assistant is empty"),
    ({"prompt": "1", "completion": "2 <im_end> 3"}, "row 1: a reply goes on behind '<im_end>', .*: '3'; take"),
    ({"prompt": "1", "completion": "2 <eos> 3"}, "row 1: a reply goes on behind '<eos>'"),
    ({"messages": [user("1"), assistant("2 <im_end> 3"), user("2"), assistant("3")]}, "row 1: a reply goes on behind"),
    ({"conversations": [{"from": "human", "value": "1"}]}, "rename `conversations` to `messages`, with turns"),
    ({"instruction": "1", "input": "2", "output": "3"}, "write `instruction` and `input` into one text, `prompt`"),
])  # fmt: skip
def test_a_row_that_cannot_be_learned_is_an_error(tmp_path, row, said):
    with pytest.raises(ValueError, match=said):
        load(tmp_path, [{"prompt": "1", "completion": "2"}, row])


def test_half_a_character_in_a_reply_is_an_error_that_names_the_row(tmp_path):
    chat = r'{"role": "user", "content": "1"}, {"role": "assistant", "content": "2\ud800"}'
    for line in (r'{"prompt": "1", "completion": "2\ud800"}', f'{{"messages": [{chat}], "answer": "2"}}'):
        source = write_bytes(tmp_path, line.encode())
        with pytest.raises(ValueError, match=r"row 0: the reply holds half a character"):
            load(tmp_path, source)


def test_end_tokens_that_the_data_hold_are_not_doubled(tmp_path):
    rows = [
        {"prompt": "1", "completion": text} for text in ("2", "2 <im_end>", "2 <im_end>\n", "2 <eos>", "2<eos><eos>")
    ]
    assert [learned(row) for row in load(tmp_path, rows)] == [[VOCABULARY["2"], END]] * 5


def test_a_null_in_completion_leaves_the_answer(tmp_path):
    rows = [{"prompt": "1", "completion": value, "answer": "2"} for value in (None, float("nan"), " ")]
    assert [learned(row) for row in load(tmp_path, rows)] == [[VOCABULARY["2"], END]] * 3


def test_a_greeting_is_context(tmp_path):
    chats = [[system("be"), assistant("hi"), user("1"), assistant("2"), user("3"), assistant("4")]]
    chats += [[assistant("hi"), user("1"), assistant("2"), user("3"), assistant("4")]]
    for row in load(tmp_path, [{"messages": chat} for chat in chats], ASKING):
        assert learned(row) == [VOCABULARY["2"], END, VOCABULARY["4"], END]
        assert VOCABULARY["hi"] in row.prompt_ids
    [row] = load(tmp_path, [{"messages": [system("be"), assistant("hi")]}])  # what the system turn asks for
    assert learned(row) == [VOCABULARY["hi"], END]


def test_an_error_of_an_earlier_turn_names_its_row(tmp_path):
    template = CHAT_TEMPLATE + "{% if messages[-1]['content'] == '9' %}{{ raise_exception('nine') }}{% endif %}"
    short = {"messages": [user("1"), assistant("2")]}
    rows = [short, short, {"messages": [user("9"), assistant("2"), user("3"), assistant("4")]}]
    with pytest.raises(ValueError, match=r"row 2: .*nine"):
        load(tmp_path, rows, template)


def test_an_earlier_reply_does_not_repeat_the_thought_that_its_prompt_opens(tmp_path):
    replies = [assistant("<think>\n2 = 3"), assistant("<think>\n4 = 5")]
    chat = [user("1"), replies[0], user("1"), replies[1]]
    rows = load(tmp_path, [{"messages": chat}], THOUGHTS)
    assert [learned(row) for row in rows] == [[*ids("2 = 3"), END], [*ids("4 = 5"), END]]


def test_chats_are_encoded_a_part_at_a_time(tmp_path, monkeypatch, capsys):
    rows = [{"messages": [user("1"), assistant("2"), user(f"<eos> {n}"), assistant(f"{n}")]} for n in range(7)]
    rows += [{"prompt": "1", "completion": "2"}]
    whole = [(list(row.completion_ids), list(row.learned)) for row in load(tmp_path, rows)]
    said = capsys.readouterr().out
    assert said.count("mention special tokens") == 1  # once, although prompts of earlier turns are encoded, too
    monkeypatch.setattr(demonstrations, "ROWS_PER_CALL", 2)
    assert [(list(row.completion_ids), list(row.learned)) for row in load(tmp_path, rows)] == whole
    assert capsys.readouterr().out == said


def test_a_conversation_that_the_policy_cannot_read_is_an_error_at_the_start(capsys):
    def rows(tokens, token=1):
        ids = [token] * (tokens - 1)
        return [demonstrations.Demonstration(0, "", [1], None, {}, completion_ids=ids, learned=ids)]

    learned_positions, rotary = build_model("gpt2"), build_model("qwen2")
    supervised.require_fit(learned_positions, rows(64), "data")
    with pytest.raises(
        ValueError, match=r"data: conversations of up to 65 tokens: .*64 positions; set max_tokens to 64"
    ):
        supervised.require_fit(learned_positions, rows(65), "data")
    size = learned_positions.config.vocab_size
    with pytest.raises(ValueError, match=f"data, row 0: token {size}: the policy has {size} tokens"):
        supervised.require_fit(learned_positions, rows(8, token=size), "data")
    assert not capsys.readouterr().out
    places = rotary.config.max_position_embeddings
    supervised.require_fit(rotary, rows(places + 1), "data")
    assert f"the policy was made for {places}: lower max_tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "value"), [("drafts", True), ("truncated", "mask"), ("print_samples", True)])
def test_options_of_sampling_are_refused(option, value):
    module, _ = layouts.load(SCRIPTS["sft"], [])
    with pytest.raises(ValueError, match=f"{option} = {value!r}: the replies are given, not sampled"):
        module.Config(**{option: value})
