"""Merges LoRA adapters into their base model and saves an ordinary model folder, for training or serving.

Run:   python scripts/merge_adapters.py runs/gspo/checkpoint-000200 models/mine
       python scripts/merge_adapters.py runs/gspo/checkpoint-000200 models/mine --dtype fp32

The sum is computed in fp32 on the CPU, then rounded to the dtype of the base model or to --dtype.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.base import console
from common.model import images, models, sources


def main(argv: list[str] | None = None) -> None:
    """Merges the adapters and saves the model."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapters", help="folder or hub id with adapter_config.json, such as a checkpoint")
    parser.add_argument("out", help="new folder to write")
    parser.add_argument(
        "--dtype", choices=sources.DTYPES, help="of the saved weights (default: that of the base model)"
    )
    args = parser.parse_args(argv)
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"{out} exists already: choose another folder")
    base = sources.base_of(sources.find(args.adapters))
    if base is None:
        parser.error(f"{args.adapters} holds no adapters (adapter_config.json): it is a model already")
    model = models.load_frozen(args.adapters, torch.device("cpu"), "fp32")  # first: it checks the base model
    config = AutoConfig.from_pretrained(sources.find(base), trust_remote_code=False)
    model = model.to(sources.DTYPES.get(args.dtype) or config.dtype)
    reader = images.load_processor if images.is_vlm(model.config) else sources.load_tokenizer
    reads = reader(args.adapters)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merge-", dir=out.parent) as scratch:  # `out` appears only when complete
        model.save_pretrained(f"{scratch}/model")
        reads.save_pretrained(f"{scratch}/model")
        Path(scratch, "model").replace(out)
    print(f"{base} + {args.adapters}: {model.num_parameters() / 1e6:.1f} M parameters in {model.dtype}: {out}")


if __name__ == "__main__":
    main()
