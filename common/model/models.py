"""Loading: the policy with its tokenizer, frozen models, and what must be true of both before training."""

import copy
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from common.base.checks import require
from common.base.distributed import print_main
from common.model import images, logprobs, merging, sources
from common.model import lora as adapters

logging.disable_progress_bar()  # bars of loading and saving would tear the one of the training
ADAPTER_RATE = 1e-3  # the highest learning rate that nothing is said about when adapters are trained
SMALL = 5_000_000  # parameters; below, a second thread gains little, and on busy cores threads wait for one another


def load_policy(
    name: str,
    device: torch.device,
    dtype: str,
    gradient_checkpointing: bool = False,
    lora: adapters.Options | None = None,
) -> tuple[PreTrainedTokenizerBase, nn.Module]:
    """Loads the model to be trained, dropout off, and its tokenizer, with padding repaired.

    Of a folder of saved adapters, such as a checkpoint, the adapters are trained further, and the reference is their
    model without them; if `lora` is None, they are merged, and all weights are trained.

    Args:
        name: see `sources.find`.
        device: where the weights go.
        dtype: see `sources.pick_dtype`.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        lora: train adapters like these; None: all weights.

    Returns:
        The tokenizer (padding on the left, pad token not the end token) and the model in train mode; with `lora` a
        PeftModel.

    Raises:
        ValueError: the model cannot be found, is of a kind the log-probabilities would be wrong for, or does not fit
            what `lora` asks for.
    """
    tokenizer, source = sources.load_tokenizer(name), sources.find(name)
    saved = sources.base_of(source) if lora else None
    base = saved or name
    model = _load(base, device, dtype, lora.bits if lora else 0)
    rows = model.get_input_embeddings().num_embeddings
    repair_padding(tokenizer, model)
    if lora:
        require(
            model.get_input_embeddings().num_embeddings == rows,
            f"{name}: its vocabulary has no token to pad with",
            "with LoRA its embedding cannot grow",
            "save the model with a pad token added, and give that folder",
        )
        model = adapters.resume(model, source, lora) if saved else adapters.add(model, lora)
        require_finite(model, source)
        # a folder by its whole path: a run may be resumed from elsewhere
        folder = Path(base).expanduser()
        where = str(folder.resolve()) if folder.is_dir() and base not in sources.BUILT_IN else base
        model.peft_config["default"].base_model_name_or_path = where
    if gradient_checkpointing:
        # renamed in transformers 5.24; the old name goes in 6
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return tokenizer, model.train()


def load_frozen(name: str, device: torch.device, dtype: str) -> PreTrainedModel:
    """Loads a model that is never trained: eval mode, no gradients.

    Args:
        name: see `sources.find`.
        device: where the weights go.
        dtype: see `sources.pick_dtype`.
    """
    return _load(name, device, dtype).eval().requires_grad_(False)


def load_spread(name: str, devices: list[torch.device], dtype: str) -> PreTrainedModel:
    """Loads a frozen model over several GPUs, some of its layers on each, one GPU at work at a time.

    Args:
        name: see `sources.find`.
        devices: GPUs, which share the weights about equally; one device: as `load_frozen`.
        dtype: see `sources.pick_dtype`.

    Raises:
        ValueError: as `load_policy`.
    """
    if len(devices) == 1:
        return load_frozen(name, devices[0], dtype)
    room = {device.index: torch.cuda.mem_get_info(device)[0] for device in devices}
    model = _read(name, sources.pick_dtype(dtype, devices[0]), device_map="balanced", max_memory=room)
    require_finite(model, sources.find(name))
    logprobs.check_head(model)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def require_finite(model: nn.Module, source: str) -> None:
    """Requires that no weight is NaN or infinite; of weights in 8 or 4 bits their scales are looked at.

    Args:
        model: on its devices, each of which reads its weights once.
        source: what it was loaded from, as `sources.find` gives it.

    Raises:
        ValueError: names the weight, and its file if `source` is a folder.
    """
    for name, weight in model.named_parameters():
        scales = getattr(getattr(weight, "quant_state", None), "absmax", None), getattr(weight, "SCB", None)
        for values in (weight, *scales):
            if values is None or not values.is_floating_point() or values.numel() == 0 or values.element_size() < 2:
                continue  # torch reduces no numbers of 8 bits
            # no temporary of the size of the weight, as isfinite() makes; NaN passes through the reduction
            bad = [value for value in torch.stack(torch.aminmax(values.detach())).tolist() if not math.isfinite(value)]
            if bad:
                raise ValueError(
                    f"model {source!r}: weight {name}{_file_of(name, source)} holds {bad[0]} in {values.dtype}: must "
                    "be finite numbers; its training had diverged when it was saved, the file is damaged, or the dtype "
                    "is too narrow: take an older checkpoint, or dtype bf16 or fp32"
                )


def _file_of(name: str, source: str) -> str:
    """Where a weight stands, for a message; a model may name it with another beginning than its file."""
    for path in sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else ():
        with safe_open(path, "pt") as file:
            if any(f".{name}".endswith(f".{key}") or key.endswith(f".{name}") for key in file.keys()):  # noqa: SIM118
                return f" of {path.name}"
    return ""


def fingerprint(model: nn.Module) -> str:
    """A name for weights: a checkpoint that was replaced under the same name has another one.

    Args:
        model: of which 64 numbers of every parameter are looked at, from its beginning to its end.

    Returns:
        SHA-256 in hexadecimal digits.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        numbers = parameter.detach().flatten()
        some = numbers[:: max(1, len(numbers) // 64)]
        digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def same_numbers(device: torch.device) -> Iterator[None]:
    """Random numbers that are the same on every rank, whose seeds differ: new weights must begin equal.

    Args:
        device: where they are drawn, besides the CPU.
    """
    with torch.random.fork_rng(range(torch.cuda.device_count()) if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def repair_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Gives the tokenizer a pad token that is not its end token, and says so.

    With pad = eos, whoever trains on the saved model later may mask its end tokens as padding, and it never stops.

    Args:
        tokenizer: changed in place where needed.
        model: its pad id follows the tokenizer's; embeddings grow only if no token of the vocabulary can serve.
    """
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        vocabulary = tokenizer.get_vocab()
        usual = ["<|endoftext|>", "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<unk>", "[UNK]"]
        free = [token for token in usual if token in vocabulary and token != tokenizer.eos_token]
        before = tokenizer.pad_token
        tokenizer.add_special_tokens({"pad_token": free[0] if free else "<|pad|>"})
        print_main(f"pad token was {before!r}, the end token {tokenizer.eos_token!r}: now {tokenizer.pad_token!r}")
    if tokenizer.pad_token_id >= model.get_input_embeddings().num_embeddings:
        with same_numbers(model.device):
            model.resize_token_embeddings(len(tokenizer))
    model.config.get_text_config().pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id


def replicate(model: PreTrainedModel, devices: Sequence[torch.device], trained: int = 1) -> list[PreTrainedModel]:
    """The model itself on the first device and a copy on each of the others, to sample and to train on all of them.

    Args:
        model: the policy, on devices[0].
        devices: one per replica.
        trained: replicas that gather gradients, the first ones; the others are frozen.

    Returns:
        One model per device; `refresh` copies the weights again after an update.
    """
    few = getattr(getattr(model, "config", None), "quantization_config", None)
    require(
        len(devices) == 1 or not getattr(few, "load_in_8bit", False),
        "load_bits = 8 on several GPUs of one process",
        "bitsandbytes cannot copy weights of 8 bits that have been used",
        "set load_bits to 4, or take the script for torchrun",
    )
    replicas = [model]
    for number, device in enumerate(devices[1:], 1):
        moved: dict[int, Any] = {}  # straight to their device, by identity: beside the model there may be no room
        for p in model.parameters():
            if type(p) is nn.Parameter:
                copied = p.detach().to(device, copy=True)
                moved[id(p)] = nn.Parameter(copied, requires_grad=p.requires_grad and number < trained)
            else:  # of a quantized layer, which is never trained
                moved[id(p)] = copy.deepcopy(p).to(device)
        moved |= {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers()}
        replicas.append(copy.deepcopy(model, moved))
    if len(devices) > 1 and devices[0].type == "cuda":
        import torch._dynamo

        # layers are compiled once per device, and above the limit (8, for one) they would run uncompiled
        torch._dynamo.config.recompile_limit = max(8 * len(devices), torch._dynamo.config.recompile_limit)
    return replicas


@torch.no_grad()
def refresh(replicas: Sequence[PreTrainedModel]) -> None:
    """Copies the weights of the first replica, those that are trained, to the others; no host waits."""
    source = list(replicas[0].parameters())
    for replica in replicas[1:]:
        for target, weight in zip(replica.parameters(), source, strict=True):
            if weight.requires_grad:
                target.copy_(weight, non_blocking=True)


@torch.no_grad()
def sum_gradients(replicas: Sequence[PreTrainedModel]) -> None:
    """Adds the gradients of all replicas up on the first, and clears those of the others; no host waits."""
    for first, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
        for other in others:
            if other.grad is not None:  # as where there were fewer sequences than replicas
                arrived = other.grad.to(first.device, non_blocking=True)
                first.grad = arrived if first.grad is None else first.grad.add_(arrived)
                other.grad = None


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode, and afterwards the mode the model was in, also after an error.

    Args:
        model: in train mode, gradient checkpointing would switch its cache off.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def warn_learning_rate(
    learning_rate: float, model: nn.Module, most: float = 2e-5, usual: str = "by RL: 5e-6 (up to 0.5 B) to 1e-6 (7 B)"
) -> None:
    """Says so when the learning rate is far above what a policy of this size bears; the built-in one bears more.

    Args:
        learning_rate: as configured.
        model: the policy; with adapters, ADAPTER_RATE is possible.
        most: what is still possible for all weights.
        usual: what is usual for them, for the message.
    """
    millions, kind = sum(p.numel() for p in model.parameters()) / 1e6, "full fine-tuning"
    if hasattr(model, "peft_config"):
        most, kind, usual = ADAPTER_RATE, "adapters", "about ten times that of full fine-tuning"
    if millions > 50 and learning_rate > most:
        print_main(
            f"warning: learning_rate = {learning_rate:g} for a policy of {millions:.0f} M parameters; usual for {kind} "
            f"{usual}"
        )


def _load(name: str, device: torch.device, dtype: str, bits: int = 0) -> PreTrainedModel:
    kind = sources.pick_dtype(dtype, device)
    model = _read(name, kind, bits=bits, device_map={"": device}) if bits else _read(name, kind).to(device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ and model.num_parameters() < SMALL:
        torch.set_num_threads(1)
    require_finite(model, sources.find(name))
    logprobs.check_head(model)
    return model


def _read(name: str, dtype: torch.dtype, bits: int = 0, **options: Any) -> PreTrainedModel:
    """The model, dropout off, adapters merged; in CPU memory, or where the options of from_pretrained say."""
    source = sources.find(name)
    base = sources.base_of(source)
    if base:
        return merging.merge(adapters.wrap_saved(_read(base, dtype, bits, **options), source))
    if bits:
        options["quantization_config"] = adapters.quantization(bits, dtype)
    # rotary positions are an fp32 product, of which TF32 would keep 11 bits: positions above 2,048 would be rounded
    torch.set_float32_matmul_precision("highest")
    try:
        is_vlm = images.is_vlm(source)
        if bits and is_vlm:
            options["quantization_config"].llm_int8_skip_modules = ["visual", "lm_head"]
        kind = AutoModelForImageTextToText if is_vlm else AutoModelForCausalLM
        options["output_loading_info"] = True
        model, found = kind.from_pretrained(source, dtype=dtype, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{sources.not_found(name)} ({error})") from error
    except SafetensorError as error:
        raise ValueError(
            f"model {name!r}: a file of its weights is cut off or damaged ({error}); copy or download it again"
        ) from error
    missing = sorted(found["missing_keys"])  # transformers fills them with random numbers
    require(
        not missing,
        f"model {name!r}",
        f"its files lack {len(missing)} weights, such as {missing[:1]}",
        "copy or download it again, or name a model of this kind",
    )
    _switch_dropout_off(model)
    return model


def _switch_dropout_off(model: nn.Module) -> None:
    """Two forward passes must agree, or the first ratio is not 1. The config, which is saved, keeps its values."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
