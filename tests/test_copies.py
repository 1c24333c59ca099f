"""The scripts of one algorithm are variants: what they share stands in each of them, word for word."""

import ast
import difflib
import re
import sys
from pathlib import Path

import pytest
from conftest import FAMILIES, ROOT, SCRIPTS

MARK = "# [copy]"
COMMON = sorted((ROOT / "common").glob("*.py"))
POSTER = [ROOT / "grpo" / "poster" / f"{name}.py" for name in ("poster_grpo", "reward_server", "supervised", "convert")]
MOST_LINES = {"grpo_ddp": 405, "similarity_grpo": 485, "gkd_ddp": 415, "gkd_multigpu": 425}
USUAL_LINES = 400
# A default that may differ: on several GPUs of one process, the CPU is used only when asked for
OWN_DEFAULT = dict.fromkeys(("gspo_multigpu", "grpo_multigpu", "gkd_multigpu"), "device")
VARIANTS = [(SCRIPTS[first], SCRIPTS[other]) for first, *others in FAMILIES.values() for other in others]
# Its Config has fields more, so it is no copy: see below
WITHOUT_CONFIG = {"similarity_grpo", "gkd_multigpu"}
OWN_FIELDS = ("similarity_", "overlap", "fsdp")  # beginnings of their names
# GRPO is GSPO with another loss: scripts with the same way of spreading work, and what may differ in main
SIBLINGS = [("gspo", "grpo"), ("gspo_multigpu", "grpo_multigpu"), ("gspo_ddp", "grpo_ddp")]
PAIRS = [(SCRIPTS[gspo], SCRIPTS[grpo]) for gspo, grpo in SIBLINGS]
DIFFERENCES = {
    "cfg.advantage_scale)": "cfg.scale)",
    "  # Eq. 6": "",
    "cfg.temperature, cfg.compile)\n    policy": "cfg.temperature, cfg.compile, cfg.entropy_coef > 0)\n    policy",
    "cfg.temperature, cfg.compile)\n    whole": "cfg.temperature, cfg.compile, cfg.entropy_coef > 0)\n    whole",
    "cfg.temperature, cfg.compile)\n    frozen": "cfg.temperature, cfg.compile, cfg.entropy_coef > 0)\n    frozen",
    "cfg.temperature, cfg.compile) for": "cfg.temperature, cfg.compile, cfg.entropy_coef > 0) for",
    "(micro.num_trained for micro in minibatch)\n": "(micro.num_trained for micro in minibatch)\n"
    "num_tokens = sum(micro.num_tokens for micro in minibatch)\n",
    "(micro.num_trained for micro in minibatch))\n": "(micro.num_trained for micro in minibatch))\n"
    "num_tokens = distributed.sum_over_ranks(sum(micro.num_tokens for micro in minibatch))\n",
    "micro, cfg, num_sequences)": "micro, cfg, num_sequences, num_tokens)",
    "log.add(micro.num_trained": "log.add(micro.num_tokens",
}


def items(path: Path) -> dict[str, str]:
    """Source of every function and class at the top level, decorators included, by name."""
    lines, found = path.read_text().splitlines(), {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
            if first > 1 and lines[first - 2] == MARK:
                found[node.name] = MARK + "\n" + found[node.name]
    return found


def marked(path: Path, own: str | None = None) -> dict[str, str]:
    """The items under a mark; the default of the field `own` is left out, and what only several ranks can have."""
    found = {name: text for name, text in items(path).items() if text.startswith(MARK)}
    if "Config" in found:
        found["Config"] = re.sub(r"\n    fsdp: bool = False .*", "", found["Config"])
    if own:
        found["Config"], count = re.subn(rf"( {own}: \w+ = )[^ ]+", r"\1...", found["Config"])
        assert count == 1
    return found


def fields(path: Path) -> list[str]:
    """Name, type and default of every Config field, in order."""
    (config,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "Config"]
    found = []
    for node in config.body:
        if isinstance(node, ast.AnnAssign):
            value = "..." if node.target.id in OWN_DEFAULT.values() else ast.unparse(node.value)
            found.append(f"{node.target.id}: {ast.unparse(node.annotation)} = {value}")
    return found


def comments_of(path: Path) -> dict[str, str]:
    """Type and comment of every Config field."""
    found = re.findall(r"^    (\w+): (\w+) = .*?  # (.*)$", path.read_text(), re.MULTILINE)
    return {name: f"{kind}: {comment}" for name, kind, comment in found}


def imported(path: Path) -> set[str]:
    """Every name of a module that a file imports, in all its parts."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."))
            names.update(alias.name for alias in node.names)
    return names


def names(parameter) -> str:
    return getattr(parameter, "stem", None)


@pytest.mark.parametrize("first, path", VARIANTS, ids=names)
def test_marked_items_are_equal_word_for_word(first, path):
    if path.stem in WITHOUT_CONFIG:
        one, other = marked(first), marked(path)
        del one["Config"]
    else:
        own = OWN_DEFAULT.get(path.stem)
        one, other = marked(first, own), marked(path, own)
    assert one.keys() == other.keys()
    for name in one:
        diff = difflib.unified_diff(
            one[name].splitlines(), other[name].splitlines(), first.name, path.name, n=1, lineterm=""
        )
        assert one[name] == other[name], f"{name} is marked as a copy and differs:\n" + "\n".join(diff)


@pytest.mark.parametrize("path", SCRIPTS.values(), ids=names)
def test_every_mark_belongs_to_an_item(path):
    assert path.read_text().splitlines().count(MARK) == len(marked(path)) > 0
    # what people replace, and what must not drift apart
    expected = {"Config", "reward", "score", "evaluate"} | ({"resample"} if "gkd" not in path.stem else {"gkd_loss"})
    assert expected - ({"Config"} if path.stem in WITHOUT_CONFIG else set()) < marked(path).keys()


@pytest.mark.parametrize("first, path", VARIANTS, ids=names)
def test_configs_have_the_same_fields_in_the_same_order(first, path):
    shared = [field for field in fields(path) if not field.startswith(OWN_FIELDS)]
    assert without_out_dir(shared) == without_out_dir(fields(first))
    own = {field.split(":")[0] for field in fields(path)} - {field.split(":")[0] for field in shared}
    assert ("fsdp" in own) == (path.stem.endswith("_ddp") or path.stem == "similarity_grpo")
    assert bool(own - {"fsdp"}) == (path.stem in WITHOUT_CONFIG)


def without_out_dir(fields: list[str]) -> list[str]:
    return [field for field in fields if not field.startswith("out_dir")]


# ---- from one algorithm to the other ----


def renamed(text: str) -> str:
    return text.replace("gspo", "grpo").replace("GSPO", "GRPO")


@pytest.mark.parametrize("gspo, grpo", PAIRS, ids=names)
def test_grpo_shares_everything_but_the_loss_with_gspo(gspo, grpo):
    one, other = items(gspo), items(grpo)
    assert {renamed(name) for name in one} == other.keys()
    for name in ("reward", "score", "resample", "evaluate"):
        assert one[name] == other[name], name
    expected = renamed(one["main"])
    for old, new in DIFFERENCES.items():
        expected = expected.replace(old, new)
    assert "".join(expected.split()) == "".join(other["main"].split()), "\n".join(
        difflib.unified_diff(expected.splitlines(), other["main"].splitlines(), gspo.name, grpo.name, lineterm="")
    )
    # fields: those of the loss are its own
    one, other = (dict(field.split(": ", 1) for field in map(renamed, fields(path))) for path in (gspo, grpo))
    assert one.keys() - other.keys() == {"clip_preset"}
    assert other.keys() - one.keys() == {"loss", "dual_clip", "cispo_cap", "entropy_coef"}
    changed = {name for name in one.keys() & other.keys() if one[name] != other[name]}
    assert changed == {"epsilon_high", "advantage_scale"}


def test_tokens_are_averaged_alike_in_all_grpo_scripts():
    found = {re.search(r"^AGGREGATION = .*$", SCRIPTS[name].read_text(), re.MULTILINE)[0] for name in FAMILIES["grpo"]}
    assert len(found) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_guards_are_alike_in_all_scripts_of_an_algorithm(family):
    found = {re.search(r"^GUARDS = .*?}", SCRIPTS[name].read_text(), re.MULTILINE | re.DOTALL)[0]
             for name in FAMILIES[family]}  # fmt: skip
    assert len(found) == 1


def test_what_similarity_adds_to_main_is_its_own_phase():
    one, other = (items(SCRIPTS[name])["main"].splitlines() for name in ("grpo_ddp", "similarity_grpo"))
    removed = [line[2:] for line in difflib.ndiff(one, other) if line.startswith("- ")]
    added = [line[2:] for line in difflib.ndiff(one, other) if line.startswith("+ ")]
    assert len(removed) <= 7 and len(added) <= 22
    assert not any(word in line for line in removed for word in ("loss", "optimizer", "sampler", "prompts"))


def test_the_options_of_the_poster_script_are_those_of_grpo_ddp():
    one, other = (comments_of(path) for path in (SCRIPTS["grpo_ddp"], POSTER[0]))
    shared = one.keys() & other.keys()
    assert len(shared) >= 45
    # what is said of data, models and losses differs; the rest is the same, word for word
    assert {name for name in shared if one[name] != other[name]} == {
        "device", "epsilon_high", "epsilon_low", "eval_data", "kl_estimator", "learning_rate", "loss",
        "max_new_tokens", "max_prompt_tokens", "policy_model", "reward_url", "train_data", "truncated",
    }  # fmt: skip


def test_a_difference_would_be_seen(tmp_path):
    changed = tmp_path / "changed.py"
    first = SCRIPTS["gspo"]
    changed.write_text(first.read_text().replace("# Eq. 7", "# Eq. 8"))
    assert {name for name, text in marked(first).items() if text != marked(changed)[name]} == {"gspo_loss"}


@pytest.mark.parametrize("path", [*SCRIPTS.values(), ROOT / "gkd" / "teacher_server.py", *POSTER], ids=names)
def test_every_option_has_a_comment_on_its_line(path):
    # it is the text of --help; a line too long for the formatter would be broken up, and lose it
    (config,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "Config"]
    lines = path.read_text().splitlines()
    options = [node for node in config.body if isinstance(node, ast.AnnAssign)]
    assert options and not [n.target.id for n in options if "  # " not in lines[n.end_lineno - 1]]


@pytest.mark.parametrize("path", SCRIPTS.values(), ids=names)
def test_no_script_imports_another(path):
    assert not imported(path) & (SCRIPTS.keys() | FAMILIES.keys())


@pytest.mark.parametrize("path", COMMON, ids=names)
def test_common_imports_no_script(path):
    assert not imported(path) & (SCRIPTS.keys() | FAMILIES.keys())


@pytest.mark.parametrize("path", SCRIPTS.values(), ids=names)
def test_scripts_stay_short(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES.get(path.stem, USUAL_LINES)


def test_no_module_hides_one_of_the_standard_library():
    # python gspo/x.py puts gspo/ on sys.path, so a gspo/queue.py, say, would be what torch imports as queue
    files = [*COMMON, *SCRIPTS.values(), *(ROOT / "grpo" / "poster").glob("*.py")]
    files += [*ROOT.glob("scripts/*.py"), *ROOT.glob("tests/*.py")]
    assert not {path.stem for path in files} & sys.stdlib_module_names
