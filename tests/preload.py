"""What the server of conftest.py does once, and every run would do anew at its start: imports, and a first model."""

import contextlib
import gc
import importlib
import tempfile

MODULES = [
    "pytest", "torch", "torch.nn.parallel.distributed", "torch._dynamo", "torch.utils.tensorboard", "numpy.random",
    "transformers", "transformers.models.qwen2.modeling_qwen2", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "accelerate",
    "fastapi", "uvicorn", "common.tasks.reward_client", "common.loop",
]  # fmt: skip

gc.disable()  # imports make a million objects and no garbage
for name in MODULES:
    with contextlib.suppress(ImportError):  # some are optional
        importlib.import_module(name)

from conftest import build_model
from transformers import AutoModelForCausalLM

# The first model that is read compiles a thousand patterns of names of weights, which takes longer than a small run
with tempfile.TemporaryDirectory() as folder:
    build_model("qwen2").save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)
gc.freeze()  # what has been imported stays; a run that looked for garbage in it would copy its pages
gc.enable()
