"""Tests of common/data.py: what a data file may look like, which tokens a prompt becomes, who gets it and when."""

import json
import sys
import tracemalloc
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import common
from common import distributed
from common.data import Example, PromptStream, collate_columns, load_examples, permutation, read_rows

SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<im_start>", "<im_end>", "<unk>"]
WORDS = ["user", "assistant", "system", "be", "brief", "hi", *"0123456789+=?\n"]
VOCABULARY = {word: i for i, word in enumerate(SPECIAL_TOKENS + WORDS)}
CHAT_TEMPLATE = (
    "{% for turn in messages %}<im_start>{{ turn['role'] + '\n' + turn['content'] }}<im_end>\n{% endfor %}"
    "{% if add_generation_prompt %}<im_start>assistant\n{% endif %}"
)
ROWS = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "2+2=?", "answer": "4"}]
RENDERED = "<im_start>user\n2+2=?<im_end>\n<im_start>assistant\n"


def make_tokenizer(template=CHAT_TEMPLATE, frame="$A", **special):
    """A word-level tokenizer whose post-processor puts a text into `frame`, such as "<bos> $A <eos>"."""
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", behavior="removed"),
            pre_tokenizers.Split("\n", behavior="isolated"),
            pre_tokenizers.Punctuation(),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    ids = [(word, VOCABULARY[word]) for word in ("<bos>", "<eos>")]
    backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=ids)
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"} | special
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=["<im_start>", "<im_end>"], chat_template=template, **special
    )


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def write_bytes(folder, content, name="rows.jsonl"):
    path = folder / name
    path.write_bytes(content)
    return str(path)


def write_rows(folder, rows):
    return write_bytes(folder, "".join(json.dumps(row) + "\n" for row in rows).encode())


def load(folder, rows, tokenizer, max_prompt_tokens=64, **settings):
    return load_examples(write_rows(folder, rows), tokenizer, max_prompt_tokens, **settings)


def load_prompt(folder, prompt, tokenizer, **settings):
    """Token ids of a data set with a single prompt."""
    [example] = load(folder, [{"prompt": prompt, "answer": "4"}], tokenizer, **settings)
    return example.prompt_ids


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


# ---- files ----


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt":"1+1=?","answer":"2"}\n{"prompt":"2+2=?","answer":"4"}\n',
        '\ufeff{"prompt":"1+1=?","answer":"2"}\n{"prompt":"2+2=?","answer":"4"}\n',
        '{"prompt":"1+1=?","answer":"2"}\r\n\r\n  \r\n{"prompt":"2+2=?","answer":"4"}',
        '\ufeff\r\n{"prompt":"1+1=?","answer":"2"}\n\n{"prompt":"2+2=?","answer":"4"}\n\n',
        '\ufeff\ufeff{"prompt":"1+1=?","answer":"2"}\n\ufeff{"prompt":"2+2=?","answer":"4"}\n\ufeff\n',
    ],
    ids=["plain", "byte-order mark", "CRLF, blank lines, no last newline", "all together", "files with marks, joined"],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_harmless_forms_of_a_file_give_the_same_rows(tmp_path, content, name):
    assert read_rows(write_bytes(tmp_path, content.encode(), name)) == ROWS


def test_line_separators_and_tabs_inside_strings_are_kept(tmp_path):
    text = "a\u2028b\u2029c\x85d\te\x0bf"
    line = '{"prompt":"' + text + '","answer":"1"}'
    assert read_rows(write_bytes(tmp_path, (line + "\r\n" + line).encode())) == [{"prompt": text, "answer": "1"}] * 2


@pytest.mark.parametrize(
    ("lines", "bad_line"),
    [
        (['{"prompt":"a","answer":"1"}', '{"prompt":"a","answer":"1"', '{"prompt":"a","answer":"1"}'], 2),
        (['{"prompt":"a","answer":"1"}', "", '{"prompt":"a","ans'], 3),
        (['{"prompt":"raw', 'newline","answer":"1"}'], 1),
        (['{"prompt":"a","answer":"1"} {"prompt":"b","answer":"1"}'], 1),
        (['{"prompt":"a","answer":"1"}', '"text"'], 2),
        (["[", '{"prompt":"a","answer":"1"}', "]"], 1),
        (['[{"prompt":"a","answer":"1"}]'], 1),
        (["{", '  "prompt": "a",', '  "answer": "1"', "}"], 1),
    ],
    ids=["no brace", "cut off", "raw newline", "two objects", "no object", "array", "array on a line", "indented"],
)
def test_a_bad_line_is_an_error_with_file_and_line(tmp_path, lines, bad_line):
    source = write_bytes(tmp_path, "\n".join(lines).encode())
    with pytest.raises(ValueError, match=rf"rows.jsonl, line {bad_line}: expected one JSON object per line"):
        read_rows(source)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[" * 100_000, "lists and objects lie too deep inside one another"),
        ("9" * 5000, "Exceeds the limit .* value has 5000 digits"),
        ('1,"answer":2', "the key 'answer' stands twice in one object"),
        ('[{"role":"user","role":"assistant"}]', "the key 'role' stands twice"),
    ],
    ids=["deep", "long number", "key twice", "key of a message twice"],
)
def test_a_line_that_python_reads_in_its_own_way_is_an_error_with_file_and_line(tmp_path, value, message):
    source = write_bytes(tmp_path, ('{"prompt":"a","answer":"1"}\n\n{"prompt":"a","answer":' + value + "}").encode())
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 3: {message}"):
        read_rows(source)


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["", "byte-order mark"])
def test_another_encoding_is_an_error_with_file_and_byte(tmp_path, bom):
    start = bom + '{"prompt":"一","answer":"1"}\n{"prompt":"'.encode()
    source = write_bytes(tmp_path, start + '中文","answer":"1"}'.encode("gbk"))
    with pytest.raises(ValueError, match=rf"rows.jsonl: byte {len(start)} is not UTF-8 text \(line 2\)"):
        read_rows(source)


@pytest.mark.parametrize(
    ("encoding", "byte"), [("utf-16", 0), ("utf-16-le", 1), ("utf-16-be", 0), ("utf-32", 0), ("utf-32-be", 0)]
)
def test_utf_16_is_an_error_not_a_guess(tmp_path, encoding, byte):
    with pytest.raises(ValueError, match=f"byte {byte} is not UTF-8"):
        read_rows(write_bytes(tmp_path, json.dumps(ROWS[0]).encode(encoding)))


@pytest.mark.parametrize("content", [b"", b"\n\r\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_an_error(tmp_path, content):
    with pytest.raises(ValueError, match="no rows"):
        read_rows(write_bytes(tmp_path, content))


def test_a_row_takes_as_much_memory_as_the_top_of_the_file_says(tmp_path, monkeypatch):
    monkeypatch.setattr("common.data.ROWS_PER_CALL", 100)  # as few of all rows as in a large file

    class Words:
        """Thirty tokens of a large vocabulary for every text."""

        chat_template, added_tokens_decoder = None, {}

        def __call__(self, text, **options):
            texts = [text] if isinstance(text, str) else text
            ids = [[1000 + (len(text) + 7 * i) % 500 for i in range(30)] for text in texts]
            return {"input_ids": ids[0] if isinstance(text, str) else ids}

    rows = [{"prompt": f"{i:06d} " + "word " * 28, "answer": str(i)} for i in range(3000)]
    source = write_rows(tmp_path, rows)
    load_examples(source, Words(), 64)  # imports and caches are not counted
    tracemalloc.start()
    examples = load_examples(source, Words(), 64)
    kept, peak = (size / len(rows) for size in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    # in whole pages, with what Python does not give back, the peak is what stays
    assert len(examples) == 3000 and kept < 850 and peak < 1250, (kept, peak)


# ---- toy, saved folders, hub ----


def test_toy_rows_come_from_the_built_in_task(monkeypatch):
    toy = SimpleNamespace(rows=lambda split: [{"prompt": split, "answer": "1"}])
    monkeypatch.setitem(sys.modules, "common.toy", toy)
    monkeypatch.setattr(common, "toy", toy, raising=False)
    assert read_rows("toy", "test") == [{"prompt": "test", "answer": "1"}]


def test_folders_saved_by_datasets(tmp_path, tokenizer):
    import datasets

    chat = [{"prompt": [user("2+2=?")], "answer": 4}]
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(chat)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "parts")
    assert read_rows(str(tmp_path / "one")) == ROWS
    assert read_rows(str(tmp_path / "parts")) == ROWS
    assert read_rows(str(tmp_path / "parts"), "test") == chat
    [example] = load_examples(str(tmp_path / "parts"), tokenizer, 64, split="test")
    assert (example.prompt, example.answer) == ([user("2+2=?")], "4")
    with pytest.raises(ValueError, match="no split 'dev'; use one of: train, test"):
        read_rows(str(tmp_path / "parts"), "dev")


def test_any_other_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"none that datasets\.save_to_disk wrote"):
        read_rows(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "name", "config"),
    [("openai/gsm8k:main", "openai/gsm8k", "main"), ("some-one/data_v1.5", "some-one/data_v1.5", None)],
)
def test_hub_ids_have_an_optional_config(monkeypatch, source, name, config):
    import datasets

    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or ROWS)
    assert read_rows(source, "test") == ROWS
    assert calls == [((name, config), {"split": "test"})]  # and no trust_remote_code


@pytest.mark.parametrize(
    "failure", [ConnectionError("no route"), ValueError("unknown split"), RuntimeError("scripts are not supported")]
)
def test_a_hub_that_fails_gives_one_error_with_what_was_asked_for(monkeypatch, failure):
    import datasets

    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=rf"'some/data:main'.*'some/data', config 'main', split 'dev'.*{failure}"):
        read_rows("some/data:main", "dev")


@pytest.mark.parametrize("source", ["here/rows", "else/rows.jsonl", "else/rows.parquet", "/else/x", "./else/x", "json"])
def test_a_path_that_does_not_exist_never_goes_to_the_hub(tmp_path, monkeypatch, source):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(FileNotFoundError, match=f"no data at '{source}'.*owner/name"):
        read_rows(source)


def test_without_datasets_only_its_sources_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert read_rows(write_rows(tmp_path, ROWS)) == ROWS
    with pytest.raises(ImportError, match="pip install datasets"):
        read_rows("openai/gsm8k:main")


# ---- columns ----


def test_examples_hold_prompt_tokens_answer_and_the_other_columns(tmp_path, tokenizer):
    rows = [{"question": "1+1=?", "answer": 2, "level": "easy"}, {"question": "2+2=?", "answer": "4", "unit": None}]
    examples = load(tmp_path, rows, tokenizer)
    assert [example.index for example in examples] == [0, 1]
    assert [example.prompt for example in examples] == ["1+1=?", "2+2=?"]
    assert [example.answer for example in examples] == ["2", "4"]
    assert [example.columns for example in examples] == [{"level": "easy", "unit": None}, {"level": None, "unit": None}]


def test_prompt_wins_over_question_and_messages(tmp_path, tokenizer):
    row = {"messages": [user("hi")], "question": "1+1=?", "prompt": "2+2=?", "answer": "4"}
    [example] = load(tmp_path, [row], tokenizer)
    assert example.prompt == "2+2=?"
    assert example.columns == {"messages": [user("hi")], "question": "1+1=?"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((8, "8"), (8.0, "8"), (-0.5, "-0.5"), ("8", "8"), (" 8 ", " 8 "), (0, "0"), (-0.0, "0")),
        *((1e16, "1" + 16 * "0"), (1e23, "1" + 23 * "0"), (0.1 + 0.2, "0.30000000000000004")),
    ],
)
def test_ground_truth_becomes_text(tmp_path, tokenizer, value, text):
    [example] = load(tmp_path, [{"prompt": "hi", "answer": value}], tokenizer)
    assert example.answer == text


@pytest.mark.parametrize("answer", [{}, {"answer": None}, {"answer": ""}, {"answer": " \n"}, {"answer": float("nan")}])
def test_a_row_without_ground_truth_stops_unless_none_is_needed(tmp_path, tokenizer, answer):
    rows = [*ROWS, {"prompt": "hi"} | answer]
    with pytest.raises(ValueError, match=r"rows.jsonl, row 2: `answer` is missing or empty; .*: prompt.*add it, or"):
        load(tmp_path, rows, tokenizer)
    assert load(tmp_path, rows, tokenizer, need_answer=False)[2].answer is None


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"prompt": "hi", "solution": "8"}, "`answer` .*found: prompt, solution; rename `solution` to `answer`"),
        ({"prompt": "hi", "Answer": "8"}, "rename `Answer` to `answer`"),
        ({"prompt": "hi", "x": "8"}, "rename the column that holds it to `answer`"),
        ({"problem": "hi", "answer": "8"}, "`prompt` .*found: problem, answer; rename `problem` to `prompt`"),
        ({"prompt": None, "answer": "8"}, "`prompt` is missing or empty"),
        ({"prompt": "", "answer": "8"}, "`prompt` is missing or empty"),
        ({"prompt": 5, "answer": "8"}, "`prompt` is int, expected text or a list of chat messages"),
        ({"messages": "hi", "answer": "8"}, "`messages` is str, expected a list of chat messages"),
        ({"prompt": ["hi"], "answer": "8"}, "needs the keys `role` and `content`, got 'hi'"),
        ({"messages": [{"from": "human", "value": "hi"}], "answer": "8"}, "needs the keys `role` and `content`"),
        ({"prompt": [], "answer": "8"}, "the chat has no turn to answer"),
        ({"prompt": [user(" ")], "answer": "8"}, "the chat has no turn to answer"),
        ({"prompt": " \n", "answer": "8"}, "`prompt` is missing or empty"),
        ({"prompt": [user(None)], "answer": "8"}, "the content of a chat message is NoneType, expected text"),
        ({"prompt": [user(None) | {"tool_calls": [1]}, user("hi")]}, "the content of a chat message is NoneType"),
        ({"prompt": [user([{"type": "text", "text": "hi"}])], "answer": "8"}, "content of a chat message is list"),
        ({"messages": [user("hi"), {"role": "gpt", "content": "8"}], "answer": "8"}, "role of a chat message is 'gpt'"),
        ({"prompt": "hi", "answer": ["8", "9"]}, "the answer is list, expected text or a finite number"),
        ({"prompt": "hi", "answer": True}, "the answer is bool, expected text or a finite number"),
        ({"prompt": "hi", "answer": float("-inf")}, "the answer is -inf, expected text or a finite number"),
        ({"prompt": "hi", "answer": "8\ud83d"}, "the answer holds half a character"),
    ],
)
def test_unusable_rows_are_errors_with_row_and_remedy(tmp_path, tokenizer, row, remedy):
    with pytest.raises(ValueError, match=rf"rows.jsonl, row 0: .*{remedy}"):
        load(tmp_path, [row], tokenizer)


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_a_last_assistant_turn_is_the_answer_and_never_in_the_prompt(tmp_path, tokenizer, column):
    chat = [user("1+1=?"), assistant("2"), user("2+2=?")]
    rows = [
        {column: [*chat, assistant("the answer is 42")]},
        {column: [*chat, assistant("the answer is 42")], "answer": 4},
        {column: chat, "answer": "4"},
    ]
    examples = load(tmp_path, rows, tokenizer)
    assert [example.answer for example in examples] == ["the answer is 42", "4", "4"]
    assert [example.prompt for example in examples] == [chat] * 3
    assert examples[0].prompt_ids == examples[1].prompt_ids == examples[2].prompt_ids
    assert all(example.columns == {} for example in examples)


def test_a_chat_of_assistant_turns_only_is_refused(tmp_path, tokenizer):
    for chat in ([assistant("hi")], [user("hi"), assistant("1"), assistant("2")]):
        with pytest.raises(ValueError, match="row 0: the chat has no turn to answer"):
            load(tmp_path, [{"messages": chat}], tokenizer)


def test_a_reply_that_calls_tools_is_no_answer_and_not_in_the_prompt(tmp_path, tokenizer):
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    turns = [user("hi"), call | {"content": "8"}, {"role": "tool", "content": "9"}]
    examples = load(tmp_path, [{"prompt": [user("hi"), call], "answer": 8}, {"prompt": turns, "answer": 8}], tokenizer)
    assert [example.prompt for example in examples] == [[user("hi")], turns]
    with pytest.raises(ValueError, match="row 0: `answer` is missing or empty"):
        load(tmp_path, [{"prompt": turns[:2]}], tokenizer)


@pytest.mark.parametrize("name", ["completions", "answers", "completion_tokens", "self"])
def test_a_column_named_as_an_argument_of_reward_functions_is_refused(tmp_path, tokenizer, name):
    with pytest.raises(ValueError, match=rf"rows.jsonl: columns {name}: reward functions get arguments of these names"):
        load(tmp_path, [*ROWS, {"prompt": "hi", "answer": "1", name: 5}], tokenizer)


def test_columns_are_repeated_for_every_completion():
    first = Example(0, "a", [1], "2", {"level": 1})
    second = Example(1, "b", [2], None, {"unit": "m"})
    answers, columns = collate_columns([first, second], group_size=3)
    assert answers == ["2", "2", "2", None, None, None]
    assert columns == {"level": [1, 1, 1, None, None, None], "unit": [None, None, None, "m", "m", "m"]}


# ---- prompts to tokens ----


def test_text_chat_and_templated_text_become_the_same_tokens(tmp_path, tokenizer, capsys):
    wanted = tokenizer.apply_chat_template([user("2+2=?")], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(wanted).replace(" ", "") == RENDERED
    assert load_prompt(tmp_path, "2+2=?", tokenizer) == wanted
    assert load_prompt(tmp_path, [user("2+2=?")], tokenizer) == wanted
    assert capsys.readouterr().out == ""
    assert load_prompt(tmp_path, RENDERED, tokenizer) == wanted
    assert "1 of 1 prompts are templated already and get no chat template" in capsys.readouterr().out


def test_a_template_without_special_tokens_is_not_applied_twice(tmp_path):
    tokenizer = make_tokenizer(template="user {{ messages[0]['content'] }}{{ '\n' }}assistant ")
    wanted = load_prompt(tmp_path, "2+2=?", tokenizer)
    assert wanted == [VOCABULARY[word] for word in ("user", *"2+2=?\n", "assistant")]
    for templated in ("user 2+2=?\nassistant ", "user 2+2=?\nassistant"):
        assert load_prompt(tmp_path, templated, tokenizer) == wanted
    assert load_prompt(tmp_path, "assistant 2+2=?", tokenizer).count(VOCABULARY["assistant"]) == 2
    # an end that any text may have tells nothing
    question = make_tokenizer(template="user {{ messages[0]['content'] }}?")
    assert load_prompt(tmp_path, "2+2=?", question)[0] == VOCABULARY["user"]


@pytest.mark.parametrize("content", [RENDERED, "<im_start>user\n2+2=?", "2+2=?<im_end>"])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, "{{ messages[0]['content'] }}<im_start><im_end>assistant"])
def test_chat_messages_that_were_templated_before_are_refused(tmp_path, content, template):
    rows = [*ROWS, {"prompt": [system("be brief"), user(content)], "answer": "4"}]
    with pytest.raises(ValueError, match="row 2: a chat message holds what the chat template writes around it"):
        load(tmp_path, rows, make_tokenizer(template=template))
    # tokens that the template does not write are text like any other
    assert VOCABULARY["<pad>"] in load_prompt(tmp_path, [user("hi <pad>")], make_tokenizer())


def test_mixed_prompts_keep_their_order_over_many_tokenizer_calls(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("common.data.ROWS_PER_CALL", 3)
    texts = [f"{i}+{i}=?" for i in range(8)]
    prompts = [[user(text)] if i % 2 else text for i, text in enumerate(texts)]
    examples = load(tmp_path, [{"prompt": prompt, "answer": "1"} for prompt in prompts], tokenizer)
    assert [example.prompt_ids for example in examples] == [load_prompt(tmp_path, text, tokenizer) for text in texts]


def test_system_turns_follow_the_data_then_the_setting(tmp_path, tokenizer):
    def render(*turns):
        return tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, return_dict=False)

    own, empty, none = [system("be brief"), user("hi")], [system(""), user("hi")], [user("hi")]
    assert [load_prompt(tmp_path, chat, tokenizer) for chat in (own, empty, none)] == [
        render(*own),
        render(*empty),
        render(*none),
    ]
    assert render(*own).count(VOCABULARY["brief"]) == 1
    for prompt in ("hi", none):
        assert load_prompt(tmp_path, prompt, tokenizer, system_prompt="be brief") == render(*own)
    for chat in (own, empty, [user("hi"), system("be brief"), user("hi")]):
        assert load_prompt(tmp_path, chat, tokenizer, system_prompt="hi") == render(*chat)


def test_keys_that_a_table_fills_up_with_null_are_not_there_for_a_template(tmp_path, tokenizer):
    tools = "{% if 'tool_calls' in turn %}{{ turn['tool_calls'] | length }}{% endif %}{% endfor %}"
    careful = make_tokenizer(template=CHAT_TEMPLATE.replace("{% endfor %}", tools))
    wanted = load_prompt(tmp_path, [user("hi")], tokenizer)
    assert load_prompt(tmp_path, [user("hi") | {"tool_calls": None, "name": None}], careful) == wanted


def test_a_template_with_a_default_system_turn_is_followed(tmp_path):
    default = "{% if messages[0]['role'] != 'system' %}<im_start>system\nbe brief<im_end>\n{% endif %}"
    tokenizer = make_tokenizer(template=default + CHAT_TEMPLATE)
    brief = VOCABULARY["brief"]
    assert load_prompt(tmp_path, [user("hi")], tokenizer).count(brief) == 1
    assert load_prompt(tmp_path, "hi", tokenizer).count(brief) == 1
    assert load_prompt(tmp_path, [system(""), user("hi")], tokenizer).count(brief) == 0


def test_a_system_prompt_without_a_place_is_refused(tmp_path, tokenizer):
    for prompt, settings in (("hi", {"apply_chat_template": False}), (RENDERED, {})):
        with pytest.raises(ValueError, match="row 0: system_prompt 'be brief' has no place"):
            load_prompt(tmp_path, prompt, tokenizer, system_prompt="be brief", **settings)


def test_without_a_template_text_is_used_as_it_is_and_chat_is_refused(tmp_path, tokenizer):
    plain = [VOCABULARY[character] for character in "2+2=?"]
    base = make_tokenizer(template=None)
    assert load_prompt(tmp_path, "2+2=?", base) == plain
    assert load_prompt(tmp_path, "2+2=?", tokenizer, apply_chat_template=False) == plain
    for unable, settings in ((base, {}), (tokenizer, {"apply_chat_template": False})):
        with pytest.raises(ValueError, match=r"row 0: chat messages need a chat template.*give prompts as text"):
            load_prompt(tmp_path, [user("hi")], unable, **settings)


@pytest.mark.parametrize("frame", ["$A", "<bos> $A", "$A <eos>", "<bos> $A <eos>"])
@pytest.mark.parametrize("same", [False, True], ids=["bos is not eos", "bos is eos"])
def test_raw_text_keeps_its_one_bos_and_gets_no_eos(tmp_path, frame, same):
    frame = frame.replace("<bos>", "<eos>") if same else frame
    bos = "<eos>" if same else "<bos>"
    tokenizer = make_tokenizer(template=None, frame=frame, bos_token=bos)
    plain = [VOCABULARY[character] for character in "2+2=?"]
    start = [VOCABULARY[bos]]
    assert load_prompt(tmp_path, "2+2=?", tokenizer) == (start if frame.startswith(bos) else []) + plain
    assert load_prompt(tmp_path, bos + "2+2=?", tokenizer) == start + plain


@pytest.mark.parametrize("frame", ["<bos> $A", "<bos> $A <eos>"])
def test_templated_text_has_exactly_the_bos_of_its_template(tmp_path, frame):
    tokenizer = make_tokenizer(template="<bos>" + CHAT_TEMPLATE, frame=frame)
    wanted = tokenizer.apply_chat_template([user("2+2=?")], add_generation_prompt=True, return_dict=False)
    for prompt in ("2+2=?", [user("2+2=?")], "<bos>" + RENDERED, RENDERED):
        ids = load_prompt(tmp_path, prompt, tokenizer)
        assert ids == wanted
        assert ids[0] == VOCABULARY["<bos>"] != ids[1]
        assert VOCABULARY["<eos>"] not in ids


def test_a_template_without_bos_is_followed_too(tmp_path):
    tokenizer = make_tokenizer(frame="<bos> $A")
    wanted = tokenizer.apply_chat_template([user("2+2=?")], add_generation_prompt=True, return_dict=False)
    for prompt in ("2+2=?", [user("2+2=?")], RENDERED):
        assert load_prompt(tmp_path, prompt, tokenizer) == wanted
    assert VOCABULARY["<bos>"] not in wanted


def test_a_tokenizer_without_pad_token_gives_the_same_tokens(tmp_path, tokenizer):
    rows = [{"prompt": "hi", "answer": "1"}, {"prompt": "1+1+1+1=?", "answer": "4"}]
    without = make_tokenizer(pad_token=None)
    assert without.pad_token is None
    assert [e.prompt_ids for e in load(tmp_path, rows, without)] == [
        e.prompt_ids for e in load(tmp_path, rows, tokenizer)
    ]


def test_prompts_of_no_tokens_are_refused(tmp_path):
    tokenizer = make_tokenizer(template=None, frame="<bos> $A")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")  # a space of no width
    with pytest.raises(ValueError, match="row 2: the prompt has 0 tokens"):
        load(tmp_path, [*ROWS, {"prompt": "\u200b", "answer": "1"}], tokenizer)


def test_half_a_character_is_an_error_with_the_row(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("common.data.ROWS_PER_CALL", 2)
    with pytest.raises(ValueError, match="row 2: the prompt holds half a character"):
        load(tmp_path, [*ROWS, {"prompt": "hi \ud83d", "answer": "1"}], tokenizer)


def test_messages_that_the_template_refuses_are_an_error_with_the_row(tmp_path):
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    rows = [*ROWS, {"prompt": [system("be brief"), user("hi")], "answer": "1"}]
    with pytest.raises(ValueError, match="row 2: the chat template refuses these messages: no system role"):
        load(tmp_path, rows, make_tokenizer(template=refuses + CHAT_TEMPLATE))
    rows = [*ROWS, {"prompt": [user("hi"), {"role": "assistant", "content": None, "tool_calls": [1]}, user("hi")]}]
    with pytest.raises(ValueError, match="row 2: the chat template refuses these messages"):
        load(tmp_path, rows, make_tokenizer(), need_answer=False)


# ---- length ----


def test_over_long_prompts_are_dropped_and_counted(tmp_path, capsys):
    base = make_tokenizer(template=None)
    rows = [{"prompt": "1" * length, "answer": "1"} for length in (4, 400, 16, 17)]
    examples = load(tmp_path, rows, base, max_prompt_tokens=16)
    assert [(example.index, len(example.prompt_ids)) for example in examples] == [(0, 4), (2, 16)]
    assert examples[0].prompt_ids == [VOCABULARY["1"]] * 4
    assert "dropped 2 of 4 prompts longer than 16 tokens (max_prompt_tokens)" in capsys.readouterr().out


def test_template_tokens_count_towards_the_limit(tmp_path, tokenizer):
    length = len(load_prompt(tmp_path, "2+2=?", tokenizer))
    assert len(load_prompt(tmp_path, "2+2=?", tokenizer, max_prompt_tokens=length)) == length
    with pytest.raises(ValueError, match=rf"1 of 1 prompts longer than {length - 1} tokens .*raise it to {length}"):
        load_prompt(tmp_path, "2+2=?", tokenizer, max_prompt_tokens=length - 1)


# ---- handing out ----


def make_examples(num_rows):
    return [Example(i, str(i), [i], str(i), {}) for i in range(num_rows)]


def indices(stream, num_batches=1):
    return [example.index for _ in range(num_batches) for example in stream.next()]


def test_every_epoch_holds_every_row_once_in_a_new_order():
    stream = PromptStream(make_examples(8), batch_size=4, seed=0)
    epochs = [indices(stream, num_batches=2) for _ in range(3)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert stream.position == 24


def test_batches_run_on_over_the_end_of_an_epoch():
    stream = PromptStream(make_examples(5), batch_size=3, seed=0)
    handed_out = indices(stream, num_batches=5)
    assert [sorted(handed_out[start : start + 5]) for start in (0, 5, 10)] == [list(range(5))] * 3


def test_seeds_and_epochs_give_distinct_orders_that_repeat_exactly():
    keys = [(seed, epoch) for seed in (0, 1, 2, 2**32 + 5, -1) for epoch in range(4)]
    orders = [permutation(50, seed, epoch) for seed, epoch in keys]
    assert len({tuple(order) for order in orders}) == len(keys)
    assert orders == [permutation(50, seed, epoch) for seed, epoch in keys]
    assert permutation(8, 0, 0) == [4, 0, 7, 3, 2, 5, 1, 6]  # resuming an older run depends on this


@pytest.mark.parametrize("num_ranks", [2, 3, 6])
def test_ranks_share_each_batch_without_overlap(num_ranks):
    examples = make_examples(10)
    alone = PromptStream(examples, batch_size=6, seed=3)
    ranks = [PromptStream(examples, 6, seed=3, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for _ in range(5):
        batch = indices(alone)
        parts = [indices(stream) for stream in ranks]
        assert parts == [batch[rank::num_ranks] for rank in range(num_ranks)]
    assert {stream.position for stream in ranks} == {alone.position} == {30}


@pytest.mark.parametrize("steps_before", [0, 1, 3, 4])
def test_a_resumed_stream_continues_where_the_first_stopped(steps_before):
    examples = make_examples(7)
    straight = indices(PromptStream(examples, batch_size=2, seed=1), num_batches=6)
    first = PromptStream(examples, batch_size=2, seed=1)
    before = indices(first, steps_before)
    resumed = PromptStream(examples, batch_size=2, seed=1, position=first.position)
    assert before + indices(resumed, 6 - steps_before) == straight


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_run_saved_on_two_ranks_resumes_on_another_number(num_ranks):
    examples = make_examples(18)
    saved = [PromptStream(examples, batch_size=6, seed=2, rank=rank, num_ranks=2) for rank in range(2)]
    seen = [index for stream in saved for index in indices(stream)]
    position = saved[0].position
    resumed = [PromptStream(examples, 6, 2, position, rank, num_ranks) for rank in range(num_ranks)]
    seen += [index for stream in resumed for index in indices(stream, num_batches=2)]
    assert sorted(seen) == list(range(18))


def test_a_resumed_stream_may_change_its_batch_size_within_an_epoch():
    examples = make_examples(9)
    first = PromptStream(examples, batch_size=3, seed=2)
    seen = indices(first)
    assert sorted(seen + indices(PromptStream(examples, 2, 2, first.position), num_batches=3)) == list(range(9))


@pytest.mark.parametrize(
    ("num_rows", "arguments", "message"),
    [
        (3, {"batch_size": 8}, "3 rows, batch_size 8"),
        (3, {"batch_size": 0}, "3 rows, batch_size 0"),
        (9, {"batch_size": 6, "num_ranks": 4}, "batch_size 6 on 4 ranks.*usable: 4 or 8"),
        (7, {"batch_size": 6, "num_ranks": 4}, "usable: 4$"),
        (9, {"batch_size": 3, "num_ranks": 4}, "usable: 4$"),
        (3, {"batch_size": 3, "num_ranks": 4}, "usable: fewer ranks"),
        (4, {"batch_size": 2, "num_ranks": 2, "rank": 2}, "rank 2 of 2"),
        (4, {"batch_size": 2, "position": -1}, "position -1"),
    ],
)
def test_batches_that_cannot_be_made_are_refused_at_the_start(num_rows, arguments, message):
    with pytest.raises(ValueError, match=message):
        PromptStream(make_examples(num_rows), seed=0, **arguments)


# ---- replacing ----


def replaced(num_ranks, monkeypatch):
    """Three rounds on 12 rows: which rows each place of a batch of 6 has, and the numbers of the new prompts."""
    streams = [PromptStream(make_examples(12), 6, 0, 0, rank, num_ranks) for rank in range(num_ranks)]
    batches = [stream.next() for stream in streams]
    numbers = []
    for unwanted in ({0, 3, 4}, set(), {3, 5}):
        flags = [[i * num_ranks + rank in unwanted for i in range(6 // num_ranks)] for rank in range(num_ranks)]
        own = [[place for place in sorted(unwanted) if place % num_ranks == rank] for rank in range(num_ranks)]
        monkeypatch.setattr(distributed, "gather_objects", lambda value, own=own: own)
        found = [stream.replace(batch, f) for stream, batch, f in zip(streams, batches, flags, strict=True)]
        assert [places for places, _ in found] == [[place // num_ranks for place in part] for part in own]
        numbers += [sorted(number for _, part in found for number in part)]
        # each rank numbers its places as they lie in the whole batch
        assert all(n % num_ranks == rank for rank, (_, part) in enumerate(found) for n in part)
    rows = [batches[place % num_ranks][place // num_ranks].index for place in range(6)]
    return rows, numbers, {stream.position for stream in streams}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_new_prompts_take_the_unwanted_places_on_any_number_of_ranks(num_ranks, monkeypatch):
    order = permutation(12, 0, 0)
    rows, numbers, positions = replaced(num_ranks, monkeypatch)
    first, new = order[:6], order[6:11]  # the new ones in the order of the places: 0 3 4, then 3 5
    assert rows == [new[0], first[1], first[2], new[3], new[2], new[4]]
    assert numbers == [[6, 9, 10], [], [21, 23]] and positions == {11}


def test_the_next_batch_comes_after_the_replacements():
    stream = PromptStream(make_examples(12), 4, seed=0)
    batch = stream.next()
    assert stream.replace(batch, [False, True, False, True]) == ([1, 3], [5, 7])
    assert indices(stream) == permutation(12, 0, 0)[6:10]
    assert stream.replace(stream.next(), [True, False, False, False])[1] == [4]  # rounds are counted per step
