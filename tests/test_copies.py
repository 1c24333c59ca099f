"""The scripts of one algorithm are variants: what they share stands in each of them, word for word."""

import ast
import difflib
import re
import sys
from pathlib import Path

import pytest
from conftest import FAMILIES, ROOT, SCRIPTS

MARK = "# [copy]"
COMMON = sorted((ROOT / "common").rglob("*.py"))
POSTER = [ROOT / "grpo" / "poster" / f"{name}.py" for name in ("poster_grpo", "reward_server", "supervised", "convert")]
MOST_LINES = {"grpo_ddp": 420, "similarity_grpo": 500, "gkd_ddp": 430, "gkd_multigpu": 440}
USUAL_LINES = 400
# A default that may differ: on several GPUs of one process, the CPU is used only when asked for
OWN_DEFAULT = dict.fromkeys(("gspo_multigpu", "grpo_multigpu", "gkd_multigpu"), "device")
WITHOUT_CONFIG = {"similarity_grpo", "gkd_multigpu"}  # its Config has fields more, so it is no copy: see below
OWN_FIELDS = ("similarity_", "overlap", "fsdp")  # beginnings of their names
VARIANTS = pytest.mark.parametrize(
    "first, name", [(first, other) for first, *others in FAMILIES.values() for other in others]
)
# How main differs where GRPO is GSPO with another loss, without spaces: patterns, and what takes their place
DIFFERENCES = {
    r"cfg\.advantage_scale\)": "cfg.scale)",
    r"#Eq\.6": "",
    r"cfg\.temperature,cfg\.compile\)(policy|whole|frozen|for)": r"cfg.temperature,cfg.compile,cfg.entropy_coef>0)\1",
    r"num_sequences=((?:\w+\.\w+\()?sum\(micro\.num_)trained(\w+\)+)": r"\g<0>num_tokens=\1tokens\2",
    r"micro,cfg,num_sequences\)": "micro,cfg,num_sequences,num_tokens)",
    r"log\.add\(micro\.num_trained": "log.add(micro.num_tokens",
}


def items(path: Path) -> dict[str, str]:
    """Source of every function and class at the top level, decorators and mark included, by name."""
    lines, found = path.read_text().splitlines(), {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            first -= lines[first - 2] == MARK
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def marked(name: str, own: str | None = None) -> dict[str, str]:
    """The items under a mark; the default of the field `own` is left out, and what only several ranks can have."""
    found = {name: text for name, text in items(SCRIPTS[name]).items() if text.startswith(MARK)}
    if "Config" in found:
        found["Config"] = re.sub(r"\n    fsdp: bool = False .*", "", found["Config"])
    if own:
        found["Config"], count = re.subn(rf"( {own}: \w+ = )[^ ]+", r"\1...", found["Config"])
        assert count == 1
    return found


def options(path: Path) -> list[ast.AnnAssign]:
    """The Config fields of a script."""
    (config,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "Config"]
    return [node for node in config.body if isinstance(node, ast.AnnAssign)]


def fields(path: Path) -> list[str]:
    """Name, type and default of every Config field, in order."""
    found = []
    for node in options(path):
        value = "..." if node.target.id in OWN_DEFAULT.values() else ast.unparse(node.value)
        found.append(f"{node.target.id}: {ast.unparse(node.annotation)} = {value}")
    return found


def imported(path: Path) -> set[str]:
    """Every name of a module that a file imports, in all its parts."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."), *(alias.name.split(".") for alias in node.names))
    return names


@VARIANTS
def test_marked_items_are_equal_word_for_word(first, name):
    if name in WITHOUT_CONFIG:
        one, other = marked(first), marked(name)
        del one["Config"]
    else:
        one, other = (marked(script, OWN_DEFAULT.get(name)) for script in (first, name))
    assert one == other


@pytest.mark.parametrize("path", SCRIPTS.values(), ids=lambda path: path.stem)
def test_every_mark_belongs_to_an_item(path):
    assert path.read_text().splitlines().count(MARK) == len(marked(path.stem)) > 0
    # what people replace, and what must not drift apart
    expected = {"Config", "reward", "score", "evaluate"} | ({"resample"} if "gkd" not in path.stem else {"gkd_loss"})
    assert expected - ({"Config"} if path.stem in WITHOUT_CONFIG else set()) < marked(path.stem).keys()


@VARIANTS
def test_configs_have_the_same_fields_in_the_same_order(first, name):
    one, other = ([f for f in fields(SCRIPTS[script]) if not f.startswith("out_dir")] for script in (first, name))
    shared = [field for field in other if not field.startswith(OWN_FIELDS)]
    assert shared == one
    own = {field.split(":")[0] for field in other} - {field.split(":")[0] for field in shared}
    assert ("fsdp" in own) == (name.endswith("_ddp") or name == "similarity_grpo")
    assert bool(own - {"fsdp"}) == (name in WITHOUT_CONFIG)


def renamed(text: str) -> str:
    return text.replace("gspo", "grpo").replace("GSPO", "GRPO")


@pytest.mark.parametrize("gspo, grpo", zip(FAMILIES["gspo"], FAMILIES["grpo"], strict=False))
def test_grpo_shares_everything_but_the_loss_with_gspo(gspo, grpo):
    one, other = items(SCRIPTS[gspo]), items(SCRIPTS[grpo])
    assert {renamed(name) for name in one} == other.keys()
    shared = ("reward", "score", "resample", "evaluate")
    assert [one[name] for name in shared] == [other[name] for name in shared]
    expected = "".join(renamed(one["main"]).split())
    for pattern, replacement in DIFFERENCES.items():
        expected = re.sub(pattern, replacement, expected)
    assert expected == "".join(other["main"].split())
    # fields: those of the loss are its own
    one, other = (dict(renamed(field).split(": ", 1) for field in fields(SCRIPTS[name])) for name in (gspo, grpo))
    assert one.keys() - other.keys() == {"clip_preset"}
    assert other.keys() - one.keys() == {"loss", "dual_clip", "cispo_cap", "entropy_coef"}
    changed = {name for name in one.keys() & other.keys() if one[name] != other[name]}
    assert changed == {"epsilon_high", "advantage_scale"}


@pytest.mark.parametrize("family, constant", [*((family, "GUARDS") for family in FAMILIES), ("grpo", "AGGREGATION")])
def test_constants_of_an_algorithm_are_alike_in_all_its_scripts(family, constant):
    texts = [SCRIPTS[name].read_text() for name in FAMILIES[family]]
    assert len({re.search(rf"^{constant} = .*?}}", text, re.MULTILINE | re.DOTALL)[0] for text in texts}) == 1


def test_what_similarity_adds_to_main_is_its_own_phase():
    one, other = (items(SCRIPTS[name])["main"].splitlines() for name in ("grpo_ddp", "similarity_grpo"))
    diff = list(difflib.ndiff(one, other))
    removed = [line for line in diff if line.startswith("- ")]
    assert len(removed) <= 7 and sum(line.startswith("+ ") for line in diff) <= 22
    assert not any(word in line for line in removed for word in ("loss", "optimizer", "sampler", "prompts"))


def test_the_options_of_the_poster_script_are_those_of_grpo_ddp():
    pattern = re.compile(r"^    (\w+): (\w+) = .*?  # (.*)$", re.MULTILINE)  # name, type and comment
    one, other = (set(pattern.findall(path.read_text())) for path in (SCRIPTS["grpo_ddp"], POSTER[0]))
    shared = {name for name, *_ in one} & {name for name, *_ in other}
    assert len(shared) >= 45
    # what is said of data, models and losses differs; the rest is the same, word for word
    assert shared - {name for name, *_ in one & other} == {
        "device", "epsilon_high", "epsilon_low", "eval_data", "kl_estimator", "learning_rate", "loss",
        "max_new_tokens", "max_prompt_tokens", "policy_model", "reward_url", "train_data", "truncated",
    }  # fmt: skip


@pytest.mark.parametrize("path", [*SCRIPTS.values(), ROOT / "gkd" / "teacher_server.py", *POSTER], ids=lambda p: p.stem)
def test_scripts_stay_short_and_every_option_has_a_comment_on_its_line(path):
    # it is the text of --help; a line too long for the formatter would be broken up, and lose it
    lines, found = path.read_text().splitlines(), options(path)
    assert found and not [node.target.id for node in found if "  # " not in lines[node.end_lineno - 1]]
    assert path not in SCRIPTS.values() or len(lines) <= MOST_LINES.get(path.stem, USUAL_LINES)


def test_neither_scripts_nor_common_import_a_script_and_no_module_hides_one_of_the_standard_library():
    names = SCRIPTS.keys() | FAMILIES.keys()
    assert not {path.name: found for path in [*SCRIPTS.values(), *COMMON] if (found := imported(path) & names)}
    # python gspo/x.py puts gspo/ on sys.path, so a gspo/queue.py, say, would be what torch imports as queue
    files = [*COMMON, *SCRIPTS.values(), *(ROOT / "grpo" / "poster").glob("*.py")]
    files += [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("tests/*.py")]
    assert not {path.stem for path in files} & sys.stdlib_module_names
