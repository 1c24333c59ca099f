"""Makes a student from a teacher by dropping layers; train it with gkd/.

Run:   python scripts/drop_layers.py models/smollm2 models/smollm2-half              every second layer
       python scripts/drop_layers.py models/smollm2 models/smollm2-10 --keep 10      ten, spread evenly

The first and the last layer are always kept, since they fit the embedding and the head.
"""

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path


def option_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("teacher", help="folder, hub id, or toy-teacher")
    found.add_argument("student", help="new folder to write")
    found.add_argument("--keep", type=int, default=0, help="layers to keep; 0: half of them (default: %(default)s)")
    return found


if __name__ == "__main__":
    option_parser().parse_args()  # answers --help and wrong options before torch is imported, which takes seconds

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console
from common.base.checks import require
from common.model import agreement, models, sources


def kept_layers(total: int, keep: int) -> list[int]:
    """Indices of `keep` out of `total` layers, spread evenly, including the first and the last.

    Raises:
        ValueError: `keep` is below 2 or above `total`.
    """
    require(2 <= keep <= total, f"keep = {keep}", f"must be from 2 to {total}", "choose a number between")
    return [round(i * (total - 1) / (keep - 1)) for i in range(keep)]


def drop_layers(model: nn.Module, keep: int) -> list[int]:
    """Removes layers of a transformers causal language model in place and updates its config.

    Returns:
        Indices of the layers kept.

    Raises:
        ValueError: the model has no list of layers, or fewer than `keep`.
    """
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__}: its decoder has no list `layers`; only llama-like models can be cut")
    numbers = kept_layers(len(layers), keep)
    decoder.layers = nn.ModuleList(layers[i] for i in numbers)
    for place, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place  # index into key-value caches
    config = model.config.get_text_config(decoder=True)
    for name, value in config.to_dict().items():  # a kind of attention, of network or of positions for each layer
        if isinstance(value, list) and len(value) == len(layers):
            with contextlib.suppress(AttributeError):  # derived from other fields
                setattr(config, name, [value[i] for i in numbers])
    config.num_hidden_layers = keep
    return numbers


@torch.no_grad()
def require_same(model: PreTrainedModel, folder: str) -> None:
    """Requires that a model can be loaded from a folder, and computes there what it computes here.

    A config may say by a period or by numbers what each of its layers is, which is wrong for the layers left.

    Args:
        model: a transformers causal language model without some of its layers.
        folder: where it has been saved.

    Raises:
        ValueError: it is another model there.
    """
    problem = ""
    try:
        again = models.load_frozen(folder, torch.device("cpu"), "auto")
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        problem = f"it cannot be loaded ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})"
    else:
        ids = torch.arange(1, 13)[None]
        one, other = (m(input_ids=ids, use_cache=False).logits.float() for m in (model.eval(), again.eval()))
        if not torch.allclose(one, other, rtol=0, atol=agreement.rounding(model) * one.std().item()):
            problem = f"its logits differ by {(one - other).abs().max().item():.3g}"
    if problem:
        raise ValueError(
            f"{type(model).__name__}: without some of its layers it must be the same model when it is loaded from its "
            f"folder, but {problem}: its config does not list what each layer is. Keep other layers, or use a teacher "
            "whose layers are all alike"
        )


def main(argv: list[str] | None = None) -> None:
    """Drops the layers and saves the student."""
    console.protect()
    parser = option_parser()
    args = parser.parse_args(argv)
    if Path(args.student).exists():
        parser.error(f"{args.student} exists already: choose another folder")
    model = models.load_frozen(args.teacher, torch.device("cpu"), "auto")
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    before = model.num_parameters()
    numbers = drop_layers(model, args.keep or max(2, -(-total // 2)))
    tokenizer, student = sources.load_tokenizer(args.teacher), Path(args.student)
    student.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".drop-", dir=student.parent) as scratch:  # moved when complete
        try:
            model.save_pretrained(f"{scratch}/model")
        except StrictDataclassError as error:
            raise ValueError(
                f"{type(model).__name__}: its config does not allow {len(numbers)} of {total} layers ({error}); keep "
                "other layers, or use a teacher whose layers are all alike"
            ) from error
        tokenizer.save_pretrained(f"{scratch}/model")
        require_same(model, f"{scratch}/model")
        Path(scratch, "model").replace(student)
    print(
        f"{len(numbers)} of {total} layers ({', '.join(map(str, numbers))}), {model.num_parameters() / 1e6:.1f} of "
        f"{before / 1e6:.1f} M parameters: {args.student}"
    )


if __name__ == "__main__":
    main()
