"""Tests of adapters on mixtures of experts, of which layers get adapters, and of what the rest does with them."""

import copy
import json

import pytest
import torch
from bounds import assert_rounded
from conftest import assert_equal_weights, build_tokenizer, tiny_model, two_replicas
from safetensors.torch import load_file, save_file
from test_checkpoint import weights_of
from test_lora import CPU, assert_unchanged, contents, logits, merge_adapters, packed, reload, trained
from torch import nn

from common.model import experts, logprobs, lora, merging, models
from common.model.lora import Options
from common.planning import shapes

OPTIONS = Options(4, 8.0)
SMALL = dict(num_experts_per_tok=2, head_dim=8)
MIXTURES = {
    "qwen3_moe": dict(SMALL, num_experts=4, moe_intermediate_size=24),
    "mixtral": dict(SMALL, num_local_experts=4),
    "gpt_oss": dict(SMALL, num_local_experts=4, layer_types=None),  # transposed, with biases
    # a dense layer, and shared experts, named as the experts once were
    "deepseek_v3": dict(num_experts_per_tok=2, head_dim=4, n_routed_experts=4, n_group=2, topk_group=1, kv_lora_rank=8,
                        moe_intermediate_size=24, first_k_dense_replace=1, q_lora_rank=8, qk_nope_head_dim=8,
                        qk_rope_head_dim=4, v_head_dim=8, num_key_value_heads=4),
    "jetmoe": dict(num_local_experts=4, num_experts_per_tok=2, kv_channels=8),  # in attention, too
}  # fmt: skip
# Through two layers: four products of attention, of width 32 and twice with adapters, three of the experts, of up to 64
# and summed over two of them, and the head
FORWARD_TERMS = 2 * (4 * 2 * 32 + 2 * 3 * 2 * 64) + 32


def mixture(kind: str) -> nn.Module:
    return tiny_model(kind, **MIXTURES[kind])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base model and adapters of each kind."""
    made = {}
    for kind in MIXTURES:
        base, saved = (tmp_path_factory.mktemp(f"{kind}-{name}") for name in ("base", "adapters"))
        mixture(kind).save_pretrained(base)
        for folder in (base, saved):
            build_tokenizer().save_pretrained(folder)
        lora.save(trained(reload(base, OPTIONS)), saved)
        made[kind] = base, saved
    return made


@pytest.mark.parametrize("kind", MIXTURES)
def test_every_expert_has_an_adapter_that_is_added_to_its_matrices(kind):
    base = mixture(kind)
    model = lora.add(copy.deepcopy(base), OPTIONS)
    assert torch.equal(logits(model), logits(base))
    by_hand, layers = copy.deepcopy(base), dict(merging.named_layers(trained(model)))
    weights, named = dict(by_hand.named_parameters()), {}
    for name, layer in layers.items():
        named[experts.adapted_name(name, layer)] = layer
    assert set(named) == set(lora.targets(base, "all-linear"))
    for name, layer in named.items():
        weight = weights[name if name in weights else f"{name}.weight"]
        weight.data += layer.get_delta_weight("default")  # as peft computes it
        assert layer.r["default"] == 4 and layer.scaling["default"] == 2
    assert_rounded(logits(model), logits(by_hand), terms=FORWARD_TERMS)
    assert (logits(model) - logits(base)).abs().max() > 0.1
    stacks = [layer for layer in named.values() if experts.of_experts(layer)]
    assert len(stacks) == sum(p.ndim == 3 for p in base.parameters()) > 0
    logprobs.LogProbs(model, 1.0)(*packed(model).tokens)[0].sum().backward()
    for name, p in model.named_parameters():
        assert p.requires_grad == ("lora_" in name) and (not p.requires_grad or p.grad.any()), name
    assert all(layer.lora_A["default"].weight.numel() == 4 * 4 * layer.in_features for layer in stacks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_merged_meanwhile_and_come_back(kind, dtype):
    model = trained(lora.add(mixture(kind).to(dtype), OPTIONS))
    before, active = contents(model), logits(model)
    with merging.adapters_disabled(model):
        without = logits(model)
    stack = next(layer for _, layer in merging.named_layers(model) if experts.of_experts(layer))
    weight, fp32 = experts.weight(stack), copy.deepcopy(stack).float()
    exact = weight.double() + fp32.double().get_delta_weight("default")
    with merging.merged(model):
        merged = logits(model)
        assert list(contents(model)) == list(before)
        once = torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((weight - exact).abs() <= once + 8 * torch.finfo(torch.float32).eps * exact.abs().max()).all()
        assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name][1])} == {
            name for name, p in model.named_parameters() if any(p is experts.weight(m) for _, m in
                                                                merging.named_layers(model))}  # fmt: skip
        with pytest.raises(RuntimeError, match="merged"), merging.as_reference(model):
            pytest.fail("there is no reference meanwhile")
    if dtype == torch.float32:
        assert_rounded(merged, active, terms=FORWARD_TERMS)
    assert (merged - without).abs().max() > 0.1
    assert_unchanged(model, before, active)
    with merging.as_reference(model):
        assert torch.equal(logits(model), without)


@pytest.mark.parametrize("kind", MIXTURES)
def test_saved_adapters_of_experts_are_resumed_kept_as_reference_and_merged(kind, folders, tmp_path, capsys):
    base, saved = folders[kind]
    model = reload(saved, OPTIONS)
    first = logits(model)
    assert torch.equal(first, logits(trained(reload(base, OPTIONS))))
    trained(model, std=0.2)
    lora.keep_start([model], str(saved))
    changed = logits(model)
    with merging.as_reference(model):
        assert torch.equal(logits(model), first) and not torch.equal(first, changed)
    assert torch.equal(logits(model), changed)
    merge_adapters(saved, tmp_path / "merged")
    ordinary = reload(tmp_path / "merged")
    assert type(ordinary) is type(reload(base)) and list(weights_of(ordinary)) == list(weights_of(reload(base)))
    assert_rounded(logits(ordinary), first, terms=FORWARD_TERMS)
    assert_equal_weights(weights_of(ordinary), weights_of(reload(saved)))
    assert all(p.requires_grad for p in ordinary.parameters())


@pytest.mark.parametrize("names", ["o_proj,shared_experts.down_proj", "experts", "o_proj,down_proj"])
def test_adapters_of_some_layers_are_resumed(names, folders, tmp_path):
    model = trained(reload(folders["deepseek_v3"][0], Options(4, 8.0, names)))
    lora.save(model, tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    assert torch.equal(logits(reload(tmp_path, Options(4, 8.0, names))), logits(model))
    with pytest.raises(ValueError, match=r"lora_targets = 'o_proj': .* differ"):
        reload(tmp_path, Options(4, 8.0, "o_proj"))


@pytest.mark.parametrize(("kind", "names", "found"), [
    ("qwen3_moe", "experts", ["down_proj"] * 2 + ["gate_up_proj"] * 2),
    ("qwen3_moe", "gate_up_proj", ["gate_up_proj"] * 2),
    ("gpt_oss", "q_proj,experts.down_proj", ["down_proj"] * 2 + ["q_proj"] * 2),
    ("mixtral", "layers.1.mlp.experts", ["down_proj", "gate_up_proj"]),
    ("deepseek_v3", "down_proj", ["down_proj"] * 3), ("jetmoe", "mlp.input_linear", ["weight"] * 2),
])  # fmt: skip
def test_experts_are_named_like_layers(kind, names, found):
    model = lora.add(mixture(kind), Options(2, 4.0, names))
    layers = merging.named_layers(model)
    assert sorted(experts.adapted_name(*pair).rpartition(".")[2] for pair in layers) == found


@pytest.mark.parametrize("names", ["gate", "gate.weight", "q_proj,mlp", "experts.gate"])
def test_what_can_have_no_adapter_is_refused_by_name(names):
    with pytest.raises(ValueError, match=rf"named '{names.split(',')[-1]}'; there are down_proj, gate_up_proj, k_proj"):
        lora.targets(mixture("qwen3_moe"), names)


@pytest.mark.parametrize(("kind", "options", "left"), [
    ("qwen3_moe", MIXTURES["qwen3_moe"], "gate.weight"), ("gpt_oss", MIXTURES["gpt_oss"], "router.weight"),
    ("falcon_mamba", {}, "dt_proj.weight, mixer.A_log, out_proj.weight, x_proj.weight"),  # its kernels read these
    ("longcat_flash", dict(n_routed_experts=4, zero_expert_num=2, moe_topk=2, kv_lora_rank=8, q_lora_rank=8,
                           qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8, num_key_value_heads=4,
                           expert_ffn_hidden_size=24, ffn_hidden_size=64, num_layers=2), "classifier.weight"),
    ("qwen2", {}, ""), ("gpt2", {}, ""), ("bloom", {}, ""), ("falcon", {}, ""), ("jetmoe", MIXTURES["jetmoe"], ""),
])  # fmt: skip
def test_what_is_left_without_adapters_is_said_and_the_rest_is_trained(kind, options, left, capsys):
    model = tiny_model(kind, **options)
    capsys.readouterr()
    adapted = lora.add(model, OPTIONS)
    said = capsys.readouterr().out
    weights = [experts.weight(layer).numel() for _, layer in merging.named_layers(adapted)]
    total = sum(p.numel() for p in adapted.get_decoder().parameters() if not p.requires_grad)
    assert said == (f"LoRA: adapters on {sum(weights) / 1e6:.2f} of {total / 1e6:.2f} M parameters; without: {left}\n"
                    if left else "")  # fmt: skip
    (active,) = trained(adapted)(input_ids=torch.arange(4, 20)[None]).logits
    active.square().sum().backward()
    assert all(p.grad.any() for p in adapted.parameters() if p.requires_grad)
    with merging.merged(adapted):
        torch.testing.assert_close(logits(adapted)[0], active, rtol=1e-4, atol=1e-4)
    named = experts.adapted_name(*merging.named_layers(adapted)[0])
    lora.add(tiny_model(kind, **options), Options(2, 4.0, named))
    assert capsys.readouterr().out == ""  # whoever names layers knows which


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_replicas_and_gradient_checkpointing_compute_the_same(kind, folders):
    model = trained(reload(folders[kind][0], OPTIONS))
    replica = models.replicate(model, [CPU, CPU], 2)[1]
    batch = packed(model)
    replica.gradient_checkpointing_enable({"use_reentrant": False})
    for one in (model, replica.train()):
        logprobs.LogProbs(one, 1.0)(*batch.tokens)[0].sum().backward()
    for p, other in zip(model.parameters(), replica.parameters(), strict=True):
        assert p is not other and p.requires_grad == other.requires_grad
        assert p.grad is other.grad is None or torch.equal(p.grad, other.grad)
    trained(model, std=0.3)
    assert not torch.equal(logits(replica), logits(model))
    models.refresh([model, replica])
    assert torch.equal(logits(replica), logits(model))


@pytest.mark.parametrize(("names", "count"), [("all-linear", 4 + 2 * 3), ("experts", 2 * 3), ("q_proj,up_proj", 3)])
def test_experts_that_are_linear_layers_have_adapters_like_others(names, count):
    model = tiny_model("llama")

    class Mixture(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.experts = nn.ModuleList([layer, copy.deepcopy(layer)])

        def forward(self, x):
            return self.experts[0](x) + self.experts[1](2 * x)

    for block in model.model.layers:
        block.mlp = Mixture(block.mlp)
    before = logits(model)
    model = lora.add(model, Options(4, 8.0, names))
    assert len(merging.named_layers(model)) == 2 * count and torch.equal(logits(model), before)
    active = logits(trained(model))
    with merging.merged(model):
        assert_rounded(logits(model), active, terms=FORWARD_TERMS)


def test_adapters_from_when_experts_were_layers_are_merged(folders, tmp_path):
    base, weights, expected = folders["mixtral"][0], {}, mixture("mixtral")
    torch.manual_seed(2)
    for number, block in enumerate(expected.model.layers):
        for e in range(4):
            for name, (size_o, size_i) in {"w1": (64, 32), "w3": (64, 32), "w2": (32, 64)}.items():
                a_rI, b_Or = 0.1 * torch.randn(4, size_i), 0.1 * torch.randn(size_o, 4)
                stem = f"base_model.model.model.layers.{number}.block_sparse_moe.experts.{e}.{name}"
                weights |= {f"{stem}.lora_A.weight": a_rI, f"{stem}.lora_B.weight": b_Or}
                stack = block.mlp.experts
                rows = {"w1": stack.gate_up_proj[e, :64], "w3": stack.gate_up_proj[e, 64:], "w2": stack.down_proj[e]}
                rows[name].data += 2 * b_Or @ a_rI
    save_file(weights, tmp_path / "adapter_model.safetensors")
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["w1", "w2", "w3"],
                  base_model_name_or_path=str(base))  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    build_tokenizer().save_pretrained(tmp_path)
    assert_rounded(logits(reload(tmp_path)), logits(expected), terms=FORWARD_TERMS)


def test_a_plan_counts_adapters_of_experts(folders):
    for kind, (base, _) in folders.items():
        shape, model = shapes.of(str(base)), reload(base, OPTIONS)
        assert 4 * shape.per_rank == sum(p.numel() for p in model.parameters() if p.requires_grad), kind
        assert shape.adapted == sum(experts.weight(m).numel() for _, m in merging.named_layers(model))
        assert shape.experts == sum(p.numel() for p in model.parameters() if p.ndim == 3)


@pytest.mark.parity
def test_a_run_with_adapters_of_experts_is_resumed_exactly(launcher, folders, tmp_path):
    options = dict(policy_model=folders["qwen3_moe"][0], lora_rank=4, lora_alpha=8.0, num_minibatches=1, steps=4,
                   save_every=2, learning_rate=3e-3, prepare=two_replicas)  # fmt: skip
    whole = launcher.run("gspo_multigpu", tmp_path / "whole", **options).succeeded()
    assert whole.output.count("M parameters; without: gate.weight") == 1
    assert whole.steps[0]["kl_ref"] < 1e-6 < whole.steps[-1]["kl_ref"]
    again = launcher.run("gspo_multigpu", tmp_path / "again", resume=whole.out_dir / "checkpoint-000002", **options)
    weights = [load_file(run.out_dir / "checkpoint-000004" / "adapter_model.safetensors")
               for run in (whole, again.succeeded())]  # fmt: skip
    moved = [name for name, p in weights[0].items() if "experts" in name and "lora_B" in name and p.any()]
    assert len(moved) == 2 * 2
    assert_equal_weights(*weights)
