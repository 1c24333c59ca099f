"""Tests of common/lora.py, of what the rest does with adapters, and of scripts/merge_adapters.py."""

import copy
import dataclasses
import importlib.util
import json
import types

import pytest
import torch
from conftest import ROOT, assert_equal_weights, build_model, build_tokenizer
from safetensors.torch import load_file, save_file
from torch import nn

from common import checkpoint, logprobs, lora, merging, models, optim, rollout
from common.lora import Options
from common.models import load_frozen, load_policy

CPU = torch.device("cpu")
FAMILIES = ["qwen2", "gpt2"]
IDS = torch.arange(4, 20)[None]
QWEN2 = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def reload(folder, options=None, dtype="fp32"):
    return load_policy(str(folder), CPU, dtype, lora=options)[1]


def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits.detach()


def packed(model, count=3) -> rollout.RolloutBatch:
    sampler = rollout.Sampler([model], end_ids=[3], pad_id=0, max_new_tokens=6)
    return sampler.generate([[5, 6, 7], [9, 8]], group_size=count, temperature=1.0)


# ---- which layers ----


def test_all_linear_means_the_decoder_without_its_head(model_folders):
    for family, expected in (("qwen2", QWEN2), ("gpt2", ["c_attn", "c_fc", "c_proj"])):
        _, model = load_policy(str(model_folders[family]), CPU, "fp32", lora=Options(2, 4.0))
        adapted = [name for name, m in model.named_modules() if hasattr(m, "lora_A")]
        assert len(adapted) == {"qwen2": 2 * 7, "gpt2": 2 * 4}[family]
        assert sorted({name.rpartition(".")[2] for name in adapted}) == expected
        assert sorted(model.peft_config["default"].target_modules) == expected
        assert type(model.get_output_embeddings()) is nn.Linear


@pytest.mark.parametrize(("names", "count"), [("q_proj,v_proj", 4), (" q_proj , mlp.up_proj ", 4),
                                              ("layers.1.self_attn.q_proj", 1)])  # fmt: skip
def test_layers_are_named_by_their_endings(names, count, model_folders):
    _, model = load_policy(str(model_folders["qwen2"]), CPU, "fp32", lora=Options(2, 4.0, names))
    adapted = [name for name, m in model.named_modules() if hasattr(m, "lora_A")]
    assert len(adapted) == count
    assert all(any(name.endswith(ending.strip()) for ending in names.split(",")) for name in adapted)


@pytest.mark.parametrize(("names", "message"), [
    ("q_proj,w_proj", f"no linear layer of the decoder is named 'w_proj'; there are {', '.join(QWEN2)}"),
    ("proj", "is named 'proj'"),  # an ending is whole names
    ("embed_tokens", "is named 'embed_tokens'"),  # is not linear
    ("q_proj,lm_head", "'lm_head' is the output head.*leave it out"),
])  # fmt: skip
def test_layers_that_cannot_have_an_adapter_are_refused(names, message, model_folders):
    with pytest.raises(ValueError, match=message):
        load_policy(str(model_folders["qwen2"]), CPU, "fp32", lora=Options(2, 4.0, names))


def test_a_vision_tower_gets_none():
    from test_images import FAMILIES as KINDS
    from test_images import build_model as build_vlm
    from test_images import build_tokenizer as vlm_tokenizer

    tokenizer = vlm_tokenizer()
    for kind in KINDS:  # whose towers have layers of the same names
        model = build_vlm(kind, tokenizer)
        inside = {id(m) for m in model.model.visual.modules()}
        for names in ("all-linear", "q_proj,down_proj"):
            found = lora.targets(model, names)
            assert found and not any(id(model.get_submodule(name)) in inside for name in found)
        assert "lm_head" not in lora.targets(model, "all-linear")
        with pytest.raises(ValueError, match="is named 'qkv'"):
            lora.targets(model, "qkv")
        model = lora.add(model, Options(2, 4.0, "down_proj"))
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        assert len(names) == 2 * 2 and not any("visual" in name for name in names)


# ---- new adapters ----


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapters_change_nothing_and_are_all_that_is_trained(family, dtype, model_folders):
    base = load_frozen(str(model_folders[family]), CPU, dtype)
    tokenizer, model = load_policy(str(model_folders[family]), CPU, dtype, lora=Options(4, 8.0))
    assert torch.equal(logits(model), logits(base)) and model.training
    assert {p.dtype for p in model.parameters()} == {models.DTYPES[dtype]}
    assert models.end_token_ids(tokenizer, model) == [3] and model.config.vocab_size == 64
    policy = logprobs.LogProbs(model, 1.0)
    policy(*packed(model).tokens)[0].sum().backward()
    for name, p in model.named_parameters():
        assert p.requires_grad == (p.grad is not None) == ("lora_" in name), name
    assert optim.AdamW(model, 1e-3).names == [name for name, p in model.named_parameters() if "lora_" in name]


def test_every_rank_begins_with_the_same_adapters(model_folders):
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        _, model = load_policy(str(model_folders["qwen2"]), CPU, "fp32", lora=Options(4, 8.0))
        drawn.append(({n: p for n, p in model.named_parameters() if p.requires_grad}, torch.rand(1).item()))
        torch.manual_seed(seed)
        assert torch.rand(1).item() == drawn[-1][1]  # what is drawn later is what it was
    assert_equal_weights(drawn[0][0], drawn[1][0])
    assert any(p.any() for p in drawn[0][0].values())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_adapters_compute(dropout, saved, tmp_path):
    # y = W x + b + alpha / r B A x, whatever dropout the adapters were once trained with
    for file in saved["qwen2"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_dropout": dropout}))
    layer = reload(tmp_path, Options(4, 8.0)).get_base_model().model.layers[1].self_attn.q_proj
    x = torch.randn(5, 32)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = x @ layer.base_layer.weight.T + layer.base_layer.bias + 8 / 4 * x @ a.T @ b.T
    torch.testing.assert_close(layer(x), expected)
    assert a.shape == (4, 32) and b.shape == (32, 4)


# ---- adapters off ----


def test_the_reference_of_adapters_is_the_model_they_were_put_on(model_folders):
    folder = str(model_folders["qwen2"])
    base = logprobs.LogProbs(load_frozen(folder, CPU, "fp32"), 0.7)
    model = trained(load_policy(folder, CPU, "fp32", gradient_checkpointing=True, lora=Options(4, 8.0))[1])
    policy = logprobs.LogProbs(model, 0.7)
    reference = logprobs.LogProbs(model, 0.7, adapters=False)
    before, batch = copy.deepcopy(model.state_dict()), packed(model)
    for name, source in (("rollout_logps", policy), ("ref_logps", reference), ("old_logps", base)):
        logprobs.fill([batch], name, source, CPU)
    assert torch.equal(batch.ref_logps, batch.old_logps)
    assert (batch.ref_logps - batch.rollout_logps).abs().max() > 0.1
    assert torch.equal(policy(*batch.tokens)[0], batch.rollout_logps)  # on again
    assert_equal_weights(before, model.state_dict())


def test_off_leaves_everything_as_it_was_also_after_an_error(model_folders):
    base = load_frozen(str(model_folders["qwen2"]), CPU, "fp32")
    model = trained(load_policy(str(model_folders["qwen2"]), CPU, "fp32", lora=Options(4, 8.0))[1])
    frozen = next(p for p in model.parameters() if p.requires_grad)
    frozen.requires_grad_(False)  # by somebody, for some reason
    wanted, on = [p.requires_grad for p in model.parameters()], logits(model)
    with pytest.raises(ZeroDivisionError), merging.off(model):
        with merging.off(model):
            assert torch.equal(logits(model), logits(base))
        assert torch.equal(logits(model), logits(base))  # the inner one leaves it off
        assert [p.requires_grad for p in model.parameters()] == wanted
        raise ZeroDivisionError
    assert torch.equal(logits(model), on) and not torch.equal(on, logits(base))
    assert [p.requires_grad for p in model.parameters()] == wanted
    with merging.off(base):
        pass


def test_there_is_no_reference_while_adapters_are_in_the_weights(saved):
    model = reload(saved["qwen2"], Options(4, 8.0))
    with merging.merged(model), pytest.raises(RuntimeError, match="merged into the weights"), merging.off(model):
        pytest.fail("entered")
    with merging.off(model):
        pass


def test_policy_and_reference_are_compiled_once_each(model_folders):
    _, model = load_policy(str(model_folders["qwen2"]), CPU, "fp32", lora=Options(2, 4.0, "v_proj"))
    policy, reference = logprobs.LogProbs(trained(model), 1.0), logprobs.LogProbs(model, 1.0, adapters=False)
    graphs, batch = [], packed(model)
    plain = [source(*batch.tokens)[0].detach() for source in (policy, reference)]

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in model.get_decoder().layers:
        block.compile(backend=backend, dynamic=True)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(reference(*batch.tokens)[0], plain[1])
        logps = policy(*batch.tokens)[0]
        torch.testing.assert_close(logps.detach(), plain[0])
        logps.sum().backward()
        assert len(graphs) == 2  # each for all blocks
    torch._dynamo.reset()


# ---- adapters in the weights ----


def adapted(family, dtype=torch.float32, **options):
    """A model with random adapters, and the weights it had without them, by name."""
    peft = pytest.importorskip("peft")
    targets = {"qwen2": ["q_proj", "up_proj"], "gpt2": ["c_attn", "c_fc"]}[family]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False,
                             fan_in_fan_out=family == "gpt2", **options)  # fmt: skip
    torch.manual_seed(1)
    return peft.get_peft_model(build_model(family).to(dtype), config).eval()


def contents(model) -> dict[str, tuple]:
    """What each parameter holds, and where it lies: a graph of a GPU reads from a place, not from a name."""
    return {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}


def assert_unchanged(model, before) -> None:
    for name, (place, value) in contents(model).items():
        assert place == before[name][0] and torch.equal(value, before[name][1]), name


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_in_the_weights_meanwhile_and_the_weights_come_back(family, dtype, options):
    model = adapted(family, dtype, **options)
    before, logits = contents(model), model(input_ids=IDS).logits
    with model.disable_adapter():
        without = model(input_ids=IDS).logits
    with merging.merged(model):
        merged = model(input_ids=IDS).logits
        places = {name: place for name, (place, _) in contents(model).items()}
        assert places == {name: place for name, (place, _) in before.items()}
        changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name][1])]
        assert len(changed) == 4 and all("base_layer.weight" in name for name in changed)  # two layers, two in each
    atol = 1e-4 if dtype == torch.float32 else 0.1 * without.abs().max().item()
    torch.testing.assert_close(merged.float(), logits.float(), rtol=1e-3, atol=atol)
    assert (logits - without).abs().max() > 3 * atol
    assert_unchanged(model, before)
    assert torch.equal(model(input_ids=IDS).logits, logits)  # the adapters are active again
    with merging.merged(model):
        assert torch.equal(model(input_ids=IDS).logits, merged)


def test_weights_come_back_after_an_error_too():
    model = adapted("qwen2", torch.bfloat16)
    before, logits = contents(model), model(input_ids=IDS).logits
    with pytest.raises(ZeroDivisionError), merging.merged(model):
        raise ZeroDivisionError
    assert_unchanged(model, before)
    assert torch.equal(model(input_ids=IDS).logits, logits)


def test_weights_come_back_when_an_adapter_cannot_be_merged(monkeypatch):
    model = adapted("qwen2", use_dora=True)
    before, logits = contents(model), model(input_ids=IDS).logits
    layers = [m for m in model.modules() if hasattr(m, "merge") and hasattr(m, "lora_A")]

    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(layers[-1], "merge", fail)  # by then the others have new tensors
    with pytest.raises(ZeroDivisionError), merging.merged(model):
        pytest.fail("entered")
    assert len(layers) == 4 and not any(layer.merged for layer in layers)
    assert_unchanged(model, before)
    assert torch.equal(model(input_ids=IDS).logits, logits)


def test_adapters_that_are_merged_or_off_stay_so():
    model = adapted("qwen2")
    model.merge_adapter()
    before, logits = contents(model), model(input_ids=IDS).logits
    with merging.merged(model):
        assert torch.equal(model(input_ids=IDS).logits, logits)
    assert_unchanged(model, before)
    assert torch.equal(model(input_ids=IDS).logits, logits)
    model.unmerge_adapter()
    model.base_model.disable_adapter_layers()
    before, logits = contents(model), model(input_ids=IDS).logits
    with merging.merged(model):
        assert_unchanged(model, before)
        assert torch.equal(model(input_ids=IDS).logits, logits)
    assert_unchanged(model, before)


def test_adapters_can_be_trained_after_they_were_merged():
    model = adapted("qwen2")
    with merging.merged(model):
        model(input_ids=IDS)
    model(input_ids=IDS, labels=IDS).loss.backward()
    for name, p in model.named_parameters():
        assert p.requires_grad == ("lora_" in name)
        assert not p.requires_grad or (p.grad.isfinite().all() and p.grad.any()), name


def test_a_model_without_adapters_is_left_alone():
    model = build_model("qwen2")
    before = contents(model)
    with merging.merged(model):
        assert_unchanged(model, before)
    assert_unchanged(model, before)


def test_the_sum_is_made_in_fp32_and_rounded_once(saved):
    model = reload(saved["qwen2"], Options(4, 8.0), "bf16")
    layer = model.get_decoder().layers[0].mlp.down_proj
    base, a, b = layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    before, expected = base.detach().clone(), (base.float() + 2.0 * b.float() @ a.float()).bfloat16()
    with merging.merged(model):
        assert torch.equal(base, expected)
        with torch.no_grad():
            x = torch.randn(3, 64).bfloat16()
            assert torch.equal(layer(x), nn.functional.linear(x, expected))  # not counted twice
    assert torch.equal(base, before)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_frozen_weights_are_copied_to_the_host_once(on_gpu, saved, monkeypatch):
    model, copied = reload(saved["qwen2"], Options(4, 8.0), "bf16"), []
    if on_gpu:  # where there is room, copies live for a rollout only
        monkeypatch.setattr(merging, "_copies", lambda model, weights: [w.detach().clone() for w in weights])
    of = merging._Copies.of

    def counted(self, weights):
        versions = self.versions
        copies = of(self, weights)
        copied.append(versions is not self.versions)
        return copies

    monkeypatch.setattr(merging._Copies, "of", counted)
    before = contents(model)
    sums = []
    for _ in range(3):
        with merging.merged(model):
            sums.append(logits(model))
        assert_unchanged(model, before)
    assert torch.equal(sums[0], sums[1]) and copied == ([] if on_gpu else [True, False, False])
    # the adapters are read each time, and weights that somebody changed are copied again
    base = model.get_decoder().layers[0].mlp.up_proj.base_layer.weight
    with torch.no_grad():
        base.mul_(0.5)
    changed = contents(model)
    with merging.merged(model):
        assert not torch.equal(logits(model), sums[0])
    assert_unchanged(model, changed)
    assert copied == ([] if on_gpu else [True, False, False, True])


def test_copies_keep_weights_of_different_kinds_apart():
    weights = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(5, 2).t(), torch.randn(2, 2).bfloat16()]
    copies = merging._Copies(weights).of(weights)
    for copy_of, w in zip(copies, weights, strict=True):
        assert torch.equal(copy_of, w) and copy_of.dtype == w.dtype and copy_of.data_ptr() != w.data_ptr()


def test_what_is_sampled_is_what_is_trained(saved):
    model = reload(saved["qwen2"], Options(4, 8.0))
    before, batch = contents(model), packed(model)
    assert_unchanged(model, before)
    logps, _ = logprobs.LogProbs(model, 1.0)(*batch.tokens)
    torch.testing.assert_close(logps, batch.rollout_logps, rtol=0, atol=1e-4)
    with merging.off(model):
        off = packed(model)
    assert not torch.equal(off.completion_ids, batch.completion_ids)


# ---- saving and loading ----


@dataclasses.dataclass(frozen=True)
class Config:
    policy_model: str
    keep_checkpoints: int = 3


def test_a_checkpoint_of_adapters_is_trained_further(model_folders, tmp_path, monkeypatch):
    monkeypatch.chdir(model_folders["qwen2"].parent)
    cfg, wanted = Config(model_folders["qwen2"].name), Options(4, 8.0)  # a folder named from here
    tokenizer, model = load_policy(cfg.policy_model, CPU, "bf16", lora=wanted)
    optimizer = optim.AdamW(model, 1e-2)

    def step(model, optimizer):
        logps, _ = logprobs.LogProbs(model, 1.0)(*batch.tokens)
        logps.sum().backward()
        optimizer.step(1.0)

    batch = packed(model)
    step(model, optimizer)
    checkpoint.save(tmp_path, 1, model, tokenizer, optimizer, 2, cfg)
    folder = checkpoint.newest(tmp_path)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {file.name for file in folder.iterdir()}
    assert not (folder / "config.json").exists()
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(model_folders["qwen2"].resolve())

    monkeypatch.chdir(tmp_path)  # from where the folder of the base model cannot be seen
    again, resumed = load_policy(str(folder), CPU, "bf16", lora=wanted)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert_equal_weights(dict(model.named_parameters()), dict(resumed.named_parameters()))
    assert [p.requires_grad for p in resumed.parameters()] == [p.requires_grad for p in model.parameters()]
    later = optim.AdamW(resumed, 1e-2)
    assert checkpoint.load(folder, later, cfg) == (1, 2)
    step(model, optimizer)
    step(resumed, later)
    assert_equal_weights(dict(model.named_parameters()), dict(resumed.named_parameters()))
    assert_equal_weights(optimizer.state_dict(), later.state_dict())
    # it goes on to say where its base model is
    lora.save(resumed, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["base_model_name_or_path"] == base


def test_the_built_in_model_and_hub_ids_keep_their_names(monkeypatch, model_folders, tmp_path):
    find = models.find
    monkeypatch.setattr(models, "find", lambda name: str(model_folders["qwen2"]) if "/" not in name[1:] else find(name))
    for name in ("toy", "toy-teacher", "some-hub-id"):
        _, model = load_policy(name, CPU, "fp32", lora=Options(2, 4.0))
        assert model.peft_config["default"].base_model_name_or_path == name


@pytest.mark.parametrize("family", FAMILIES)
def test_without_lora_adapters_become_part_of_an_ordinary_model(family, saved, model_folders, tmp_path):
    with_adapters = reload(saved[family], Options(4, 8.0))
    base = load_frozen(str(model_folders[family]), CPU, "fp32")
    tokenizer, model = load_policy(str(saved[family]), CPU, "fp32")
    assert type(model) is type(base) and not hasattr(model, "peft_config")
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in base.named_parameters()]
    torch.testing.assert_close(logits(model), logits(with_adapters), atol=1e-4, rtol=0)
    assert (logits(model) - logits(base)).abs().max() > 0.1
    frozen, spread = load_frozen(str(saved[family]), CPU, "fp32"), models.load_spread(str(saved[family]), [CPU], "fp32")
    for other in (frozen, spread):
        assert not any(p.requires_grad for p in other.parameters()) and not other.training
        assert torch.equal(logits(other), logits(model))
    # what is saved then is a whole model
    lora.save(model, tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").is_file() and not (tmp_path / "adapter_config.json").exists()
    assert torch.equal(logits(reload(tmp_path)), logits(model))


def test_adapters_without_a_tokenizer_have_that_of_their_model(saved, tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((saved["qwen2"] / name).read_bytes())
    tokenizer, _ = load_policy(str(tmp_path), CPU, "fp32", lora=Options(4, 8.0))
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()


@pytest.mark.parametrize(("options", "message"), [
    (Options(8, 8.0), "lora_rank = 8: must be that of the adapters trained further in .*, 4; .*merge_adapters"),
    (Options(4, 16.0), "lora_alpha = 16.0: .*, 8"),
    (Options(4, 8.0, "q_proj,up_proj"), "lora_targets = 'q_proj,up_proj': .*: down_proj, gate_proj, k_proj, o_proj"),
])  # fmt: skip
def test_adapters_that_are_trained_further_are_as_they_are(options, message, saved):
    with pytest.raises(ValueError, match=message):
        reload(saved["qwen2"], options)


@pytest.mark.parametrize("damage", ["missing", "unknown", "none"])
def test_adapters_that_are_not_all_there_are_refused(damage, saved, tmp_path):
    for file in saved["qwen2"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = next(name for name in weights if "layers.1" in name and "lora_B" in name)
    if damage != "none":
        value = weights.pop(name)
        weights |= {name.replace("layers.1", "layers.7"): value} if damage == "unknown" else {}
        save_file(weights, tmp_path / "adapter_model.safetensors")
    for options in (None, Options(4, 8.0)):
        if damage == "none":
            reload(tmp_path, options)
            continue
        with pytest.raises(ValueError, match=r"weights have no counterpart.*layers.*lora_B"):
            reload(tmp_path, options)


@pytest.mark.parametrize(("change", "message"), [
    ({"base_model_name_or_path": "/gone/away"}, "'/gone/away': no such folder"),
    ({"base_model_name_or_path": None}, "must name their model; fill in base_model_name_or_path"),
    ({"peft_type": "IA3"}, "adapters of type IA3: must be LORA"),
])  # fmt: skip
def test_adapters_without_their_model_are_refused(change, message, saved, tmp_path):
    for file in saved["qwen2"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    for load in (reload, lambda folder: load_frozen(str(folder), CPU, "fp32")):
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_an_embedding_that_would_have_to_grow_is_refused(model_folders, tmp_path):
    build_model("qwen2").save_pretrained(tmp_path)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f"more{i}" for i in range(20)])
    tokenizer.pad_token = "more19"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no token to pad with: with LoRA its embedding cannot grow"):
        reload(tmp_path, Options(4, 8.0))
    assert reload(tmp_path).get_input_embeddings().num_embeddings > 64


def test_adapters_bear_a_higher_learning_rate(capsys):
    model = types.SimpleNamespace(parameters=lambda: [torch.empty(8000, 8000, device="meta")], peft_config={})
    models.warn_learning_rate(2e-4, model)
    assert capsys.readouterr().out == ""
    models.warn_learning_rate(2e-3, model)
    assert "learning_rate = 0.002 for a policy of 64 M parameters; usual for adapters" in capsys.readouterr().out


# ---- scripts ----


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-4), ("bf16", 0.2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_merge_adapters_writes_an_ordinary_folder(family, dtype, tolerance, saved, tmp_path, capsys):
    script, out = load_script("merge_adapters"), tmp_path / "merged"
    script.main([str(saved[family]), str(out), *(["--dtype", dtype] if dtype else [])])
    assert "M parameters" in capsys.readouterr().out
    kinds = {tensor.dtype for tensor in load_file(out / "model.safetensors").values()}
    assert kinds == {models.DTYPES[dtype or "fp32"]}
    tokenizer, model = load_policy(str(out), CPU, "fp32")
    assert not hasattr(model, "peft_config") and tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    expected = logits(reload(saved[family], Options(4, 8.0)))
    torch.testing.assert_close(logits(model), expected, atol=tolerance, rtol=0)
    for other, message in ((out, "exists already"), (tmp_path / "new", "holds no adapters")):
        with pytest.raises(SystemExit):
            script.main([str(saved[family] if other == out else out), str(other)])
        assert message in capsys.readouterr().err


def test_a_merged_vision_language_model_has_its_processor(tmp_path):
    from test_images import SIZES, build_model, build_tokenizer, chat
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from common import images

    tokenizer = build_tokenizer()
    build_model("qwen2_5_vl", tokenizer).save_pretrained(tmp_path / "base")
    pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16})
    images.image_only(images.PROCESSORS["qwen2_5_vl"])(
        pixels, tokenizer, chat_template=tokenizer.chat_template
    ).save_pretrained(tmp_path / "base")
    _, model = load_policy(str(tmp_path / "base"), CPU, "fp32", lora=Options(4, 8.0))
    lora.save(trained(model), tmp_path / "adapters")
    images.load_processor(tmp_path / "base").save_pretrained(tmp_path / "adapters")
    load_script("merge_adapters").main([str(tmp_path / "adapters"), str(tmp_path / "merged")])
    processors = [images.load_processor(tmp_path / name) for name in ("base", "adapters", "merged")]
    prompts = [images.encode(one, chat("what?", len(SIZES[0])), SIZES[0]) for one in processors]
    assert prompts[0] == prompts[1] == prompts[2]
    merged_model = load_frozen(str(tmp_path / "merged"), CPU, "fp32")
    assert images.is_vlm(merged_model.config)
    torch.testing.assert_close(logits(merged_model), logits(model), atol=1e-4, rtol=0)


def test_evaluate_and_sample_take_a_folder_of_adapters(saved, sums_file, capsys):
    short = ["--max_new_tokens", "4", "--device", "cpu"]
    load_script("evaluate").main([str(saved["qwen2"]), "--data", str(sums_file), "--examples", "4", *short])
    load_script("sample").main([str(saved["qwen2"]), "--prompt", "1 + 2 = ?", *short])
    assert '"examples": 4' in capsys.readouterr().out


# ---- configuration ----


@pytest.mark.parametrize(("fields", "message"), [
    ({"lora_rank": -1}, "lora_rank = -1: must be at least 0"),
    ({"lora_rank": 4, "lora_alpha": 0.0}, "lora_alpha = 0.0: must be above 0"),
    ({"lora_rank": 4, "load_bits": 3}, "load_bits = 3: must be 0, 4 or 8"),
    ({"load_bits": 4}, "load_bits = 4, lora_rank = 0: .*cannot be trained; set lora_rank"),
    ({"lora_rank": 4, "load_bits": 8, "param_offload": True}, "load_bits = 8, param_offload = True: .*stay on the GPU"),
    ({"lora_rank": 4, "lora_targets": " , "}, "lora_targets = ' , ': must name layers"),
    ({"lora_rank": 4, "reference_refresh": 2}, "the reference is the policy without adapters"),
    ({"lora_rank": 4, "fsdp": True}, "with LoRA that is little; leave one off"),
    ({}, ""), ({"lora_rank": 0, "fsdp": True, "reference_refresh": 2}, ""),
    ({"lora_rank": 4, "load_bits": 8, "fsdp": False, "reference_refresh": 0}, ""),
])  # fmt: skip
def test_check(fields, message):
    cfg = types.SimpleNamespace(**fields)
    if not message:
        lora.check(cfg)
        return
    with pytest.raises(ValueError, match=message):
        lora.check(cfg)


def test_options():
    fields = dict(lora_alpha=32.0, lora_targets="q_proj", load_bits=4)
    assert lora.options(types.SimpleNamespace(lora_rank=0, **fields)) is None
    assert lora.options(types.SimpleNamespace(lora_rank=8, **fields)) == Options(8, 32.0, "q_proj", 4)


# ---- weights in few bits ----


def test_few_bits_need_a_package(model_folders, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="load_bits = 4: needs the package bitsandbytes; pip install bitsandbytes"):
        reload(model_folders["qwen2"], Options(4, 8.0, bits=4))


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_on_weights_of_few_bits(bits, model_folders, tmp_path):
    bnb = pytest.importorskip("bitsandbytes")
    kind = bnb.nn.Linear4bit if bits == 4 else bnb.nn.Linear8bitLt
    tokenizer, model = load_policy(str(model_folders["qwen2"]), CPU, "bf16", lora=Options(4, 8.0, bits=bits))
    base = [m for m in model.modules() if isinstance(m, kind)]
    assert len(base) == 14 and type(model.get_output_embeddings()) is nn.Linear
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}
    off, on = logits(model), logits(trained(model))
    assert (on - off).abs().max() > 0.1
    was = load_frozen(str(model_folders["qwen2"]), CPU, "bf16").model.layers[0].mlp.down_proj.weight.float()
    # on CPUs bitsandbytes is wrong about rows shorter than its blocks of 64, as the other layers have them
    quantized = model.get_decoder().layers[0].mlp.down_proj.base_layer(torch.eye(64).bfloat16()).float().t()
    assert 1e-3 < (was - quantized).norm() / was.norm() < {4: 0.12, 8: 0.015}[bits]
    before = [p.detach().clone() for p in model.parameters()]
    batch = packed(model)  # with the adapters beside the weights, which are not merged
    policy, reference = logprobs.LogProbs(model, 1.0), logprobs.LogProbs(model, 1.0, adapters=False)
    logprobs.fill([batch], "ref_logps", reference, CPU)
    logps, _ = policy(*batch.tokens)
    torch.testing.assert_close(logps, batch.rollout_logps, atol=0.3, rtol=0)
    logps.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    with pytest.raises(ValueError, match="cannot be merged"):
        merging.merge(model)
    lora.save(model, tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert torch.equal(logits(reload(tmp_path, Options(4, 8.0, bits=bits), "bf16")), on)


# ---- a run ----


def test_a_run_with_adapters_is_resumed_exactly(launcher, tmp_path):
    script, options = launcher.copy("gspo"), dict(lora_rank=4, lora_alpha=8.0, learning_rate=3e-3,
                                                    num_minibatches=1, steps=4)  # fmt: skip
    whole = launcher.run(script, tmp_path / "whole", **options).succeeded()
    assert whole.steps[0]["kl_ref"] < 1e-6 < whole.steps[-1]["kl_ref"]  # the reference is the policy without adapters
    folder = tmp_path / "whole" / "checkpoint-000002"
    assert not (folder / "model.safetensors").exists()
    again = launcher.run(script, tmp_path / "again", resume=folder, **options).succeeded()
    weights = [load_file(run.out_dir / "checkpoint-000004" / "adapter_model.safetensors") for run in (whole, again)]
    assert len(weights[0]) == 2 * 14
    assert_equal_weights(*weights)


@pytest.mark.parametrize(
    ("one", "script", "ranks"),
    [("gspo", "gspo_ddp", 2), ("gspo", "gspo_multigpu", 1), ("grpo", "grpo_ddp", 2), ("gkd", "gkd_ddp", 2)],
)
def test_every_script_trains_the_same_adapters(launcher, model_folders, one, script, ranks):
    options = dict(lora_rank=4, steps=2, eval_every=0, learning_rate=1e-3, optimizer_offload="rollout")
    first, other = (launcher.trained(one, **options),
                    launcher.trained(script, ranks, **options, gradient_checkpointing=True))  # fmt: skip
    files = [run.out_dir / run.checkpoints[-1] / "adapter_model.safetensors" for run in (first, other)]
    saved, again = map(load_file, files)
    assert saved.keys() == again.keys()
    for name in saved:
        torch.testing.assert_close(again[name], saved[name], rtol=0, atol=2e-5)
    moved = [name for name in saved if "lora_B" in name and saved[name].abs().max() > 1e-4]
    assert len(moved) == 14  # they begin at 0
    source = json.loads((files[1].parent / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert source == str(model_folders["qwen2"])
