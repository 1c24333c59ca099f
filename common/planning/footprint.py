"""Memory of each part of a run on each GPU, in bytes, from the shape of the model and the settings.

The factors at the top estimate activations and temporary tensors of compiled blocks of attention and an MLP. They are
derived, not fitted; tests/test_plan.py compares them with the tensors that autograd saves, and plans with measured
peaks. Blocks that are not compiled are measured, see blocks.py: all others, and all with `compile` off.

Dims: H hidden size, I intermediate size of the MLP, T new tokens and G completions of a prompt.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from common.base import distributed, settings
from common.base.devices import GIB
from common.generation.engine import KEEP_SHARE
from common.generation.scheduler import PREFILL_TOKENS
from common.model import head, merging, passes
from common.planning import shapes
from common.planning.blocks import Pass
from common.training import optim

Roles = Mapping[str, tuple[int, ...]]  # GPU numbers by role, as `layouts.roles` gives them
PASSES = ("loss", "backward", "reduce")  # phases of a forward and backward pass, see `Gpu.parts`
# Value of an option that a script does not have: the feature is off
ABSENT = dict(lora_rank=0, load_bits=0, fsdp=False, optimizer_offload="none", param_offload=False, freeze_vision=False,
              kl_coef=0, epochs=1, max_images=0, max_pixels=0, max_tokens=0,
              embedding_model="ngrams", teacher_prompt="")  # fmt: skip


def option(cfg: Any, name: str) -> Any:
    """The value of an option, or that of `ABSENT` if the script does not have it.

    Args:
        cfg: Config of a script.
        name: a key of `ABSENT`.
    """
    return getattr(cfg, name, ABSENT[name])


def completion_tokens(cfg: Any, longest: int) -> int:
    """Most tokens behind a prompt: those that are sampled, or the rest of a given conversation.

    Args:
        cfg: Config of a script.
        longest: tokens of the longest prompt.
    """
    return max(cfg.max_new_tokens, option(cfg, "max_tokens") - longest)


@dataclasses.dataclass(frozen=True)
class PerToken:
    """Elements that a decoder layer holds per token, in the dtype of the model, as multiples of its widths."""

    hidden: float  # times H
    queries: float  # times the width of all query heads, usually H
    keys: float  # times the width of all keys and values
    inner: float  # times I

    def of(self, shape: shapes.Shape) -> float:
        """Elements per token and layer of a model."""
        widths = shape.hidden, shape.queries, shape.keys, shape.inner
        return sum(a * b for a, b in zip(dataclasses.astuple(self), widths, strict=True))


# Tensors that a compiled layer saves for its backward pass: both residual inputs and the outputs of both norms (4 H);
# q, k, v and the output of attention; gate, up and their product (3 I). The rest is recomputed.
COMPILED = PerToken(4, 2, 1, 3)
BACKWARD = PerToken(6, 0, 0, 3)  # temporaries of a layer's backward pass: gradients of these, norms in fp32
FORWARD = PerToken(4, 0, 0, 3)  # temporaries of a layer in a pass without gradients
SAMPLED_LOGITS = 4  # fp32 copies of logits alive at once while sampling, as the engine counts them
LOGITS, COMPILED_LOGITS = 3.3, 1.8  # the same for a chunk of the loss
PAIRED_LOGITS, COMPILED_PAIRED = 4.0, 3.0  # with the logits of a teacher
EMBEDDER = 567_754_752  # parameters of BAAI/bge-m3, assumed for an embedder that is not a local folder
WORKSPACE = GIB // 4  # of cuBLAS and CUDA graphs, without logits
BYTES = {4: 0.516, 8: 1.01}  # per weight quantized to so many bits, scales included
STREAMED_BUCKETS = 3  # of an offloaded optimizer state on the GPU at once: uploaded, in use, downloaded
USABLE = 0.95  # share of a GPU's free memory: the rest goes to CUDA, NCCL and fragmentation


@dataclasses.dataclass
class Gpu:
    """Bytes on one GPU by purpose.

    Attributes:
        always: in every phase.
        phases: of each phase, in addition.
        groups: prompts whose completions the GPU would sample at once; 0: it does not sample.
        cache: KV cache for the completions of one prompt.
        states: of layers other than attention, for the completions of one prompt.
        step: temporaries of such layers in a decode step, likewise.
        logits: for the completions of one prompt.
        copy: copy of the weights that adapters are merged into; in CPU memory if it would take much of the free memory.
    """

    always: Counter = dataclasses.field(default_factory=Counter)
    phases: dict[str, Counter] = dataclasses.field(default_factory=dict)
    groups: int = 0
    cache: int = 0
    states: int = 0
    step: int = 0
    logits: int = 0
    copy: int = 0

    def add(self, phase: str, **parts: float) -> None:
        """Adds bytes to a phase, or to `always`; "_" in names become spaces."""
        to = self.always if phase == "always" else self.phases.setdefault(phase, Counter())
        for name, number in parts.items():
            to[name.replace("_", " ")] += math.ceil(number)

    def at_once(self, capacity: float = math.inf) -> int:
        """Prompts whose completions are sampled at once; the others are queued.

        Args:
            capacity: bytes available to the run.
        """
        if not self.groups:
            return 0
        return max(1, min(self.groups, self.room(capacity)))

    def room(self, capacity: float) -> int:
        """Prompts whose completions fit into memory at once, by the rule of the engine; 0: not even those of one.

        Args:
            capacity: bytes available to the run.
        """
        if capacity == math.inf:
            return self.groups
        base = self.always.total() + self.phases["rollout"].total() + self.copied(capacity)
        return int(max(0, min(0.9 * (capacity - base), USABLE * capacity - base)) // self.prompt_bytes())

    def prompt_bytes(self) -> int:
        """Bytes for the completions of one prompt."""
        return self.cache + self.states + self.step + self.logits

    def copied(self, capacity: float = math.inf) -> int:
        """Bytes of `copy` on the GPU: all or none.

        Args:
            capacity: bytes available to the run.
        """
        return self.copy if self.copy <= merging.GPU_COPY_SHARE * (capacity - self.always.total()) else 0

    def parts(self, phase: str, capacity: float = math.inf) -> Counter:
        """Bytes of a phase by purpose, without `always`.

        Args:
            phase: "rollout"; "score", "reference" and "teacher", passes without gradients; "similarity"; "loss", at the
                start of the backward pass; "backward", in its first layer; "reduce", in its last; "step", of AdamW.
            capacity: bytes available to the run.
        """
        parts, groups = Counter(self.phases.get(phase, {})), self.at_once(capacity)
        if phase == "rollout":
            parts += Counter({"KV cache": groups * self.cache, "logits": groups * self.logits})
            parts += Counter({"states": groups * self.states, "decode step": groups * self.step})
            parts += Counter({"weights without adapters": self.copied(capacity)})
        elif groups * (self.cache + self.states) <= KEEP_SHARE * capacity < math.inf:  # stays allocated
            parts += Counter({"KV cache": groups * self.cache, "states": groups * self.states})
        return +parts

    def peak(self, capacity: float = math.inf) -> int:
        """Bytes in the phase with the most.

        Args:
            capacity: bytes available to the run; infinite: all completions are sampled at once.
        """
        return self.always.total() + max((self.parts(phase, capacity).total() for phase in self.phases), default=0)


class Run:
    """The sizes of a run that memory depends on, per process, and the memory of its parts."""

    def __init__(
        self, cfg: Any, shape: shapes.Shape, ranks: int, longest: int, visual_tokens: int | None, on_gpu: bool
    ):
        """Derives the sizes from a Config.

        Args:
            cfg: of a training script.
            shape: of the trained model.
            ranks: processes of the run.
            longest: tokens of the longest prompt.
            visual_tokens: most image tokens of a prompt, for a vision-language model; None: the limit of the options.
            on_gpu: whether the run is on GPUs.
        """
        self.cfg, self.shape, self.longest, self.on_gpu = cfg, shape, longest, on_gpu
        dtype = {"auto": "bf16" if on_gpu else "fp32"}.get(cfg.dtype, cfg.dtype)
        self.size = 4 if dtype == "fp32" else 2  # bytes per element
        self.dtype = torch.float32 if dtype == "fp32" else torch.bfloat16  # fp16 takes the same memory
        self.compiled, self.shares_prompts = cfg.compile and on_gpu, on_gpu and self.size == 2
        self.prompts = max(1, cfg.batch_size // ranks)
        self.rows = self.prompts * cfg.group_size
        self.completion = completion_tokens(cfg, longest)
        self.sequence = longest + self.completion
        self.optimizer_steps = cfg.num_minibatches * option(cfg, "epochs")
        self.has_kl = option(cfg, "kl_coef") > 0
        self.visual = 0
        if shape.levels:
            most = option(cfg, "max_images") * option(cfg, "max_pixels") // 28**2
            self.visual = min(longest, most if visual_tokens is None else visual_tokens)

        self.rank, self.bits = option(cfg, "lora_rank"), option(cfg, "load_bits")
        self.shards = ranks if distributed.shards(cfg) else 1
        frozen = shape.vision if option(cfg, "freeze_vision") else 0
        self.trained = shape.per_rank * self.rank if self.rank else shape.params - frozen
        linear = shape.linear * (BYTES[self.bits] if self.bits else self.size)
        self.weights = (shape.params - shape.linear) * self.size + linear + (self.trained * self.size * (self.rank > 0))
        starts = self.rank > 0 and self.has_kl and (Path(cfg.policy_model) / "adapter_config.json").is_file()
        self.start = self.trained * self.size * starts  # the adapters of a reference
        # quantized layers are not merged, but fused experts are never quantized
        self.merged = (shape.experts if self.bits else shape.adapted) * self.size if self.rank else 0
        masters = 4 if self.size == 2 and self.shards == 1 else 0  # sharded weights are fp32 and need no master copy
        self.state = (masters + 8) * self.trained / self.shards

        # a teacher in this process; full: the loss takes its hidden states, else only log-probabilities of tokens
        self.distilled = hasattr(cfg, "teacher_model")
        self.teacher = shapes.of(settings.teacher_name(cfg)) if self.distilled and not cfg.teacher_url else None
        # tokens that its longest prompt has more than the student's
        self.privileged = max(0, cfg.max_teacher_prompt_tokens - longest) if option(cfg, "teacher_prompt") else 0
        self.full = self.teacher is not None and cfg.loss != "opd"
        self.offload, self.param_offload = option(cfg, "optimizer_offload"), option(cfg, "param_offload")
        self.host = self.state if self.offload != "none" else 0  # bytes of pinned CPU memory
        if self.param_offload:
            body = self.teacher.params - self.teacher.head * self.full if self.teacher else 0
            self.host += self.weights + body * self.size

    def add(self, gpus: dict[int, Gpu], process: Roles) -> None:
        """Adds the memory of one process.

        Args:
            gpus: by number.
            process: its roles.
        """
        own = process["student"] if self.distilled else process["policy"]
        for i in own:
            self._weights(gpus[i])
            self._update(gpus[i], len(own))
        self._optimizer(gpus[own[0]])  # with several GPUs per process, on the first
        self._rollout(gpus, own, process.get("rollout", own))
        self._frozen(gpus, process)
        if self.teacher:
            self._teacher(gpus, own, process["teacher"])

    def minibatch(self, num_gpus: int) -> int:
        """Most tokens of an optimizer step on one GPU.

        Args:
            num_gpus: of one process, which divide its part of the step.
        """
        rows, prompts = -(-self.rows // self.cfg.num_minibatches), self.prompts
        if self.distilled:  # whole groups, and maybe a part of one at either end
            prompts = min(prompts, rows // self.cfg.group_size + 2)
        return self._tokens(self.shape, -(-rows // num_gpus), prompts)

    def _tokens(self, shape: shapes.Shape, rows: int, prompts: int) -> int:
        """Most tokens of rows of at most so many prompts, each of which is computed once."""
        # ranks that share a model cannot halve micro-batches, if it turns out that the model is not packed after all
        once = self._packed(shape) and self.shards == 1
        return rows * self.completion + (min(rows, prompts) if once else rows) * self.longest

    def _weights(self, gpu: Gpu) -> None:
        """Weights of the trained model."""
        # an idle student is in CPU memory while the teacher works
        for phase in ("rollout", "score", *PASSES, "step") if self.param_offload else ("always",):
            gpu.add(phase, weights=self.weights if self.shards == 1 else 4 * self.shape.params / self.shards)
        if self.start:
            gpu.add("always", reference=self.start)
        if self.shards > 1:
            gpu.add("always", copy_to_sample=self.size * self.shape.params)
        if self.visual:
            numbers = self.prompts * self.visual * self.shape.hidden * self.shape.levels
            gpu.add("always", image_features=numbers * self.size)

    def _update(self, gpu: Gpu, num_gpus: int) -> None:
        """Forward and backward passes on one of `num_gpus` GPUs."""
        cfg, shape, size = self.cfg, self.shape, self.size
        minibatch = self.minibatch(num_gpus)
        tokens = max(self.sequence, min(cfg.micro_batch_tokens, minibatch))
        if (self.has_kl or self.optimizer_steps > 1) and (not self.distilled or cfg.loss == "opd"):
            gpu.add("score", **self._forward(shape, num_gpus))  # log-probabilities before the update
        # if a minibatch is one micro-batch, gradients appear while activations are freed
        for phase in ("reduce", "step") if minibatch <= cfg.micro_batch_tokens else (*PASSES, "step"):
            gpu.add(phase, gradients=self.trained * (4 if self.shards > 1 else size) / self.shards)

        together = cfg.group_size if self.distilled else -(-cfg.group_size // cfg.num_minibatches)
        layers = self._layers(shape, tokens, self.sequence, together)
        dequantized = shape.linear / shape.layers * size if self.bits else 0
        kept, at_work, alone = layers.kept, layers.at_work + dequantized, layers.at_work + dequantized + layers.layer
        if cfg.gradient_checkpointing:  # the input of each layer, and all of the layer being recomputed
            kept, at_work = tokens * shape.hidden * size * shape.layers, alone
        if self.rank and shape.experts:  # the sums of experts and adapters, and the gradient of those of a layer
            kept += 0 if cfg.gradient_checkpointing else shape.experts * size
            at_work += 2 * shape.experts / shape.layers * size
        # the input of the last norm in fp32, and its output; with a teacher or given replies, their gradients in fp32
        last = tokens * shape.hidden * (4 + size + 4 * (self.full or option(cfg, "max_tokens") > 0))
        # the gradient of the head is summed in fp32, then rounded; that of a tied head is kept until the embedding's
        head_gradient = 0 if self.rank else shape.head * (4 + size)
        waiting = shape.head * size if shape.tied and not self.rank else 0
        logits = self._logits(tokens, shape.vocabulary, self.full)
        gpu.add("loss", activations=kept + last, logits=logits, gradient_of_the_head=head_gradient)
        gpu.add("backward", activations=kept, layer_at_work=at_work, gradient_of_the_head=waiting)
        gpu.add("reduce", layer_at_work=alone, gradient_of_the_head=waiting)
        if self.shards > 1:
            ends = (shape.embedding + shape.head * (not shape.tied)) * size
            gathered = ends + 2 * shape.layer * size
            gpu.add("loss", gathered_layers=gathered)
            gpu.add("backward", gathered_layers=gathered + shape.layer * (4 + size))  # and a gradient being reduced
            gpu.add("reduce", gathered_layers=ends * (2 + 4 / size))

    def _optimizer(self, gpu: Gpu) -> None:
        """State and step of AdamW."""
        bucket = optim.STREAM_ELEMENTS if self.offload == "always" else optim.BUCKET_ELEMENTS
        bucket = min(bucket, self.trained / self.shards)
        casts = 4 * bucket if self.size == 2 and self.shards == 1 else 0
        gpu.add("step", fp32_gradients=casts)
        if self.offload == "always":
            gpu.add("step", streamed_state=STREAMED_BUCKETS * 12 * bucket)
            return
        during = (*PASSES, "step") if self.optimizer_steps > 1 else ("step",)  # the first step moves it back
        for phase in ("always",) if self.offload == "none" else during:
            gpu.add(phase, AdamW=self.state)

    def _rollout(self, gpus: dict[int, Gpu], own: tuple[int, ...], sampling: tuple[int, ...]) -> None:
        """Sampling, and the copies of the model that only sample."""
        shape, T, G = self.shape, self.cfg.max_new_tokens, self.cfg.group_size
        for i in sampling:
            gpu = gpus[i]
            if i not in own:
                gpu.add("always", copy_to_sample=self.weights)
            most = max(1, self.cfg.rollout_batch // G) if self.cfg.rollout_batch else self.prompts
            gpu.groups += min(most, -(-self.prompts // len(sampling)))
            slots = self.longest + G * T if self.shares_prompts else G * (self.longest + T)
            gpu.cache = shape.layers * shape.keys * self.size * slots
            gpu.logits = SAMPLED_LOGITS * 4 * shape.vocabulary * G
            gpu.copy = self.merged
            if not shape.plain and self.on_gpu:
                held = shape.blocks.cache(self.dtype)
                gpu.cache, gpu.states, gpu.step = held.token * slots, held.row * G, held.step * G
            tokens = min(max(PREFILL_TOKENS, self.longest), gpu.groups * self.longest)
            reading = self._layers(shape, tokens, self.longest).inference
            gpu.add("rollout", workspace=WORKSPACE, reading_prompts=reading)

    def _frozen(self, gpus: dict[int, Gpu], process: Roles) -> None:
        """Reference, reward model and embedder."""
        cfg = self.cfg
        for i in process.get("reference", ()) if self.has_kl and not self.rank else ():
            gpus[i].add("always", reference=self.shape.params * self.size / self.shards)
            gpus[i].add("reference", **self._forward(self.shape))
        for i in process.get("reward", ()):
            gpus[i].add("always", reward_model=shapes.of(cfg.reward_model, "reward").params * self.size)
        for i in process.get("embedder", ()) if option(cfg, "embedding_model") != "ngrams" else ():
            # not from the hub: without a network, that takes long
            local = Path(cfg.embedding_model).expanduser().is_dir()
            params = shapes.of(cfg.embedding_model, "embedder").params if local else EMBEDDER
            gpus[i].add("similarity" if cfg.similarity_offload else "always", embedder=2 * params)  # fp16

    def _teacher(self, gpus: dict[int, Gpu], own: tuple[int, ...], where: tuple[int, ...]) -> None:
        """A teacher, spread over its GPUs; it may be offloaded while idle, except for a head that the loss needs."""
        head_size = self.teacher.head * self.size * self.full
        body = (self.teacher.params * self.size - head_size) / len(where)
        for i in where:
            gpus[i].add("teacher" if self.param_offload else "always", teacher=body)
            gpus[i].add("teacher", **self._forward(self.teacher, more=self.privileged))
        gpus[where[-1]].add("always", teacher=head_size)
        for i in own:
            if i != where[-1]:
                gpus[i].add("loss", head_of_the_teacher=head_size)
        states = self.rows * self.cfg.max_new_tokens * self.teacher.hidden * self.size * self.full
        for phase in ("teacher", *PASSES):
            gpus[own[0]].add(phase, what_the_teacher_said=states)

    def _forward(self, shape: shapes.Shape, num_gpus: int = 1, more: int = 0) -> dict[str, float]:
        """Memory of a pass without gradients; `more` tokens stand before each prompt."""
        at_once, sequence = self.cfg.micro_batch_tokens, self.sequence + more
        if self._packed(shape):
            at_once *= passes.FORWARD_FACTOR
        else:  # the rows of a micro-batch stay together
            at_once *= sequence / self.sequence
        rows = -(-self.rows // num_gpus)
        prompts = min(rows, self.prompts) if self._packed(shape) and self.shards == 1 else rows
        most = self._tokens(shape, rows, self.prompts) + prompts * more
        tokens = max(sequence, min(at_once, most))
        layers = self._layers(shape, math.ceil(tokens), sequence, self.cfg.group_size)
        return dict(forward_pass=layers.inference, logits=self._logits(tokens, shape.vocabulary))

    def _layers(self, shape: shapes.Shape, tokens: int, length: int, together: int = 1) -> Pass:
        """Memory of the decoder blocks for a number of tokens in sequences of `length`, `together` of a prompt."""
        if not self.on_gpu:  # only what is always there is planned
            return Pass(0, 0, 0, 0)
        if not (shape.plain and self.compiled):
            adapters = self.rank > 0 and shape is self.shape
            measured = shape.blocks.measure(max(1, tokens // length), length, self.dtype, adapters)
        else:
            layer, at_work, inference = (
                math.ceil(tokens * factors.of(shape) * self.size) for factors in (COMPILED, BACKWARD, FORWARD)
            )
            measured = Pass(layer * shape.layers, layer, at_work, inference)
        if together == 1 or not self._packed(shape):
            return measured
        # Each completion reads a copy of the keys of its prompt. Lengths are those of the longest: with shorter
        # completions there are more copies, but of shorter prompts fewer.
        copied = tokens * (together - 1) * self.longest / (self.longest + together * self.cfg.max_new_tokens)
        copies, wide = math.ceil(copied * shape.keys * self.size), math.ceil((tokens + copied) * shape.keys * 4)
        kept, layer = measured.kept + copies * shape.layers, measured.layer + copies
        return Pass(kept, layer, measured.at_work + copies + wide, measured.inference + copies + wide)

    def _packed(self, shape: shapes.Shape) -> bool:
        """Whether rows are packed: layers with states read padded ones."""
        return shape.plain or not self.on_gpu or not shape.blocks.cache(self.dtype).row

    def _logits(self, tokens: int, vocabulary: int, paired: bool = False) -> float:
        """Logits of a chunk of tokens."""
        plain, compiled = (PAIRED_LOGITS, COMPILED_PAIRED) if paired else (LOGITS, COMPILED_LOGITS)
        return (compiled if self.compiled else plain) * 4 * vocabulary * min(tokens, head.CHUNK_TOKENS)
