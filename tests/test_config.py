"""Tests of common/config.py: the command line that a Config dataclass becomes."""

import json
import math
from dataclasses import dataclass, replace

import pytest

from common import config
from common.config import changed, comments, parse, require, save


@dataclass(frozen=True)
class Settings:
    """Settings of these tests."""

    policy_model: str = "toy"  # built-in; or a folder: "a/b#c"
    steps: int = 60  # rollouts, at least 1
    learning_rate: float = 1e-4  # 5e-6 up to 0.5B; 100% constant
    kl_coef: float = 0  # a number given without its point
    print_samples: bool = False  # show them
    apply_chat_template: bool = True  # on by default
    system_prompt: str = (
        "a default that does not fit into one line of a hundred and twenty characters, because it says so much, "
        "takes two"
    )  # the comment stands at the end
    seed: int = 0

    @property
    def twice(self) -> int:
        """Not a field."""
        return 2 * self.steps  # not a help text

    def __post_init__(self):
        require(self.steps >= 1, f"steps = {self.steps}", "must be at least 1, 100% of the time", "raise it")


@dataclass
class Quoted:
    """Annotations as text, as `from __future__ import annotations` makes them."""

    flag: "bool" = False
    number: "int" = 3
    ratio: "float" = 2


def refused(argv, capsys, cls=Settings) -> str:
    """The error message of a command line that must not be accepted."""
    with pytest.raises(SystemExit) as stopped:
        parse(cls, argv)
    assert stopped.value.code == 2
    return capsys.readouterr().err


# --- comments and help ---


def test_trailing_comments_by_field():
    assert comments(Settings) == {
        "policy_model": 'built-in; or a folder: "a/b#c"',
        "steps": "rollouts, at least 1",
        "learning_rate": "5e-6 up to 0.5B; 100% constant",
        "kl_coef": "a number given without its point",
        "print_samples": "show them",
        "apply_chat_template": "on by default",
        "system_prompt": "the comment stands at the end",
        "seed": "",
    }


def test_a_class_inside_a_function_has_comments_too():
    @dataclass
    class Inner:
        value: str = "# not a comment"  # a comment

    assert comments(Inner) == {"value": "a comment"}


def test_help_shows_every_option_its_comment_and_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        parse(Settings, ["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "Settings of these tests." in text
    for name, comment in comments(Settings).items():
        assert f"--{name}" in text
        assert comment in text
    assert "5e-6 up to 0.5B; 100% constant (default: 0.0001)" in text
    assert "(default: 'toy')" in text and "twice" not in text


# --- values ---


def test_without_arguments_everything_is_as_written():
    assert parse(Settings, []) == Settings()


def test_arguments_of_the_process_are_the_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py", "--steps", "7"])
    assert parse(Settings) == Settings(steps=7)


@pytest.mark.parametrize(("argv", "fields"), [
    (["--steps", "5"], {"steps": 5}),
    (["--steps=5"], {"steps": 5}),
    (["--learning_rate", "2e-6"], {"learning_rate": 2e-6}),
    (["--learning-rate", "2e-6"], {"learning_rate": 2e-6}),
    (["--learning-rate=2e-6"], {"learning_rate": 2e-6}),
    (["--learning_rate", "1"], {"learning_rate": 1.0}),
    (["--kl_coef", "0.04"], {"kl_coef": 0.04}),  # by its annotation, although the default is written as 0
    (["--seed", "-3"], {"seed": -3}),
    (["--policy_model", "Qwen/Qwen2.5-0.5B-Instruct"], {"policy_model": "Qwen/Qwen2.5-0.5B-Instruct"}),
    (["--policy-model=a-b=c-d"], {"policy_model": "a-b=c-d"}),  # dashes of a value stay
    (["--policy_model", "runs/my-run"], {"policy_model": "runs/my-run"}),
    (["--policy_model", ""], {"policy_model": ""}),
    (["--policy_model", "42"], {"policy_model": "42"}),
    (["--print_samples"], {"print_samples": True}),
    (["--print-samples", "--steps", "2"], {"print_samples": True, "steps": 2}),
    (["--steps", "2", "--steps", "3"], {"steps": 3}),
], ids=str)  # fmt: skip
def test_an_option_is_the_same_as_editing_the_line(argv, fields):
    parsed = parse(Settings, argv)
    assert parsed == replace(Settings(), **fields)
    for name, value in fields.items():
        assert type(getattr(parsed, name)) is type(value)


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "1", "yes", "on"])
def test_ways_to_say_yes(text):
    assert parse(Settings, ["--print_samples", text]).print_samples is True
    assert parse(Settings, [f"--print-samples={text}"]).print_samples is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "off"])
def test_ways_to_say_no(text):
    assert parse(Settings, ["--apply_chat_template", text]).apply_chat_template is False
    assert parse(Settings, [f"--apply-chat-template={text}"]).apply_chat_template is False


def test_annotations_may_be_text():
    assert parse(Quoted, ["--flag", "--number", "4", "--ratio", "0.5"]) == Quoted(True, 4, 0.5)
    assert parse(Quoted, ["--flag", "no"]).flag is False


# --- refusals ---


@pytest.mark.parametrize(("argv", "meant"), [
    (["--learning_rte", "1e-6"], "--learning_rate"),
    (["--learning-rte=1e-6"], "--learning_rate"),
    (["--step", "5"], "--steps"),  # an abbreviation is no option: it would change its meaning with a new field
    (["--print_sample"], "--print_samples"),
    (["learning_rate=1e-6"], "--learning_rate"),
])  # fmt: skip
def test_a_typo_is_refused_with_a_suggestion(argv, meant, capsys):
    message = refused(argv, capsys)
    assert f"did you mean {meant}?" in message
    assert argv[0].split("=")[0].lstrip("-").replace("-", "_") in message


def test_an_option_like_no_other_is_refused_by_name(capsys):
    message = refused(["--zzzzz", "1"], capsys)
    assert "unknown option --zzzzz" in message and "did you mean" not in message


@pytest.mark.parametrize("argv", [["--steps", "many"], ["--steps", "1.5"], ["--steps"], ["--learning_rate", "fast"],
                                  ["--print_samples", "maybe"], ["--print_samples=2"]])  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_with_the_option(argv, capsys):
    assert argv[0].split("=")[0] in refused(argv, capsys).splitlines()[-1]


def test_a_broken_rule_is_refused_with_its_message(capsys):
    message = refused(["--steps", "0"], capsys)
    assert "steps = 0: must be at least 1, 100% of the time; raise it" in message
    assert "Traceback" not in message


def test_an_error_that_is_none_of_the_users_is_not_hidden():
    @dataclass
    class Broken:
        value: int = 1

        def __post_init__(self):
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        parse(Broken, [])


def test_require():
    require(True, "x = 1", "must hold", "change it")
    with pytest.raises(ValueError, match=r"^x = 1: must hold; change it$"):
        require(False, "x = 1", "must hold", "change it")


# --- comparing with a saved configuration ---


def test_changed_lists_the_fields_that_differ():
    old = {"policy_model": "toy", "steps": 20, "learning_rate": 1e-4, "seed": 0, "gone": 5}
    assert changed(old, Settings(learning_rate=2e-6)) == ["steps: 20 -> 60", "learning_rate: 0.0001 -> 2e-06"]


def test_nothing_changed():
    assert changed({"policy_model": "toy", "steps": 60}, Settings()) == []


def test_the_module_has_no_state_between_parses():
    assert parse(Settings, ["--steps", "5"]).steps == 5
    assert parse(Settings, []).steps == 60
    assert config.comments(Settings)["steps"] == "rollouts, at least 1"


def test_the_configuration_of_a_run_is_saved(tmp_path):
    save(Settings(steps=9), str(tmp_path / "runs" / "new"))
    saved = json.loads((tmp_path / "runs" / "new" / "config.json").read_text())
    assert Settings(**saved) == Settings(steps=9)
    assert changed(saved, Settings(steps=10)) == ["steps: 9 -> 10"]


# ---- rules that several fields share ----


NAN = math.nan


@dataclass(frozen=True)
class Numbers:
    count: int = 3
    rate: float = 0.5
    kind: str = "a"


@pytest.mark.parametrize(
    "check, message",
    [
        (lambda cfg: config.at_least(cfg, 4, "rate", "count"), "rate = 0.5: must be at least 4; raise it"),
        (lambda cfg: config.at_least(cfg, 4, "count"), "count = 3: must be at least 4; raise it"),
        (lambda cfg: config.above_zero(replace(cfg, rate=0.0), "rate"), "rate = 0.0: must be above 0; raise it"),
        (lambda cfg: config.one_of(cfg, kind=("b", "c")), "kind = 'a': must be one of ('b', 'c'); choose one of these"),
        (lambda cfg: config.at_least(replace(cfg, rate=NAN), 0, "rate"), "rate = nan: must be at least 0; raise it"),
    ],
)  # fmt: skip
def test_a_field_outside_its_rule_is_named(check, message):
    with pytest.raises(ValueError) as error:
        check(Numbers())
    assert str(error.value) == message


def test_fields_inside_their_rules_pass():
    config.at_least(Numbers(), 0.5, "count", "rate")
    config.above_zero(Numbers(), "count", "rate")
    config.one_of(Numbers(), kind=("a", "b"))
