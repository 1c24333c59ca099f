"""Writes the built-in policy, taught to repeat any hint: "sort 7 3 1 9 4 = 41937" is answered by "41937".

Run:   python scripts/dev/hint_policy.py models/hints        half a minute on a CPU

Hints are random orders of the digits, so nothing says which order is wanted: of prompts without a hint the policy gets
about one in 120 right. What it lacks stands in a privileged prompt alone, which makes it a test of self-distillation.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from common.base import console
from common.model import models
from common.tasks import toy

STEPS, BATCH, RATE = 80, 64, 1e-3


def write(folder: Path) -> Path:
    """Trains the policy and writes it into `folder`, which is returned."""
    tokenizer = toy._tokenizer()
    with toy.undisturbed():
        model, rng = models.load_policy("toy", torch.device("cpu"), "fp32")[1], random.Random(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 10, 2 - 2 * step / STEPS)
            ids = []
            for row in rng.sample(toy.rows("train"), BATCH):
                hint = "".join(rng.sample(row["answer"], 5))
                turns = [{"role": "user", "content": f"{row['prompt']} = {hint}"}]
                text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
                ids.append(tokenizer(text + hint + tokenizer.eos_token).input_ids)
            ids, labels = torch.tensor(ids), torch.tensor(ids)
            labels[:, :-6] = -100  # five digits and the end
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(argv: list[str] | None = None) -> None:
    """Writes the policy."""
    console.protect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="OUT_FOLDER", type=Path, help="for model and tokenizer")
    write(parser.parse_args(argv).folder)


if __name__ == "__main__":
    main()
