"""Images in prompts, for policies of the Qwen-VL families: processor, prompt tokens, vision features, positions.

The vision tower runs once per prompt, however many completions the prompt has and however often
their log-probabilities are computed. Its features are kept in `Images`, which belongs to the batch;
a group shares them by prompt number. The decoder gets embeddings in which features replace the
image tokens, so caching, packing and gradients work as for text.

Dims: P prompts, B sequences, m of them in one forward pass, Q prompt tokens, T tokens of a row, n image tokens of one
prompt, N of a forward pass, H hidden size, D levels of features: one for the embeddings and, for Qwen3-VL, one more for
each of the first few layers of the decoder (DeepStack).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, ProcessorMixin
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLProcessor

from common.model import sources
from common.tasks import chat_templates

PROCESSORS = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}
SPECIALS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def load_processor(name: str | Path, max_pixels: int = 0) -> ProcessorMixin:
    """Loads tokenizer, image processor and chat template of a Qwen-VL model, for images only.

    The stock processors also load a video processor, which needs torchvision. Images are always
    resized by Pillow, so that machines with and without torchvision produce the same pixels.

    Args:
        name: a folder with config.json or processor files, or a hub id.
        max_pixels: larger images are scaled down to this area, in pixels; 0: the limit of the
            model.

    Returns:
        A processor of the family's class, which pads on the left; `save_pretrained` writes a folder
        that can be loaded again.

    Raises:
        ValueError: the model is of another family, its tokenizer does not match, or `max_pixels` is
            below the model's minimum.
    """
    name = str(name)
    tokenizer = sources.load_tokenizer(name)
    source = sources.find(name)
    base = PROCESSORS[_family(source)]
    if missing := [token for token in SPECIALS if token not in tokenizer.get_vocab()]:
        raise ValueError(f"the tokenizer of {name!r} has no token {', '.join(missing)}: it is not that of the model")
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(source)  # the same in all families
    settings, _ = base.get_processor_dict(source)  # with the chat template, from whichever file it is in
    template = settings.get("chat_template") or tokenizer.chat_template
    if max_pixels:
        least = image_processor.size["shortest_edge"]  # both are areas, whatever their names say
        if max_pixels < least:
            raise ValueError(f"max_pixels = {max_pixels}: must be 0 or at least {least}, the least area of {name!r}")
        image_processor.size = {"shortest_edge": least, "longest_edge": max_pixels}
    processor = image_only(base)(image_processor, tokenizer, chat_template=template)
    chat_templates.require_bounded(processor)
    return processor


def image_only(base: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """A processor class without videos: transformers loads what the signature of `__init__` names.

    Args:
        base: one of `PROCESSORS`.

    Returns:
        A class with the same name, which saved folders refer to.
    """

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs: Any):
        self.image_token, self.video_token, self.vision_start_token, self.vision_end_token = SPECIALS
        ids = tokenizer.convert_tokens_to_ids(list(SPECIALS))
        self.image_token_id, self.video_token_id, self.vision_start_token_id, self.vision_end_token_id = ids
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    return type(base.__name__, (base,), {"__init__": __init__})


def _family(source: str) -> str:
    """The model type from config.json, or from the processor's class without one."""
    kind = PretrainedConfig.get_config_dict(source)[0].get("model_type")  # no config.json gives no error, but {}
    if kind is None:
        declared = ProcessorMixin.get_processor_dict(source)[0].get("processor_class")
        kind = {base.__name__: kind for kind, base in PROCESSORS.items()}.get(declared, declared)
    if kind not in PROCESSORS:
        raise ValueError(f"model {source!r} is of type {kind!r}: images are for {', '.join(PROCESSORS)}")
    return kind


def is_vlm(source: PretrainedConfig | str) -> bool:
    """Whether a model belongs to the supported vision-language families.

    Args:
        source: a config, or what from_pretrained takes.
    """
    if isinstance(source, PretrainedConfig):
        return source.model_type in PROCESSORS
    return PretrainedConfig.get_config_dict(source)[0].get("model_type") in PROCESSORS


def vision_ids(model: nn.Module) -> list[int]:
    """Placeholder tokens of images and videos, which a policy must not generate.

    Pass them as `suppressed_ids` both to `rollout.Sampler` and to `logprobs.LogProbs`, or ratios
    are wrong.

    Args:
        model: a policy, wrapped by peft or not; without images the result is empty.
    """
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {getattr(model.config, name, None) for name in names} if is_vlm(model.config) else set()
    return sorted(ids - {None})


def tower(model: nn.Module) -> nn.Module:
    """The vision tower of a policy.

    Args:
        model: wrapped by peft or not.
    """
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    return inner.model.visual


def freeze_vision(model: nn.Module) -> None:
    """Freezes the vision tower; its features of a prompt are then valid for the whole run.

    Args:
        model: a policy.
    """
    tower(model).requires_grad_(False)


def encode(
    processor: ProcessorMixin, messages: list[dict[str, Any]], sizes: Sequence[tuple[int, int]], **template: Any
) -> list[int]:
    """Tokens of a prompt with images; needs only the sizes of the images, not their pixels.

    Args:
        processor: from `load_processor`.
        messages: chat messages; an image is a content part {"type": "image"}.
        sizes: (width, height) of the images in order, in pixels, like `PIL.Image.size`.
        template: more variables of the chat template.

    Returns:
        Token ids up to the header of the assistant's turn, with one image token per visual token.

    Raises:
        ValueError: a text holds a placeholder of images, the aspect ratio of an image is too large,
            or the numbers of images and of their places differ.
    """
    for text in _texts(messages):
        for token in SPECIALS:
            if token in text:
                raise ValueError(
                    f"a prompt's text holds {token!r}, which would be read as an image: take it out; images are parts "
                    '{"type": "image"} of a message'
                )
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
    before, *after = text.split(processor.image_token)
    if len(after) != len(sizes):
        raise ValueError(f"{len(sizes)} images for a prompt with {len(after)} places for one: they must be as many")
    pixels = processor.image_processor
    for (width, height), part in zip(sizes, after, strict=True):
        try:
            num_tokens = pixels.get_number_of_image_patches(height, width) // pixels.merge_size**2
        except ValueError as error:  # its aspect ratio is too large
            raise ValueError(f"an image of {width} x {height} pixels cannot be shown ({error}): crop it") from error
        before += processor.image_token * num_tokens + part
    return processor.tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"]


def _texts(messages: list[dict[str, Any]]) -> list[str]:
    """The texts of messages, without image parts."""
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    return [c for c in contents if isinstance(c, str)] + [part["text"] for part in parts if "text" in part]


@dataclasses.dataclass
class Images:
    """Vision features of P prompts, and the prompt that each of B sequences belongs to.

    `select` and `repeat` share the features: parts of a batch see those that `refresh` computes,
    and their backward passes accumulate gradients in them, where `backward` reads them.

    Attributes:
        prompts: [B] int64, on the CPU: prompt number of each sequence.
        places: per prompt [4, Q] int64, on the CPU: time, height and width of each token, and
            whether it is an image's.
        ends: [P] int64, on the CPU: the position that follows a prompt.
        features: per prompt [n, D, H], on the device of the model; leaves that receive gradients if
            the vision tower is trained.
        pixels: per prompt the inputs of the tower, on the CPU: patches and their grid; empty if the
            tower is frozen.
        outputs: by prompt number [n, D, H], with the graph of the tower, from `refresh`.
    """

    prompts: torch.Tensor
    places: list[torch.Tensor]
    ends: torch.Tensor
    features: list[torch.Tensor]
    pixels: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)
    outputs: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: nn.Module,
        processor: ProcessorMixin,
        prompts: Sequence[list[int]],
        pictures: Sequence[Sequence[Image.Image]],
    ) -> "Images":
        """Runs the vision tower once per prompt: features do not depend on the batch.

        Args:
            model: a policy, wrapped by peft or not.
            processor: from `load_processor`.
            prompts: token ids of P prompts, from `encode`.
            pictures: the images of each prompt, in order; a prompt may have none.

        Returns:
            One sequence per prompt, without graph, ready for a rollout.

        Raises:
            ValueError: images and tokens of a prompt do not match.
        """
        if len(prompts) != len(pictures):
            raise ValueError(f"{len(prompts)} prompts and images of {len(pictures)}: give a list per prompt, if empty")
        visual, merge = tower(model), processor.image_processor.merge_size
        trained = any(p.requires_grad for p in visual.parameters())
        places, ends, features, pixels = [], [], [], []
        for number, (ids, own) in enumerate(zip(prompts, pictures, strict=True)):
            grids = torch.empty(0, 3, dtype=torch.long)
            patches = torch.empty(0)
            if own:
                encoded = processor.image_processor(images=list(own), return_tensors="pt")
                patches, grids = encoded["pixel_values"], encoded["image_grid_thw"]
            try:
                place_4Q, end = positions(ids, (grids // torch.tensor([1, merge, merge])).tolist(), model.config)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from None
            places.append(place_4Q)
            ends.append(end)
            features.append(_features(model, patches, grids))
            pixels += [(patches, grids)] if trained else []
        return cls(torch.arange(len(prompts)), places, torch.tensor(ends), features, pixels)

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: torch.Tensor) -> "Images":
        """The images of some sequences.

        Args:
            rows: [b] int64, row numbers, on the CPU.
        """
        return dataclasses.replace(self, prompts=self.prompts[rows])

    def repeat(self, group_size: int) -> "Images":
        """Repeats each sequence `group_size` times, as neighbours.

        Args:
            group_size: completions per prompt.
        """
        return dataclasses.replace(self, prompts=self.prompts.repeat_interleave(group_size))

    def like(self, other: "Images") -> "Images":
        """The same features for the sequences of another.

        Args:
            other: of the same prompts, with the same numbers.
        """
        return dataclasses.replace(self, prompts=other.prompts)

    def put(self, rows: torch.Tensor, other: "Images") -> "Images":
        """Replaces some rows by those of another; prompts that no sequence uses are dropped.

        Args:
            rows: [b] int64, row numbers, on the CPU.
            other: b rows.
        """
        both = join([self, other])
        new = both.prompts[len(self) :]
        return _compact(dataclasses.replace(both, prompts=both.prompts[: len(self)].index_copy(0, rows, new)))

    def check(self, lengths: Sequence[int]) -> None:
        """Raises ValueError if these are the images of prompts of other lengths.

        Args:
            lengths: prompt tokens of each sequence.
        """
        own = [self.places[p].shape[1] for p in self.prompts.tolist()]
        if list(lengths) != own:
            raise ValueError(
                f"images of prompts of {own} tokens for prompts of {list(lengths)} tokens: rows and images must be cut "
                "and ordered alike, as RolloutBatch.select does"
            )

    def to(self, device: torch.device) -> "Images":
        """Copies the features to another device; gradients still reach the leaves.

        Args:
            device: of the model that reads them.
        """
        if all(x.device == torch.device(device) for x in self.features):
            return self
        return dataclasses.replace(self, features=[x.to(device) for x in self.features])

    def refresh(self, model: nn.Module, prompts: torch.Tensor) -> None:
        """Computes features with the current weights of the tower, and keeps the graph.

        Call it at the start of an optimizer step on the images of the whole batch; a no-op for a
        frozen tower.

        Args:
            model: the policy.
            prompts: int64, on the CPU: prompt numbers of the step; may repeat.
        """
        if not self.pixels:
            return
        self.outputs.clear()
        for number in prompts.unique().tolist():
            output = _features(model, *self.pixels[number])
            self.features[number] = output.detach()
            if output.requires_grad:  # else the prompt has no image
                self.outputs[number] = output
                self.features[number].requires_grad_()

    def backward(self) -> None:
        """Backpropagates the gradients of the features through the tower, one pass per prompt.

        Call it before the optimizer step, on the images that were refreshed. The features stay,
        without graph.
        """
        for number, output in self.outputs.items():
            gradient = self.features[number].grad
            if gradient is not None:
                output.backward(gradient)
            self.features[number] = self.features[number].detach()
        self.outputs.clear()

    def inputs(
        self,
        model: nn.Module,
        ids: torch.Tensor,
        rows: torch.Tensor,
        place: torch.Tensor,
        first: Sequence[int] | None = None,
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Keyword arguments for a decoder call on prompts, or on prompts and completions.

        Image tokens in a completion are treated like any other token.

        Args:
            model: the policy.
            ids: [m, T] int64, or the same tokens in another shape, such as [1, M].
            rows: row number of each token, of a shape that broadcasts to that of `ids`.
            place: position of each token in its row, of such a shape too; negative: padding.
            first: the rows whose prompts are among the tokens, in their order; None: all, ascending.
        """
        device = ids.device
        used = self.prompts.tolist()
        table = pad_sequence([self.places[p].T for p in used], batch_first=True).permute(2, 0, 1).to(device)
        lengths = torch.tensor([self.places[p].shape[1] for p in used], device=device)
        ends = self.ends[self.prompts].to(device)
        rows, place = torch.broadcast_tensors(rows, place)
        in_prompt = place < lengths[rows]  # positions after the prompt count up from its end
        *where, is_image = table[:, rows, place.clamp(0, table.shape[2] - 1)]
        position_ids = torch.where(in_prompt, torch.stack(where), place - lengths[rows] + ends[rows])
        kwargs = {"position_ids": position_ids.clamp(min=0)}
        embeddings = model.get_input_embeddings()(ids)
        seen = used if first is None else [used[i] for i in first]
        features_NDH = torch.cat([self.features[p] for p in seen]).to(embeddings.dtype)
        is_image = is_image.bool() & in_prompt & (place >= 0)
        if len(features_NDH):
            embeddings = embeddings.masked_scatter(is_image[..., None], features_NDH[:, 0])
            if features_NDH.shape[1] > 1:
                kwargs["visual_pos_masks"] = is_image
                kwargs["deepstack_visual_embeds"] = list(features_NDH[:, 1:].unbind(1))
        return kwargs | {"inputs_embeds": embeddings}


def join(parts: Sequence[Images]) -> Images:
    """Concatenates the sequences of several.

    Args:
        parts: at least one.
    """
    starts = torch.tensor([0] + [len(part.places) for part in parts[:-1]]).cumsum(0).tolist()
    return Images(
        prompts=torch.cat([part.prompts + start for part, start in zip(parts, starts, strict=True)]),
        places=[x for part in parts for x in part.places],
        ends=torch.cat([part.ends for part in parts]),
        features=[x for part in parts for x in part.features],
        pixels=[x for part in parts for x in part.pixels],
    )


def positions(ids: Sequence[int], grids: Sequence[Sequence[int]], config: PretrainedConfig) -> tuple[torch.Tensor, int]:
    """Rotary positions of a prompt with images.

    A text token has the same position on all three axes. An image token has its own time, row and
    column, counted from the position that follows the text before it. Text after an image continues
    after the largest of them.

    Args:
        ids: the prompt's tokens.
        grids: (time, height, width) of each image, in tokens.
        config: of the policy.

    Returns:
        [4, Q] int64: time, height, width, and 1 for image tokens; and the position that follows the
        prompt.

    Raises:
        ValueError: images and image tokens do not match.

    Source: Qwen2-VL, arXiv 2409.12191, section 2.1 (M-RoPE).
    """
    is_image = torch.tensor(ids) == config.image_token_id
    tokens, wanted = int(is_image.sum()), sum(t * h * w for t, h, w in grids)
    if tokens != wanted:
        raise ValueError(
            f"{len(grids)} images of {wanted} visual tokens for {tokens} image tokens: give the images whose sizes the "
            "prompt was encoded with, in that order, and the same processor"
        )
    parts, place, start = [], 0, 0
    for t, h, w in grids:
        first = place + int(is_image[place:].int().argmax())
        parts.append(torch.arange(start, start + first - place).expand(3, -1))
        start, place = start + first - place, first + t * h * w
        if not is_image[first:place].all():
            raise ValueError(f"image tokens {first} to {place - 1} are interrupted: images are of other sizes or order")
        block = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
        parts.append(torch.stack(block).flatten(1) + start)
        start += max(h, w)
    rest = len(ids) - place
    parts.append(torch.arange(start, start + rest).expand(3, -1))
    return torch.cat([torch.cat(parts, dim=1), is_image[None].long()]), start + rest


def _features(model: nn.Module, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Output of the tower for the images of one prompt, [n, D, H]."""
    visual, config = tower(model), model.config.vision_config
    levels = 1 + len(getattr(config, "deepstack_visual_indexes", None) or ())
    if not len(grids):
        width = model.get_input_embeddings().weight.shape[1]
        return torch.empty(0, levels, width, dtype=visual.dtype, device=visual.device)
    output = visual(patches.to(visual.device, visual.dtype), grid_thw=grids.to(visual.device), return_dict=True)
    return torch.stack([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())], dim=1)


def _compact(images: Images) -> Images:
    """Drops the prompts that no sequence belongs to."""
    used, prompts = images.prompts.unique(return_inverse=True)
    kept = used.tolist()
    return Images(
        prompts=prompts,
        places=[images.places[p] for p in kept],
        ends=images.ends[used],
        features=[images.features[p] for p in kept],
        pixels=[images.pixels[p] for p in kept] if images.pixels else [],
    )
