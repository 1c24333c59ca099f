"""Tests of common/base/config.py: the command line that a Config dataclass becomes."""

import gc
import json
import math
import re
import runpy
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from conftest import ROOT, SCRIPTS

from common.base import checks, config, option_names
from common.base.checks import require
from common.base.config import changed, comments, parse, save
from common.planning import layouts
from common.run import rules


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


def test_trailing_comments_by_field():
    assert comments(Settings) == {
        "policy_model": 'built-in; or a folder: "a/b#c"', "steps": "rollouts, at least 1",
        "learning_rate": "5e-6 up to 0.5B; 100% constant", "kl_coef": "a number given without its point",
        "print_samples": "show them", "apply_chat_template": "on by default",
        "system_prompt": "the comment stands at the end", "seed": "",
    }  # fmt: skip

    @dataclass
    class Inner:
        value: str = "# not a comment"  # a comment

    assert comments(Inner) == {"value": "a comment"}


@pytest.mark.parametrize("asked", ["--help", "-h", "help"])
def test_help_shows_every_option_its_comment_and_default(asked, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        parse(Settings, [asked])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "Settings of these tests." in text
    assert all(f"--{name}" in text and comment in text for name, comment in comments(Settings).items())
    assert "100% constant (default: 0.0001)" in text and "(default: 'toy')" in text and "twice" not in text


def test_without_arguments_everything_is_as_written_and_those_of_the_process_are_the_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py", "--steps", "7"])
    assert parse(Settings) == Settings(steps=7)
    assert parse(Settings, []) == Settings()  # nothing is kept from the parse before


@pytest.mark.parametrize(("argv", "fields"), [
    ("--steps 5", {"steps": 5}), ("--steps=5", {"steps": 5}), ("--steps 2 --steps 3", {"steps": 3}),
    ("--learning_rate 2e-6", {"learning_rate": 2e-6}), ("--learning-rate 2e-6", {"learning_rate": 2e-6}),
    ("--learning-rate=2e-6", {"learning_rate": 2e-6}), ("--learning_rate 1", {"learning_rate": 1.0}),
    ("--kl_coef 0.04", {"kl_coef": 0.04}),  # by its annotation, although the default is written as 0
    ("--seed -3", {"seed": -3}), ("--policy_model Qwen/Qwen2.5-0.5B", {"policy_model": "Qwen/Qwen2.5-0.5B"}),
    ("--policy-model=a-b=c-d", {"policy_model": "a-b=c-d"}),  # dashes of a value stay
    ("--policy_model runs/my-run", {"policy_model": "runs/my-run"}), ("--policy_model=", {"policy_model": ""}),
    ("--policy_model 42", {"policy_model": "42"}), ("--print_samples", {"print_samples": True}),
    ("--print-samples --steps 2", {"print_samples": True, "steps": 2}),
    *((f"--print{sign}samples {text}", {"print_samples": True}) for sign, text in
      [("_", "true"), ("-", "True"), ("_", "TRUE"), ("-", "1"), ("_", "yes"), ("-", "on")]),
    *((f"--apply-chat-template={text}", {"apply_chat_template": False}) for text in
      ("false", "False", "0", "no", "off")),
])  # fmt: skip
def test_an_option_is_the_same_as_editing_the_line(argv, fields):
    parsed = parse(Settings, argv.split())
    assert parsed == replace(Settings(), **fields)
    assert all(type(getattr(parsed, name)) is type(value) for name, value in fields.items())


def test_texts_for_a_model_are_read_in_a_locale_of_ascii_and_paths_keep_their_bytes():
    given = "\u4e2d".encode().decode("ascii", "surrogateescape")
    cfg = layouts.load(SCRIPTS["gspo"], ["--system_prompt", given, "--stop_strings", f'["{given}"]',
                                         "--out_dir", given])[1]  # fmt: skip
    assert (cfg.system_prompt, cfg.stops, cfg.out_dir) == ("\u4e2d", ("\u4e2d",), given)


def test_annotations_may_be_text():
    assert parse(Quoted, ["--flag", "--number", "4", "--ratio", "0.5"]) == Quoted(True, 4, 0.5)
    assert parse(Quoted, ["--flag", "no"]).flag is False


@pytest.mark.parametrize(("argv", "said"), [
    ("--learning_rte 1e-6", "--learning_rte; did you mean --learning_rate?"),
    ("--learning-rte=1e-6", "--learning_rte=1e-6; did you mean --learning_rate?"),
    # an abbreviation is no option: it would change its meaning with a new field
    ("--step 5", "--step; did you mean --steps?"), ("--print_sample", "--print_sample; did you mean --print_samples?"),
    ("learning_rate=1e-6", "learning_rate=1e-6; did you mean --learning_rate?"),
    ("--zzzzz 1", "unknown option --zzzzz; --help"),  # like no other
    ("--num_generations 8", "a name of TRL"), ("steps 5", "steps; did you mean --steps?"),
    ("-n 4", "'-n' belongs to no option: options have the form --name value"), ("--no_print_samples", "samples false?"),
    ("--steps many", "--steps: 'many' is not a whole number"), ("--steps 1.5", "--steps"),
    ("--steps", "--steps: needs a value"), ("--system_prompt -x", "--system_prompt: needs a value"),
    ("--learning_rate fast", "--learning_rate"), ("--print_samples maybe", "--print_samples"),
    ("--print_samples=2", "--print_samples"),
    ("--steps 0", "steps = 0: must be at least 1, 100% of the time; raise it"),
    ("--learning_rate nan", "learning_rate = nan: must be a finite"), (f"--seed {2**31}", f"seed = {2**31}: must be"),
])  # fmt: skip
def test_a_typo_a_wrong_type_and_a_broken_rule_are_refused_with_the_option(argv, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Settings, argv.split())
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.count("\n") == 1  # without the usage text
    assert said in message.partition("error:")[2]


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), (["--zzzzz"], 2), (["--steps", "0"], 2)])
def test_of_several_ranks_the_first_answers(argv, code, capsys, monkeypatch):
    monkeypatch.setattr(config, "SPEAK_FIRST", 0.0)
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stopped:
            parse(Settings, argv)
        assert stopped.value.code == code and bool("".join(capsys.readouterr())) == (rank == "0")


def test_an_error_that_is_none_of_the_users_is_not_hidden():
    @dataclass
    class Broken:
        value: int = 1

        def __post_init__(self):
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        parse(Broken, [])


def test_changed_lists_the_fields_that_differ():
    old = {"policy_model": "toy", "steps": 20, "learning_rate": 1e-4, "seed": 0, "gone": 5}
    assert changed(old, Settings(learning_rate=2e-6)) == ["steps: 20 -> 60", "learning_rate: 0.0001 -> 2e-06"]
    assert changed({"policy_model": "toy", "steps": 60}, Settings()) == []


def test_the_configuration_of_a_run_is_saved(tmp_path):
    file = tmp_path / "runs" / "new" / "config.json"
    save(Settings(steps=9), str(file.parent))
    assert Settings(**json.loads(file.read_text())) == Settings(steps=9)


@dataclass(frozen=True)
class Limited:
    count: int = 3
    rate: float = 0.5
    kind: str = "a"
    max_new_tokens: int = 8


@pytest.mark.parametrize(("check", "message"), [
    (lambda cfg: checks.at_least(cfg, 4, "rate", "count"), "rate = 0.5: must be at least 4; raise it"),
    (lambda cfg: checks.at_least(cfg, 4, "count"), "count = 3: must be at least 4; raise it"),
    (lambda cfg: checks.above_zero(replace(cfg, rate=0.0), "rate"), "rate = 0.0: must be above 0; raise it"),
    (lambda cfg: checks.one_of(cfg, kind=("b", "c")), "kind = 'a': must be one of ('b', 'c'); choose one of these"),
    (lambda cfg: checks.at_least(replace(cfg, rate=math.nan), 0, "rate"), "rate = nan: must be at least 0; raise it"),
    (lambda cfg: rules.no_longer_than_completions(replace(cfg, count=9), "count"), "at most max_new_tokens = 8"),
])  # fmt: skip
def test_a_field_outside_its_rule_is_named_and_fields_inside_pass(check, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(Limited())
    checks.at_least(Limited(), 0.5, "count", "rate")
    checks.above_zero(Limited(), "count", "rate")
    checks.one_of(Limited(), kind=("a", "b"))
    rules.no_longer_than_completions(replace(Limited(), count=8), "count")


@pytest.mark.parametrize(("host", "alone"), [
    ("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("[::1]", True), ("::1", True), ("0.0.0.0", False),
    ("10.0.0.1", False), ("localhost.example.org", False),
])  # fmt: skip
def test_which_hosts_nobody_else_sees(host, alone):
    assert checks.is_loopback(host) is alone


@dataclass(frozen=True)
class Inherited:
    """Machine and run."""

    device: Literal["cpu", "cuda"] = "cpu"  # where it runs
    steps: int = 60  # of training


@dataclass(frozen=True)
class Own(Inherited):
    """A script."""

    rate: float = 0.1  # of learning
    steps: int = 5  # of distillation


def test_options_are_inherited_and_may_be_named_again(capsys):
    assert parse(Own, ["--device", "cuda", "--rate", "1"]) == Own(rate=1.0, device="cuda")
    assert comments(Own) == {"rate": "of learning", "steps": "of distillation", "device": "where it runs"}
    with pytest.raises(SystemExit):
        parse(Own, ["--help"])
    shown = capsys.readouterr().out.split("Machine and run:")
    assert "of distillation (default: 5)" in shown[0] and "of training" not in "".join(shown)
    assert "--device {cpu,cuda}" in shown[1] and "--steps" not in shown[1]  # the script's own come first


@pytest.mark.parametrize(("script", "argument", "said"), [
    ("gspo/gspo.py", "--beta", "a name of TRL and ms-swift, here --kl_coef;"),
    ("gspo/gspo.py", "--model_name_or_path=a", "here --policy_model ("),
    ("gkd/gkd.py", "--model_name_or_path", "here --student_model ("),
    ("gspo/gspo.py", "actor_rollout_ref.rollout.n=8", "a name of verl, here --group_size"),
    ("gspo/gspo.py", "+algorithm.kl_ctrl.kl_coef=0.1", "here --kl_coef; here the KL is a term of the loss"),
    ("gspo/gspo.py", "--rollout.n_samples_per_prompt", "OpenRLHF, here --group_size"),
    ("gspo/gspo.py", "--use_vllm", "not here: sampling runs in PyTorch"),
    ("gspo/gspo.py", "--reward_funcs", "here REWARDS at the top of the script"),
    ("gspo/gspo.py", "--num_generation", "did you mean num_generations, a name of TRL and ms-swift, here --group_size"),
    ("gspo/gspo.py", "data.nothing=4", "docs/coming_from.md lists"), ("gspo/gspo.py", "a.yaml", "no files of options"),
    ("gspo/gspo.py", "--local-rank=0", "torchrun"), ("gspo/gspo.py", "--teacher_url", "an option of gkd/gkd.py"),
    ("gspo/gspo.py", "--delta", "here --dual_clip of grpo/grpo.py"), ("gspo/gspo.py", "-n", "'-n' belongs to no"),
    ("gkd/gkd.py", "--reward_model", "a name of ms-swift, here --reward_model of gspo/gspo.py"),
    ("gspo/gspo.py", "Model", "'Model' belongs to no"), ("gspo/gspo.py", "\u2013steps", "--steps?"),
    ("gspo/gspo.py", "\u2212\u2212steps=3", "--steps?"), ("gspo/gspo.py", "--lora", "here --lora_rank; any rank"),
    ("grpo/grpo.py", "--loss_agg_mode", "did you mean actor_rollout_ref.actor.loss_agg_mode, a name of verl, here --l"),
    ("grpo/grpo.py", "filter_groups.enable=1", "here --dynamic_sampling"), ("grpo/grpo.py", "--path", "--help lists"),
    ("gspo/gspo.py", "--batch", "--batch_size?"), ("gspo/gspo.py", "--STEPS", "--steps?"),
    ("gkd/gkd.py", "--max_top_k", "an option of gkd/teacher_server.py"),
    ("gspo/gspo.py", "--student_gpu_ids", "STUDENT_GPU_IDS at the top of gkd/gkd.py"),
])  # fmt: skip
def test_a_name_from_elsewhere_is_translated(script, argument, said):
    message = option_names.unknown(argument, option_names.scripts()[script])
    assert said in message and "\n" not in message


def test_the_table_of_names_leads_to_options_that_exist_and_is_the_page():
    known = set().union(*option_names.scripts().values())
    rows = option_names.table()
    assert not [row for row in rows if not set(row.here) <= known or not (row.here or row.note)]
    pairs = Counter((toolkit, name) for row in rows for toolkit in row.toolkits for name in row.names)
    assert {name for (_, name), count in pairs.items() if count > 1} == {"beta"}  # of GRPO and of GKD
    per_toolkit = Counter(toolkit for toolkit, _ in pairs)
    least = {"TRL": 60, "verl": 40, "ms-swift": 40, "OpenRLHF": 30}
    assert all(per_toolkit[toolkit] >= count for toolkit, count in least.items())
    page = (ROOT / option_names.PAGE).read_text()
    writer = runpy.run_path(str(ROOT / "scripts" / "dev" / "coming_from.py"))
    assert page == writer["page"](), "python scripts/dev/coming_from.py writes it"
    (command,) = re.findall(r"^python grpo/grpo.py (.*?)\n```", page, re.M | re.S)
    translated = layouts.load(SCRIPTS["grpo"], command.replace("\\\n", " ").split())[1]
    assert (translated.batch_size, translated.kl_coef, translated.epsilon_high) == (8, 0.04, 0.2)


def run_script(path, text, *argv):
    path.write_text(text)
    command = [sys.executable, path, *argv]
    return subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)


SCRIPT = """
from dataclasses import dataclass
from common.base import checks, config
{early}
print("imported")
{late}
from common.base.settings import RLSettings

@dataclass(frozen=True)
class Config(RLSettings):
    \"\"\"A script.\"\"\"

    steps: int = LATE  # of training

    def __post_init__(self):
        checks.require(self.steps > 0, f"steps = {{self.steps}}", "must be above 0", "raise it")
        checks.warn("only once")

if __name__ == "__main__":
    print(config.parse(Config).steps)
"""


def test_options_are_answered_before_the_imports_and_again_by_parse_without_another_warning(tmp_path):
    early, late = "config.answer_early(globals())", "LATE = 7"
    quick = SCRIPT.replace("LATE  #", "7  #").format(early=early, late="")
    for argv, code in ((["--help"], 0), (["--stepz"], 2), (["--steps", "0"], 2), (["--steps", "x"], 2)):
        answered = run_script(tmp_path / "quick.py", quick, *argv)
        assert answered.returncode == code and "imported" not in answered.stdout
        assert len((answered.stdout if code == 0 else answered.stderr).splitlines()) > 0
    done = run_script(tmp_path / "quick.py", quick, "--steps", "3")
    assert done.stdout == "imported\nwarning: only once\n3\n" and not done.stderr
    # a Config that needs what is imported later is answered at the end, as one without the line is
    for text in (SCRIPT.format(early=early, late=late), SCRIPT.format(early="", late=late)):
        assert run_script(tmp_path / "late.py", text).stdout == "imported\nwarning: only once\n7\n"
        refused = run_script(tmp_path / "late.py", text, "--steps", "0")
        assert refused.returncode == 2 and "steps = 0: must be above 0" in refused.stderr
    # nor does an import of a script read the command line
    assert run_script(tmp_path / "other.py", "import quick", "--stepz").stdout == "imported\n"


def begins_a_run(rank: int, ranks: int, script: str) -> None:
    """In a process of its own, in which nothing is frozen yet."""
    gc.unfreeze()
    assert runpy.run_path(script, run_name="__main__")["found"] == [False, 0, True, True]


def test_garbage_is_not_looked_for_during_the_imports_and_is_afterwards(launcher, tmp_path):
    shown = "import gc; print(gc.isenabled(), gc.get_freeze_count() > 0)"
    text = SCRIPT.format(early="config.answer_early(globals())", late="LATE = 7")
    out = run_script(tmp_path / "script.py", text.replace('print("imported")', shown) + f"    {shown}\n").stdout
    assert out.splitlines() == ["False False", "warning: only once", "7", "True True"]
    # also where a script reads no command line, and begins its run with a Config of its own
    script = tmp_path / "other.py"
    script.write_text("""from common.base import config
config.answer_early(globals())
import gc
from pathlib import Path
from common.base import devices
from common.loop import Run
from gspo.gspo import Config
found = [gc.isenabled(), gc.get_freeze_count()]
Run(Config(out_dir=str(Path(__file__).with_name("run"))), devices.layout("cpu", policy=(0,)), {})
found += [gc.isenabled(), gc.get_freeze_count() > 0]
""")
    launcher.run_function(begins_a_run, 1, (str(script),))


@pytest.mark.parametrize(("url", "rule"), [
    ("http://127.0.0.1:89x", "89x"), ("http://127.0.0.1:99999", "0-65535"), ("http://127.0.0.1:0", "from 1 to 65535"),
    ("http://127.0.0.1:", "from 1 to 65535"), ("127.0.0.1:8899", "http://"), ("ftp://a", "http://"),
    ("http://", "a host"), ("http:///path", "a host"), ("http://<host>:80", "a host"), ("http://a b:80", "spaces"),
    ("http://a\n", "control"), ("http://a..b", "address"), ("http://[::1", "address"),
    ("http://me:secret@a:8899", "no password"), ("http://me:secret@a:8x", "8x"), ("http://a/?key=1", "after ?"),
    ("http://a#b", "after ?"), ("http://a/?", "after ?"), ("http://256.1.1.1:80", "four numbers"),
    ("http://127.0.1", "four numbers"), ("http://0x7f.1", "four numbers"),
])  # fmt: skip
def test_a_url_that_is_none_is_refused_by_the_rules_of_every_script(url, rule, capsys):
    for script, option in (("gspo", "reward_url"), ("gkd", "teacher_url")):
        with pytest.raises(SystemExit):
            layouts.load(SCRIPTS[script], [f"--{option}", url])
        message = capsys.readouterr().err
        assert f"{option} = " in message and rule in message and "secret" not in message


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8899", "https://a.example/rewards/", "http://[::1]:80", "http://a_b", "http://1.2.3.4"]
)
def test_a_url_may_have_a_path(url):
    checks.require_url("reward_url", url)
