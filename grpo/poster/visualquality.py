"""VisualQuality-R1 as a visual scorer: a Qwen2.5-VL 7B that rates a picture from 1 to 5.

It was trained to rank photographs from image-quality databases, without a reference. So its scale is not calibrated,
flat renders are out of distribution, and it judges pixels rather than layout: by default the deterministic CPU formula
is half of the visual score. It can also read: texts that are not in the ground truth are grey bars in its images.

Source: arXiv 2505.14460, Table 1 (the question, without thinking), and the model card. Differences: greedy decoding
instead of sampling, few new tokens, fewer pixels, and an answer without a rating is an error, not a random number.

Dims: m images, C tokens of answers, V vocabulary
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from transformers import GenerationConfig, PretrainedConfig, ProcessorMixin, Qwen2_5_VLForConditionalGeneration

from common.base.checks import require
from common.model import models, sources
from common.model.images import load_processor
from grpo.poster.errors import ScorerError

QUESTION = (
    "You are doing the image quality assessment task. Here is the question: What is your overall rating on the quality "
    "of this picture? The rating should be a float between 1 and 5, rounded to two decimal places, with 1 representing "
    "very poor quality and 5 representing excellent quality."
)
INSTRUCTION = "Please only output the final answer with only one score in <answer> </answer> tags."
PREFILL = "<answer>"  # makes the model begin with the rating
MAX_NEW_TOKENS = 16  # "<answer>4.25</answer>" takes 10
MAX_ASPECT = 200  # long side over short side; the limit of the image processor
DIGITS = "12345"
DIGIT_MASS = 0.5  # least probability of a digit as the next token; below, the model was not about to write a rating
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def parse(text: str) -> float | None:
    """The rating in an answer: the first number of the last <answer>, or of the whole text if there is no such tag.

    Args:
        text: of the model.

    Returns:
        From 1 to 5. None if there is no number, or one out of range, or only thoughts, whose numbers are not ratings.
    """
    before, closed, _ = text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    if not (opened and closed):
        answer = "" if "<think>" in text else text
    number = NUMBER.search(answer)
    rating = float(number[0]) if number else 0.0
    return rating if 1 <= rating <= 5 else None


class VisualQuality:
    """The scorer; not thread-safe.

    Attributes:
        name: of the kind of scorer.
        identity: everything its scores depend on: model, weights, question and options.
        needs_image: true.
        counters: images "asked" about, "retried" and "unparsable" ones among them, batches "out_of_memory".
    """

    name = "visualquality_r1"
    needs_image = True

    def __init__(
        self,
        model: str = "TianheWu/VisualQuality-R1-7B",
        device: str = "auto",
        dtype: str = "auto",
        alpha: float = 0.5,
        batch_size: int = 16,
        expected: bool = False,
        max_pixels: int = 602112,
    ):
        """Loads the model.

        Args:
            model: folder or hub id of a Qwen2.5-VL.
            device: "auto": the first visible GPU, else the CPU; or what torch.device takes.
            dtype: "fp32", "bf16", "fp16", or "auto": bf16 on a GPU, fp32 on the CPU.
            alpha: weight of the model in the visual score; the CPU formula has the rest.
            batch_size: images in one forward pass. Changes bf16 ratings slightly through padding, but is not part of
                `identity`.
            expected: rate by the expectation of the first digit under the next-token probabilities instead of the
                written number: a single forward pass, and no ties. It ignores decimals, so the scale differs. Not
                validated.
            max_pixels: area above which images are downscaled; 28 x 28 pixels are one visual token.

        Raises:
            ValueError: an option is out of range, or the model is absent or of another kind.
        """
        require(0 <= alpha <= 1, f"alpha = {alpha}", "must be from 0 to 1", "0.5: half model, half CPU formula")
        require(batch_size >= 1, f"batch_size = {batch_size}", "must be at least 1", "lower it only to save memory")
        self.alpha, self.batch_size, self.expected = alpha, batch_size, expected
        self.counters: Counter[str] = Counter()
        if device == "auto":
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.processor, self.model = _load(model, self.device, dtype, max_pixels)
        self.tokenizer = self.processor.tokenizer
        content = [{"type": "image"}, {"type": "text", "text": f"{QUESTION} {INSTRUCTION}"}]
        self.prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, add_vision_id=True
        )
        self.digit_ids = [self.tokenizer.encode(digit, add_special_tokens=False) for digit in DIGITS]
        single = all(len(ids) == 1 for ids in self.digit_ids)
        require(single or not expected, "expected = True", "each digit must be one token", "set it to False")
        # replaces the checkpoint's own settings, which sample and penalise repetition
        ends, pad_id = sources.end_token_ids(self.tokenizer, self.model), self.tokenizer.pad_token_id
        self.model.generation_config = GenerationConfig(
            do_sample=False, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=ends,
            pad_token_id=ends[0] if pad_id is None else pad_id,
        )  # fmt: skip
        asked = self.prompt + PREFILL * expected
        self.identity = json.dumps(
            {
                "scorer": self.name, "model": model, "weights": models.fingerprint(self.model),
                "dtype": str(self.model.dtype), "alpha": alpha, "expected": expected, "max_pixels": max_pixels,
                "prompt": hashlib.sha256(asked.encode()).hexdigest(),
            }
        )  # fmt: skip

    def score_batch(self, images: Sequence[Image.Image | None], metas: Sequence[dict]) -> list[float | ScorerError]:
        """Visual scores of posters, `(1 - alpha) * cpu + alpha * (rating - 1) / 4`.

        Args:
            images: m posters, RGB.
            metas: "cpu" is the score of the CPU formula in [0, 1]; "visual_quality", the score of the model, is added.

        Returns:
            For each poster a score in [0, 1] or an error: "scorer_unparsable" (no rating in two attempts) and
            "scorer_bad_image" are deterministic and not retryable, "scorer_out_of_memory" is.
        """
        if len(images) != len(metas):
            raise ValueError(f"{len(images)} images, {len(metas)} metas: must be as many; give one meta for each")
        results: list[float | ScorerError | None] = [_problem(image) for image in images]
        asked = [i for i, problem in enumerate(results) if problem is None]
        for start in range(0, len(asked), self.batch_size):
            part = asked[start : start + self.batch_size]
            for i, rating in zip(part, self._rate([images[i] for i in part]), strict=True):
                results[i] = rating
                if not isinstance(rating, ScorerError):
                    metas[i]["visual_quality"] = (rating - 1) / 4
                    results[i] = (1 - self.alpha) * metas[i]["cpu"] + self.alpha * metas[i]["visual_quality"]
        return results

    def _rate(self, images: list[Image.Image], halve: bool = True) -> list[float | ScorerError]:
        """Ratings from 1 to 5; if memory runs out, in two halves."""
        try:
            ratings = self._expectations(images) if self.expected else self._ask(images)
            self.counters["asked"] += len(images)
            return ratings
        except torch.OutOfMemoryError:
            self.counters["out_of_memory"] += 1
        # outside the handler, where the error still holds tensors of the failed pass
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if not halve or len(images) == 1:
            text = f"no memory for {len(images)} images at a time: lower batch_size or max_pixels"
            return [ScorerError("scorer_out_of_memory", text, retryable=True) for _ in images]
        middle = (len(images) + 1) // 2
        return self._rate(images[:middle], halve=False) + self._rate(images[middle:], halve=False)

    def _ask(self, images: list[Image.Image]) -> list[float | ScorerError]:
        """Ratings as written; a retry prefills the tag, since greedy decoding would repeat the first answer."""
        texts = self.generate(images)
        ratings: list[float | ScorerError | None] = [parse(text) for text in texts]
        failed = [i for i, rating in enumerate(ratings) if rating is None]
        if failed:
            self.counters["retried"] += len(failed)
            again = self.generate([images[i] for i in failed], PREFILL)
            for i, text in zip(failed, again, strict=True):
                ratings[i] = parse(PREFILL + text)
                if ratings[i] is None:
                    ratings[i] = self._unparsable(f"no rating from 1 to 5 in {texts[i]!r}, nor in {PREFILL + text!r}")
        return ratings

    @torch.no_grad()
    def generate(self, images: list[Image.Image], prefill: str = "") -> list[str]:
        """Answers of the model about m images.

        Args:
            images: RGB, of any size.
            prefill: beginning of each answer.

        Returns:
            m texts without the prefill.
        """
        inputs = self._inputs(images, prefill)
        ids_mC = self.model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(ids_mC, skip_special_tokens=True)

    @torch.no_grad()
    def _expectations(self, images: list[Image.Image]) -> list[float | ScorerError]:
        """Expectations of the digit after the tag."""
        logits_mV = self.model(**self._inputs(images, PREFILL), use_cache=False, logits_to_keep=1).logits[:, -1]
        probs_mV = logits_mV.float().softmax(-1)
        probs_m5 = probs_mV[:, [ids[0] for ids in self.digit_ids]]
        mass_m = probs_m5.sum(-1)
        digits_5 = torch.arange(1.0, len(DIGITS) + 1, device=probs_m5.device)
        ratings_m = (probs_m5 @ digits_5 / mass_m).clamp(1, 5)  # rounding may exceed the ends; NaN stays NaN
        return [
            rating if mass >= DIGIT_MASS else self._unparsable(f"only {mass:.3f} of the next token is a digit 1 to 5")
            for rating, mass in zip(ratings_m.tolist(), mass_m.tolist(), strict=True)
        ]

    def _inputs(self, images: list[Image.Image], prefill: str) -> Any:
        texts = [self.prompt + prefill] * len(images)
        return self.processor(images=images, text=texts, padding=True, return_tensors="pt").to(self.device)

    def _unparsable(self, why: str) -> ScorerError:
        self.counters["unparsable"] += 1
        return ScorerError("scorer_unparsable", why, retryable=False)


def _problem(image: Image.Image | None) -> ScorerError | None:
    """The error for an image that the model cannot rate, if any."""
    if image is None:
        return ScorerError("scorer_bad_image", "there is no image: malformed posters are not to be asked about", False)
    if max(image.size) > MAX_ASPECT * min(image.size):
        return ScorerError("scorer_bad_image", f"{image.size}: one side is over {MAX_ASPECT} times the other", False)
    return None


def _load(
    name: str, device: torch.device, dtype: str, max_pixels: int
) -> tuple[ProcessorMixin, Qwen2_5_VLForConditionalGeneration]:
    """Loads the processor and the frozen model.

    Raises:
        ValueError: it is absent, of another kind, or lacks weights, which would be random.
    """
    source = sources.find(name)
    try:
        kind = PretrainedConfig.get_config_dict(source)[0].get("model_type")  # None: a folder without config.json
        require(kind == "qwen2_5_vl", f"model {name!r} has the type {kind!r}", "must be 'qwen2_5_vl'",
                "give the folder or hub id of VisualQuality-R1")  # fmt: skip
        processor = load_processor(name, max_pixels=max_pixels)
        model, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            source, dtype=sources.pick_dtype(dtype, device), trust_remote_code=False, output_loading_info=True
        )
    except OSError as error:
        text = f"model {name!r} is neither a folder with config.json and weights nor could it be downloaded"
        remedy = "check the name and the network, or download it elsewhere and give the folder"
        raise ValueError(f"{text}: {remedy} ({error})") from error
    missing = sorted(report["missing_keys"])
    require(not missing, f"{name!r} has no {missing[:3]}", "all weights must be there", "download it again")
    return processor, model.to(device).eval().requires_grad_(False)
