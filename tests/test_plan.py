"""The plan of memory: counts as published models and real objects have them, peaks as measured, advice that holds."""

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, build_model, tiny_model
from test_tools import load_script
from torch.autograd.graph import saved_tensors_hooks

from common.base import devices
from common.base.devices import GIB
from common.generation.flash_cache import FlashCache
from common.generation.scheduler import Space
from common.generation.sdpa_cache import SdpaCache
from common.model import attention, lora
from common.planning import footprint, layouts, plan, shapes
from common.training import optim

plan_memory, random_vlm = load_script("plan_memory"), load_script("random_vlm")


def text(kind: str, V: int, H: int, I: int, L: int, heads: int, kv: int, tied: bool) -> dict:  # noqa: E741
    return dict(model_type=kind, vocab_size=V, hidden_size=H, intermediate_size=I, num_hidden_layers=L,
                num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=tied)  # fmt: skip


def vlm(shape: str) -> dict:
    inner = dict(**random_vlm.SHAPES[shape], rope_parameters={"rope_type": "default", "rope_theta": 1e6,
                                                              "mrope_section": [16, 24, 24]})  # fmt: skip
    vision = random_vlm.VISION | {"out_hidden_size": inner["hidden_size"]}
    return dict(model_type="qwen2_5_vl", text_config=inner, vision_config=vision,
                tie_word_embeddings=inner["tie_word_embeddings"])  # fmt: skip


PUBLISHED = {
    "0.5b": text("qwen2", 151936, 896, 4864, 24, 14, 2, True),
    "1.5b": text("qwen2", 151936, 1536, 8960, 28, 12, 2, True),
    "7b": text("qwen2", 152064, 3584, 18944, 28, 28, 4, False),
    "70b": text("llama", 128256, 8192, 28672, 80, 64, 8, False),
    "tiny": text("qwen2", 64, 32, 64, 2, 4, 2, True), "3b-vl": vlm("3b"), "7b-vl": vlm("7b"),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders that hold nothing but a config."""
    folders = {name: tmp_path_factory.mktemp(name) for name in PUBLISHED}
    for name, folder in folders.items():
        (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return {name: str(folder) for name, folder in folders.items()}


def loaded(script: str, **options):
    """Module and Config of a script, from a command line."""
    return layouts.load(ROOT / script, [text for name, value in options.items() for text in (f"--{name}", str(value))])


def planned(script: str, ranks: int = 1, prompt_tokens: int = 0, visual_tokens=None, on_gpu=True, **options):
    module, cfg = loaded(script, **options)
    given = dict(ranks=ranks, prompt_tokens=prompt_tokens, visual_tokens=visual_tokens, on_gpu=on_gpu)
    return plan.of(cfg, layouts.all_ranks(module, cfg, ranks), **given)


def names_of(models, script: str, student: str, teacher: str = "1.5b") -> dict[str, str]:
    """Options that name the models."""
    if script.rpartition("/")[2].startswith("gkd"):
        return dict(student_model=models[student], teacher_model=models[teacher])
    return dict(policy_model=models[student])


def test_parameters_are_those_of_the_published_models(models, tmp_path):
    counts = {name: shapes.of(models[name]).params for name in ("0.5b", "1.5b", "7b")}
    assert counts == {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "7b": 7_615_616_512}
    # a classifier with one output in place of the vocabulary
    assert shapes.of(models["7b"], "reward").params == 7_615_616_512 - 152_064 * 3584 + 3584
    assert shapes.of(models["7b"]).per_rank * 16 == 40_370_176  # as peft counts with rank 16 on all linear layers
    assert shapes.of(models["7b"], targets="q_proj,v_proj").per_rank == 28 * (3584 + 3584 + 3584 + 512)
    state = torch.get_rng_state()
    shape = shapes.of(models["3b-vl"])
    assert torch.equal(torch.get_rng_state(), state)
    assert shape.levels == 1 and shape.params - shape.vision == 3_085_938_688 and shape.vision > 6e8
    assert shapes.of(models["7b"] + "/config.json") == shapes.of(models["7b"])
    # a token goes through a few experts only
    shared = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=40)
    mixtral = dict(num_local_experts=4, num_experts_per_tok=3)
    for kind, experts, inner in (("qwen2_moe", shared, 2 * 16 + 40), ("mixtral", mixtral, 3 * 64)):
        (path := tmp_path / f"{kind}.json").write_text(json.dumps(text(kind, 64, 32, 64, 1, 4, 2, False) | experts))
        assert shapes.of(str(path)).inner == inner


@pytest.mark.parametrize(("config", "said"), [
    (dict(model_type="bert"), "BertLMHeadModel: an encoder"), (dict(hidden_size=8), "Should have a `model_type`"),
])  # fmt: skip
def test_what_is_wrong_with_a_model_is_one_line_with_its_name(tmp_path, config, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^model ") as raised:
        shapes.of(str(tmp_path))
    message = str(raised.value)
    assert str(tmp_path) in message and said in message and "\n" not in message and len(message) < 500


def test_a_tiny_model_and_the_cache_take_what_the_plan_says(models):
    """Weights, adapters, optimizer state and cache as allocated by the objects themselves, whatever the dtype."""
    layers = [attention.Layer(torch.nn.Module(), 2, 128, 6)] * 28  # of the 1.5b model
    sizes = dict(batch_size=4, group_size=8, max_new_tokens=100, max_prompt_tokens=300)
    space = Space(rows=32, batch=32, prompts=4, group_size=8, longest=300, tokens=100)
    for dtype, kind, own in (("fp32", torch.float32, SdpaCache), ("bf16", torch.bfloat16, FlashCache)):
        options, model = dict(policy_model=models["tiny"], dtype=dtype), build_model("qwen2").to(kind)
        always = planned("gspo/gspo.py", **options).gpus[0].always
        assert always["weights"] == sum(p.nbytes for p in model.parameters())
        assert always["AdamW"] == optim.AdamW(model, 1e-3).offload() * GIB  # masters and moments; fp32 ones stay
        adapted = lora.add(model, lora.Options(4, 8.0))
        always = planned("gspo/gspo.py", lora_rank=4, kl_coef=0.1, **options).gpus[0].always
        assert always["weights"] == sum(p.nbytes for p in adapted.parameters())
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        assert always["AdamW"] == trained * (8 if dtype == "fp32" else 12) and "reference" not in always
        gpu = planned("gspo/gspo.py", policy_model=models["1.5b"], dtype=dtype, **sizes).gpus[0]
        assert gpu.groups * gpu.cache == own(layers, kind, torch.device("cpu")).bytes(space)


def kept_per_token(adapters: bool, layers: int) -> float:
    """Numbers in bf16 that a compiled model keeps per token for its backward pass."""
    model = tiny_model("qwen2", hidden_size=64, intermediate_size=256, num_hidden_layers=layers)
    model = model.to(torch.bfloat16).train()
    if adapters:
        model = lora.add(model, lora.Options(1, 1.0))
    support, tokens = attention.install(model), 128
    torch._dynamo.reset()
    for block in attention.decoder_layers(model, support):
        block.compile(backend="aot_eager_decomp_partition", dynamic=True)
    own, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), x)  # held, so that no other takes its address
        return x

    inputs = dict(input_ids=torch.ones(1, tokens, dtype=torch.long), position_ids=torch.arange(tokens)[None])
    inputs |= attention.inputs(torch.device("cpu"), attention.Packed.of([tokens], torch.device("cpu")))
    with saved_tensors_hooks(pack, lambda x: x):
        model.get_decoder()(**inputs)
    return sum(size for size, _ in found.values()) / tokens / 2


@pytest.mark.families
@pytest.mark.parametrize("adapters", [False, True])
def test_compiled_layers_keep_what_the_factors_say(adapters):
    layer = kept_per_token(adapters, 3) - kept_per_token(adapters, 2)
    shape = SimpleNamespace(hidden=64, queries=64, keys=64, inner=256)
    # the CPU's kernel writes its output transposed, so that the next layer takes a copy; ranks and statistics are small
    assert layer == pytest.approx(footprint.COMPILED.of(shape) + 64, rel=0.03)


WHOLE = dict(batch_size=8, group_size=8, num_minibatches=1, max_new_tokens=256, micro_batch_tokens=32768)


# peaks that were measured on H100 and H200 cards (docs/speed.md, gkd/README.md, grpo/poster/README.md)
@pytest.mark.parametrize(("gib", "script", "model", "prompt_tokens", "options"), [
    (13.8, "gspo/gspo.py", "0.5b", 128,
     dict(batch_size=8, group_size=8, num_minibatches=4, max_new_tokens=256, kl_coef=0.1)),
    (24.2, "gspo/gspo.py", "0.5b", 128, WHOLE),
    (56.4, "gspo/gspo.py", "1.5b", 128, WHOLE),
    (20.4, "gkd/gkd.py", "0.5b", 128, dict(batch_size=64, group_size=1, num_minibatches=1, max_new_tokens=256,
                                           loss="jsd", micro_batch_tokens=8064)),
    (122.4, "grpo/poster/poster_grpo.py", "7b-vl", 1006,
     dict(batch_size=8, group_size=8, max_new_tokens=512, gradient_checkpointing=True)),
])  # fmt: skip
def test_planned_peaks_are_the_measured_ones(models, gib, script, model, prompt_tokens, options):
    visual = 464 if "vl" in model else None
    options = names_of(models, script, model) | options
    run = planned(script, prompt_tokens=prompt_tokens, visual_tokens=visual, **options)
    assert run.for_capacity(80 * GIB if gib < 20 else 140 * GIB).peak(0) / GIB == pytest.approx(gib, rel=0.1)


def test_smaller_settings_take_less(models):
    run = planned("gspo/gspo.py", policy_model=models["1.5b"], prompt_tokens=300)  # known prompts are cut, too
    assert (
        run.with_options(max_prompt_tokens=200).longest == 200
        and run.with_options(max_prompt_tokens=400).longest == 300
    )
    base = planned("gspo/gspo_ddp.py", ranks=2, policy_model=models["1.5b"], kl_coef=0.1)
    sizes = [base.with_options(micro_batch_tokens=n).peak(0) for n in (640, 1024, 2048, 8192, 10240)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-2]
    assert sizes[-1] == base.with_options(micro_batch_tokens=10**6).peak(0)  # a minibatch has no more
    full = base.peak(0)
    for changes in (dict(gradient_checkpointing=True), dict(optimizer_offload="always"), dict(fsdp=True),
                    dict(lora_rank=16, load_bits=4), dict(kl_coef=0.0)):  # fmt: skip
        assert base.with_options(**changes).peak(0) < full, changes
    assert base.with_options(compile=False).peak(0) > full == base.peak(1)  # compiled layers keep less


def test_where_optimizer_state_shards_and_the_copy_that_samples_are(models):
    base = planned("gspo/gspo_ddp.py", ranks=2, policy_model=models["1.5b"])
    state = 12 * shapes.of(models["1.5b"]).params
    always, during = base.with_options(optimizer_offload="always"), base.with_options(optimizer_offload="rollout")
    assert always.host == during.host == 2 * state and base.host == 0
    gpu = during.gpus[0]
    assert "AdamW" not in gpu.always.keys() | gpu.phases["rollout"].keys()
    assert gpu.phases["loss"]["AdamW"] == gpu.phases["step"]["AdamW"] == state
    # with one optimizer step per rollout it comes back when the activations have gone
    assert "AdamW" not in during.with_options(num_minibatches=1).gpus[0].phases["loss"]
    assert "AdamW" not in always.gpus[0].phases["loss"]
    assert always.gpus[0].phases["step"]["streamed state"] < state / 10
    assert not always.for_capacity(100 * GIB, host=36 * GIB).fits()
    assert always.for_capacity(100 * GIB, host=64 * GIB).fits()
    params = shapes.of(models["7b"]).params
    gpu = planned("gspo/gspo_ddp.py", 8, policy_model=models["7b"], fsdp=True).gpus[0]
    assert gpu.always["weights"] == gpu.phases["step"]["gradients"] == pytest.approx(4 * params / 8)
    assert gpu.always["AdamW"] == pytest.approx(8 * params / 8) and gpu.always["copy to sample"] == 2 * params
    assert planned("gspo/gspo_ddp.py", 1, policy_model=models["7b"], fsdp=True).gpus[0].always["weights"] == 2 * params


def test_roles_of_several_gpus_in_one_process(models):
    options = dict(policy_model=models["0.5b"], kl_coef=0.1)
    run = planned("gspo/gspo_multigpu.py", reward_model=models["1.5b"], **options)
    first, second, third = run.gpus.values()
    weights = 2 * shapes.of(models["0.5b"]).params
    assert first.always["weights"] == second.always["weights"] == third.always["reference"] == weights
    assert first.phases["step"]["gradients"] == second.phases["step"]["gradients"] == weights
    assert first.always["AdamW"] == 6 * weights and "AdamW" not in second.always
    assert third.always["copy to sample"] == weights and "gradients" not in str(third.phases)
    assert third.always["reward model"] == 2 * shapes.of(models["1.5b"], "reward").params
    assert first.groups + second.groups + third.groups >= 16
    # a reference on a GPU that two ranks share is there once for each
    shared = [{"policy": (rank,), "reference": (2,)} for rank in range(2)]
    run = plan.of(loaded("gspo/gspo_ddp.py", **options)[1], shared, ranks=2)
    assert run.gpus[2].always["reference"] == 2 * weights


def test_a_teacher_on_two_gpus_and_one_that_waits_in_cpu_memory(models):
    _, cfg = loaded("gkd/gkd_multigpu.py", **names_of(models, "gkd", "0.5b"))
    teacher, student = (2 * shapes.of(models[name]).params for name in ("1.5b", "0.5b"))
    roles = {"student": (0,), "rollout": (0,), "teacher": (1, 2)}
    run = plan.of(cfg, roles)
    assert sum(run.gpus[i].always["teacher"] for i in (1, 2)) == pytest.approx(teacher)
    assert run.gpus[0].phases["loss"]["head of the teacher"] == (head := 2 * 151936 * 1536)
    cfg = dataclasses.replace(cfg, param_offload=True)
    away = plan.of(cfg, roles | {"teacher": (0,)})
    gpu = away.gpus[0]
    assert (gpu.always["weights"], gpu.always["teacher"]) == (0, head) and away.host == student + teacher - head
    assert (gpu.phases["teacher"]["teacher"], gpu.phases["rollout"]["weights"]) == (teacher - head, student)
    two = plan.of(cfg, {"student": (0, 1), "rollout": (0, 1), "teacher": (0,)})
    assert two.host - away.host == pytest.approx(student, abs=2)  # every replica of a student takes CPU memory


def test_completions_wait_where_memory_is_short(models):
    options = dict(lora_rank=16, max_new_tokens=1024, batch_size=64, num_minibatches=64, gradient_checkpointing=True)
    run = planned("gspo/gspo.py", policy_model=models["7b"], **options)
    gpu, short = run.gpus[0], run.for_capacity(30 * GIB)
    assert gpu.at_once() == 64 and 1 <= gpu.at_once(30 * GIB) < 64
    assert short.peak(0) <= 30 * GIB < run.peak(0) and "of 64 prompts are sampled at once" in str(short)
    assert (
        run.with_options(rollout_batch=33).gpus[0].at_once() == 4
        and run.with_options(rollout_batch=1).gpus[0].at_once() == 1
    )
    # the frozen weights stay beside those with adapters where there is room, else in CPU memory
    assert short.pinned > run.for_capacity(140 * GIB).pinned == 0


@pytest.mark.parametrize("script", layouts.scripts())
def test_every_script_is_planned(models, script):
    for options in ({}, dict(optimizer_offload="always", gradient_checkpointing=True), dict(lora_rank=8, load_bits=8)):
        run = planned(script, **names_of(models, script, "0.5b"), **options)
        assert str(run).count("\nGPU ") >= len(run.gpus)
        assert run.for_capacity(1000 * GIB).fits() and not run.for_capacity(GIB).fits()


def test_given_conversations_count_with_all_their_tokens(models):
    usual = dict(policy_model=models["1.5b"], batch_size=4, max_prompt_tokens=512, max_new_tokens=128)
    run = planned("gkd/sft.py", **usual, max_tokens=2048)
    assert run.sequence == 2048 and run.completion == 2048 - 512 and "512 + 1536 tokens" in str(run)
    assert run.minibatch == 4 * 2048  # none of them shares a prompt
    short = planned("gkd/sft.py", **usual, max_tokens=300)
    assert short.sequence == 512 + 128  # an evaluation may be longer than what is learned
    # the cache holds what is sampled only
    assert run.gpus[0].cache == short.gpus[0].cache
    assert run.peak(0) > short.peak(0)


def test_advice_may_shorten_conversations(models):
    options = dict(policy_model=models["7b"], max_tokens=65536, max_prompt_tokens=65536, micro_batch_tokens=65536)
    run = planned("gkd/sft.py", **options).for_capacity(24 * GIB)
    advice = run.advice()
    assert not run.fits() and advice.plan.fits() and advice.changes["max_tokens"] < 65536
    assert "--max_tokens" in str(advice) and run.with_options(**advice.changes).fits()
    assert (
        "max_tokens" not in planned("gspo/gspo.py", policy_model=models["7b"]).for_capacity(16 * GIB).advice().changes
    )


@pytest.mark.parametrize(("script", "ranks", "model", "gib"), [
    ("gspo/gspo.py", 1, "1.5b", 40), ("gspo/gspo_ddp.py", 8, "7b", 80), ("gspo/gspo_multigpu.py", 1, "1.5b", 24),
    ("grpo/poster/poster_grpo.py", 4, "7b-vl", 48),
])  # fmt: skip
def test_advice_holds_and_asks_for_no_more_than_is_needed(models, script, ranks, model, gib):
    run = planned(script, ranks, policy_model=models[model]).for_capacity(gib * GIB)
    advice = run.advice()
    assert not run.fits() and advice.changes and advice.plan.fits() and run.with_options(**advice.changes).fits()
    for name, value in advice.changes.items():
        assert f"--{name} {str(value).lower()}" in str(advice)
        with contextlib.suppress(ValueError):  # where the others are not possible without it
            assert not run.with_options(**{key: advice.changes[key] for key in advice.changes.keys() - {name}}).fits()


def test_advice_begins_with_what_costs_least(models):
    def first(gib, **options):
        return planned("gspo/gspo_ddp.py", 2, **({"policy_model": models["1.5b"]} | options)).advice(gib * GIB).changes

    assert first(80) == {}
    assert list(first(36)) == ["micro_batch_tokens"]
    assert first(36, micro_batch_tokens=640 * 2) == {}
    assert "lora_rank" not in first(24) and "lora_rank" in first(6)
    sharded = first(40, fsdp=True, policy_model=models["7b"])  # which adapters cannot be
    assert sharded["lora_rank"] and sharded["fsdp"] is False
    assert list(first(80, policy_model=models["7b"], gradient_checkpointing=True)) == ["optimizer_offload"]
    # shards and recomputed activations before small micro-batches, each of which would gather all layers again
    assert first(24) == {"gradient_checkpointing": True, "fsdp": True}
    # small micro-batches come after all else that changes no result
    options = dict(max_new_tokens=64, max_prompt_tokens=64, num_minibatches=1)
    run = planned("gspo/gspo.py", policy_model=models["1.5b"], **options)
    found = [run.advice(gib * GIB).changes for gib in (8.25, 8.75, 15, 18, 33, 36)]
    small = [changes for changes in found if changes["micro_batch_tokens"] < 8192 / 4]
    assert 0 < len(small) < len(found)
    assert all(changes["gradient_checkpointing"] and changes["optimizer_offload"] == "always" for changes in small)


def test_advice_counts_cpu_memory(models):
    run = planned("gspo/gspo_ddp.py", 4, policy_model=models["1.5b"], dtype="fp16").for_capacity(24 * GIB)
    advice = run.advice()
    state = 4 * 12 * shapes.of(models["1.5b"]).params
    assert advice.changes["optimizer_offload"] == "always" and advice.plan.pinned == state
    assert f"{state / GIB:.1f} GiB of CPU memory" in str(advice)
    short = run.for_capacity(24 * GIB, host=60 * GIB).advice()
    assert "optimizer_offload" not in short.changes and short.plan.fits()
    # one process of four, as a script asks for it
    one = plan.of(loaded("gspo/gspo_ddp.py", policy_model=models["1.5b"], dtype="fp16")[1], {"policy": (0,)}, ranks=4)
    assert "GiB of CPU memory for each process" in str(one.advice(24 * GIB))


def test_what_the_script_would_refuse_is_not_advised(models):
    for options in (dict(dtype="fp16"), dict(kl_coef=0.1, reference_refresh=5)):
        run = planned("gspo/gspo_ddp.py", 2, policy_model=models["1.5b"], **options)
        assert not any("fsdp" in run.advice(gib * GIB).changes for gib in (12, 24))
        with pytest.raises(ValueError, match="fsdp = True"):
            run.with_options(fsdp=True)
    # neither with a reference elsewhere, nor with a vision tower that is trained
    _, cfg = loaded("gspo/gspo_ddp.py", policy_model=models["1.5b"], kl_coef=0.1)
    for where, possible in ((None, True), (2, False)):
        roles = [{"policy": (i,), "reference": (where or i,)} for i in range(2)]
        assert ("fsdp" in plan.of(cfg, roles, ranks=2).advice(24 * GIB).changes) == possible
    for frozen in (True, False):
        options = dict(policy_model=models["3b-vl"], batch_size=8, freeze_vision=frozen)
        changes = planned("grpo/poster/poster_grpo.py", 4, **options).advice(40 * GIB).changes
        assert changes and ({"fsdp", "lora_rank"} & changes.keys() != set()) == frozen


def test_where_nothing_helps_the_size_that_would_is_right(models):
    for script, ranks, model, gib in (("gspo/gspo_ddp.py", 2, "70b", 24), ("gspo/gspo.py", 1, "7b", 4)):
        run = planned(script, ranks, policy_model=models[model])
        advice = run.advice(gib * GIB)
        said = str(advice)
        assert said.startswith("nothing helps: with --lora_rank 16 --load_bits 4") and not advice.changes
        assert "max_new_tokens" not in said and "max_prompt_tokens" not in said
        needed = int(said.split("take GPUs of ")[1].split(" GiB")[0])
        assert advice.plan.fits(needed * GIB) and not advice.plan.fits((needed - 1) * GIB)
        assert run.advice(needed * GIB).changes
    run = planned("gspo/gspo.py", policy_model=models["1.5b"], optimizer_offload="always", lora_rank=16)
    said = str(run.for_capacity(80 * GIB, host=2**20).advice())
    assert said.startswith("nothing helps: ") and "GiB of CPU memory; 0.0" in said
    # a teacher can wait in CPU memory, or be served elsewhere
    sizes = (("1.5b", "7b", 24), ("0.5b", "70b", 24), ("0.5b", "0.5b", 1.5))
    waits, served, small = (planned("gkd/gkd.py", **names_of(models, "gkd", student, teacher)).advice(gib * GIB)
                            for student, teacher, gib in sizes)  # fmt: skip
    assert waits.changes["param_offload"] and waits.plan.fits() and "lora_rank" not in waits.changes
    assert "--teacher_url" in str(served) and "--teacher_url" not in str(small) and "nothing helps" in str(small)


def test_a_minibatch_counts_a_prompt_once_where_it_is_computed_once(models):
    def tokens(script="gspo/gspo.py", roles=None, **options):
        options = dict(batch_size=6, max_prompt_tokens=100, max_new_tokens=10) | options
        return planned(script, **names_of(models, script, "0.5b"), **options).minibatch

    assert tokens(group_size=8, num_minibatches=1) == 48 * 10 + 6 * 100
    assert tokens(group_size=8, num_minibatches=4) == 12 * 10 + 6 * 100  # every step sees every prompt
    assert tokens(group_size=4, num_minibatches=8) == 3 * 110
    blocks = dict(group_size=4, num_minibatches=3, loss="jsd")  # of distillation: blocks of the batch
    assert tokens("gkd/gkd.py", **blocks) == 8 * 10 + 4 * 100
    many = planned("gspo/gspo_ddp.py", ranks=2, policy_model=models["0.5b"], batch_size=6, group_size=8,
                   num_minibatches=1, max_prompt_tokens=100, max_new_tokens=10)  # fmt: skip
    assert many.minibatch == 24 * 10 + 3 * 100
    # ranks that share a model must not count on it, since they cannot halve a micro-batch
    assert many.with_options(fsdp=True).minibatch == 24 * 110


def test_the_largest_micro_batch_and_the_most_completions(models):
    run = planned("gspo/gspo.py", policy_model=models["0.5b"], kl_coef=0.1).for_capacity(16 * GIB)
    tokens, completions = run.largest()
    assert (
        run.with_options(micro_batch_tokens=tokens).fits()
        and not run.with_options(micro_batch_tokens=2 * tokens).fits()
    )
    more = run.with_options(batch_size=completions // 8 + 8)
    assert more.gpus[0].at_once(16 * GIB) * 8 == pytest.approx(completions, abs=16 * 8)
    assert run.largest(4 * GIB)[0] == 0 and run.largest(1000 * GIB)[0] == run.minibatch
    for tokens in (1, 3000, 10**6):  # a run that fits is never told to take less
        there = run.with_options(micro_batch_tokens=tokens)
        most = there.largest()[0]
        assert most <= run.minibatch and (not most or there.with_options(micro_batch_tokens=most).fits())
        assert not there.fits() or most >= min(tokens, run.minibatch)


@pytest.mark.parametrize(("script", "options"), [
    ("gspo/gspo.py", {}), ("gspo/gspo.py", dict(batch_size=1024, group_size=16)), ("gspo/gspo.py", dict(batch_size=8)),
    ("gkd/gkd.py", dict(loss="jsd")),
])  # fmt: skip
def test_micro_batches_are_as_large_as_leaves_a_reserve(models, script, options):
    run = planned(script, **(names_of(models, script, "1.5b") | dict(batch_size=64, num_minibatches=1) | options))
    chosen = []
    for gib in (20, 48, 52, 68, 80, 140, 1000):  # with 52 and 68 larger ones would fit, but leave no reserve
        there = run.for_capacity(gib * GIB).with_largest_micro_batches()
        tokens = there.cfg.micro_batch_tokens
        assert f", {tokens} in a micro-batch" in str(there) and there.capacity == {0: gib * GIB}
        doubled = there.with_options(micro_batch_tokens=2 * tokens)
        reserved = {0: (1 - plan.RESERVE) * gib * GIB}
        assert tokens == 8192 or there.fits(reserved)
        assert tokens >= min(run.minibatch, 32768) or not doubled.fits(reserved)
        chosen.append(tokens)
    assert chosen == sorted(chosen) and chosen[0] == 8192 < chosen[-2]
    assert chosen[-1] == 32768 or chosen[-1] < 2 * run.minibatch  # no more than there is to fill them with


def test_only_ranks_that_cannot_halve_micro_batches_start_below_the_usual_ones(models):
    run = dict(script="gspo/gspo_ddp.py", ranks=2, policy_model=models["7b"], max_prompt_tokens=128)
    capacity = 85 * GIB
    sharded, whole = (
        planned(**run, fsdp=fsdp).for_capacity(capacity).with_largest_micro_batches() for fsdp in (True, False)
    )
    tokens = sharded.cfg.micro_batch_tokens
    assert sharded.sequence <= tokens < 8192 == whole.cfg.micro_batch_tokens and not whole.fits()
    assert sharded.fits() and not sharded.with_options(micro_batch_tokens=2 * tokens).fits()


def test_all_ranks_and_a_resumed_run_have_the_same_micro_batches(models, monkeypatch, capsys, tmp_path):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(devices, "free_bytes", lambda device: 140 * GIB)

    def start(model=models["1.5b"], resumed=0, **options):
        _, cfg = loaded("gspo/gspo.py", policy_model=model, batch_size=64, num_minibatches=1, **options)
        found = plan.require_fit(cfg, devices.Layout((gpu,), reference=gpu, reward=gpu), resumed_tokens=resumed)
        return plan.micro_batch_tokens(cfg, found)

    most = start()
    assert most > 8192 and f"micro_batch_tokens = 0: micro-batches of up to {most} tokens" in capsys.readouterr().out
    assert start(resumed=5000) == 5000 and start(resumed=10**6) == most  # chosen again, if they fit
    capsys.readouterr()
    assert start(resumed=5000, micro_batch_tokens=3000) == 3000 and "= 0: micro" not in capsys.readouterr().out
    monkeypatch.setattr(plan.distributed, "gather_objects", lambda value: [value, 12000])  # of the other rank
    assert start() == 12000 and start(resumed=5000) == 5000
    taken = []
    monkeypatch.setattr(plan.distributed, "gather_objects", lambda value: taken.append(value) or [value])
    assert start(str(tmp_path / "missing" / "model")) == 8192 == taken.pop()  # without a plan, others still wait
    start(micro_batch_tokens=3000)
    assert not taken


def test_a_run_that_cannot_fit_is_refused_with_what_to_change(models, monkeypatch, capsys, tmp_path):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    def start(gib, model="1.5b", script="gspo/gspo.py", **options):  # on GPUs that are not there
        _, cfg = loaded(script, policy_model=models.get(model, model), **options)
        monkeypatch.setattr(devices, "free_bytes", lambda device: gib * GIB)
        capsys.readouterr()
        return plan.require_fit(cfg, devices.Layout((gpu,), reference=gpu, reward=gpu)), capsys.readouterr().out

    with pytest.raises(ValueError, match=r"about 2\d\.\d GiB: 22\.8 GiB can be used; it would fit with --micro"):
        start(24)
    assert "does not fit" in capsys.readouterr().out
    with pytest.raises(ValueError, match="nothing helps"):
        start(1)
    run, said = start(24, force=True)
    assert run.capacity == {0: 24 * GIB} and "starting all the same" in said
    # a model that cannot be read ends nothing
    (tmp_path / "config.json").write_text("{")
    for model in (tmp_path / "missing" / "model", tmp_path):
        reason, said = start(24, str(model))
        assert reason in said and reason.startswith("no plan of memory: ")
    # too large a micro-batch is only said
    assert "micro_batch_tokens = 8192 may be too many" in start(34)[1]
    said = start(80)[1]
    assert "plan:" in said and "GPU 0" in said and "may be too many" not in said
    # CPU memory is that of all processes of the machine, here 17.3 GiB each
    options = dict(script="gspo/gspo_ddp.py", optimizer_offload="always")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"17\.3 GiB.*this machine has 4\.0; it would"):
        patch.setattr(plan.os, "sysconf", lambda name: 2**16)  # 4 GiB
        start(80, **options)
    monkeypatch.setattr(plan, "host_bytes", lambda: 40 * GIB)
    start(80, **options)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"69\.0 GiB of CPU memory for all processes: this machine has 40\.0"):
        start(80, **options)


def test_the_layouts_of_scripts_become_roles(models, monkeypatch, capsys):
    monkeypatch.setattr(devices, "free_bytes", lambda device: 500 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    a, b, c, d = (torch.device("cuda", i) for i in range(4))
    for script, layout, roles in (
        ("gspo/gspo_multigpu.py", devices.Layout((a, b), (c,), (0, 1, 2), c, d),
         {"policy": (0, 1), "rollout": (0, 1, 2), "reference": (2,)}),
        ("gkd/gkd.py", devices.Layout((a,), teacher=(a,)), dict.fromkeys(("student", "rollout", "teacher"), (0,))),
        ("gkd/gkd_multigpu.py", devices.Layout((a,), (b,), (1,), teacher=(c, d)),
         {"student": (0,), "rollout": (1,), "teacher": (2, 3)}),
    ):  # fmt: skip
        options = {} if "gkd" in script else dict(kl_coef=0.1)
        run = plan.require_fit(loaded(script, **names_of(models, script, "0.5b"), **options)[1], layout)
        assert run.given["roles"] == roles
    assert run.gpus[1].always["copy to sample"] and not run.gpus[0].groups
    capsys.readouterr()
    # on the CPU a line at most
    for model, said in (("tiny", ""), ("0.5b", "plan: weights and optimizer take 5.52 GiB of CPU memory")):
        plan.require_fit(loaded("gspo/gspo.py", policy_model=models[model])[1], devices.Layout((torch.device("cpu"),)))
        printed = capsys.readouterr().out
        assert printed.startswith(said) and bool(printed) == bool(said)


def test_one_command_tells_whether_a_model_fits_the_cards_and_the_machine(models, monkeypatch, capsys):
    def command(code, *argv):
        assert plan_memory.main([*argv]) == code
        return capsys.readouterr().out

    argv = [str(ROOT / "gspo/gspo_ddp.py"), "--policy_model", models["7b"], "--gpu-gib", "24", "--ranks", "2"]
    out = command(1, *argv)
    assert "GPU 1" in out and "it does not fit; it would fit with --lora_rank 16" in out
    assert "largest" not in out and "then micro_batch_tokens can be up to" in out
    better = next(line for line in out.splitlines() if line.startswith("    torchrun --nproc_per_node=2 "))
    better = [*better.split()[2:], *argv[3:]]
    assert "it fits; micro_batch_tokens can be up to" in command(0, *better)
    assert "not compared" not in command(0, *better, "--cpu-gib", "30")
    small = [argv[0], "--policy_model", models["0.5b"], "--num_minibatches", "1", "--gpu-gib", "80"]
    assert ", 32768 in a micro-batch" in command(0, *small)
    assert ", 8192 in a micro-batch" in command(0, *small[:-1], "24")
    assert "which does not fit" in command(1, *better, "--cpu-gib", "2")  # weights that adapters are merged into
    command(1, *better, "--memory_limit", "12")  # a limit is a smaller card
    given = [str(ROOT / "gkd/sft.py"), "--policy_model", models["0.5b"], "--max_tokens", "2048", "--gpu-gib", "80"]
    assert "sequences of up to 512 + 1536 tokens" in command(0, *given)
    # cards are those of the layout, and CPU memory is that of this machine
    script = [str(ROOT / "gspo/gspo_multigpu.py"), "--policy_model", models["0.5b"]]
    out = command(1, "--gpu-gib", "24", *script, "--gpu-gib=24", "--gpu_gib", "1")
    assert out.count("does not fit") == 2  # GPU 2 and the verdict
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "--gpu-gib 24 asks" in command(2, *script)
    command(0, *script, "--device", "cpu")
    monkeypatch.setattr(devices, "free_bytes", lambda device: 80 * GIB)
    monkeypatch.setattr(plan, "host_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    script = [str(ROOT / "gspo/gspo.py"), "--policy_model", models["1.5b"], "--optimizer_offload", "rollout"]
    assert "pinned: 17.25, which does not fit" in command(1, *script)
    command(0, *script, "--cpu-gib", "20")
    assert "CPU memory is not compared" in command(0, *script, "--gpu-gib", "80")


@pytest.mark.parametrize(("flags", "said"), [
    ("--ranks 0", "--ranks 0: must be at least 1"), ("--gpu-gib nan", "--gpu-gib nan: must be a number above 0"),
    ("--ranks 3", "batch_size = 16: must be a multiple of the 3 ranks; 15 would do"),
    ("--cpu-gib 0", "--cpu-gib 0.0: must be a number above 0"),
    ("--ranks 2 --gpu-gib 24 --gpu-gib 24 --gpu-gib 24", "one for each"), ("--ranks 4", "2 are visible"),
])  # fmt: skip
def test_commands_that_the_script_or_the_plan_cannot_follow(models, monkeypatch, capsys, flags, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit) as stopped:
        plan_memory.main([str(ROOT / "gspo/gspo_ddp.py"), "--policy_model", models["0.5b"], *flags.split()])
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and said in captured.err and captured.out == ""
