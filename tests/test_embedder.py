"""Tests of common/tasks/embedder.py: where models come from, when they are loaded, and what they must not do."""

import gc
import json
import math
import os
import re
import runpy
import shutil
import socket
import sys
import time
import tracemalloc
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import torch
from bounds import assert_rounded
from conftest import build_tokenizer
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from common.tasks import embedder
from common.tasks.embedder import Embedder, answer_part, fetch
from common.tasks.similarity import cosines


@pytest.fixture(scope="module")
def ngrams() -> Embedder:
    return Embedder("ngrams", ["cpu"])


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Nothing can be reached, and the hub's cache is an empty folder, which is returned."""
    refuse = mock.Mock(side_effect=OSError("no network in this test"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # the variable is read at import
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path / "hub"


class Stub:
    """Stands for a loaded SentenceTransformer; the vector of a text is (its length, 1), unless it is given."""

    def __init__(self, vectors=None):
        self.vectors, self.calls = vectors or {}, []

    def encode(self, texts, **options):
        self.calls.append(list(texts))
        self.options = options
        return torch.tensor([self.vectors.get(text, [float(len(text)), 1.0]) for text in texts])

    def get_embedding_dimension(self):
        return 2

    def parameters(self):
        return iter([torch.zeros(1)])


@pytest.fixture
def stubbed(monkeypatch):
    """An Embedder over stubs, which stand in `models` after the first call."""

    def build(devices=("cpu",), vectors=None):
        monkeypatch.setattr(embedder, "_load", lambda name, device, max_tokens: Stub(vectors))
        return Embedder("stub", devices)

    return build


@pytest.mark.parametrize(("text", "answer"), [
    ("<think>a</think> 42 \n", "42"), ("<think>a</think>b</think>c", "c"), ("<think>never closed",) * 2, ("", ""),
])  # fmt: skip
def test_answer_part(text, answer):
    assert answer_part(text) == answer


def complete(folder: Path, weights: str = "model.safetensors") -> Path:
    """The folder with what every model has."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.zeros(9)}, folder / weights)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    return folder


def test_the_built_in_embedder_and_a_folder_are_themselves(tmp_path, offline):
    assert fetch("ngrams") == "ngrams"
    for name in ("config.json", "modules.json"):
        complete(tmp_path / name / "0_part", weights="pytorch_model.bin")
        (tmp_path / name / name).write_text("[]")
        assert fetch(str(tmp_path / name)) == str(tmp_path / name)


@pytest.mark.parametrize(("file", "content", "message"), [
    ("config.json", None, "no config.json or modules.json"),
    ("model.safetensors", None, r"no weights \(\*.safetensors, \*.bin\) in .*; download all"),
    ("tokenizer.json", None, r"no tokenizer \(.*\) in .*; download all"),
    ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\nsize 90868376\n", "is damaged .*again"),
    ("model.safetensors", ..., "model.safetensors is damaged .*again"),
])  # fmt: skip
def test_a_part_of_a_model_is_an_error_before_the_first_rollout(file, content, message, tmp_path):
    path = complete(tmp_path) / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5] if content is ... else content)  # the download was broken off
    with pytest.raises(ValueError, match=f"similarity_model '{tmp_path}'.*{message}"):
        fetch(str(tmp_path))


@pytest.fixture
def hub(monkeypatch):
    """The two functions of the hub that are used; there is nothing on it yet."""
    hub = mock.Mock()
    hub.snapshot_download.side_effect = FileNotFoundError("not in the cache")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hub.model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_what_is_nowhere_fails_at_once_and_says_what_to_do(offline, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    for name in ("./nowhere", "~/nowhere", "models/bge/m3"):
        with pytest.raises(ValueError, match=f"{name!r}: no such folder.*hub id, or 'ngrams'"):
            fetch(name)
    for variable in (True, False):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", variable)
        for name in ("BAAI/bge-m3", "bge-m3", "not a hub id/bge-m3"):
            with pytest.raises(ValueError, match=f"{name!r}.*`hf download {name} --local-dir bge-m3`.*'ngrams'"):
                fetch(name)


def test_a_hub_that_does_not_answer_is_given_up(hub):
    hub.model_info.side_effect = TimeoutError("timed out")
    with pytest.raises(ValueError, match="timed out"):
        fetch("BAAI/bge-m3")
    hub.model_info.assert_called_once_with("BAAI/bge-m3", timeout=embedder.HUB_TIMEOUT)
    assert hub.snapshot_download.call_args.kwargs["local_files_only"] is True and embedder.HUB_TIMEOUT <= 5


def test_a_model_in_the_cache_needs_no_network(offline):
    repository = offline / "models--BAAI--bge-m3"
    snapshot = repository / "snapshots" / ("0" * 40)
    complete(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert fetch("BAAI/bge-m3") == str(snapshot)
    assert embedder._readable(str(snapshot)) == "BAAI/bge-m3"


@pytest.mark.parametrize("safe", [True, False])
def test_a_second_copy_of_the_weights_is_not_downloaded(safe, tmp_path, hub):
    complete(tmp_path, "model.safetensors" if safe else "pytorch_model.bin")
    hub.snapshot_download.side_effect = [str(tmp_path)] * 2
    assert fetch("BAAI/bge-m3") == str(tmp_path)
    calls = [call.kwargs for call in hub.snapshot_download.call_args_list]
    assert ["pytorch_model*.bin" in call["ignore_patterns"] for call in calls] == [True] + [False] * (not safe)
    assert not any(call["local_files_only"] for call in calls)
    assert {"onnx/*", "openvino/*", "*.h5", "*.msgpack", "*.jpg"} <= set(calls[-1]["ignore_patterns"])


def test_nothing_is_imported_before_the_first_call_which_says_one_line(monkeypatch, capfd):
    with monkeypatch.context() as patch:
        # None in sys.modules makes an import fail; the module is executed anew, for its own imports
        for name in ("sentence_transformers", "sklearn", "transformers", "huggingface_hub"):
            patch.setitem(sys.modules, name, None)
        again = runpy.run_path(embedder.__file__)
        embed = again["Embedder"](again["fetch"]("ngrams"), ["cpu", "cpu"])
        assert embed.models == []
        with pytest.raises(ImportError, match="sentence_transformers"):
            embed(["a"], 1)
    embed(["a", "b"], 2)
    out, err = capfd.readouterr()
    assert re.fullmatch(r"similarity: ngrams .* cpu, cpu \(float32\) in .* s; 2 texts .* s\n", out) and not err
    embed(["a", "c"], 2)
    assert capfd.readouterr() == ("", "")


def test_embeddings_are_unit_vectors_on_the_cpu(ngrams):
    texts = ["7 + 5", "<think>so</think> 7 + 5", "🎉", "\ud800", "a" * 2000, "\x00", "\n", "<think>long</think>"]
    vectors = ngrams(texts, 4)
    assert vectors.shape == (2, 4, 1024) and vectors.dtype == torch.float32 and vectors.device.type == "cpu"
    assert not vectors.requires_grad and not vectors.is_inference()
    # at most 20 different grams: a norm here, one there, and a quotient of each
    assert_rounded(vectors.norm(dim=-1), torch.tensor([[1.0] * 4, [1.0, 1.0, 0.0, 0.0]]), terms=2 * 20 + 4)
    assert ngrams([], 4).shape == (0, 4, 1024)
    assert torch.equal(Embedder("ngrams", ["cpu"])(["", ""], 2), torch.zeros(1, 2, 1024))  # the first call too


def test_ngrams_by_hand_and_of_permutations_are_the_same_in_every_process(ngrams):
    # with its marks, "ab" has the grams < a b > <a ab b> <ab ab>, and "b": < b > <b b> <b>: < b > b> are common
    vectors = ngrams(["ab", "b"], 2)[0]
    assert (vectors > 0).sum(-1).tolist() == [9, 6]
    assert_rounded(vectors[0] @ vectors[1], 4 / math.sqrt(9 * 6), terms=3 * 9 + 8)  # two norms, a product
    # "aaaa" has a 4 times: log(1 + 4) beside log(1 + 1)
    values = ngrams(["aaaa"], 1).unique()
    assert_rounded(values[-1] / values[1], math.log(5) / math.log(2), terms=2 * 4 + 3)  # two logarithms, quotients
    # permutations are told apart
    first, second, other = ngrams(["1 2 3 4", "2 1 4 3", "1 2 3 5"], 3)[0]
    assert 0.2 < first @ second < 0.99 and 0.2 < first @ other < 0.99
    # the same in every process: crc32 of "2", modulo 1024
    assert (ngrams(["2 1", "1 1"], 2)[0, :, 525] > 0).tolist() == [True, False]


def test_each_distinct_text_is_embedded_once(stubbed):
    embedder = stubbed()
    vectors = embedder(["aa", "b", "", "aa", "<think>x</think>aa", " b "], 3)
    assert embedder.models[0].calls == [["aa", "b"]]
    assert embedder.models[0].options["show_progress_bar"] is False and embedder.models[0].options["batch_size"] == 64
    expected = torch.tensor([[[2.0, 1], [1, 1], [0, 0]], [[2, 1], [2, 1], [1, 1]]])
    torch.testing.assert_close(vectors, torch.nn.functional.normalize(expected, dim=-1))


def test_devices_share_the_work_by_prompt_and_the_order_stays(stubbed):
    texts = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg", "bb"]
    embedder = stubbed(["cpu", "cpu", "cpu"])
    vectors = embedder(texts, 2)
    assert [model.calls for model in embedder.models] == [[["a", "bb", "ggggggg"]], [["ccc", "dddd"]],
                                                          [["eeeee", "ffffff"]]]  # fmt: skip
    ratios = (vectors[..., 0] / vectors[..., 1]).flatten()
    torch.testing.assert_close(ratios, torch.tensor([float(len(text)) for text in texts]))
    two, one = (Embedder("ngrams", ["cpu"] * number)(texts, 2) for number in (2, 1))
    assert_rounded(two, one, terms=2 * 20 + 4)  # a norm of at most 20 grams, which may add up in another order


def test_an_embedding_that_is_no_direction_is_named(stubbed):
    for vector, wrong in (([math.nan, 1.0], "is not finite"), ([0.0, 0.0], "has length 0")):
        embedder = stubbed(["cpu", "cpu"], {"abc": vector})
        with pytest.raises(FloatingPointError, match=f"embedding {wrong} in row 3, 'abc': the model 'stub' .*'ngrams'"):
            embedder(["a", "", "b", "<think></think>abc"], 2)


def test_embeddings_of_another_number_or_width_and_incomplete_groups_are_refused(stubbed, monkeypatch):
    with pytest.raises(ValueError, match=r"3 texts.*group_size = 2"):
        stubbed()(["a", "b", "c"], 2)
    for shape in ((1, 2), (2, 3)):
        monkeypatch.setattr(Stub, "encode", lambda *args, shape=shape, **options: torch.ones(shape))
        with pytest.raises(ValueError, match=rf"'stub': embeddings of shape \[{shape[0]}, {shape[1]}\] for 2 texts"):
            stubbed()(["aa", "b", "", "aa"], 2)


def test_an_error_in_a_thread_is_raised(stubbed):
    embedder = stubbed(["cpu", "cpu"])
    assert embedder(["a", "b"], 2).shape == (1, 2, 2) and embedder.models[1].calls == []  # one prompt, two devices
    embedder.models[1].encode = mock.Mock(side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        embedder(["a", "b"], 1)


def test_memory_is_flat(ngrams):
    def bytes_after(numbers: range) -> tuple[int, int]:
        for number in numbers:
            ngrams([f"{number} {i}" for i in range(8)], 4)
        gc.collect()
        kept = sum(x.nbytes for x in gc.get_objects() if type(x) is torch.Tensor)
        return kept, tracemalloc.get_traced_memory()[0]

    bytes_after(range(5))
    gc.freeze()  # what other tests have left is not looked through
    tracemalloc.start()
    (tensors, before), (later, after) = bytes_after(range(5, 10)), bytes_after(range(10, 110))
    tracemalloc.stop()
    gc.unfreeze()
    assert later == tensors and after - before < 20e3  # the texts of 100 calls would be 42 kB


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """The folder of a tiny BERT: no modules.json, and no pooler."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                        num_attention_heads=2, max_position_embeddings=32, initializer_range=0.5)  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def test_a_folder_is_loaded_quietly_and_leaves_the_random_numbers_alone(bert, offline, capfd):
    state = torch.get_rng_state()
    embedder = Embedder(fetch(str(bert)), ["cpu"], max_tokens=8)
    vectors = embedder(["1 + 2", "what is 3 ?"], 2)
    out, err = capfd.readouterr()
    assert out.count("\n") == 1 and f"similarity: {bert} created on cpu (float32)" in out and not err
    assert torch.equal(torch.get_rng_state(), state)
    assert vectors.shape == (1, 2, 16) and cosines(vectors)[0, 0, 1] < 0.99
    model = embedder.models[0]
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    # texts are cut at max_tokens
    assert torch.equal(embedder(["1 2 3 4 5 6 7 8 9 10"], 1), embedder(["1 2 3 4 5 6 7 8 11 12"], 1))
    assert model.max_seq_length == 8


@pytest.mark.parametrize(("max_tokens", "limit", "remedy"), [
    (8, 8, "raise similarity_max_tokens"), (1024, 32, "choose a model that reads more"),
])  # fmt: skip
def test_texts_that_are_cut_are_said_once(bert, max_tokens, limit, remedy, capsys):
    embedder = Embedder(str(bert), ["cpu"], max_tokens=max_tokens)
    assert embedder(["1 " * limit, "2 2" + " " * 200 + "2"], 1).norm() > 0  # all of them is read
    assert "warning" not in capsys.readouterr().out
    vectors = embedder(["1 " * limit + "2", "1 " * limit + "3 3", "1 " * limit + "2", "2"], 4)[0]
    assert torch.equal(vectors[0], vectors[1]) and not torch.equal(vectors[0], vectors[3])
    said = f"warning: 2 responses have more tokens than the {limit} that {bert} reads: their ends are not compared"
    assert capsys.readouterr().out == f"{said}; {remedy}\n"
    embedder(["1 " * 99], 1)
    assert embedder.models[0].max_seq_length == limit and capsys.readouterr().out == ""


def test_a_model_without_all_its_weights_is_refused(bert, tmp_path):
    folder, weights = shutil.copytree(bert, tmp_path / "model"), load_file(bert / "model.safetensors")
    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{folder}.*lacks the weights.*encoder.layer.0.output.dense.weight"):
        Embedder(str(folder), ["cpu"])(["1"], 1)


@pytest.mark.parametrize("place", ["modules.json", "config.json", "config.json of a known kind"])
def test_code_that_comes_with_a_model_is_not_run(place, tmp_path):
    marker = complete(tmp_path) / "it_ran"
    code = f"from transformers import PretrainedConfig\nopen({str(marker)!r}, 'w').close()\n"
    (tmp_path / "own_code.py").write_text(code + "class Own(PretrainedConfig):\n    model_type = 'own'\n")
    config = {"model_type": "bert" if "known" in place else "own", "architectures": ["Own"],
              "auto_map": {"AutoConfig": "own_code.Own", "AutoModel": "own_code.Own"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = "cannot be loaded.*never run"
    if place == "modules.json":
        modules = [{"idx": 0, "name": "0", "path": "", "type": "own_code.Own"}]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        message = r"its own code, \['own_code.Own'\], which is not run"
        with pytest.raises(ValueError, match=message):
            fetch(str(tmp_path))
    with pytest.raises(ValueError, match=re.compile(f"{tmp_path}.*{message}", re.DOTALL)):
        Embedder(str(tmp_path), ["cpu"])(["1"], 1)
    assert not marker.exists()


@pytest.mark.parametrize("place", ["", "1_Dense"])
def test_pickled_weights_are_not_run(place, bert, tmp_path):
    marker, folder = tmp_path / "it_ran", tmp_path / "model"
    shutil.copytree(bert, folder)
    (folder / "1_Dense").mkdir()
    (folder / "1_Dense" / "config.json").write_text('{"in_features": 16, "out_features": 8, "bias": false}')
    save_file({"linear.weight": torch.zeros(8, 16)}, folder / "1_Dense" / "model.safetensors")
    kinds = {"": "Transformer", "1_Dense": "Dense"}
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kinds[path]}"}
               for i, path in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))

    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    path = folder / place / "pytorch_model.bin"
    path.with_name("model.safetensors").unlink()
    torch.save({"linear.weight": Planted()}, path)
    with pytest.raises(Exception, match="Weights only load failed"):
        Embedder(str(folder), ["cpu"])(["1"], 1)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()  # or the file was harmless
