"""Tests of common/tasks/data.py: what a data file may look like, which tokens a prompt becomes, who gets it and
when.
"""

import functools
import gzip
import json
import shutil
import sys
import tracemalloc
from decimal import Decimal
from types import SimpleNamespace
from unittest import mock

import datasets
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import common
from common.base import bounded, distributed
from common.base import settings as options
from common.loop import load_data
from common.model import sources
from common.tasks import chat_templates
from common.tasks.data import Example, PromptStream, collate_columns, load_examples, permutation, read_rows

SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<im_start>", "<im_end>", "<unk>"]
WORDS = ["user", "assistant", "system", "be", "brief", "hi", *"0123456789+=?\n"]
VOCABULARY = {word: i for i, word in enumerate(SPECIAL_TOKENS + WORDS)}
CHAT_TEMPLATE = (
    "{% for turn in messages %}<im_start>{{ turn['role'] + '\n' + turn['content'] }}<im_end>\n{% endfor %}"
    "{% if add_generation_prompt %}<im_start>assistant\n{% endif %}"
)
OF_USER = CHAT_TEMPLATE.replace("messages %}", "messages if turn['role'] == 'user' %}")  # passes over other turns
ROWS = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "2+2=?", "answer": "4"}]
RENDERED = "<im_start>user\n2+2=?<im_end>\n<im_start>assistant\n"
PLAIN = [VOCABULARY[character] for character in "2+2=?"]


def make_tokenizer(template=CHAT_TEMPLATE, frame="$A", **special):
    """A word-level tokenizer whose post-processor puts a text into `frame`, such as "<bos> $A <eos>"."""
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    split = pre_tokenizers.Split
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        split(" ", behavior="removed"), split("\n", behavior="isolated"), pre_tokenizers.Punctuation(),
        pre_tokenizers.Digits(individual_digits=True),
    ])  # fmt: skip
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
    return write_bytes(folder, "\n".join(map(json.dumps, rows)).encode())


def load(folder, rows, tokenizer, max_prompt_tokens=64, **settings):
    return load_examples(write_rows(folder, rows), tokenizer, max_prompt_tokens, **settings)


def load_prompt(folder, prompt, tokenizer, **settings):
    """Token ids of a data set with a single prompt."""
    [example] = load(folder, [{"prompt": prompt, "answer": "4"}], tokenizer, **settings)
    return example.prompt_ids


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


user, assistant, system = (functools.partial(turn, role) for role in ("user", "assistant", "system"))


def render(tokenizer, *turns):
    return tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, return_dict=False)


LINES = ['{"prompt":"1+1=?","answer":"2"}', '{"prompt":"2+2=?","answer":"4"}']


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_harmless_forms_of_a_file_give_the_same_rows(tmp_path, name):
    for form in ("{}\n{}\n", "\ufeff{}\n{}\n", "{}\r\n\r\n  \r\n{}", "\ufeff\r\n{}\n\n{}\n\n",
                 "\ufeff\ufeff{}\n\ufeff{}\n\ufeff\n"):  # fmt: skip
        assert read_rows(write_bytes(tmp_path, form.format(*LINES).encode(), name)) == ROWS, repr(form)
    text = "a\u2028b\u2029c\x85d\te\x0bf"  # separators of lines and a tab inside a string
    line = '{"prompt":"' + text + '","answer":"1"}'
    assert read_rows(write_bytes(tmp_path, (line + "\r\n" + line).encode())) == [{"prompt": text, "answer": "1"}] * 2


ONE_PER_LINE = "one JSON object per line"


@pytest.mark.parametrize(("lines", "bad_line", "message"), [
    ([LINES[0], "", '{"prompt":"a","ans'], 3, ONE_PER_LINE), ([f"[{LINES[0]}]"], 1, ONE_PER_LINE),
    ([" ".join(LINES)], 1, ONE_PER_LINE), (["{", '  "prompt": "a",', '  "answer": "1"', "}"], 1, ONE_PER_LINE),
    # what Python would read in its own way
    ([LINES[0], "", '{"a":' + "[" * 100_000 + "}"], 3, "too deep"), ([f'{{"a":{"9" * 5000}}}'], 1, "5000 digits"),
    (['{"a":[{"b":1,"b":2}]}'], 1, "'b' stands twice"),
], ids=range(7))  # fmt: skip
def test_a_bad_line_is_an_error_with_file_and_line(tmp_path, lines, bad_line, message):
    source = write_bytes(tmp_path, "\n".join(lines).encode())
    with pytest.raises(ValueError, match=f"rows.jsonl, line {bad_line}: .*{message}"):
        read_rows(source)


def test_another_encoding_is_an_error_with_file_and_byte_and_so_is_a_file_without_rows(tmp_path):
    start = "\ufeff".encode() + '{"prompt":"一","answer":"1"}\n{"prompt":"'.encode()
    source = write_bytes(tmp_path, start + '中文","answer":"1"}'.encode("gbk"))
    with pytest.raises(ValueError, match=rf"rows.jsonl: byte {len(start)} is not UTF-8.* \(line 2\)"):
        read_rows(source)
    with pytest.raises(ValueError, match="byte 1 is not UTF-8"):
        read_rows(write_bytes(tmp_path, LINES[0].encode("utf-16-le")))
    for content in (b"", b"\n\r\n", b"\xef\xbb\xbf"):
        with pytest.raises(ValueError, match="no rows"):
            read_rows(write_bytes(tmp_path, content))


def test_a_row_takes_as_much_memory_as_the_top_of_the_file_says(tmp_path, monkeypatch):
    monkeypatch.setattr("common.tasks.prompt_encoding.ROWS_PER_CALL", 33)  # as few of all rows as in a large file

    class Words:
        """Thirty tokens of a large vocabulary for every text."""

        chat_template, added_tokens_decoder = None, {}

        def __call__(self, text, **options):
            texts = [text] if isinstance(text, str) else text
            ids = [[1000 + (len(text) + 7 * i) % 500 for i in range(30)] for text in texts]
            return {"input_ids": ids[0] if isinstance(text, str) else ids}

    rows = [{"prompt": f"{i:06d} " + "word " * 28, "answer": str(i)} for i in range(1000)]
    source = write_rows(tmp_path, rows)
    load_examples(source, Words(), 64)  # imports and caches are not counted
    tracemalloc.start()
    examples = load_examples(source, Words(), 64)
    kept, peak = (size / len(rows) for size in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    # in whole pages, with what Python does not give back, the peak is what stays
    assert len(examples) == 1000 and kept < 850 and peak < 1250, (kept, peak)


@pytest.mark.parametrize(("name", "write"), [
    ("rows.parquet", lambda data, path: data.to_parquet(path)), ("rows", lambda data, path: data.to_parquet(path)),
    ("rows.csv", lambda data, path: data.to_csv(path)), ("rows.tsv", lambda data, path: data.to_csv(path, sep="\t")),
    ("rows.json", lambda data, path: path.write_text("\ufeff" + json.dumps(list(data), indent=1))),
    ("rows.jsonl.gz", lambda data, path: path.write_bytes(gzip.compress("\n".join(map(json.dumps, data)).encode()))),
    ("rows.arrow", lambda data, path: shutil.copy(next(save(data, path).glob("*.arrow")), path)),
])  # fmt: skip
def test_formats_of_a_file(tmp_path, name, write):
    rows = [{"prompt": '1, "1"\n=?', "answer": "007"}, {"prompt": "2+2=?", "answer": "4"}]
    write(datasets.Dataset.from_list(rows), tmp_path / name)
    assert read_rows(str(tmp_path / name)) == rows
    packed = (tmp_path / name).read_bytes()
    if name.endswith((".parquet", ".gz")):
        with pytest.raises(ValueError, match=rf"{name}: .*damaged.*again"):
            read_rows(write_bytes(tmp_path, packed[:-9], name))


def save(data, path):
    data.save_to_disk(path.with_suffix(".saved"))
    return path.with_suffix(".saved")


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.csv", b"prompt,answer\na,b,c", "line 2: .*2 fields"), ("a.csv", b"prompt,prompt\na,b", "stands twice"),
    ("a.csv", "prompt,answer\n\xe4,b".encode("latin-1"), "utf-8"), ("a.json", b"[1]", "row 0: .*JSON object"),
    ("a.jsonl.zst", b"\x28\xb5\x2f\xfd--", "not read here; .*jsonl.gz"), ("a.zip", b"PK\3\4--", "not read here"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        read_rows(write_bytes(tmp_path, content, name))


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """A folder as a hub has it: a card, two splits, and code that must not run."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "gsm8k"
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        datasets.Dataset.from_list(rows).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    (folder / "code.py").write_text("raise SystemExit")
    return folder


CARD = "---\nhomepage: https://x.y\nconfigs:\n- config_name: main\n  data_files: {}\n---\n# Title"


def test_a_folder_of_data_files_has_splits_and_configs(downloaded):
    assert read_rows(str(downloaded)) == ROWS and read_rows(str(downloaded), "test") == ROWS[:1]
    with pytest.raises(ValueError, match=r"gsm8k .*split 'dev'.*'train', 'test'"):
        read_rows(str(downloaded), "dev")
    (downloaded / "README.md").write_text(CARD.format("data/test-*"))
    assert read_rows(f"{downloaded}:main") == ROWS[:1]
    with pytest.raises(ValueError, match=r"config 'other'.*main"):
        read_rows(f"{downloaded}:other")
    # links of the hub's cache lead to blobs of the same repository
    cached, blob = downloaded.parent / "data--a" / "snapshots" / "0f", downloaded.parent / "data--a" / "blob"
    shutil.copytree(downloaded, cached)
    shutil.move(cached / "data" / "test-00000-of-00001.parquet", blob)
    (cached / "data" / "test-00000-of-00001.parquet").symlink_to(blob)
    assert read_rows(f"{cached}:main") == ROWS[:1]


@pytest.mark.parametrize("name", ["../rows.parquet", "/etc/passwd", "https://x.y/z.parquet", "{train: [../*.csv]}"])
def test_a_card_that_names_files_outside_of_its_folder_is_refused(downloaded, name):
    (downloaded / "README.md").write_text(CARD.format(name))
    with pytest.raises(ValueError, match=r"README.md: .*points to .*outside.*copy the file"):
        read_rows(str(downloaded))
    (downloaded / "README.md").write_text("---\nconfigs: 3\n---\n")
    with pytest.raises(ValueError, match=r"cannot load the data files of .*configs"):
        read_rows(str(downloaded))


@pytest.mark.parametrize(("file", "content"), [
    ("train/state.json", '{"_data_files": [{"filename": "../../other/data-00000-of-00001.arrow"}]}'),
    ("train/state.json", '{"_data_files": [{"filename": "/tmp/data.arrow"}]}'),
    ("dataset_dict.json", '{"splits": ["train", "../other"]}'), ("dataset_dict.json", "no json"),
    ("train/data-00000-of-00001.arrow", None), ("train", None),
])  # fmt: skip
def test_a_saved_folder_that_points_outside_of_itself_is_refused(tmp_path, file, content):
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=data).save_to_disk(tmp_path / "own")
    data.save_to_disk(tmp_path / "other")
    path = tmp_path / "own" / file
    if content is None:  # a link instead of a file or folder
        target = path.rename(tmp_path / "moved")
        path.symlink_to(target)
    else:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"own/{file.split('/')[0]}.*: .*(outside.*copy the file|not a JSON object)"):
        read_rows(str(tmp_path / "own"))


def test_folders_saved_by_datasets(tmp_path, tokenizer):

    chat = [{"prompt": [user("2+2=?")], "answer": 4}]
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(chat)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "parts")
    assert read_rows(str(tmp_path / "one")) == read_rows(str(tmp_path / "parts")) == ROWS
    [example] = load_examples(str(tmp_path / "parts"), tokenizer, 64, split="test")
    assert (example.prompt, example.answer) == ([user("2+2=?")], "4")
    with pytest.raises(ValueError, match="no split 'dev'; use one of: train, test"):
        read_rows(str(tmp_path / "parts"), "dev")
    with pytest.raises(ValueError, match=r"none that datasets\.save_to_disk wrote"):
        read_rows(str(tmp_path))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", hub := mock.Mock(return_value=ROWS))
    return hub


def test_hub_ids_have_an_optional_config_and_a_hub_that_fails_gives_one_error_with_what_was_asked_for(hub):
    for source, name, config in (("openai/gsm8k:main", "openai/gsm8k", "main"), ("a-b/c_v1.5", "a-b/c_v1.5", None)):
        assert read_rows(source, "test") == ROWS
        hub.assert_called_with(name, config, split="test")  # and no trust_remote_code
    hub.side_effect = ConnectionError("no route")
    with pytest.raises(ValueError, match=r"'some/data:main'.*'some/data', config 'main', split 'dev'.*no route"):
        read_rows("some/data:main", "dev")


def test_toy_is_the_built_in_task_and_without_datasets_only_its_sources_are_refused(tmp_path, monkeypatch):
    toy = SimpleNamespace(rows=lambda split: [{"prompt": split, "answer": "1"}])
    monkeypatch.setitem(sys.modules, "common.tasks.toy", toy)
    monkeypatch.setattr(common.tasks, "toy", toy, raising=False)
    assert read_rows("toy", "test") == [{"prompt": "test", "answer": "1"}]
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert read_rows(write_rows(tmp_path, ROWS)) == ROWS
    with pytest.raises(ImportError, match="pip install datasets"):
        read_rows("openai/gsm8k:main")


@pytest.mark.parametrize("source", ["here/rows", "else/rows.jsonl", "/else/x", "./else/x", "json"])
def test_a_path_that_does_not_exist_never_goes_to_the_hub(tmp_path, monkeypatch, hub, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(FileNotFoundError, match=f"no data at '{source}'.*owner/name"):
        read_rows(source)
    hub.assert_not_called()


def test_examples_hold_prompt_tokens_answer_and_the_other_columns(tmp_path, tokenizer):
    rows = [{"question": "1+1=?", "answer": 2, "level": "easy"}, {"question": "2+2=?", "answer": "4", "unit": None}]
    assert load(tmp_path, rows, tokenizer) == [
        Example(0, "1+1=?", render(tokenizer, user("1+1=?")), "2", {"level": "easy", "unit": None}),
        Example(1, "2+2=?", render(tokenizer, user("2+2=?")), "4", {"level": None, "unit": None}),
    ]
    row = {"messages": [user("hi")], "question": "1+1=?", "prompt": "2+2=?", "answer": "4"}  # the prompt wins
    [example] = load(tmp_path, [row], tokenizer)
    assert (example.prompt, example.columns) == ("2+2=?", {"messages": [user("hi")], "question": "1+1=?"})
    # every column is repeated for every completion
    examples = [Example(0, "a", [1], "2", {"level": 1}), Example(1, "b", [2], None, {"unit": "m"})]
    answers, columns = collate_columns(examples, group_size=3)
    assert answers == ["2", "2", "2", None, None, None]
    assert columns == {"level": [1, 1, 1, None, None, None], "unit": [None, None, None, "m", "m", "m"]}


def test_ground_truth_becomes_text(tmp_path, tokenizer):
    texts = {8.0: "8", -0.5: "-0.5", " 8 ": " 8 ", -0.0: "0", 1e23: "1" + 23 * "0", 0.1 + 0.2: "0.30000000000000004"}
    examples = load(tmp_path, [{"prompt": "hi", "answer": value} for value in texts], tokenizer)
    assert [example.answer for example in examples] == list(texts.values())
    table = datasets.Dataset.from_list([{"prompt": "hi", "answer": Decimal("2.50")}])
    table.to_parquet(tmp_path / "rows.parquet")
    assert load_examples(str(tmp_path / "rows.parquet"), tokenizer, 64)[0].answer == "2.50"


@pytest.mark.parametrize("answer", [{}, {"answer": None}, {"answer": ""}, {"answer": " \n"}, {"answer": float("nan")}])
def test_a_row_without_ground_truth_stops_unless_none_is_needed(tmp_path, tokenizer, answer):
    rows = [*ROWS, {"prompt": "hi"} | answer]
    with pytest.raises(ValueError, match=r"rows.jsonl, row 2: `answer` is missing or empty; .*: prompt.*add it"):
        load(tmp_path, rows, tokenizer)
    assert load(tmp_path, rows, tokenizer, need_answer=False)[2].answer is None


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": "hi", "Answer": "8"}, "rename `Answer` to `answer`"), ({"prompt": "hi", "x": "8"}, "add it, or rename"),
    ({"problem": "hi", "answer": "8"}, "`prompt` .*found: problem, answer; rename `problem` to `prompt`"),
    ({"prompt": " \n", "answer": "8"}, "`prompt` is missing"), ({"prompt": 5, "answer": "8"}, "`prompt` is int"),
    ({"messages": "hi", "answer": "8"}, "`messages` is str"), ({"prompt": [], "answer": "8"}, "no turn to answer"),
    ({"prompt": [user(" ")], "answer": "8"}, "no turn to answer"), ({"prompt": [assistant("8")]}, "no turn to answer"),
    ({"messages": [user("hi"), assistant("1"), assistant("2")]}, "no turn to answer"),
    ({"prompt": ["hi"], "answer": "8"}, "the keys `role` and `content`, got 'hi'"),
    ({"messages": [{"from": "human", "value": "hi"}], "answer": "8"}, "the keys `role` and `content`"),
    ({"prompt": [user(None, tool_calls=[1]), user("hi")]}, "the content .* is NoneType"),
    ({"messages": [user("hi"), turn("gpt", "8")], "answer": "8"}, "the role .* is 'gpt'"),
    ({"prompt": "hi", "answer": ["8", "9"]}, "the answer is list"), ({"prompt": "hi", "answer": True}, "is bool"),
    ({"prompt": "hi", "answer": float("-inf")}, "the answer is -inf"),
    ({"prompt": "hi", "answer": "8\ud83d"}, "the answer holds half a character"),
])  # fmt: skip
def test_unusable_rows_are_errors_with_row_and_remedy(tmp_path, tokenizer, row, message):
    with pytest.raises(ValueError, match=rf"rows.jsonl, row 0: .*{message}"):
        load(tmp_path, [row], tokenizer)


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_a_last_assistant_turn_is_the_answer_and_never_in_the_prompt(tmp_path, tokenizer, column):
    chat = [user("1+1=?"), assistant("2"), user("2+2=?")]
    replied = {column: [*chat, assistant("the answer is 42")]}
    examples = load(tmp_path, [replied, replied | {"answer": 4}, {column: chat, "answer": "4"}], tokenizer)
    assert [example.answer for example in examples] == ["the answer is 42", "4", "4"]
    for example in examples:
        assert example.prompt == chat and example.prompt_ids == render(tokenizer, *chat) and example.columns == {}


def test_a_reply_that_calls_tools_is_no_answer_and_not_in_the_prompt(tmp_path, tokenizer):
    call = assistant(None, tool_calls=[{"type": "function"}])
    turns = [user("hi"), call | {"content": "8"}, turn("tool", "9")]
    examples = load(tmp_path, [{"prompt": [user("hi"), call], "answer": 8}, {"prompt": turns, "answer": 8}], tokenizer)
    assert [example.prompt for example in examples] == [[user("hi")], turns]
    with pytest.raises(ValueError, match="row 0: `answer` is missing or empty"):
        load(tmp_path, [{"prompt": turns[:2]}], tokenizer)


def test_a_column_named_as_an_argument_of_reward_functions_is_refused(tmp_path, tokenizer):
    for name in ("completions", "completion_tokens", "self"):
        with pytest.raises(ValueError, match=f"rows.jsonl: columns {name}: .*rename"):
            load(tmp_path, [*ROWS, {"prompt": "hi", "answer": "1", name: 5}], tokenizer)


def test_text_chat_and_templated_text_become_the_same_tokens(tmp_path, tokenizer, capsys):
    wanted = render(tokenizer, user("2+2=?"))
    assert tokenizer.decode(wanted).replace(" ", "") == RENDERED
    assert load_prompt(tmp_path, "2+2=?", tokenizer) == load_prompt(tmp_path, [user("2+2=?")], tokenizer) == wanted
    assert capsys.readouterr().out == ""
    assert load_prompt(tmp_path, RENDERED, tokenizer) == wanted
    assert "1 of 1 prompts are templated already" in capsys.readouterr().out


def test_a_template_without_special_tokens_is_not_applied_twice(tmp_path):
    tokenizer = make_tokenizer(template="user {{ messages[0]['content'] }}{{ '\n' }}assistant ")
    wanted = [VOCABULARY[word] for word in ("user", *"2+2=?\n", "assistant")]
    for prompt in ("2+2=?", "user 2+2=?\nassistant ", "user 2+2=?\nassistant"):
        assert load_prompt(tmp_path, prompt, tokenizer) == wanted
    assert load_prompt(tmp_path, "assistant 2+2=?", tokenizer).count(VOCABULARY["assistant"]) == 2
    # an end that any text may have tells nothing
    question = make_tokenizer(template="user {{ messages[0]['content'] }}?")
    assert load_prompt(tmp_path, "2+2=?", question)[0] == VOCABULARY["user"]


@pytest.mark.parametrize("content", [RENDERED, "<im_start>user\n2+2=?", "2+2=?<im_end>"])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, "{{ messages[0]['content'] }}<im_start><im_end>assistant"])
def test_chat_messages_that_were_templated_before_are_refused(tmp_path, content, template):
    rows = [*ROWS, {"prompt": [system("be brief"), user(content)], "answer": "4"}]
    with pytest.raises(ValueError, match="row 2: a chat message holds what the chat template writes"):
        load(tmp_path, rows, make_tokenizer(template=template))


def test_a_question_that_ends_with_the_token_of_a_reply_is_no_template(tmp_path):
    template = "{% for turn in messages %}<im_start>{{ turn['content'] }}{% endfor %}<im_end>assistant"
    tokenizer = make_tokenizer(template=template)
    with pytest.raises(ValueError, match="row 0: a chat message holds what the chat template writes"):
        load_prompt(tmp_path, "hi <im_end>assistant", tokenizer)
    wanted = load_prompt(tmp_path, "2+2=?", tokenizer)
    assert load_prompt(tmp_path, "<im_start>2+2=?<im_end>assistant", tokenizer) == wanted


@pytest.mark.parametrize("content", ["<eos> 2", "hi <eos> hi", "hi <im_end> hi", "hi <bos>", "2<pad>2"])
def test_a_special_token_that_is_mentioned_is_text_in_both_forms(tmp_path, capsys, content):
    tokenizer = make_tokenizer()
    ids = load_prompt(tmp_path, content, tokenizer)
    assert "1 of 1 prompts, such as row 0, mention special tokens" in capsys.readouterr().out
    assert ids == load_prompt(tmp_path, [user(content)], tokenizer)
    frame = render(tokenizer, user(content.partition("<")[0].strip() or "hi"))
    control = [id_ for id_ in ids if id_ < VOCABULARY["<unk>"]]
    assert control == [id_ for id_ in frame if id_ < VOCABULARY["<unk>"]]  # those of the template alone
    # without a template only the text itself can write control tokens
    raw = load_prompt(tmp_path, content, tokenizer, apply_chat_template=False)
    assert len(raw) == len([*content.replace("<", " <").replace(">", "> ").split()])
    # what stands elsewhere in a chat, in tools and in the system prompt, is text as well
    ids = load_prompt(tmp_path, [user("hi"), turn("tool", content)], tokenizer, system_prompt=content)
    assert sum(id_ < VOCABULARY["<unk>"] for id_ in ids) == 2 * 3 + 1


THINKS = "{% if thinking is defined and not thinking %}<think>\n\n</think>{% else %}<think>\n{% endif %}{% endif %}"
THINKING = CHAT_TEMPLATE.removesuffix("{% endif %}") + THINKS


@pytest.mark.parametrize(("template", "prompt", "start"), [
    (THINKING, "hi", "<think>\n"), (THINKING, [user("<think> hi")], "<think>\n"), (CHAT_TEMPLATE, "hi\n<think>\n", ""),
    (CHAT_TEMPLATE, [user("hi"), assistant("<think> hi"), user("hi")], ""), (THINKING, RENDERED, ""),
    (THINKING, RENDERED + "<think>\nhi hi", "<think>\nhi hi"), (CHAT_TEMPLATE, RENDERED + "[THINK]", "[THINK]"),
    (THINKING, RENDERED + "<think>\n\n</think>\n\n", ""), (None, "hi <think>\n", "<think>\n"),
    (None, "hi <think> ?", ""),
    (None, RENDERED + "<think>\nhi", "<think>\nhi"), (None, RENDERED.replace("2+2", "\n<think>"), ""),
])  # fmt: skip
def test_an_example_holds_the_thought_that_its_prompt_opens(tmp_path, template, prompt, start):
    [example] = load(tmp_path, [{"prompt": prompt, "answer": "4"}], make_tokenizer(template=template))
    assert example.reply_start == start
    if template == THINKING and prompt == "hi":
        options = dict(template_kwargs={"thinking": False})
        [example] = load(tmp_path, [{"prompt": "hi", "answer": "4"}], make_tokenizer(template=template), **options)
        assert example.reply_start == ""


def test_arguments_of_the_template_are_those_that_it_reads(tmp_path):
    tokenizer = make_tokenizer(template=THINKING)
    for text in ("[]", "{", "5", '"a"', "[" * 10**5):
        with pytest.raises(ValueError, match=r"chat_template_kwargs = .*JSON object.*enable_thinking"):
            options.template_kwargs(text)
    settings = {"template_kwargs": {"thinking": False}, "system_prompt": "", "apply_chat_template": True}
    source = {"train_data": write_rows(tmp_path, ROWS), "eval_data": "", "eval_every": 0, "eval_examples": 1}
    source["eval_columns"] = ()
    examples, _ = load_data(SimpleNamespace(max_prompt_tokens=64, **settings, **source), tokenizer)
    assert [example.reply_start for example in examples] == ["", ""]
    assert options.template_kwargs("") == {} and options.template_kwargs('{"a": 1}') == {"a": 1}
    for name in ("enable_thinking", "messages", "add_generation_prompt", "tokenize", "eos_token"):
        with pytest.raises(ValueError, match=rf"rows.jsonl: chat_template_kwargs: .* not read {name}; use thinking"):
            load(tmp_path, ROWS, tokenizer, template_kwargs={"thinking": True, name: False})
    with pytest.raises(ValueError, match=r"chat_template_kwargs .*no chat template"):
        load(tmp_path, ROWS, make_tokenizer(template=None), template_kwargs={"thinking": True})


def test_a_date_is_pinned(tmp_path):
    tokenizer = make_tokenizer(template="{{ strftime_now('%d') | int }} " + CHAT_TEMPLATE)
    for day in ("2024-01-03", "2024-02-07"):
        chat_templates.pin_date(day)
        assert load_prompt(tmp_path, "hi", tokenizer)[0] == VOCABULARY[day[-1]]
    with pytest.raises(ValueError, match=r"month"):
        chat_templates.pin_date("2024-13-01")


@pytest.mark.parametrize(("template", "message"), [
    ("{{ 'hi' * 10**10 }}", "memory"), ("{{ 'hi' * 10**6 }}", "2000000 characters"),
    ("{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}", "more than 1 seconds"),
    ("{% if messages[0]['content'] == '2+2=?' %}{{ '%9999999999d' % 1 }}{% endif %}" + CHAT_TEMPLATE, "memory"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "refuses"),
])  # fmt: skip
def test_a_template_without_end_is_refused(tmp_path, monkeypatch, template, message):
    monkeypatch.setattr(bounded, "SECONDS", 1)
    with pytest.raises(ValueError, match=rf"rows.jsonl(, row 1)?: .*the chat template.* {message}"):
        load(tmp_path, ROWS, make_tokenizer(template=template))
    if template.startswith("{{"):  # nothing else renders it before
        with pytest.raises(bounded.Exceeded):
            sources._turn_end(make_tokenizer(template=template))


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + CHAT_TEMPLATE.replace(
    "<im_end>", "{% for c in turn.tool_calls or [] %}{{ c.function.arguments ARGUMENTS }}{% endfor %}<im_end>"
).replace("turn['content']", "(turn['content'] or '')")


@pytest.mark.parametrize("value", [
    [ADD], json.dumps([ADD]), json.dumps(ADD), [json.dumps(ADD)], [ADD | {"x": None}],
])  # fmt: skip
def test_tools_reach_the_template_and_the_reward(tmp_path, value):
    tokenizer = make_tokenizer(template=WITH_TOOLS.replace("ARGUMENTS", "| tojson"))
    rows = [{"prompt": prompt, "answer": "1", "tools": value} for prompt in ("hi", [user("hi")])]
    examples = load(tmp_path, [*rows, *({"prompt": "hi", "answer": "1", "tools": no} for no in ([], None))], tokenizer)
    offered = tokenizer.apply_chat_template([user("hi")], [ADD], add_generation_prompt=True, return_dict=False)
    bare = render(tokenizer, user("hi"))
    assert [example.prompt_ids for example in examples] == [offered, offered, bare, bare] and offered != bare
    assert [example.columns["tools"] for example in examples] == [value, value, [], None]


@pytest.mark.parametrize(("template", "row", "message"), [
    (CHAT_TEMPLATE, {"tools": [ADD]}, "template does not print tools, .*remove"),
    (CHAT_TEMPLATE, {"tools": [ADD], "prompt": RENDERED}, "`tools` have no place .*write them into"),
    (None, {"tools": [ADD]}, "`tools` have no place .*instruct"),
    (CHAT_TEMPLATE, {"tools": ["add"]}, "`tools` is .*schemas"),
    (CHAT_TEMPLATE, {"tools": {"type": "function"}}, "`tools` is"), (CHAT_TEMPLATE, {"tools": 5}, "`tools` is 5"),
    (CHAT_TEMPLATE, {"images": ["a.png"]}, "`images` .*poster_grpo.py"), (None, {"Image": "a"}, "`Image` "),
    (CHAT_TEMPLATE, {"audio": {"bytes": ""}}, "`audio` .*remove the column"), (None, {"videos": ["a"]}, "`videos`"),
    (CHAT_TEMPLATE, {"prompt": [user([{"type": "image"}])]}, "'image', .*poster_grpo.py"),
    (CHAT_TEMPLATE, {"prompt": [user(["hi"])]}, "'str', .*text"),
    (CHAT_TEMPLATE, {"prompt": [user([{"type": "text"}])]}, "no text"),
    (CHAT_TEMPLATE, {"prompt": [user("hi"), assistant("", tool_calls=[ADD]), turn("tool", "1")]}, "print tool calls"),
    (OF_USER, {"prompt": [system("be brief"), user("hi")]}, "print a turn of the role 'system', .*turn of the user"),
    (OF_USER, {"prompt": [user("hi"), turn("tool", "1")]}, "print a turn of the role 'tool'"),
])  # fmt: skip
def test_what_a_template_would_drop_is_refused_with_row_and_remedy(tmp_path, template, row, message):
    with pytest.raises(ValueError, match=rf"row 2.*{message}"):
        load(tmp_path, [*ROWS, {"prompt": "hi", "answer": "1"} | row], make_tokenizer(template=template))


@pytest.mark.parametrize("arguments", [{"a": 1, "b": None}, '{"a": 1}'])
@pytest.mark.parametrize("reads", ["| tojson", "+ ''"])  # as an object, or as text
def test_calls_of_tools_render_with_arguments_in_either_form(tmp_path, arguments, reads):
    tokenizer = make_tokenizer(template=WITH_TOOLS.replace("ARGUMENTS", reads))
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    chat = [user([{"type": "text", "text": "2+"}, {"type": "text", "text": "2", "image": None}]),
            {"role": "assistant", "tool_calls": [call]}, turn("tool", "3")]  # fmt: skip
    [example] = load(tmp_path, [{"prompt": chat, "answer": "1", "images": []}], tokenizer)
    text = (
        "<im_start>user\n2+2<im_end>\n<im_start>assistant\n{}<im_end>\n<im_start>tool\n3<im_end>\n<im_start>assistant\n"
    )
    text = text.replace("{}", '{"a": 1}')
    assert example.prompt_ids == tokenizer(text)["input_ids"] and example.prompt[0] == user("2+2")


@pytest.mark.parametrize("special", [{}, {"pad_token": None}])
def test_prompts_keep_their_order_over_many_tokenizer_calls_with_a_pad_token_or_without(tmp_path, monkeypatch, special):
    monkeypatch.setattr("common.tasks.prompt_encoding.ROWS_PER_CALL", 3)
    texts, tokenizer = [f"{i}+{i}=?" for i in range(8)], make_tokenizer(**special)
    rows = [{"prompt": [user(text)] if i % 2 else text, "answer": "1"} for i, text in enumerate(texts)]
    examples = load(tmp_path, rows, tokenizer)
    assert [example.prompt_ids for example in examples] == [render(tokenizer, user(text)) for text in texts]


def test_system_turns_follow_the_data_then_the_setting(tmp_path, tokenizer):
    brief = [system("be brief"), user("hi")]
    for chat in (brief, [system(""), user("hi")], [user("hi"), system("be brief"), user("hi")]):
        for settings in ({}, {"system_prompt": "hi"}):
            assert load_prompt(tmp_path, chat, tokenizer, **settings) == render(tokenizer, *chat)
    for prompt in ("hi", [user("hi")]):
        assert load_prompt(tmp_path, prompt, tokenizer, system_prompt="be brief") == render(tokenizer, *brief)
    refuses = "{{ raise_exception('no such role') if messages[0]['role'] == 'system' }}" + CHAT_TEMPLATE
    for template, message in ((refuses, "no such role"), (OF_USER, "does not print")):
        with pytest.raises(ValueError, match=f"row 0: .*{message}.*system_prompt 'be brief' .*leave it empty"):
            load_prompt(tmp_path, "hi", make_tokenizer(template=template), system_prompt="be brief")
    for prompt, settings in (("hi", {"apply_chat_template": False}), (RENDERED, {})):
        with pytest.raises(ValueError, match="row 0: system_prompt 'be brief' has no place"):
            load_prompt(tmp_path, prompt, tokenizer, system_prompt="be brief", **settings)


def test_keys_that_a_table_fills_up_with_null_are_not_there(tmp_path, tokenizer):
    tools = "{% if 'tool_calls' in turn %}{{ turn['tool_calls'] | length }}{% endif %}{% endfor %}"
    careful = make_tokenizer(template=CHAT_TEMPLATE.replace("{% endfor %}", tools))
    assert load_prompt(tmp_path, [user("hi", tool_calls=None, name=None)], careful) == render(tokenizer, user("hi"))


@pytest.mark.parametrize(("frame", "bos"), [("$A", "<bos>"), ("<bos> $A <eos>", "<bos>"), ("<bos> $A", "<eos>")])
def test_without_a_template_raw_text_keeps_its_one_bos_and_gets_no_eos_and_chat_is_refused(tmp_path, frame, bos):
    frame = frame.replace("<bos>", bos)
    raw = make_tokenizer(template=None, frame=frame, bos_token=bos)
    off = make_tokenizer(frame=frame, bos_token=bos)
    start = [VOCABULARY[bos]]
    for tokenizer, settings in ((raw, {}), (off, {"apply_chat_template": False})):
        first = start if frame.startswith(bos) else []
        assert load_prompt(tmp_path, "2+2=?", tokenizer, **settings) == first + PLAIN
        assert load_prompt(tmp_path, bos + "2+2=?", tokenizer, **settings) == start + PLAIN
        with pytest.raises(ValueError, match="row 0: chat messages need a chat template"):
            load_prompt(tmp_path, [user("hi")], tokenizer, **settings)


@pytest.mark.parametrize("bos", ["<bos>", ""])
def test_templated_text_has_exactly_the_bos_of_its_template(tmp_path, bos):
    tokenizer = make_tokenizer(template=bos + CHAT_TEMPLATE, frame="<bos> $A <eos>")
    wanted = render(tokenizer, user("2+2=?"))
    assert wanted.count(VOCABULARY["<bos>"]) == bool(bos) and VOCABULARY["<eos>"] not in wanted
    for prompt in ("2+2=?", [user("2+2=?")], bos + RENDERED, RENDERED):
        assert load_prompt(tmp_path, prompt, tokenizer) == wanted


REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


@pytest.mark.parametrize(("prompt", "message", "template"), [
    ("\u200b", "the prompt .*has 0 tokens", None), ("hi \ud83d", "the prompt .*half a character", None),
    ([system("be brief"), user("hi")], "the chat template refuses these messages: .*no system role", REFUSES),
    # joined to a text, which null is not
    ([user("hi"), assistant(None, tool_calls=[1]), user("hi")], "the chat template refuses", CHAT_TEMPLATE),
])  # fmt: skip
def test_a_prompt_that_cannot_be_encoded_is_an_error_with_the_row(tmp_path, monkeypatch, prompt, message, template):
    monkeypatch.setattr("common.tasks.prompt_encoding.ROWS_PER_CALL", 2)
    tokenizer = make_tokenizer(template=template, frame="<bos> $A")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")  # a space of no width
    with pytest.raises(ValueError, match=f"row 2: {message}"):
        load(tmp_path, [*ROWS, {"prompt": prompt, "answer": "1"}], tokenizer)


def test_over_long_prompts_are_dropped_and_counted(tmp_path, tokenizer, capsys):
    rows = [{"prompt": "1" * length, "answer": "1"} for length in (4, 400, 16, 17)]
    examples = load(tmp_path, rows, make_tokenizer(template=None), max_prompt_tokens=16)
    assert [(example.index, len(example.prompt_ids)) for example in examples] == [(0, 4), (2, 16)]
    assert "dropped 2 of 4 prompts longer than 16 tokens (max_prompt_tokens)" in capsys.readouterr().out
    # tokens of the template count
    length = len(load_prompt(tmp_path, "2+2=?", tokenizer))
    assert len(load_prompt(tmp_path, "2+2=?", tokenizer, max_prompt_tokens=length)) == length
    with pytest.raises(ValueError, match=rf"1 of 1 prompts longer than {length - 1} tokens .*raise it to {length}"):
        load_prompt(tmp_path, "2+2=?", tokenizer, max_prompt_tokens=length - 1)


def make_stream(num_rows, batch_size, seed=0, **options):
    return PromptStream([Example(i, str(i), [i], str(i), {}) for i in range(num_rows)], batch_size, seed, **options)


def indices(stream, num_batches=1):
    return [example.index for _ in range(num_batches) for example in stream.next()]


def test_every_epoch_holds_every_row_once_in_a_new_order_and_a_resumed_stream_goes_on():
    stream, first = make_stream(8, 3), make_stream(8, 3)  # some batches run on over the end of an epoch
    handed_out = indices(stream, num_batches=8)
    epochs = [handed_out[start : start + 8] for start in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and stream.position == 24
    before = indices(first, 3)
    assert before + indices(make_stream(8, 3, position=first.position), 5) == handed_out


def test_seeds_and_epochs_give_distinct_orders_that_repeat_exactly():
    keys = [(seed, epoch) for seed in (0, 1, 2, 2**32 + 5, -1) for epoch in range(4)]
    orders = [permutation(50, seed, epoch) for seed, epoch in keys]
    assert len({tuple(order) for order in orders}) == len(keys)
    assert orders == [permutation(50, seed, epoch) for seed, epoch in keys]
    assert permutation(8, 0, 0) == [4, 0, 7, 3, 2, 5, 1, 6]  # resuming an older run depends on this


@pytest.mark.parametrize("num_ranks", [2, 6])
def test_ranks_share_each_batch_without_overlap(num_ranks):
    alone = make_stream(10, batch_size=6, seed=3)
    ranks = [make_stream(10, 6, seed=3, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for _ in range(5):
        batch = indices(alone)
        assert [indices(stream) for stream in ranks] == [batch[rank::num_ranks] for rank in range(num_ranks)]
    assert {stream.position for stream in ranks} == {alone.position} == {30}


@pytest.mark.parametrize(("num_ranks", "batch_size"), [(1, 6), (3, 6), (1, 4)])
def test_a_run_saved_on_two_ranks_resumes_on_another_number(num_ranks, batch_size):
    saved = [make_stream(18, batch_size=6, rank=rank, num_ranks=2) for rank in range(2)]
    seen = [index for stream in saved for index in indices(stream)]
    for rank in range(num_ranks):
        resumed = make_stream(18, batch_size, position=saved[0].position, rank=rank, num_ranks=num_ranks)
        seen += indices(resumed, num_batches=12 // batch_size)
    assert sorted(seen) == list(range(18))


@pytest.mark.parametrize(("num_rows", "batch_size", "options", "message"), [
    (3, 8, {}, "3 rows, batch_size 8"), (3, 0, {}, "3 rows, batch_size 0"), (7, 6, {"num_ranks": 4}, "usable: 4$"),
    (9, 6, {"num_ranks": 4}, "batch_size 6 on 4 ranks.*usable: 4 or 8"), (3, 3, {"num_ranks": 4}, "fewer ranks"),
    (4, 2, {"num_ranks": 2, "rank": 2}, "rank 2 of 2"), (4, 2, {"position": -1}, "position -1"),
])  # fmt: skip
def test_batches_that_cannot_be_made_are_refused_at_the_start(num_rows, batch_size, options, message):
    with pytest.raises(ValueError, match=message):
        make_stream(num_rows, batch_size, **options)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_new_prompts_take_the_unwanted_places_on_any_number_of_ranks(num_ranks, monkeypatch):
    streams = [make_stream(12, 6, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    batches, numbers = [stream.next() for stream in streams], []
    for unwanted in ({0, 3, 4}, set(), {3, 5}):
        flags = [[i * num_ranks + rank in unwanted for i in range(6 // num_ranks)] for rank in range(num_ranks)]
        own = [[place for place in sorted(unwanted) if place % num_ranks == rank] for rank in range(num_ranks)]
        monkeypatch.setattr(distributed, "gather_objects", lambda value, own=own: own)
        found = [stream.replace(batch, f) for stream, batch, f in zip(streams, batches, flags, strict=True)]
        assert [places for places, _ in found] == [[place // num_ranks for place in part] for part in own]
        numbers.append(sorted(number for _, part in found for number in part))
        # each rank numbers its places as they lie in the whole batch
        assert all(n % num_ranks == rank for rank, (_, part) in enumerate(found) for n in part)
    order = permutation(12, 0, 0)
    first, new = order[:6], order[6:11]  # the new ones in the order of the places: 0 3 4, then 3 5
    rows = [batches[place % num_ranks][place // num_ranks].index for place in range(6)]
    assert rows == [new[0], first[1], first[2], new[3], new[2], new[4]]
    assert numbers == [[6, 9, 10], [], [21, 23]] and {stream.position for stream in streams} == {11}
    # the next batch comes after the replacements, and counts its rounds anew
    batch = streams[0].next()
    assert batch[0].index == order[11] and streams[0].replace(batch, [True])[1] == [6]
