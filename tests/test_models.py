"""Tests of common/model/models.py: loading, and what must be true of model and tokenizer before training."""

import json
import shutil
import socket
import time
import types

import huggingface_hub.constants
import pytest
import torch
from conftest import assert_equal_weights, build_model, build_tokenizer, tiny_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GPT2LMHeadModel, Qwen2Config
from transformers import PreTrainedTokenizerFast as FastTokenizer

from common.generation.rollout import Sampler
from common.model import head, logprobs, models, sources
from common.model.models import load_frozen, load_policy, load_spread, repair_padding
from common.model.sources import end_token_ids, find, load_tokenizer

CPU = torch.device("cpu")
FAMILIES = ["qwen2", "gpt2"]
IDS = torch.arange(4, 20)[None]


def make_tokenizer(words, **special) -> FastTokenizer:
    backend = Tokenizer(tokenizer_models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return FastTokenizer(tokenizer_object=backend, **special)


def save(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    (tokenizer or build_tokenizer()).save_pretrained(folder)
    return str(folder)


def weights_of(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


@pytest.fixture
def offline(monkeypatch):
    """Neither the hub nor anything else can be reached; whoever tries fails at once, and the test in the end."""
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # the variable is read at import
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not attempts


def test_a_folder_is_itself_and_a_hub_id_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "runs/mine", str(tmp_path / "runs" / "mine")):
        assert find(name) == name
    assert find("~/runs/mine") == str(tmp_path / "runs" / "mine")


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere", "/nowhere", "~/nowhere", "models/qwen/step-20", "./file"])
def test_a_path_without_anything_there_is_an_error_at_once(name, offline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"")  # is no folder
    for load in (find, lambda n: load_policy(n, CPU, "fp32"), lambda n: load_frozen(n, CPU, "fp32"), load_tokenizer):
        with pytest.raises(ValueError, match=f"{name!r}: no such folder.*hub id"):
            load(name)


@pytest.mark.parametrize("name", ["nobody/no-such-model-anywhere", "no-such-model-anywhere"])
def test_an_unknown_hub_id_without_network_fails_at_once_and_by_name(name, offline):
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"{name!r}.*check the name and the network"):
        load_policy(name, CPU, "fp32")
    assert time.monotonic() - start < 10  # no retries


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(("damage", "said"), [
    ("a weight", rf"lack 1 weights, such as \['{NAME}'\]; copy or download"), ("half a file", "cut off or damaged"),
    ("model.safetensors", ""), ("config.json", ""), ("*", ""),  # a run's folder, not one of its checkpoints
])  # fmt: skip
@pytest.mark.usefixtures("offline")
def test_weights_that_are_missing_or_cut_off_are_an_error_and_not_random_numbers(damage, said, model_folders, tmp_path):
    folder = shutil.copytree(model_folders["qwen2"], tmp_path / "model")
    weights = folder / "model.safetensors"
    if damage == "a weight":
        save_file({key: value for key, value in load_file(weights).items() if key != NAME}, weights)
    elif damage == "half a file":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    else:
        (folder / "checkpoint-20").mkdir()
        for path in list(folder.glob(damage)):
            path.rmdir() if path.is_dir() else path.unlink()
    for load in (load_policy, load_frozen):
        with pytest.raises(ValueError, match=rf"{folder}.*{said}"):
            load(str(folder), CPU, "fp32")


@pytest.mark.parametrize("config", [GPT2Config, Qwen2Config, Gemma2Config])
def test_a_folder_without_a_tokenizer_is_an_error_that_names_it(tmp_path, offline, config):
    # transformers makes one up that knows special tokens only: every text is empty to it, or one unknown token
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_is_the_one_in_the_folder(model_folders, family):
    # transformers puts another class in its place if it thinks that the model type asks for it
    text, saved = "<im_start> user what is 1 + 2 = ? <im_end> assistant", build_tokenizer()
    loaded = load_tokenizer(str(model_folders[family]))
    assert loaded(text).input_ids == saved(text).input_ids
    assert loaded.decode(saved(text).input_ids) == text
    assert (loaded.pad_token, loaded.eos_token, len(loaded)) == ("<pad>", "<im_end>", len(saved))
    assert loaded.padding_side == "left" and loaded.chat_template == saved.chat_template


@pytest.mark.parametrize(("dtype", "device", "expected"), [
    ("auto", "cpu", torch.float32), ("auto", "cuda", torch.bfloat16), ("fp32", "cuda", torch.float32),
    ("bf16", "cpu", torch.bfloat16), ("fp16", "cuda", torch.float16), ("float32", "cpu", None), ("", "cpu", None),
])  # fmt: skip
def test_pick_dtype(dtype, device, expected):
    if expected is None:
        with pytest.raises(ValueError, match="must be auto, fp32, bf16, fp16"):
            sources.pick_dtype(dtype, torch.device(device))
    else:
        assert sources.pick_dtype(dtype, torch.device(device)) == expected


@pytest.mark.parametrize(("family", "dtype"), [("qwen2", "fp32"), ("gpt2", "bf16")])
def test_the_policy_trains_in_its_dtype_and_the_frozen_model_does_not(model_folders, family, dtype, offline, capsys):
    before, folder = torch.get_float32_matmul_precision(), str(model_folders[family])
    torch.set_float32_matmul_precision("high")  # as TF32, which holds numbers of half precision exactly, others not
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        tokenizer, policy = load_policy(folder, CPU, dtype)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(p.requires_grad for p in policy.parameters()) and tokenizer.padding_side == "left"
    assert not any(getattr(module, "gradient_checkpointing", False) for module in policy.modules())
    assert not any(module.training for module in policy.modules())  # no dropout, whatever it is called
    for model in (policy, load_frozen(folder, CPU, dtype), load_spread(folder, [CPU], dtype)):
        assert_equal_weights(weights_of(model), weights_of(build_model(family).to(sources.DTYPES[dtype])))
        assert model is policy or not (model.training or any(p.requires_grad for p in model.parameters()))
    captured = capsys.readouterr()
    assert captured.out == "" and "it/s" not in captured.err  # no progress bars
    _, model = load_policy(folder, CPU, dtype, gradient_checkpointing=True)
    checkpointed = [getattr(module, "gradient_checkpointing", False) for module in model.modules()]
    assert any(checkpointed) and checkpointed == [module.training for module in model.modules()]


@pytest.mark.parametrize(("family", "attention", "names"), [
    ("gpt2", "sdpa", ["resid_pdrop", "embd_pdrop", "attn_pdrop"]),
    ("qwen2", "sdpa", ["attention_dropout"]), ("qwen2", "eager", ["attention_dropout"]),  # calls the function
])  # fmt: skip
def test_every_dropout_is_off_and_the_config_keeps_its_values(family, attention, names, tmp_path):
    folder, path = save(tmp_path, build_model(family)), tmp_path / "config.json"
    changed = {**dict.fromkeys(names, 0.5), "attn_implementation": attention}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    _, loaded = load_policy(folder, CPU, "fp32")
    noisy = AutoModelForCausalLM.from_pretrained(folder).train()  # without the loader it would show
    for model, same in ((loaded, True), (noisy, False)):
        assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits) == same
    assert not any(module.p for module in loaded.modules() if isinstance(module, nn.Dropout))
    loaded.save_pretrained(tmp_path)
    assert [json.loads(path.read_text())[name] for name in names] == [0.5] * len(names)


WORDS = ["<start>", "<eos>", *"abcdefgh"]


def sized_model(size) -> GPT2LMHeadModel:
    """Tied embeddings of more rows than columns, or a new row would be their mean; no pad token is named."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=size, n_embd=4, n_layer=1, n_head=2, n_positions=32, eos_token_id=1, pad_token_id=None,
                   bos_token_id=None)
    )  # fmt: skip


@pytest.mark.parametrize(("more", "special", "spare", "pad"), [
    (["<pad>"], {}, 0, "<pad>"),  # no pad token named, though there is one
    (["[PAD]"], {"pad_token": "<eos>"}, 0, "[PAD]"),  # pad = eos
    (["<|endoftext|>", "<unk>"], {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, 0, "<unk>"),
    (["<unk>"], {"unk_token": "<unk>"}, 0, "<unk>"),
    (["<unk>", "<pad>"], {"pad_token": "h"}, 0, "h"),  # a sound one is left alone
    ([], {}, 6, "<|pad|>"),  # a spare row of the embedding is used before it grows
    ([], {"pad_token": "<new>"}, 0, "<new>"),  # added to the tokenizer by somebody who forgot the model
])  # fmt: skip
def test_a_token_of_the_vocabulary_becomes_the_pad_token(more, special, spare, pad, capsys):
    words = [*WORDS, *more]
    tokenizer, model = make_tokenizer(words, **{"eos_token": "<eos>", **special}), sized_model(len(words) + spare)
    place = words.index(pad) if pad in words else len(words)
    repair_padding(tokenizer, model)
    assert tokenizer.pad_token == pad and tokenizer.pad_token_id == place != tokenizer.eos_token_id
    assert model.config.pad_token_id == model.generation_config.pad_token_id == place
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == max(len(words) + spare, place + 1)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    output = capsys.readouterr().out
    assert f"now {pad!r}" in output if special.get("pad_token") not in ("h", "<new>") else not output


@pytest.mark.parametrize("special", [{}, {"pad_token": "<eos>"}], ids=["no pad", "pad = eos"])
def test_without_a_usable_token_the_embedding_grows(special, tmp_path, capsys):
    tokenizer = make_tokenizer(WORDS, eos_token="<eos>", **special)
    folder = save(tmp_path / "before", sized_model(10), tokenizer)
    rows, drawn = [], []
    for rank in range(2):
        torch.manual_seed(rank)
        tokenizer, model = load_policy(folder, CPU, "fp32")
        rows.append(model.get_input_embeddings().weight[10])
        drawn.append(torch.rand(1))
        torch.manual_seed(rank)
        assert torch.equal(torch.rand(1), drawn[-1])  # what is drawn afterwards is as before
    assert torch.equal(*rows)  # the new row is the same on every rank
    assert tokenizer.pad_token_id == 10 and len(tokenizer) == 11
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == 11
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model(input_ids=torch.tensor([[10, 2]])).logits.shape == (1, 2, 11)
    assert "'<eos>'" in capsys.readouterr().out
    assert torch.equal(model.get_input_embeddings().weight[:10], sized_model(10).get_input_embeddings().weight)
    again, model = load_policy(save(tmp_path / "after", model, tokenizer), CPU, "fp32")
    assert again.pad_token_id == model.config.pad_token_id == 10 and capsys.readouterr().out == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repaired_tokenizer_gives_the_rollout_of_an_explicit_one(family):
    model, results = build_model(family), []
    for pad_token in ("<pad>", None, "<im_end>"):
        tokenizer = build_tokenizer()
        tokenizer.pad_token = pad_token
        repair_padding(tokenizer, model)
        ids = dict(end_ids=end_token_ids(tokenizer, model), pad_id=tokenizer.pad_token_id)
        sampler = Sampler([model], max_new_tokens=8, **ids)
        results.append(sampler.generate([[4, 5, 6], [7, 8, 9, 10, 11]], group_size=3, temperature=1.0))
    for batch in results[1:]:  # bit for bit: one model, the same operations
        for field in ("completion_ids", "completion_mask", "rollout_logps"):
            assert torch.equal(getattr(batch, field), getattr(results[0], field))


@pytest.mark.parametrize(("tokenizer_eos", "config_eos", "generation_eos", "expected"), [
    ("user", 3, [3, 5], [3, 4, 5]), ("<im_end>", [5, 3], None, [3, 5]), ("<im_end>", None, None, [3]),
    (None, None, 7, [7]), ("<im_end>", 0, None, [0, 3]),  # token 0 is a token
    ("<im_end>", 3, "3", None), ("<im_end>", 3, [[3, 5]], None), ("<im_end>", 3, 3.0, None), (None, None, None, None),
])  # fmt: skip
def test_every_end_token_counts(tokenizer_eos, config_eos, generation_eos, expected):
    tokenizer, model = build_tokenizer(), build_model("qwen2")
    tokenizer.eos_token = tokenizer_eos
    model.config.eos_token_id, model.generation_config.eos_token_id = config_eos, generation_eos
    if expected is None:
        said = r"eos_token_id = .*whole numbers.*generation_config.json" if tokenizer_eos else "no end token"
        with pytest.raises(ValueError, match=said):
            end_token_ids(tokenizer, model)
    else:
        assert end_token_ids(tokenizer, model) == expected


@pytest.mark.parametrize(("given", "left_out"), [([-1, 64, 3, None], [-1, 64]), (3, [])])
def test_end_tokens_that_the_policy_cannot_say_are_left_out(given, left_out, capsys):
    model = build_model("qwen2")
    model.generation_config.eos_token_id = given
    ids = end_token_ids(build_tokenizer(), model)
    output = capsys.readouterr().out
    assert ids == [3] and (f"warning: end tokens {left_out} " in output if left_out else not output)


def test_a_reply_that_ends_in_the_template_as_no_completion_does_is_warned_of(capsys):
    tokenizer, model = build_tokenizer(), build_model("qwen2")  # <im_end>, token 3, ends a turn of its template
    assert end_token_ids(tokenizer, model) == [3] and not capsys.readouterr().out
    tokenizer.eos_token, model.config.eos_token_id, model.generation_config.eos_token_id = "user", 4, None
    assert end_token_ids(tokenizer, model) == [4]
    assert capsys.readouterr().out.count("warning: the chat template ends a reply with '<im_end>'") == 1
    tokenizer.chat_template = "{{ raise_exception('no chat here') }}"
    assert end_token_ids(tokenizer, model) == [4] and not capsys.readouterr().out


def test_over_several_gpus_it_takes_those_named_and_no_others(model_folders, tmp_path, monkeypatch):
    read, options = models._read, []

    def without_gpus(name, dtype, **how):
        options.append((name, dtype, how))
        return read(name, torch.float32)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 + device.index, 999))
    monkeypatch.setattr(models, "_read", without_gpus)
    where = [torch.device("cuda", i) for i in (3, 1)]
    model = load_spread(str(model_folders["gpt2"]), where, "auto")
    how = dict(device_map="balanced", max_memory={3: 103, 1: 101})  # what is free there
    assert options == [(str(model_folders["gpt2"]), torch.bfloat16, how)]
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    model = build_model("qwen2").eval()
    assert logprobs.LogProbs(model, 1.0).packed
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert not logprobs.LogProbs(model, 1.0).packed  # nor are its sequences
    # the head must be a known one there, too
    folder = save(tmp_path, tiny_model("granite", logits_scaling=4.0))
    load_spread(folder, where, "fp32")
    monkeypatch.setattr(head, "SCALES", ())
    with pytest.raises(ValueError, match="GraniteForCausalLM: its logits differ"):
        load_spread(folder, where, "fp32")


def test_replicas_follow_the_first_after_a_refresh(model_folders):
    _, model = load_policy(str(model_folders["qwen2"]), CPU, "fp32")
    (alone,) = models.replicate(model, (CPU,))
    assert alone is model  # one device needs no copy
    model.config.quantization_config = types.SimpleNamespace(load_in_8bit=True)
    with pytest.raises(ValueError, match=r"load_bits = 8 .*set load_bits to 4"):
        models.replicate(model, (CPU, CPU))
    del model.config.quantization_config
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    replicas = models.replicate(model, (CPU, CPU, CPU))
    assert replicas[0] is model and len({id(replica) for replica in replicas}) == 3
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
            assert p.requires_grad
    for replica in replicas[1:]:
        assert not any(p.requires_grad for p in replica.parameters())
        assert replica.get_output_embeddings().weight is replica.get_input_embeddings().weight
        assert_equal_weights(weights_of(replica), before)  # a copy, not the same tensors
    models.refresh(replicas)
    for replica in replicas[1:]:
        assert_equal_weights(weights_of(replica), weights_of(model))


def test_replicas_that_are_trained_gather_gradients_for_the_first():
    model = build_model("qwen2").double()  # sums in another order differ by less than any fault
    model.model.norm.weight.requires_grad_(False)
    replicas = models.replicate(model, (CPU,) * 4, trained=3)
    for replica, trained in zip(replicas, (True, True, True, False), strict=True):
        names = {name for name, p in replica.named_parameters() if p.requires_grad}
        assert (len(names) > 5) == trained and "model.norm.weight" not in names
    ids = torch.arange(4, 28).view(3, 8)
    (model(input_ids=ids).logits ** 2).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    for replica, rows in zip(replicas[1:], (ids[:2], ids[2:]), strict=False):  # the first gets nothing to do
        (replica(input_ids=rows).logits ** 2).sum().backward()
    models.sum_gradients(replicas[:3])
    gathered = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(gathered, expected)
    assert all(p.grad is None for replica in replicas[1:] for p in replica.parameters())

    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    untouched = replicas[3].model.norm.weight.clone()
    models.refresh(replicas)
    for replica in replicas[1:]:
        assert torch.equal(replica.model.norm.weight, untouched)  # what is not trained is not copied
        assert torch.equal(replica.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize(("width", "rate", "adapters", "warned"), [
    (8000, 1e-4, False, True), (8000, 5e-6, False, False), (100, 1e-4, False, False),
    (8000, 2e-4, True, False), (8000, 2e-3, True, True),  # adapters bear a higher one
])  # fmt: skip
def test_a_learning_rate_far_too_high_for_the_size_is_pointed_out(width, rate, adapters, warned, capsys):
    model = nn.Linear(width, width, device="meta")  # 64 M or 10 k parameters
    if adapters:
        model.peft_config = {}
    models.warn_learning_rate(rate, model)
    output = capsys.readouterr().out
    assert (f"warning: learning_rate = {rate:g} for a policy of 64 M parameters" in output) == bool(output) == warned
    assert ("adapters" in output) == (adapters and warned)
