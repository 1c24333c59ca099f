"""Read by the server of conftest.py at the end of its imports: does what every run would do anew at its start."""

import tempfile

from conftest import build_model
from transformers import AutoModelForCausalLM

# The first model that is read compiles a thousand patterns of names of weights, which takes longer than a small run
with tempfile.TemporaryDirectory() as folder:
    build_model("qwen2").save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)
