"""Golden runs: a few steps of every training script, compared with the metrics and weights recorded in golden/.

They hold the numbers still while the scripts and common/ are rebuilt. On a machine of a family that has recorded them
(processor, vector instructions, version of torch) everything is equal bit for bit, since one thread does the same
operations in the same order; elsewhere metrics and sums of weights agree within the bounds of comparing.py.
`python scripts/dev/golden.py` records them again, and shows what has changed.
"""

import functools
import hashlib
import json
import os
import platform
import re
from pathlib import Path

import pytest
import torch
from comparing import comparable, config_of, metric_differences, share, updates
from conftest import ROOT, Run, reward, two_replicas

from common.generation import batches
from common.maths import losses

FOLDER = ROOT / "tests" / "golden"
POSTER = ROOT / "grpo" / "poster" / "poster_grpo.py"
SEPARATE = dict(constants={"ROLLOUT_GPU_IDS": (2,)})  # on the CPU: a copy of the student that samples
TWO = dict(prepare=two_replicas)
MIXED = dict(loss="jsd", beta=0.3, loss_temperature=0.7, lmbda=0.5, steps=6)
SIMILAR = dict(similarity_model="ngrams")
REFRESH = dict(kl_coef=0.1, reference_refresh=2)
MASKED = dict(truncated="mask", overlong_cache=4, dynamic_sampling=1, micro_batch_tokens=60)
LORA = dict(lora_rank=2, kl_coef=0.1)
FSDP = dict(fsdp=True, kl_coef=0.1, micro_batch_tokens=60)
CLIPPED = dict(epochs=2, clip_preset="custom", epsilon_low=0.001, epsilon_high=0.001)
DUAL = dict(loss="grpo", dual_clip=3.0, entropy_coef=0.01, kl_estimator="rho_k3", epochs=2)

# script and name of the case: number of ranks, options, what is handed in
CASES = {
    "gspo plain": (1, dict(kl_coef=0.0), {}),
    "gspo kl": (1, dict(kl_estimator="k2", advantage_scale="batch", micro_batch_tokens=60), {}),
    "gspo refresh": (1, REFRESH, {}),
    "gspo dynamic": (1, dict(dynamic_sampling=2), {}),
    "gspo masked": (1, MASKED, {}),
    "gspo clipped": (1, CLIPPED, {}),
    "gspo lora": (1, LORA, {}),
    "gspo resumed": (1, dict(steps=6), {}),
    "gspo_multigpu two": (1, CLIPPED, TWO),
    "gspo_multigpu refresh": (1, REFRESH | dict(dynamic_sampling=1), TWO),
    "gspo_ddp two": (2, CLIPPED, {}),
    "gspo_ddp fsdp": (2, FSDP, {}),
    "gspo_ddp lora": (2, LORA, {}),
    "grpo grpo": (1, dict(loss="grpo"), {}),
    "grpo dapo": (1, dict(loss="dapo", epochs=2, advantage_scale="batch"), {}),
    "grpo dr_grpo": (1, dict(loss="dr_grpo", kl_estimator="k2"), {}),
    "grpo cispo": (1, dict(loss="cispo", kl_coef=0.0, epsilon_high=0.01, advantage_scale="none"), {}),
    "grpo dppo": (1, dict(loss="dppo", kl_coef=0.0, advantage_scale="rloo", epsilon_low=0.01, epsilon_high=0.01), {}),
    "grpo gspo": (1, dict(loss="gspo", advantage_scale="lite_ppo", sampler_correction="tis"), {}),
    "grpo tokens": (1, dict(loss="sapo", advantage_scale="reinforce_pp", kl_coef=0.1, kl_estimator="in_reward"), {}),
    "grpo dual": (1, DUAL, {}),
    "grpo masked": (1, MASKED, {}),
    "grpo resumed": (1, REFRESH | dict(dynamic_sampling=1, steps=6), {}),
    "grpo lora": (1, LORA, {}),
    "grpo_multigpu two": (1, DUAL, TWO),
    "grpo_ddp two": (2, DUAL, {}),
    "grpo_ddp masked": (2, MASKED, {}),
    "grpo_ddp fsdp": (2, FSDP, {}),
    "gkd reverse": (1, dict(loss="reverse_kl"), {}),
    "gkd forward": (1, dict(loss="forward_kl", aggregation="seq_mean", truncated="mask"), {}),
    "gkd jsd": (1, dict(loss="jsd", beta=0.3), {}),
    "gkd opd": (1, dict(loss="opd", num_minibatches=2), {}),
    "gkd mixed reverse": (1, dict(loss="reverse_kl", lmbda=0.5, steps=6), {}),
    "gkd mixed forward": (1, dict(loss="forward_kl", lmbda=0.4, seq_kd=True, steps=6), {}),
    "gkd mixed jsd": (1, MIXED, {}),
    "gkd offloaded": (1, MIXED | dict(param_offload=True, optimizer_offload="rollout"), {}),
    "gkd lora": (1, dict(lora_rank=2), {}),
    "gkd resumed": (1, MIXED, {}),
    "gkd_multigpu two": (1, MIXED, TWO),
    "gkd_multigpu ahead": (1, dict(overlap=True, param_offload=True), SEPARATE),
    "gkd_ddp mixed": (2, MIXED, {}),
    "gkd_ddp opd": (2, dict(loss="opd", num_minibatches=2), {}),
    "gkd_ddp fsdp": (2, dict(fsdp=True, micro_batch_tokens=60), {}),
    "sft plain": (1, {}, {}),
    "sft turns": (1, dict(rows="chats", aggregation="seq_mean", micro_batch_tokens=60), {}),
    "sft lora": (1, dict(rows="chats", lora_rank=2), {}),
    "sft_ddp two": (2, dict(rows="chats", micro_batch_tokens=60), {}),
    "sft_ddp fsdp": (2, dict(rows="chats", fsdp=True, micro_batch_tokens=60), {}),
    "similarity_grpo discount": (1, SIMILAR | dict(similarity_method="discount"), {}),
    "similarity_grpo advantage": (1, SIMILAR | dict(similarity_method="advantage", similarity_threshold=0.5), {}),
    "similarity_grpo dra": (1, SIMILAR | dict(similarity_method="dra", loss="dr_grpo"), {}),
    "similarity_grpo within": (1, SIMILAR | dict(similarity_method="within", similarity_kappa=2.0), {}),
    "similarity_grpo two": (2, SIMILAR | dict(similarity_method="discount", dynamic_sampling=1), {}),
    "poster_grpo text": (1, dict(policy="text"), {}),
    "poster_grpo images": (1, dict(policy="vlm"), {}),
    "poster_grpo two": (2, dict(policy="text", loss="dapo", kl_coef=0.1), {}),
}
# one of each kind; the others are variants
FAST = {"gspo masked", "gspo clipped", "gspo resumed", "gspo_multigpu refresh", "grpo grpo", "grpo dr_grpo",
        "grpo cispo",
        "grpo dual", "grpo_ddp two", "gkd reverse", "gkd opd", "gkd mixed jsd", "sft turns", "similarity_grpo discount",
        "poster_grpo text"}  # fmt: skip


@functools.cache
def family() -> str:
    """What decides how this machine rounds."""
    text = Path("/proc/cpuinfo").read_text()
    processor = " ".join(dict(re.findall(r"^(vendor_id|cpu family|model)\s*: (.*)$", text, re.M)).values())
    threads = os.environ.get("RL_HAND_TEST_THREADS", "1")
    return ", ".join([
        platform.machine(), processor, torch.backends.cpu.get_cpu_capability(), f"torch {torch.__version__[:6]}",
        f"threads {threads}", f"mkldnn {torch.backends.mkldnn.enabled}",
    ])  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory, chats_file) -> dict[str, dict]:
    """Options: untrained policies, text and vision-language, with eight posters to write; chats to learn."""
    from grpo.poster import synthetic, toys

    tokenizer, folder = toys.build_tokenizer(), tmp_path_factory.mktemp("posters")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(synthetic.record(seed, 0)) + "\n" for seed in range(8)))
    options = {"chats": dict(train_data=chats_file, eval_data=chats_file)}
    for kind, build, saved in (
        ("text", toys.build_llama, tokenizer), ("vlm", toys.build_qwen_vl, toys.build_processor(tokenizer)),
    ):  # fmt: skip
        torch.manual_seed(0)
        build(tokenizer).save_pretrained(folder / kind)
        saved.save_pretrained(folder / kind)
        options[kind] = dict(policy_model=folder / kind, train_data=rows, eval_data=rows, micro_batch_tokens=400)
    return options


def run_case(launcher, files, name: str, out_dir: Path, **changes) -> Run:
    ranks, options, given = CASES[name]
    script, options, given = name.split()[0], options | changes, dict(given)
    if "policy" in options:
        script, given["rewards"] = POSTER, [reward]
        options = files[options.pop("policy")] | {"kl_coef": 0.0} | options
    if "rows" in options:
        options = files[options.pop("rows")] | options
    if name.endswith("resumed"):
        launcher.run(script, out_dir, ranks, **{**given, **options, "steps": 3}).succeeded()
    given["prepare"] = changes.pop("prepare", given.get("prepare"))
    return launcher.run(script, out_dir, ranks, **{**options, **given}).succeeded()


def signed_sums(weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """A number for each tensor: the sum of its elements, every other pair of them negative, in fp64."""
    return {name: (w.double().flatten() * _signs(w.numel())).sum().item() for name, w in sorted(weights.items())}


def _signs(count: int) -> torch.Tensor:
    return 1.0 - (torch.arange(count, dtype=torch.float64) // 2 % 2) * 2


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    folder = run.out_dir / run.checkpoints[-1]
    return load_file(next(path for path in sorted(folder.glob("*model.safetensors"))))


def record(run: Run) -> dict:
    """What is kept of a run."""
    weights = weights_of(run)
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return {
        "lines": comparable(run.lines),
        "sums": signed_sums(weights),
        "samples": hashlib.sha256(json.dumps(run.samples).encode()).hexdigest()[:16],
        "weights": {family(): digest.hexdigest()[:16]},
    }


def differences(found: dict, expected: dict, config: dict, elements: dict[str, int]) -> list[str]:
    """What a record shows that the expected one does not; exact if this family of machines has recorded it."""
    if exact := expected["weights"].get(family()):
        changed = [key for key in ("lines", "samples", "sums") if found[key] != expected[key]]
        changed += ["weights"] * (found["weights"][family()] != exact)
        details = _first_lines(found["lines"], expected["lines"])
        return [f"not bit for bit the recorded {', '.join(changed)}", *details] if changed else []
    problems, ended = metric_differences(found["lines"], expected["lines"], config)
    if problems or ended:
        return problems
    for name, value in expected["sums"].items():
        most = config["learning_rate"] * updates(config) * (share() * elements[name] + 4)
        if not abs(found["sums"].get(name, float("nan")) - value) <= most:
            problems.append(f"{name}: signed sum {found['sums'].get(name)}, not {value} within {most:.2g}")
    return problems


def _first_lines(lines: list[dict], expected: list[dict]) -> list[str]:
    for line, other in zip(lines, expected, strict=False):
        if line != other:
            return [f"step {line.get('step')}: {name} {line.get(name)!r}, not {other.get(name)!r}"
                    for name in sorted({*line, *other}) if line.get(name) != other.get(name)]  # fmt: skip
    return []


def path_of(name: str) -> Path:
    return FOLDER / f"{name.split()[0]}.json"


def load(name: str) -> dict:
    return json.loads(path_of(name).read_text())[name]


def store(name: str, entry: dict) -> None:
    """Writes a record into its file; one line of metrics on one line of text, so that a difference can be read."""
    path = path_of(name)
    entries = json.loads(path.read_text()) if path.exists() else {}
    entries[name] = entry
    parts = []
    for key in sorted(entries):
        fields = []
        for field, value in entries[key].items():
            text = json.dumps(value)
            if field == "lines":
                text = "[\n   " + ",\n   ".join(json.dumps(line) for line in value) + "\n  ]"
            fields.append(f'  "{field}": {text}')
        parts.append(f'"{key}": {{\n' + ",\n".join(fields) + "\n}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.parity, id=n.replace(" ", "-")) for n in CASES]
)
def test_a_run_is_the_recorded_one(launcher, files, tmp_path, pytestconfig, name):
    run = run_case(launcher, files, name, tmp_path / "run")
    found, elements = record(run), {key: weight.numel() for key, weight in weights_of(run).items()}
    if pytestconfig.getoption("--record"):
        old = load(name) if path_of(name).exists() and name in json.loads(path_of(name).read_text()) else None
        changed = differences(found, old, config_of(run), elements) if old else ["new"]
        if not changed:  # another family of machines may add its weights
            found = old | {"weights": old["weights"] | found["weights"]}
        store(name, found)
        print(f"{name}: " + ("\n    ".join(changed) if changed else "as recorded"))
        return
    problems = differences(found, load(name), config_of(run), elements)
    assert not problems, "\n".join(problems)


def other_sign(module) -> None:
    real = losses.clipped_surrogate
    losses.clipped_surrogate = lambda *arguments: -real(*arguments)


def other_index(module) -> None:
    real = batches.RolloutBatch.minibatches

    def minibatches(*arguments, **options):
        cut = real(*arguments, **options)
        first = next(micro for micro in cut[0] if len(micro.rows) > 1)
        first.rows = first.rows.flip(0)  # rows get the advantages of others
        return cut

    batches.RolloutBatch.minibatches = minibatches


@pytest.mark.parametrize("change", [dict(prepare=other_sign), dict(prepare=other_index), dict(seed=1)],
                         ids=["sign of the loss", "index in a minibatch", "seed"])  # fmt: skip
def test_a_golden_run_fails_when_one_thing_is_wrong(launcher, files, tmp_path, change):
    run = run_case(launcher, files, "gspo clipped", tmp_path / "run", **change)
    found, elements = record(run), {key: weight.numel() for key, weight in weights_of(run).items()}
    expected = load("gspo clipped")
    assert differences(found, expected, config_of(run), elements)
    # and where bits are not compared
    assert differences(found, expected | {"weights": {}}, config_of(run), elements)
