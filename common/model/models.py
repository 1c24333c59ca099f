"""Loads policies and frozen models, repairs and checks them, and keeps replicas in step."""

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
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from common.base import storage
from common.base.checks import require
from common.base.distributed import print_main
from common.model import agreement, head, images, merging, sources
from common.model import lora as adapters
from common.model.modes import train_mode

logging.disable_progress_bar()  # progress bars of loading and saving would break the one of the training
ADAPTER_RATE = 1e-3  # highest learning rate for adapters without a warning
SMALL = 5_000_000  # parameters; a smaller model gains little from a second thread, which may have to wait for a core


def load_policy(
    name: str,
    device: torch.device,
    dtype: str,
    gradient_checkpointing: bool = False,
    lora: adapters.Options | None = None,
) -> tuple[PreTrainedTokenizerBase, nn.Module]:
    """Loads the model to be trained, without dropout, and its tokenizer, with padding repaired.

    Saved adapters, such as those in a checkpoint, are trained further; if `lora` is None, they are
    merged, and all weights are trained.

    Args:
        name: see `sources.find`.
        device: of the weights.
        dtype: see `sources.pick_dtype`.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        lora: the adapters to train; None: all weights.

    Returns:
        The tokenizer, which pads on the left with a token that is not the end token, and the model
        as `train_mode` leaves it; with `lora` a PeftModel.

    Raises:
        ValueError: the model cannot be found, its log-probabilities would be wrong, or `lora` does
            not fit it.
    """
    tokenizer, source = sources.load_tokenizer(name), sources.find(name)
    saved = sources.base_of(source) if lora else None
    base = saved or name
    model = _load(base, device, dtype, lora.bits if lora else 0)
    rows = model.get_input_embeddings().num_embeddings
    repair_padding(tokenizer, model)
    if not lora:
        agreement.require_saveable(model)
    else:
        require(
            model.get_input_embeddings().num_embeddings == rows,
            f"{name}: its vocabulary has no token to pad with",
            "with LoRA its embedding cannot grow",
            "save the model with a pad token added, and give that folder",
        )
        model = adapters.resume(model, source, lora) if saved else adapters.add(model, lora)
        require_finite(model, source)
        # the absolute path of a folder, because a run may be resumed from another one
        folder = Path(base).expanduser()
        where = str(folder.resolve()) if folder.is_dir() and base not in sources.BUILT_IN else base
        model.peft_config["default"].base_model_name_or_path = where
    if gradient_checkpointing:
        # renamed in transformers 5.24; the old name goes in 6
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return tokenizer, train_mode(model)


def load_frozen(name: str, device: torch.device, dtype: str) -> PreTrainedModel:
    """Loads a model that is never trained: eval mode, no gradients.

    Args:
        name: see `sources.find`.
        device: of the weights.
        dtype: see `sources.pick_dtype`.
    """
    return _load(name, device, dtype).eval().requires_grad_(False)


def load_spread(name: str, devices: list[torch.device], dtype: str) -> PreTrainedModel:
    """Loads a frozen model, its layers spread over several GPUs, which compute in turn.

    Args:
        name: see `sources.find`.
        devices: GPUs, each with about the same share of the weights; one device: as `load_frozen`.
        dtype: see `sources.pick_dtype`.

    Raises:
        ValueError: as in `load_policy`.
    """
    if len(devices) == 1:
        return load_frozen(name, devices[0], dtype)
    room = {device.index: torch.cuda.mem_get_info(device)[0] for device in devices}
    model = _read(name, sources.pick_dtype(dtype, devices[0]), device_map="balanced", max_memory=room)
    require_finite(model, sources.find(name))
    head.check(model)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def require_finite(model: nn.Module, source: str) -> None:
    """Checks that no weight is NaN or infinite; of quantized weights the scales are checked.

    Args:
        model: on its devices.
        source: what it was loaded from, as `sources.find` returns it.

    Raises:
        ValueError: names the weight, and its file if `source` is a folder.
    """
    for name, weight in model.named_parameters():
        scales = getattr(getattr(weight, "quant_state", None), "absmax", None), getattr(weight, "SCB", None)
        for values in (weight, *scales):
            if values is None or not values.is_floating_point() or values.numel() == 0 or values.element_size() < 2:
                continue  # torch has no reductions for 8 bits
            # unlike isfinite(), aminmax() allocates nothing of the size of the weight; it
            # propagates NaN
            bad = [value for value in torch.stack(torch.aminmax(values.detach())).tolist() if not math.isfinite(value)]
            if bad:
                raise ValueError(
                    f"model {source!r}: weight {name}{_file_of(name, source)} holds {bad[0]} in {values.dtype}: must "
                    "be finite numbers; its training had diverged when it was saved, the file is damaged, or the dtype "
                    "is too narrow: take an older checkpoint, or dtype bf16 or fp32"
                )


def _file_of(name: str, source: str) -> str:
    """The file of a weight, for messages; names in model and file may differ in their prefix."""
    for path in sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else ():
        with safe_open(path, "pt") as file:
            if any(f".{name}".endswith(f".{key}") or key.endswith(f".{name}") for key in file.keys()):  # noqa: SIM118
                return f" of {path.name}"
    return ""


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of 64 values of every parameter, to detect another checkpoint under the same name.

    Args:
        model: on any device.

    Returns:
        Hexadecimal digits.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        numbers = parameter.detach().flatten()
        some = numbers[:: max(1, len(numbers) // 64)]
        digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Draws the same random numbers on every rank, for new weights; ranks have different seeds.

    Args:
        device: where they are drawn, besides the CPU.
    """
    with torch.random.fork_rng(range(torch.cuda.device_count()) if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def repair_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Gives the tokenizer a pad token that is not its end token, and reports the change.

    With pad = eos, later training on the saved model may mask its end tokens as padding, and it
    never stops.

    Args:
        tokenizer: changed in place if needed.
        model: gets the pad id of the tokenizer; its embedding grows only if the vocabulary has no
            suitable token.
    """
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        vocabulary = tokenizer.get_vocab()
        usual = ["<|endoftext|>", "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<unk>", "[UNK]"]
        free = [token for token in usual if token in vocabulary and token != tokenizer.eos_token]
        before = tokenizer.pad_token
        tokenizer.add_special_tokens({"pad_token": free[0] if free else "<|pad|>"})
        print_main(f"pad token was {before!r}, the end token {tokenizer.eos_token!r}: now {tokenizer.pad_token!r}")
    if tokenizer.pad_token_id >= model.get_input_embeddings().num_embeddings:
        with same_random_numbers(model.device):
            model.resize_token_embeddings(len(tokenizer))
    model.config.get_text_config().pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id


def replicate(model: PreTrainedModel, devices: Sequence[torch.device], trained: int = 1) -> list[PreTrainedModel]:
    """Copies a model to other devices.

    Args:
        model: the policy, on devices[0].
        devices: one per replica.
        trained: number of replicas that need gradients, the first ones; the others are frozen.

    Returns:
        The model itself and one copy for each other device; `refresh` updates the copies.
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
        moved: dict[int, Any] = {}  # by id; made on their device, since a copy may not fit beside the model
        for p in model.parameters():
            if type(p) is nn.Parameter:
                copied = p.detach().to(device, copy=True)
                moved[id(p)] = nn.Parameter(copied, requires_grad=p.requires_grad and number < trained)
            else:  # quantized, never trained
                moved[id(p)] = copy.deepcopy(p).to(device)
        moved |= {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers()}
        replicas.append(copy.deepcopy(model, moved))
    if len(devices) > 1 and devices[0].type == "cuda":
        import torch._dynamo

        # layers are compiled once per device; beyond the limit, by default 8, they would run
        # uncompiled
        torch._dynamo.config.recompile_limit = max(8 * len(devices), torch._dynamo.config.recompile_limit)
    return replicas


@torch.no_grad()
def refresh(replicas: Sequence[PreTrainedModel]) -> None:
    """Copies the trainable weights of the first replica to the others, without a host sync."""
    source = list(replicas[0].parameters())
    for replica in replicas[1:]:
        for target, weight in zip(replica.parameters(), source, strict=True):
            if weight.requires_grad:
                target.copy_(weight, non_blocking=True)


@torch.no_grad()
def sum_gradients(replicas: Sequence[PreTrainedModel]) -> None:
    """Moves the gradients of all replicas to the first and sums them, without a host sync."""
    for first, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
        for other in others:
            if other.grad is not None:  # None with fewer sequences than replicas
                arrived = other.grad.to(first.device, non_blocking=True)
                first.grad = arrived if first.grad is None else first.grad.add_(arrived)
                other.grad = None


def warn_learning_rate(
    learning_rate: float, model: nn.Module, most: float = 2e-5, usual: str = "by RL: 5e-6 (up to 0.5 B) to 1e-6 (7 B)"
) -> None:
    """Warns if the learning rate is unusually high for this model size; small models are exempt.

    Args:
        learning_rate: as configured.
        model: the policy; with adapters the limit is ADAPTER_RATE.
        most: limit for full fine-tuning.
        usual: usual values for full fine-tuning, for the message.
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
    if device.type == "cuda":  # only there anything is compiled
        storage.keep_compiled_code()
    kind = sources.pick_dtype(dtype, device)
    model = _read(name, kind, bits=bits, device_map={"": device}) if bits else _read(name, kind).to(device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ and model.num_parameters() < SMALL:
        torch.set_num_threads(1)
    require_finite(model, sources.find(name))
    head.check(model)
    return model


def _read(name: str, dtype: torch.dtype, bits: int = 0, **options: Any) -> PreTrainedModel:
    """Loads a model without dropout, saved adapters merged; on the CPU, unless `options` differ."""
    source = sources.find(name)
    base = sources.base_of(source)
    if base:
        return merging.merge(adapters.wrap_saved(_read(base, dtype, bits, **options), source))
    if bits:
        options["quantization_config"] = adapters.quantization(bits, dtype)
    # TF32 would keep 11 bits of the rotary positions, an fp32 product, and round positions above
    # 2,048
    torch.set_float32_matmul_precision("highest")
    # cuDNN's attention with a mask has NaN in its gradient at some lengths on H100 and H200, since
    # torch 2.11 (pytorch/pytorch#196678)
    torch.backends.cuda.enable_cudnn_sdp(False)
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
    missing = sorted(found["missing_keys"])  # transformers initialises them randomly
    require(
        not missing,
        f"model {name!r}",
        f"its files lack {len(missing)} weights, such as {missing[:1]}",
        "copy or download it again, or name a model of this kind",
    )
    _disable_dropout(model)
    return model


def _disable_dropout(model: nn.Module) -> None:
    """Disables dropout in blocks that `train_mode` leaves in train mode. The model's config keeps its values."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        config = getattr(module, "config", None)
        if isinstance(module, GradientCheckpointingLayer) and config is not None and _rates(config):
            module.config = copy.copy(module.config)  # some blocks read rates there
            for name in _rates(module.config):
                setattr(module.config, name, 0.0)
        for name in _rates(module):
            setattr(module, name, 0.0)


def _rates(holder: Any) -> list[str]:
    """Attributes that are rates of dropout, or of layers dropped."""
    # a router's jitter is none: PhiMoE has it as a threshold in eval mode too
    return [name for name, value in vars(holder).items() if "drop" in name and isinstance(value, float) and value > 0]
