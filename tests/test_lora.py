"""Tests of common/model/lora.py, of what the rest does with adapters, and of scripts/merge_adapters.py."""

import contextlib
import importlib.util
import inspect
import json
import runpy
import shutil
import types

import peft
import pytest
import torch
from bounds import assert_rounded
from conftest import ROOT, SCRIPTS, assert_equal_weights, build_model, build_tokenizer, two_replicas
from safetensors.torch import load_file, save_file
from test_checkpoint import Policy, weights_of
from torch import nn

from common.generation import batches, rollout
from common.model import logprobs, lora, lora_targets, merging, models, passes, sources
from common.model.lora import Options
from common.model.models import load_frozen, load_policy
from common.planning import layouts, plan
from common.run import checkpoint, rules
from common.training import optim

CPU = torch.device("cpu")
FAMILIES = ["qwen2", "gpt2"]
IDS = torch.arange(4, 20)[None]
QWEN2 = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
# through two layers: query, scores, values, output, up (of width 32, twice with adapters) and down; then the head
FORWARD_TERMS = 2 * (6 * 2 * 32 + 64) + 32


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def merge_adapters(*arguments) -> None:
    runpy.run_path(str(ROOT / "scripts" / "merge_adapters.py"))["main"](list(map(str, arguments)))


@torch.no_grad()
def trained(model, std=0.1):
    """The model as if its adapters had been trained a long way."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.requires_grad:
            p.copy_(std * torch.randn(p.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def saved(model_folders, tmp_path_factory):
    """A folder of adapters for each family, as a checkpoint holds them: rank 4, alpha 8, all linear layers."""
    folders = {}
    for family in FAMILIES:
        tokenizer, model = load_policy(str(model_folders[family]), CPU, "fp32", lora=Options(4, 8.0))
        folders[family] = tmp_path_factory.mktemp(f"adapters-{family}")
        lora.save(trained(model), folders[family])
        tokenizer.save_pretrained(folders[family])
    return folders


@pytest.fixture
def copied(saved, tmp_path):
    """One of them to be changed."""
    return shutil.copytree(saved["qwen2"], tmp_path / "adapters")


def edit_config(folder, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reload(folder, options=None, dtype="fp32"):
    return load_policy(str(folder), CPU, dtype, lora=options)[1]


def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits.detach()


def packed(model) -> batches.RolloutBatch:
    sampler = rollout.Sampler([model], end_ids=[3], pad_id=0, max_new_tokens=6)
    return sampler.generate([[5, 6, 7], [9, 8]], group_size=3, temperature=0.7)


@pytest.mark.parametrize(("family", "names", "count", "endings"), [
    ("qwen2", "all-linear", 2 * 7, QWEN2), ("gpt2", "all-linear", 2 * 4, ["c_attn", "c_fc", "c_proj"]),
    ("qwen2", "q_proj,v_proj", 4, ["q_proj", "v_proj"]), ("qwen2", " q_proj , mlp.up_proj ", 4, ["q_proj", "up_proj"]),
    ("qwen2", "layers.1.self_attn.q_proj", 1, ["model.layers.1.self_attn.q_proj"]),
])  # fmt: skip
def test_layers_are_named_by_their_endings_or_all_but_the_head_are_taken(family, names, count, endings):
    model = lora.add(build_model(family), Options(2, 4.0, names))
    adapted = [name for name, _ in merging.named_layers(model)]
    assert len(adapted) == count and all(name.endswith(tuple(endings)) for name in adapted)
    assert sorted(model.peft_config["default"].target_modules) == endings  # short names where they say the same
    assert type(model.get_output_embeddings()) is nn.Linear


@pytest.mark.parametrize(("names", "message"), [
    ("q_proj,w_proj", f"'w_proj'; .*{', '.join(QWEN2)}"),
    ("proj", "is named 'proj'"),  # an ending is whole names
    ("embed_tokens", "is named 'embed_tokens'"),  # is not linear
    ("q_proj,lm_head", "'lm_head' is the output head.*leave it out"),
])  # fmt: skip
def test_layers_that_cannot_have_an_adapter_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        lora.targets(build_model("qwen2"), names)


def test_a_vision_tower_gets_none():
    from test_images import build_model as build_vlm
    from test_images import build_tokenizer as vlm_tokenizer

    model = build_vlm("qwen2_5_vl", vlm_tokenizer())  # its tower has layers of the same names
    found = lora.targets(model, "all-linear")
    assert found and not any("visual" in name or "lm_head" in name for name in found)
    with pytest.raises(ValueError, match="is named 'qkv'"):
        lora.targets(model, "qkv")
    model = lora.add(model, Options(2, 4.0, "down_proj"))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 2 and not any("visual" in name for name in names)


@pytest.mark.parametrize(("family", "dtype"), [("qwen2", "fp32"), ("gpt2", "bf16")])
def test_new_adapters_change_nothing_and_are_all_that_is_trained(family, dtype, model_folders):
    base, drawn = load_frozen(str(model_folders[family]), CPU, dtype), []
    for rank in (1, 2):
        torch.manual_seed(rank)
        tokenizer, model = load_policy(str(model_folders[family]), CPU, dtype, lora=Options(4, 8.0))
        drawn.append((weights_of(model), torch.rand(1).item()))
        torch.manual_seed(rank)
        assert torch.rand(1).item() == drawn[-1][1]  # what is drawn later is what it was
    assert_equal_weights(drawn[0][0], drawn[1][0])  # every rank begins with the same adapters
    layers = [layer for _, layer in merging.named_layers(model)]
    assert layers and all(layer.lora_A["default"].weight.any() for layer in layers)
    assert not any(layer.lora_B["default"].weight.any() for layer in layers)
    if dtype == "fp32":
        assert_rounded(logits(model), logits(base), terms=FORWARD_TERMS)
    assert not any(module.training for module in model.modules())  # no dropout
    assert {p.dtype for p in model.parameters()} == {sources.DTYPES[dtype]}
    assert sources.end_token_ids(tokenizer, model) == [3] and model.config.vocab_size == 64
    logprobs.LogProbs(model, 1.0)(*packed(model).tokens)[0].sum().backward()
    for name, p in model.named_parameters():
        assert p.requires_grad == (p.grad is not None) == ("lora_" in name), name
    assert optim.AdamW(model, 1e-3).names == [name for name, p in model.named_parameters() if "lora_" in name]


def test_what_adapters_compute(copied):
    # y = W x + b + alpha / r B A x, whatever dropout the adapters were once trained with
    edit_config(copied, lora_dropout=0.5)
    layer = reload(copied, Options(4, 8.0)).get_base_model().model.layers[1].self_attn.q_proj.double()
    x = torch.randn(5, 32).double()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = x @ layer.base_layer.weight.T + layer.base_layer.bias + 8 / 4 * x @ a.T @ b.T
    torch.testing.assert_close(layer(x), expected)
    assert a.shape == (4, 32) and b.shape == (32, 4)


def test_off_leaves_everything_as_it_was_also_after_an_error(model_folders):
    base = load_frozen(str(model_folders["qwen2"]), CPU, "fp32")
    model = trained(reload(model_folders["qwen2"], Options(4, 8.0)))
    frozen = next(p for p in model.parameters() if p.requires_grad)
    frozen.requires_grad_(False)  # by somebody, for some reason
    wanted, on, without = [p.requires_grad for p in model.parameters()], logits(model), logits(base)
    with pytest.raises(ZeroDivisionError), merging.adapters_disabled(model):
        with merging.adapters_disabled(model):
            assert_rounded(logits(model), without, terms=FORWARD_TERMS)
        assert_rounded(logits(model), without, terms=FORWARD_TERMS)  # the inner one leaves it off
        assert [p.requires_grad for p in model.parameters()] == wanted
        raise ZeroDivisionError
    assert torch.equal(logits(model), on) and (on - without).abs().max() > 0.1
    assert [p.requires_grad for p in model.parameters()] == wanted
    with merging.adapters_disabled(base):
        pass


@pytest.mark.parity
def test_policy_and_reference_are_compiled_once_each(model_folders):
    model = reload(model_folders["qwen2"], Options(2, 4.0, "v_proj"))
    policy, reference = logprobs.LogProbs(trained(model), 1.0), logprobs.LogProbs(model, 1.0, adapters=False)
    graphs, batch = [], packed(model)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in model.get_decoder().layers:
        block.compile(backend=backend, dynamic=True)
    for _ in range(3):
        with torch.no_grad():
            reference(*batch.tokens)
        policy(*batch.tokens)[0].sum().backward()
        assert len(graphs) == 2  # each for all blocks
    torch._dynamo.reset()


def adapted(family, dtype=torch.float32, **options):
    """A model with random adapters on two kinds of layers."""
    targets = {"qwen2": ["q_proj", "up_proj"], "gpt2": ["c_attn", "c_fc"]}[family]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False,
                             fan_in_fan_out=family == "gpt2", **options)  # fmt: skip
    torch.manual_seed(1)
    return peft.get_peft_model(build_model(family).to(dtype), config).eval()


def contents(model) -> dict[str, tuple]:
    """What each parameter holds, and where it lies: a graph of a GPU reads from a place, not from a name."""
    return {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}


def assert_unchanged(model, before, logits_before=None) -> None:
    for name, (place, value) in contents(model).items():
        assert place == before[name][0] and torch.equal(value, before[name][1]), name
    if logits_before is not None:
        assert torch.equal(logits(model), logits_before)  # the same weights in the same places, the same operations


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_in_the_weights_meanwhile_and_the_weights_come_back(family, dtype, options):
    model = adapted(family, dtype, **options)
    before, active = contents(model), logits(model)
    with model.disable_adapter():
        without = logits(model)
    with merging.merged(model):
        merged = logits(model)
        assert [p.data_ptr() for p in model.parameters()] == [place for place, _ in before.values()]
        changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name][1])]
        assert len(changed) == 4 and all("base_layer.weight" in name for name in changed)  # two layers, two in each
    if dtype == torch.float32:  # in bf16 the sum is rounded: test_the_sum_is_made_in_fp32_and_rounded_once
        assert_rounded(merged, active, terms=FORWARD_TERMS)
    assert (merged - without).abs().max() > 0.1
    assert_unchanged(model, before, active)  # the adapters are active again
    with merging.merged(model):
        assert torch.equal(logits(model), merged)
    model(input_ids=IDS, labels=IDS).loss.backward()
    for name, p in model.named_parameters():
        assert p.requires_grad == ("lora_" in name)
        assert not p.requires_grad or (p.grad.isfinite().all() and p.grad.any()), name


@pytest.mark.parametrize("when", ["while they are in", "while they go in"])
def test_weights_come_back_after_an_error_too(when, monkeypatch):
    def fail():
        raise ZeroDivisionError

    model = adapted("qwen2", use_dora=True)
    before, active = contents(model), logits(model)
    layers = [layer for _, layer in merging.named_layers(model)]
    if when == "while they go in":
        monkeypatch.setattr(layers[-1], "merge", fail)  # by then the others have new tensors
    with pytest.raises(ZeroDivisionError), merging.merged(model):
        assert when == "while they are in"
        with pytest.raises(RuntimeError, match="merged into the weights"), merging.adapters_disabled(model):
            pytest.fail("there is no reference meanwhile")
        fail()
    assert len(layers) == 4 and not any(layer.merged for layer in layers)
    assert_unchanged(model, before, active)
    with merging.adapters_disabled(model):
        pass


def test_adapters_that_are_merged_or_off_stay_so():
    model = adapted("qwen2")
    for switch in (model.merge_adapter, lambda: model.unmerge_adapter() or model.base_model.disable_adapter_layers()):
        switch()
        before, active = contents(model), logits(model)
        with merging.merged(model):
            assert_unchanged(model, before, active)
        assert_unchanged(model, before, active)


def test_the_sum_is_made_in_fp32_and_rounded_once(saved):
    model, versions = reload(saved["qwen2"], Options(4, 8.0), "bf16"), None
    layer = model.get_decoder().layers[0].mlp.down_proj
    base, a, b = layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    for change, copied_again in ((1.0, True), (1.0, False), (0.5, True)):  # frozen weights go to the host once
        if change != 1.0:  # by somebody
            with torch.no_grad():
                base.mul_(change)
        before, exact = contents(model), base.double() + 2.0 * b.double() @ a.double()
        with merging.merged(model), torch.no_grad():
            once = torch.finfo(torch.bfloat16).eps / 2 * exact.abs()
            assert ((base - exact).abs() <= once + 6 * torch.finfo(torch.float32).eps * exact.abs().max()).all()
            x = torch.randn(3, 64).bfloat16()
            assert torch.equal(layer(x), nn.functional.linear(x, base))  # not counted twice
        assert_unchanged(model, before)
        assert (merging._on_host[model].versions is not versions) == copied_again
        versions = merging._on_host[model].versions


def test_copies_keep_weights_of_different_kinds_apart():
    weights = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(5, 2).t(), torch.randn(2, 2).bfloat16()]
    copies = merging._Copies(weights).of(weights)
    for copy_of, w in zip(copies, weights, strict=True):
        assert torch.equal(copy_of, w) and copy_of.dtype == w.dtype and copy_of.data_ptr() != w.data_ptr()


def test_what_is_sampled_is_what_is_trained(model_folders):
    folder = str(model_folders["qwen2"])
    base = logprobs.LogProbs(load_frozen(folder, CPU, "fp32"), 0.7)
    model = trained(load_policy(folder, CPU, "fp32", gradient_checkpointing=True, lora=Options(4, 8.0))[1])
    policy, reference = logprobs.LogProbs(model, 0.7), logprobs.LogProbs(model, 0.7, adapters=False)
    before, batch = contents(model), packed(model)
    with merging.adapters_disabled(model):
        off = packed(model)
    for source, other, sampled in ((policy, reference, batch), (reference, policy, off)):
        passes.fill([sampled], "ref_logps", other, CPU)
        passes.fill([sampled], "old_logps", source, CPU)
        assert_rounded(sampled.old_logps, sampled.rollout_logps, terms=FORWARD_TERMS)
        assert (sampled.ref_logps - sampled.rollout_logps).abs().max() > 0.1
    assert_rounded(off.rollout_logps, base(*off.tokens)[0], terms=FORWARD_TERMS)  # the model they were put on
    assert_unchanged(model, before)


def test_a_checkpoint_of_adapters_is_trained_further(model_folders, tmp_path, monkeypatch):
    def base_in(folder):
        return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]

    monkeypatch.chdir(model_folders["qwen2"].parent)
    cfg, wanted = Policy(policy_model=model_folders["qwen2"].name), Options(4, 8.0)  # a folder named from here
    tokenizer, model = load_policy(cfg.policy_model, CPU, "bf16", lora=wanted)
    optimizer = optim.AdamW(model, 1e-2)
    logprobs.LogProbs(model, 1.0)(*packed(model).tokens)[0].sum().backward()
    optimizer.step(1.0)
    checkpoint.save(tmp_path, 1, model, tokenizer, optimizer, 2, cfg)
    folder = checkpoint.newest(tmp_path)
    files = {file.name for file in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files and "config.json" not in files
    assert base_in(folder) == str(model_folders["qwen2"].resolve())

    monkeypatch.chdir(tmp_path)  # from where the folder of the base model cannot be seen
    again, resumed = load_policy(str(folder), CPU, "bf16", lora=wanted)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert_equal_weights(weights_of(model), weights_of(resumed))
    assert [p.requires_grad for p in resumed.parameters()] == [p.requires_grad for p in model.parameters()]
    later = optim.AdamW(resumed, 1e-2)
    assert checkpoint.load(folder, later, cfg) == (1, 2)
    assert_equal_weights(optimizer.state_dict(), later.state_dict())
    # it goes on to say where its base model is
    lora.save(resumed, tmp_path / "again")
    assert base_in(tmp_path / "again") == base_in(folder)
    # and without a tokenizer beside the adapters, that of the base model serves
    assert sources.load_tokenizer(str(tmp_path / "again")).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("name", ["toy-teacher", "some-hub-id"])
def test_the_built_in_model_and_hub_ids_keep_their_names(name, monkeypatch, model_folders):
    find, folder = sources.find, str(model_folders["qwen2"])
    monkeypatch.setattr(sources, "find", lambda name: folder if "/" not in name[1:] else find(name))
    assert reload(name, Options(2, 4.0)).peft_config["default"].base_model_name_or_path == name


@pytest.mark.parametrize("family", FAMILIES)
def test_without_lora_adapters_become_part_of_an_ordinary_model(family, saved, model_folders):
    with_adapters = reload(saved[family], Options(4, 8.0))
    base = load_frozen(str(model_folders[family]), CPU, "fp32")
    model = reload(saved[family])
    assert type(model) is type(base) and not hasattr(model, "peft_config")
    assert all(p.requires_grad for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks
    assert list(weights_of(model)) == list(weights_of(base))
    assert_rounded(logits(model), logits(with_adapters), terms=FORWARD_TERMS)
    assert (logits(model) - logits(base)).abs().max() > 0.1
    for other in (load_frozen(str(saved[family]), CPU, "fp32"), models.load_spread(str(saved[family]), [CPU], "fp32")):
        assert not any(p.requires_grad for p in other.parameters()) and not other.training
        assert_equal_weights(weights_of(other), weights_of(model))


def test_adapters_that_are_trained_further_are_as_they_are(saved):
    for options, message in [
        (Options(8, 8.0), "lora_rank = 8: .*, 4; .*merge_adapters"), (Options(4, 16.0), "lora_alpha = 16.0: .*, 8"),
        (Options(4, 8.0, "q_proj,up_proj"), "lora_targets = 'q_proj,up_proj': .*: down_proj, gate_proj"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            reload(saved["qwen2"], options)


@pytest.mark.parametrize("options", [None, Options(4, 8.0)], ids=["merged", "trained"])
@pytest.mark.parametrize(("lack", "message"), [
    ("a weight", "no counterpart.*layers.*lora_B.*base_model_name_or_path"),
    ("a layer", "no counterpart.*layers.*lora_B.*base_model_name_or_path"),
    ("weights", r"adapter_model\.safetensors is missing"),
    ({"base_model_name_or_path": "/gone/away"}, "'/gone/away': no such folder"),
    ({"base_model_name_or_path": None}, "must name their model; fill in base_model_name_or_path"),
    ({"peft_type": "IA3"}, "type IA3: must be LORA"),
])  # fmt: skip
def test_adapters_that_are_not_all_there_are_refused(lack, message, options, copied):
    path = copied / "adapter_model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if "layers.1" in name and "lora_B" in name)
    value = weights.pop(name)
    if isinstance(lack, dict):
        edit_config(copied, **lack)
    elif lack == "weights":
        path.unlink()
    else:
        save_file(weights | ({name.replace("layers.1", "layers.7"): value} if lack == "a layer" else {}), path)
    with pytest.raises(ValueError, match=message):
        reload(copied, options)


def test_an_embedding_that_would_have_to_grow_is_refused(model_folders, tmp_path):
    build_model("qwen2").save_pretrained(tmp_path)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f"more{i}" for i in range(20)])
    tokenizer.pad_token = "more19"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no token to pad with: with LoRA"):
        reload(tmp_path, Options(4, 8.0))
    assert reload(tmp_path).get_input_embeddings().num_embeddings > 64


@pytest.mark.tools
@pytest.mark.parametrize(("family", "dtype"), [("qwen2", None), ("gpt2", "bf16")])
def test_merge_adapters_writes_an_ordinary_folder(family, dtype, saved, tmp_path, capsys):
    out, kind = tmp_path / "merged", sources.DTYPES[dtype or "fp32"]
    merge_adapters(saved[family], out, *(["--dtype", dtype] if dtype else []))
    assert "M parameters" in capsys.readouterr().out
    tokenizer, model = load_policy(str(out), CPU, dtype or "fp32")
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {kind}
    assert not hasattr(model, "peft_config") and tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert_equal_weights(weights_of(model), weights_of(load_frozen(str(saved[family]), CPU, "fp32").to(kind)))
    for source, other, message in ((saved[family], out, "exists already"), (out, tmp_path / "new", "no adapters")):
        with pytest.raises(SystemExit):
            merge_adapters(source, other)
        assert message in capsys.readouterr().err


@pytest.mark.tools
def test_a_merged_vision_language_model_has_its_processor(tmp_path):
    from test_images import SIZES, build_model, build_tokenizer, chat
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from common.model import images

    tokenizer, base = build_tokenizer(), tmp_path / "base"
    build_model("qwen2_5_vl", tokenizer).save_pretrained(base)
    pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16})
    processor = images.image_only(images.PROCESSORS["qwen2_5_vl"])
    processor(pixels, tokenizer, chat_template=tokenizer.chat_template).save_pretrained(base)
    lora.save(model := trained(reload(base, Options(4, 8.0))), tmp_path / "adapters")
    images.load_processor(base).save_pretrained(tmp_path / "adapters")
    merge_adapters(tmp_path / "adapters", tmp_path / "merged")
    processors = [images.load_processor(tmp_path / name) for name in ("base", "merged")]
    first, second = (images.encode(one, chat("what?", len(SIZES[0])), SIZES[0]) for one in processors)
    assert first == second
    merged = load_frozen(str(tmp_path / "merged"), CPU, "fp32")
    assert images.is_vlm(merged.config)
    assert_rounded(logits(merged), logits(model), terms=FORWARD_TERMS)


@pytest.mark.parametrize(("fields", "message"), [
    ({"lora_rank": -1}, "lora_rank = -1: must be at least 0"),
    ({"lora_rank": 4, "lora_alpha": 0.0}, "lora_alpha = 0.0: must be above 0"),
    ({"lora_rank": 4, "load_bits": 3}, "load_bits = 3: must be 0, 4 or 8"),
    ({"load_bits": 4}, "load_bits = 4, lora_rank = 0: .*set lora_rank"),
    ({"lora_rank": 4, "load_bits": 8, "param_offload": True}, "load_bits = 8, param_offload = True: "),
    ({"lora_rank": 4, "lora_targets": " , "}, "lora_targets = ' , ': must name layers"),
    ({"lora_rank": 4, "reference_refresh": 2}, "reference_refresh = 2, lora_rank = 4: .*starting model"),
    ({"lora_rank": 4, "fsdp": True}, "fsdp = True, lora_rank = 4: .*leave one off"),
    ({}, ""), ({"lora_rank": 0, "fsdp": True, "reference_refresh": 2}, ""),
    ({"lora_rank": 4, "load_bits": 8, "fsdp": False, "reference_refresh": 0}, ""),
])  # fmt: skip
def test_check(fields, message):
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        rules.check_lora(types.SimpleNamespace(**fields))


def test_options_are_none_without_a_rank_and_few_bits_need_a_package(model_folders, monkeypatch):
    fields = dict(lora_alpha=32.0, lora_targets="q_proj", load_bits=4)
    assert lora.options(types.SimpleNamespace(lora_rank=0, **fields)) is None
    assert lora.options(types.SimpleNamespace(lora_rank=8, **fields)) == Options(8, 32.0, "q_proj", 4)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"load_bits = 4: .*pip install bitsandbytes"):
        reload(model_folders["qwen2"], Options(4, 8.0, bits=4))


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_on_weights_of_few_bits(bits, model_folders, tmp_path):
    bnb = pytest.importorskip("bitsandbytes")
    kind = {4: bnb.nn.Linear4bit, 8: bnb.nn.Linear8bitLt}[bits]
    tokenizer, model = load_policy(str(model_folders["qwen2"]), CPU, "bf16", lora=Options(4, 8.0, bits=bits))
    base = [m for m in model.modules() if isinstance(m, kind)]
    assert len(base) == 14 and type(model.get_output_embeddings()) is nn.Linear
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}
    off, on = logits(model), logits(trained(model))
    assert (on - off).abs().max() > 0.1
    batch = packed(model)  # with the adapters beside the weights, which are not merged
    policy, reference = logprobs.LogProbs(model, 1.0), logprobs.LogProbs(model, 1.0, adapters=False)
    passes.fill([batch], "ref_logps", reference, CPU)
    logps, _ = policy(*batch.tokens)
    # two layers of seven products, each rounded to bf16 (2**-8); of 14 roundings of values up to 20 most cancel
    torch.testing.assert_close(logps, batch.rollout_logps, atol=0.3, rtol=0)
    logps.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    assert torch.equal(logits(model), on)
    with pytest.raises(ValueError, match="cannot be merged"):
        merging.merge(model)
    lora.save(model, tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(tmp_path, Options(4, 8.0, bits=bits), "bf16")), on)


@pytest.mark.parity
def test_a_run_with_adapters_is_resumed_exactly(launcher, tmp_path):
    options = dict(lora_rank=4, lora_alpha=8.0, learning_rate=3e-3, num_minibatches=1, steps=4)
    whole = launcher.run("gspo", tmp_path / "whole", **options).succeeded()
    assert whole.steps[0]["kl_ref"] < 1e-6 < whole.steps[-1]["kl_ref"]  # the reference is the policy without adapters
    folder = tmp_path / "whole" / "checkpoint-000002"
    assert not (folder / "model.safetensors").exists()
    again = launcher.run("gspo", tmp_path / "again", resume=folder, **options).succeeded()
    weights = [load_file(run.out_dir / "checkpoint-000004" / "adapter_model.safetensors") for run in (whole, again)]
    assert len(weights[0]) == 2 * 14
    assert_equal_weights(*weights)


@pytest.mark.parametrize("bits", [0, 4])
def test_adapters_that_a_run_starts_from_are_its_reference_also_after_a_resume(bits, saved, tmp_path):
    if bits:
        pytest.importorskip("bitsandbytes")
    options, start = Options(4, 8.0, bits=bits), str(saved["qwen2"])
    model = reload(start, options)
    first, batch = logits(model), packed(model)
    trained(model, std=0.2)
    replicas = models.replicate(model, [CPU, CPU], 2)
    lora.save(model, tmp_path)
    resumed = reload(tmp_path, options)  # as a checkpoint is
    for policies in (replicas, [resumed]):
        lora.keep_start(policies, start)
        for policy in policies:
            before, now = contents(policy), logits(policy)
            assert (now - first).abs().max() > 0.1
            with pytest.raises(ZeroDivisionError), merging.as_reference(policy):
                assert torch.equal(logits(policy), first)
                raise ZeroDivisionError
            assert_unchanged(policy, before, now)
    reference, alone = (logprobs.LogProbs(resumed, 1.0, adapters=on)(*batch.tokens)[0] for on in (False, True))
    passes.fill([batch], "ref_logps", logprobs.LogProbs(reload(start, options), 1.0), CPU)
    assert torch.equal(reference, batch.ref_logps) and (reference - alone).abs().max() > 0.1
    if not bits:  # or nothing is merged
        with merging.merged(resumed), pytest.raises(RuntimeError, match="merged"), merging.as_reference(resumed):
            pytest.fail("there is no reference meanwhile")
    with merging.adapters_disabled(resumed):
        without = logits(resumed)
    new = reload(tmp_path, options)
    lora.keep_start([new], json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"])
    with merging.as_reference(new):  # new adapters start from the plain model
        assert torch.equal(logits(new), without)


def test_the_plan_counts_the_adapters_of_a_reference(saved):
    given = ["--policy_model", str(saved["qwen2"]), "--lora_rank", "4", "--lora_alpha", "8", "--dtype", "fp32"]
    trains = merging.trained_weights(reload(saved["qwen2"], Options(4, 8.0)))
    for kl_coef, expected in (("0.1", sum(p.nbytes for p in trains)), ("0", 0)):
        module, cfg = layouts.load(SCRIPTS["gspo"], [*given, "--kl_coef", kl_coef])
        assert plan.of(cfg, layouts.all_ranks(module, cfg)).gpus[0].always["reference"] == expected


@pytest.mark.parity
@pytest.mark.parametrize(("script", "given"), [
    ("gspo", {}), ("gspo_multigpu", {"prepare": two_replicas}), ("similarity_grpo", {"similarity_model": "ngrams"}),
    ("gspo", {"load_bits": 4}),
])  # fmt: skip
def test_a_run_that_starts_from_adapters_begins_at_its_reference(launcher, saved, tmp_path, script, given):
    if "load_bits" in given:
        pytest.importorskip("bitsandbytes")
    options = dict(policy_model=saved["qwen2"], lora_rank=4, lora_alpha=8.0, num_minibatches=1, steps=4, save_every=2,
                   learning_rate=3e-3, **given)  # fmt: skip
    whole = launcher.run(script, tmp_path / "whole", **options).succeeded()
    assert whole.steps[0]["kl_ref"] < 1e-6 < whole.steps[1]["kl_ref"]
    folder = tmp_path / "whole" / "checkpoint-000002"
    again = launcher.run(script, tmp_path / "again", resume=folder, **options).succeeded()
    assert [line["kl_ref"] for line in again.steps] == [line["kl_ref"] for line in whole.steps[2:]]
    assert_equal_weights(*(load_file(run.out_dir / "checkpoint-000004" / "adapter_model.safetensors")
                           for run in (whole, again)))  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize(
    "one, script, ranks", [("gspo", "gspo_ddp", 2), ("gspo", "gspo_multigpu", 1), ("gkd", "gkd_ddp", 2)]
)
def test_every_script_trains_the_same_adapters(launcher, one, script, ranks):
    options = dict(lora_rank=4, steps=2, eval_every=0, learning_rate=1e-3, optimizer_offload="rollout")
    first = launcher.trained(one, **options)
    other = launcher.trained(script, ranks, **options, gradient_checkpointing=True)
    folders = [run.out_dir / run.checkpoints[-1] for run in (first, other)]
    saved, again = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert saved.keys() == again.keys()
    for name in saved:
        torch.testing.assert_close(again[name], saved[name], rtol=0, atol=2e-5)
    moved = [name for name in saved if "lora_B" in name and saved[name].abs().max() > 1e-4]
    assert len(moved) == 14  # they begin at 0


def test_the_source_of_a_class_is_found_without_parsing_its_module():
    inside = {}
    for family in ("llama", "mamba2", "mixtral", "falcon"):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        inside |= {c: inspect.getsource(c) for c in vars(module).values()
                   if inspect.isclass(c) and c.__module__ == module.__name__}  # fmt: skip
    assert len(inside) > 30
    for kind, source in inside.items():
        assert lora_targets._source(kind).rstrip() == source[source.index(f"class {kind.__name__}") :].rstrip()
