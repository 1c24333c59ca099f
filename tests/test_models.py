"""Tests of common/models.py: loading, and what must be true of model and tokenizer before training."""

import json
import shutil
import socket
import time
import types

import huggingface_hub.constants
import pytest
import torch
from conftest import build_model, build_tokenizer, tiny_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from torch import nn
from transformers import (
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from common import logprobs, models
from common.models import (
    end_token_ids,
    find,
    load_frozen,
    load_policy,
    load_spread,
    load_tokenizer,
    pick_dtype,
    refresh,
    repair_padding,
    replicate,
    warn_learning_rate,
)
from common.rollout import Sampler

CPU = torch.device("cpu")
FAMILIES = ["qwen2", "gpt2"]


def make_tokenizer(words, **special) -> PreTrainedTokenizerFast:
    backend = Tokenizer(tokenizer_models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def save(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    (tokenizer or build_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def offline(monkeypatch):
    """Neither the hub nor anything else can be reached; yields the attempts."""
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # the variable is read at import
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return attempts


# --- where a model comes from ---


def test_a_folder_is_itself_and_a_hub_id_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.json").write_text("{}")
    assert find(str(tmp_path / "runs" / "mine")) == str(tmp_path / "runs" / "mine")
    assert find("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find("runs/mine") == "runs/mine"
    assert find("~/runs/mine") == str(tmp_path / "runs" / "mine")


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere", "/nowhere", "~/nowhere", "models/qwen/step-20"])
def test_a_path_without_anything_there_is_an_error_at_once(name, offline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for load in (find, lambda n: load_policy(n, CPU, "fp32"), lambda n: load_frozen(n, CPU, "fp32"), load_tokenizer):
        with pytest.raises(ValueError, match=f"{name!r}: no such folder.*hub id"):
            load(name)
    assert not offline


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="no such folder"):
        find(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["nobody/no-such-model-anywhere", "no-such-model-anywhere"])
@pytest.mark.parametrize("load", [load_policy, load_frozen])
def test_an_unknown_hub_id_without_network_fails_at_once_and_by_name(load, name, offline):
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"{name!r}.*check the name and the network"):
        load(name, CPU, "fp32")
    assert time.monotonic() - start < 10  # no retries
    assert not offline


def test_a_folder_loads_without_network(model_folders, offline):
    load_policy(str(model_folders["qwen2"]), CPU, "fp32")
    load_frozen(str(model_folders["gpt2"]), CPU, "fp32")
    assert not offline


def test_weights_that_are_missing_or_cut_off_are_an_error_and_not_random_numbers(tmp_path, model_folders):
    folder = shutil.copytree(model_folders["qwen2"], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({key: value for key, value in weights.items() if key != name}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"its files lack 1 weights, such as \['{name}'\]; copy or download it again"):
        models.load_policy(str(folder), CPU, "fp32")
    content = (model_folders["qwen2"] / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="a file of its weights is cut off or damaged"):
        models.load_frozen(str(folder), CPU, "fp32")


@pytest.mark.parametrize("missing", ["weights", "config", "everything"])
def test_an_incomplete_folder_is_an_error_that_names_it(tmp_path, missing, offline):
    folder = save(tmp_path, build_model("qwen2"))
    (tmp_path / "checkpoint-20").mkdir()  # "everything": the folder of a run, not one of its checkpoints
    files = [file.name for file in tmp_path.iterdir() if file.is_file()]
    for name in {"weights": ["model.safetensors"], "config": ["config.json"], "everything": files}[missing]:
        (tmp_path / name).unlink()
    with pytest.raises(ValueError) as error:
        load_policy(folder, CPU, "fp32")
    assert folder in str(error.value)


@pytest.mark.parametrize("config", [GPT2Config, Qwen2Config, Gemma2Config])
def test_a_folder_without_a_tokenizer_is_an_error_that_names_it(tmp_path, offline, config):
    # transformers makes one up that knows special tokens only: every text is empty to it, or one unknown token
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_is_the_one_in_the_folder(model_folders, family):
    # transformers puts another class in its place if it thinks that the model type asks for it
    text, saved = "<im_start> user what is 1 + 2 = ? <im_end> assistant", build_tokenizer()
    loaded = load_tokenizer(str(model_folders[family]))
    assert loaded(text).input_ids == saved(text).input_ids
    assert loaded.decode(saved(text).input_ids) == text
    assert (loaded.pad_token, loaded.eos_token, len(loaded)) == ("<pad>", "<im_end>", len(saved))
    messages = [{"role": "user", "content": "1 + 2 = ?"}]
    rendered = [t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for t in (loaded, saved)]
    assert rendered[0] == rendered[1]


# --- dtype, mode, dropout ---


@pytest.mark.parametrize(("dtype", "device", "expected"), [
    ("auto", "cpu", torch.float32), ("auto", "cuda", torch.bfloat16), ("fp32", "cuda", torch.float32),
    ("bf16", "cpu", torch.bfloat16), ("fp16", "cuda", torch.float16),
])  # fmt: skip
def test_pick_dtype(dtype, device, expected):
    assert pick_dtype(dtype, torch.device(device)) == expected


@pytest.mark.parametrize("dtype", ["float32", "int8", ""])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="must be auto, fp32, bf16, fp16"):
        pick_dtype(dtype, CPU)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_policy_trains_in_its_dtype_and_the_frozen_model_does_not(model_folders, family, dtype, expected):
    tokenizer, policy = load_policy(str(model_folders[family]), CPU, dtype)
    frozen = load_frozen(str(model_folders[family]), CPU, dtype)
    assert {p.dtype for p in [*policy.parameters(), *frozen.parameters()]} == {expected}
    assert policy.training and all(p.requires_grad for p in policy.parameters())
    assert not frozen.training and not any(p.requires_grad for p in frozen.parameters())
    assert tokenizer.padding_side == "left"


def test_every_dropout_is_off_and_the_config_keeps_its_values(model_folders, tmp_path):
    _, model = load_policy(str(model_folders["gpt2"]), CPU, "fp32")
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert len(dropouts) >= 5 and all(module.p == 0.0 for module in dropouts)
    ids = torch.arange(4, 20)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert [saved[name] for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")] == [0.1, 0.1, 0.1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_that_is_no_module_is_off_too(tmp_path, attention):
    model = build_model("qwen2")
    model.config.attention_dropout = 0.5  # Qwen2 keeps it as a number and calls the function
    folder = save(tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attn_implementation": attention}))
    _, loaded = load_policy(folder, CPU, "fp32")
    ids = torch.arange(4, 20)[None]
    assert torch.equal(loaded(input_ids=ids).logits, loaded(input_ids=ids).logits)
    assert loaded.config.attention_dropout == 0.5
    # without the loader it would show
    noisy = Qwen2ForCausalLM.from_pretrained(folder).train()
    assert not torch.equal(noisy(input_ids=ids).logits, noisy(input_ids=ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_reaches_the_layers(model_folders, family):
    states = []
    for wanted in (False, True):
        _, model = load_policy(str(model_folders[family]), CPU, "fp32", gradient_checkpointing=wanted)
        assert model.training
        states.append({getattr(module, "gradient_checkpointing", None) for module in model.modules()} - {None})
    assert states == [{False}, {True}]


def test_weights_are_those_of_the_folder(model_folders):
    _, policy = load_policy(str(model_folders["qwen2"]), CPU, "fp32")
    for (name, ours), theirs in zip(policy.named_parameters(), build_model("qwen2").parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_fp32_is_multiplied_in_fp32(model_folders):
    # TF32 holds numbers of half precision exactly, and others not
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        load_policy(str(model_folders["qwen2"]), CPU, "fp32")
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


# --- padding ---

WORDS = ["<start>", "<eos>", *"abcdefgh"]


def sized_model(size) -> GPT2LMHeadModel:
    """A model with tied embeddings of `size` rows that names no pad token."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2, n_positions=32, eos_token_id=1, pad_token_id=None,
                   bos_token_id=None)
    )  # fmt: skip


@pytest.mark.parametrize(("words", "special", "pad"), [
    ([*WORDS, "<pad>"], {}, "<pad>"),  # no pad token named, though there is one
    ([*WORDS, "<pad>"], {"pad_token": "<eos>"}, "<pad>"),  # pad = eos
    ([*WORDS, "[PAD]"], {"pad_token": "<eos>"}, "[PAD]"),
    ([*WORDS, "<|endoftext|>", "<unk>"], {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, "<unk>"),
    ([*WORDS, "<unk>"], {"unk_token": "<unk>"}, "<unk>"),
])  # fmt: skip
def test_a_token_of_the_vocabulary_becomes_the_pad_token(words, special, pad, capsys):
    tokenizer = make_tokenizer(words, **{"eos_token": "<eos>", **special})
    model, before = sized_model(len(tokenizer)), len(tokenizer)
    repair_padding(tokenizer, model)
    assert tokenizer.pad_token == pad and tokenizer.pad_token_id == words.index(pad)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.config.pad_token_id == model.generation_config.pad_token_id == words.index(pad)
    assert len(tokenizer) == before == model.get_input_embeddings().num_embeddings
    assert f"now {pad!r}" in capsys.readouterr().out


@pytest.mark.parametrize("special", [{}, {"pad_token": "<eos>"}], ids=["no pad", "pad = eos"])
def test_without_a_usable_token_the_embedding_grows(special, tmp_path, capsys):
    tokenizer = make_tokenizer(WORDS, eos_token="<eos>", **special)
    folder = save(tmp_path / "before", sized_model(10), tokenizer)
    tokenizer, model = load_policy(folder, CPU, "fp32")
    assert tokenizer.pad_token_id == 10 and len(tokenizer) == 11
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == 11
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model(input_ids=torch.tensor([[10, 2]])).logits.shape == (1, 2, 11)
    assert "'<eos>'" in capsys.readouterr().out
    # the rows there were stay, and what is saved loads without another repair
    assert torch.equal(model.get_input_embeddings().weight[:10], sized_model(10).get_input_embeddings().weight)
    again, model = load_policy(save(tmp_path / "after", model, tokenizer), CPU, "fp32")
    assert again.pad_token_id == model.config.pad_token_id == 10 and capsys.readouterr().out == ""


def test_spare_rows_of_the_embedding_are_used_before_it_grows():
    tokenizer = make_tokenizer(WORDS, eos_token="<eos>")
    model = sized_model(16)
    weight = model.get_input_embeddings().weight
    repair_padding(tokenizer, model)
    assert tokenizer.pad_token_id == 10
    assert model.get_input_embeddings().weight is weight and model.config.vocab_size == 16


def test_a_pad_token_beyond_the_embedding_gets_a_row():
    # added to the tokenizer by somebody who forgot the model
    tokenizer = make_tokenizer(WORDS, eos_token="<eos>", pad_token="<pad>")
    model = sized_model(10)
    repair_padding(tokenizer, model)
    assert tokenizer.pad_token_id == model.config.pad_token_id == 10
    assert model(input_ids=torch.tensor([[10, 2]])).logits.shape == (1, 2, 11)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_new_row_is_the_same_on_every_rank():
    rows, drawn = [], []
    for rank in range(2):
        tokenizer = make_tokenizer(WORDS, eos_token="<eos>", pad_token="<pad>")
        model = sized_model(10)
        torch.manual_seed(rank)
        repair_padding(tokenizer, model)
        rows.append(model.get_input_embeddings().weight[10])
        drawn.append(torch.rand(1))
        torch.manual_seed(rank)
        assert torch.equal(torch.rand(1), drawn[-1])  # and what is drawn afterwards is as before
    assert torch.equal(*rows) and not torch.equal(*drawn)


def test_weights_of_8_bits_are_not_copied():
    model = sized_model(10)
    model.config.quantization_config = types.SimpleNamespace(load_in_8bit=True)
    assert replicate(model, [CPU]) == [model]
    with pytest.raises(ValueError, match=r"load_bits = 8 on several GPUs of one process: .*set load_bits to 4"):
        replicate(model, [CPU, CPU])


def test_a_sound_pad_token_is_left_alone(capsys):
    tokenizer = make_tokenizer([*WORDS, "<unk>", "<pad>"], eos_token="<eos>", pad_token="h")
    model = sized_model(12)
    repair_padding(tokenizer, model)
    assert tokenizer.pad_token == "h" and model.config.pad_token_id == 9
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repaired_tokenizer_gives_the_rollout_of_an_explicit_one(family):
    prompts, results = [[4, 5, 6], [7, 8, 9, 10, 11, 12, 13]], []
    for pad_token in ("<pad>", None, "<im_end>"):
        tokenizer, model = build_tokenizer(), build_model(family)
        tokenizer.pad_token = pad_token
        repair_padding(tokenizer, model)
        ids = dict(end_ids=end_token_ids(tokenizer, model), pad_id=tokenizer.pad_token_id)
        results.append(Sampler([model], max_new_tokens=8, **ids).generate(prompts, group_size=3, temperature=1.0))
    for batch in results[1:]:
        assert torch.equal(batch.completion_ids, results[0].completion_ids)
        assert torch.equal(batch.completion_mask, results[0].completion_mask)
        assert torch.equal(batch.rollout_logps, results[0].rollout_logps)


# --- end tokens ---


@pytest.mark.parametrize(("tokenizer_eos", "config_eos", "generation_eos", "expected"), [
    ("<im_end>", 3, 3, [3]),
    ("<im_end>", 3, [3, 5], [3, 5]),  # a second one in the generation config only
    ("<im_end>", [5, 3], None, [3, 5]),
    ("user", 3, [3, 5], [3, 4, 5]),  # the tokenizer's own
    ("<im_end>", None, None, [3]),
    (None, None, 7, [7]),
    ("<im_end>", 0, None, [0, 3]),  # token 0 is a token
])  # fmt: skip
def test_every_end_token_counts(tokenizer_eos, config_eos, generation_eos, expected):
    tokenizer, model = build_tokenizer(), build_model("qwen2")
    tokenizer.eos_token = tokenizer_eos
    model.config.eos_token_id, model.generation_config.eos_token_id = config_eos, generation_eos
    assert end_token_ids(tokenizer, model) == expected


@pytest.mark.parametrize(("given", "left_out"), [([3, 151645], [151645]), ([-1, 64, 3, None], [-1, 64]), (3, [])])
def test_end_tokens_that_the_policy_cannot_say_are_left_out(given, left_out, capsys):
    model = build_model("qwen2")
    model.generation_config.eos_token_id = given
    ids = end_token_ids(build_tokenizer(), model)
    said = f"warning: end tokens {left_out} are left out: the policy has logits for tokens 0 to 63"
    assert ids == [3] and capsys.readouterr().out.splitlines() == [said] * bool(left_out)
    # an index of the vocabulary while no completion may end
    Sampler([model], end_ids=ids, pad_id=0, max_new_tokens=2, min_new_tokens=2).generate(
        [[5]], group_size=1, temperature=1
    )


@pytest.mark.parametrize("given", [["3"], [[3, 5]], 3.0, "<im_end>"])
def test_end_tokens_are_whole_numbers(given):
    model = build_model("qwen2")
    model.generation_config.eos_token_id = given
    with pytest.raises(ValueError, match=r"eos_token_id = .*: must be token ids.*generation_config.json"):
        end_token_ids(build_tokenizer(), model)


def test_end_tokens_survive_saving_and_end_completions(tmp_path):
    model = build_model("gpt2")
    model.generation_config.eos_token_id = [3, 30]
    tokenizer, model = load_policy(save(tmp_path, model), CPU, "fp32")
    end_ids = end_token_ids(tokenizer, model)
    assert end_ids == [3, 30]
    # a bias towards token 30: the greedy completion must stop there
    with torch.no_grad():
        model.transformer.ln_f.bias.copy_(50 * model.lm_head.weight[30])
    sampler = Sampler([model], end_ids=end_ids, pad_id=0, max_new_tokens=9)
    batch = sampler.generate([[5, 6]], group_size=1, temperature=0)
    assert batch.completion_ids.tolist() == [[30]] and not batch.truncated.any()


def test_a_reply_that_ends_in_the_template_as_no_completion_does_is_warned_of(capsys):
    tokenizer, model = build_tokenizer(), build_model("qwen2")  # <im_end>, token 3, ends a turn of its template
    assert end_token_ids(tokenizer, model) == [3] and not capsys.readouterr().out
    tokenizer.eos_token, model.config.eos_token_id, model.generation_config.eos_token_id = "user", 4, None
    assert end_token_ids(tokenizer, model) == [4]
    assert capsys.readouterr().out.count("warning: the chat template ends a reply with '<im_end>'") == 1
    tokenizer.chat_template = "{{ raise_exception('no chat here') }}"
    assert end_token_ids(tokenizer, model) == [4] and not capsys.readouterr().out


def test_no_end_token_at_all_is_refused():
    tokenizer, model = build_tokenizer(), build_model("qwen2")
    tokenizer.eos_token = None
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match=r"no end token.*tokenizer\.eos_token"):
        end_token_ids(tokenizer, model)


# --- nothing in a model folder is run ---


def plant(folder, file, mapping, **config) -> None:
    """Points an auto_map of a JSON file at a module that leaves a marker when it is imported."""
    marker = folder / "marker"
    (folder / "planted.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import Qwen2Config as Config, Qwen2ForCausalLM as Model\n"
        "from transformers import PreTrainedTokenizerFast as Tok\n"
    )
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": mapping, **config}))


def test_code_of_an_unknown_architecture_is_refused_and_not_run(tmp_path):
    folder = save(tmp_path, build_model("qwen2"))
    plant(tmp_path, "config.json", {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"},
          model_type="planted", architectures=["Model"])  # fmt: skip
    for load in (load_policy, load_frozen):
        with pytest.raises(ValueError, match=r"trust_remote_code|custom code"):
            load(folder, CPU, "fp32")
    assert not (tmp_path / "marker").exists()


def test_code_beside_a_known_architecture_is_not_run(tmp_path):
    folder = save(tmp_path, build_model("qwen2"))
    plant(tmp_path, "config.json", {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"})
    _, model = load_policy(folder, CPU, "fp32")
    load_frozen(folder, CPU, "fp32")
    assert type(model) is Qwen2ForCausalLM
    assert not (tmp_path / "marker").exists()


def test_code_of_a_tokenizer_is_not_run(tmp_path):
    save(tmp_path, build_model("qwen2"))
    plant(tmp_path, "tokenizer_config.json", {"AutoTokenizer": [None, "planted.Tok"]}, tokenizer_class="Tok")
    try:
        load_tokenizer(str(tmp_path))
    except ValueError as error:  # refusing and falling back on a class of transformers are both safe
        assert "trust_remote_code" in str(error) or "custom code" in str(error)
    assert not (tmp_path / "marker").exists()


class Planted:
    """Unpickling it creates a file."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def test_pickled_code_in_a_weight_file_is_not_run(tmp_path):
    folder = save(tmp_path, build_model("qwen2"))
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Planted(tmp_path / "marker")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only|unpickl|not a valid|corrupt|pytorch_model"):
        load_policy(folder, CPU, "fp32")
    assert not (tmp_path / "marker").exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "marker").exists()  # or the file was harmless


# --- tied embeddings ---


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings_stay_tied_through_training_saving_and_loading(model_folders, family, dtype, tmp_path):
    tokenizer, model = load_policy(str(model_folders[family]), CPU, dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    folder = save(tmp_path, model, tokenizer)
    _, again = load_policy(folder, CPU, dtype)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert len(dict(again.named_parameters())) == len(dict(model.named_parameters()))
    ids = torch.arange(4, 20)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


# --- a frozen model over several devices ---


def test_over_one_device_it_is_a_frozen_model(model_folders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    spread, frozen = (load(str(model_folders["qwen2"]), where, "fp32")
                      for load, where in ((load_spread, [CPU]), (load_frozen, CPU)))  # fmt: skip
    assert not spread.training and not any(p.requires_grad for p in spread.parameters())
    for one, other in zip(spread.parameters(), frozen.parameters(), strict=True):
        assert torch.equal(one, other)


def test_over_several_gpus_it_takes_those_named_and_no_others(model_folders, monkeypatch):
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
    assert not any(module.p for module in model.modules() if isinstance(module, nn.Dropout))


def test_over_several_gpus_too_the_head_must_be_a_plain_one(tmp_path, monkeypatch):
    model = tiny_model("granite", logits_scaling=4.0)
    folder, read = save(tmp_path, model), models._read
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 1))
    monkeypatch.setattr(models, "_read", lambda name, dtype, **how: read(name, torch.float32))
    with pytest.raises(ValueError, match="GraniteForCausalLM: its logits differ"):
        load_spread(folder, [torch.device("cuda", 0), torch.device("cuda", 1)], "fp32")


def test_layers_on_several_devices_are_not_packed():
    model = build_model("qwen2").eval()
    assert logprobs.LogProbs(model, 1.0).packed
    model = build_model("qwen2").eval()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert not logprobs.LogProbs(model, 1.0).packed


# --- replicas ---


def test_replicas_follow_the_first_after_a_refresh(model_folders):
    _, model = load_policy(str(model_folders["qwen2"]), CPU, "fp32")
    replicas = replicate(model, (CPU, CPU, CPU))
    assert replicas[0] is model and len({id(replica) for replica in replicas}) == 3
    assert all(p.requires_grad for p in model.parameters())
    for replica in replicas[1:]:
        assert not any(p.requires_grad for p in replica.parameters())
        assert replica.get_output_embeddings().weight is replica.get_input_embeddings().weight

    ids = torch.arange(4, 20)[None]
    before = model(input_ids=ids).logits.detach()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    after = model(input_ids=ids).logits.detach()
    assert not torch.equal(before, after)
    for replica in replicas[1:]:
        assert torch.equal(replica(input_ids=ids).logits, before)  # a copy, not the same tensors
    refresh(replicas)
    for replica in replicas:
        assert torch.equal(replica(input_ids=ids).logits, after)


def test_replicas_that_are_trained_gather_gradients_for_the_first(model_folders):
    _, model = load_policy(str(model_folders["qwen2"]), CPU, "fp32")
    model.model.norm.weight.requires_grad_(False)
    replicas = replicate(model, (CPU,) * 4, trained=3)
    for replica, trained in zip(replicas, (True, True, True, False), strict=True):
        names = {name for name, p in replica.named_parameters() if p.requires_grad}
        assert (len(names) > 5) == trained and "model.norm.weight" not in names
    ids = torch.arange(4, 28).view(3, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    for replica, rows in zip(replicas[1:], (ids[:2], ids[2:]), strict=False):  # the first gets nothing to do
        (replica(input_ids=rows, labels=rows).loss * len(rows) / 3).backward()
    models.sum_gradients(replicas[:3])
    for name, p in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
        else:
            assert p.grad is None
    assert all(p.grad is None for replica in replicas[1:] for p in replica.parameters())

    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    untouched = replicas[3].model.norm.weight.clone()
    refresh(replicas)
    for replica in replicas[1:]:
        assert torch.equal(replica.model.norm.weight, untouched)  # what is not trained is not copied
        assert torch.equal(replica.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


def test_one_device_needs_no_copy(model_folders):
    _, model = load_policy(str(model_folders["gpt2"]), CPU, "fp32")
    replicas = replicate(model, (CPU,))
    refresh(replicas)
    assert len(replicas) == 1 and replicas[0] is model


# --- learning rate ---


@pytest.mark.parametrize(("width", "rate", "warned"), [(8000, 1e-4, True), (8000, 5e-6, False), (100, 1e-4, False)])
def test_a_learning_rate_far_too_high_for_the_size_is_pointed_out(width, rate, warned, capsys):
    warn_learning_rate(rate, nn.Linear(width, width, device="meta"))  # 64 M or 10 k parameters
    output = capsys.readouterr().out
    assert ("warning: learning_rate = 0.0001 for a policy of 64 M parameters" in output) == warned
    assert bool(output) == warned


def test_progress_bars_of_loading_are_off(model_folders, capsys):
    models.load_policy(str(model_folders["qwen2"]), CPU, "fp32")
    captured = capsys.readouterr()
    assert captured.out == "" and "it/s" not in captured.err
