"""Images in prompts: processor, prompt tokens, features once per prompt, rollout, log-probabilities, gradients."""

import copy
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl import Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLForConditionalGeneration

from common import head, images, logprobs, rollout
from common import models as policies
from common.logprobs import LogProbs

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *images.SPECIALS]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: whatever the policy writes can be decoded, and any text encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIALS)
    tokenizer.train_from_iterator(["what is in the picture? a red disc, a blue square"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=TEMPLATE,
        additional_special_tokens=SPECIALS[1:],
    )  # fmt: skip


def build_model(family: str, tokenizer: PreTrainedTokenizerFast) -> torch.nn.Module:
    torch.manual_seed(0)
    ids = dict(zip(("image", "video", "vision_start", "vision_end"), images.SPECIALS, strict=True))
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()}
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": len(tokenizer) + 3, "max_position_embeddings": 512,
            "initializer_range": 0.2, "tie_word_embeddings": True, "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
              "initializer_range": 0.2}  # fmt: skip
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
        kinds = Qwen2VLConfig, Qwen2VLForConditionalGeneration
    elif family == "qwen2_5_vl":
        vision |= {"hidden_size": 32, "intermediate_size": 64, "window_size": 56, "out_hidden_size": 32,
                   "fullatt_block_indexes": [1]}  # fmt: skip
        kinds = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32, "num_position_embeddings": 64,
                   "deepstack_visual_indexes": [0, 1]}  # fmt: skip
        rope |= {"mrope_interleaved": True}
        size |= {"head_dim": 16}
        kinds = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    config = kinds[0](
        tie_word_embeddings=True, text_config=size | {"rope_parameters": rope}, vision_config=vision, **ids
    )
    return kinds[1](config).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder per family, with the files that a hub repository of that family has."""
    tokenizer = build_tokenizer()
    made = {}
    for family in FAMILIES:
        made[family] = folder = tmp_path_factory.mktemp(family)
        build_model(family, tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16})
        pixels.save_pretrained(folder)
        file = folder / "preprocessor_config.json"
        kept = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": images.PROCESSORS[family].__name__}
        settings = json.loads(file.read_text()) | kept
        if family == "qwen2_vl":  # as older repositories are: other names of the areas, template in a file of its own
            del settings["size"]
            settings |= {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16}
            (folder / "chat_template.jinja").unlink()
            (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        file.write_text(json.dumps(settings))
    return made


@pytest.fixture(scope="module")
def processor(folders):
    return images.load_processor(folders["qwen2_5_vl"])


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def chat(text: str, num_images: int) -> list[dict]:
    content = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


# ---- processor ----


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_processor_loads_again_and_gives_the_same(family, folders, tmp_path):
    first = images.load_processor(folders[family])
    first.save_pretrained(tmp_path)
    again = images.load_processor(tmp_path)
    assert type(again).__name__ == type(first).__name__ == images.PROCESSORS[family].__name__
    texts = [first.apply_chat_template(chat("what?", n), tokenize=False, add_generation_prompt=True) for n in (2, 1)]
    pictures = [[picture(90, 60), picture(40, 130, 1)], [picture(64, 64, 2)]]
    ours, theirs = (p(text=texts, images=pictures, padding=True, return_tensors="pt") for p in (first, again))
    assert set(ours) == {"input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids"}
    assert ours["attention_mask"][1, 0] == 0  # on the left
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_encoded_from_sizes_are_those_of_the_processor(family, folders):
    processor = images.load_processor(folders[family])
    sizes = [[(90, 60), (33, 200)], [(500, 31)], [(28, 28), (1, 40), (112, 112)], []]
    for own in sizes:
        messages = [{"role": "system", "content": "you see"}, *chat("what is in the picture? ünï\n", len(own))]
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pictures = [picture(*size) for size in own] or None
        given = processor(text=[text], images=pictures, return_tensors="pt")
        assert images.encode(processor, messages, own) == given["input_ids"][0].tolist()


def test_max_pixels_caps_the_area_of_an_image(folders):
    for max_pixels, most in ((7100, 9), (3200, 4)):  # 28 x 28 pixels per token
        processor = images.load_processor(folders["qwen2_5_vl"], max_pixels)
        ids = images.encode(processor, chat("?", 1), [(300, 300)])
        assert ids.count(processor.image_token_id) == most
        pixels = processor.image_processor(images=[picture(300, 300)], return_tensors="pt")
        assert pixels["image_grid_thw"].prod().item() == 4 * most
    with pytest.raises(ValueError, match="max_pixels = 100: must be 0 or at least 3136"):
        images.load_processor(folders["qwen2_5_vl"], 100)


@pytest.mark.parametrize("token", images.SPECIALS)
def test_a_text_that_holds_an_image_token_is_refused(token, processor):
    for messages in (
        chat(f"look: {token}", 1),
        [*chat("hi", 1), {"role": "assistant", "content": token}],
    ):
        with pytest.raises(ValueError, match="would be read as an image"):
            images.encode(processor, messages, [(28, 28)])


def test_images_and_their_places_must_be_as_many(processor):
    with pytest.raises(ValueError, match="1 images for a prompt with 2 places"):
        images.encode(processor, chat("?", 2), [(28, 28)])
    with pytest.raises(ValueError, match="2 images for a prompt with 1 places"):
        images.encode(processor, chat("?", 1), [(28, 28)] * 2)
    with pytest.raises(ValueError, match=r"an image of 1 x 2000 pixels cannot be shown .*: crop it"):
        images.encode(processor, chat("?", 1), [(1, 2000)])


def test_other_models_are_refused(tmp_path, folders):
    config = {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of type 'llama': images are for qwen2_vl, qwen2_5_vl, qwen3_vl"):
        images.load_processor(tmp_path)
    assert not images.is_vlm(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no token <\|image_pad\|>, "):
        images.load_processor(tmp_path)
    assert all(images.is_vlm(str(folder)) for folder in folders.values())


# ---- features, positions, rollout ----

SIZES = [[(90, 60), (40, 130), (30, 90)], [(64, 64)], []]  # 3, 1 and 0 images; as visual tokens 6 + 5 + 8, 4, 0


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def loaded(family, folders):
    """Processor, model as the trainers load it, and three prompts with their images."""
    _, model = policies.load_policy(str(folders[family]), torch.device("cpu"), "fp32")
    processor = images.load_processor(folders[family])
    prompts, pictures = batch_of(processor)
    return processor, model, prompts, pictures


def batch_of(processor):
    texts = ["what is in the picture?", "a", "no picture, but a long line of text"]
    prompts = [images.encode(processor, chat(text, len(own)), own) for text, own in zip(texts, SIZES, strict=True)]
    pictures = [[picture(*size, seed=10 * i + k) for k, size in enumerate(own)] for i, own in enumerate(SIZES)]
    return prompts, pictures


def sampler_of(processor, model, fallback=False, **options):
    end = policies.end_token_ids(processor.tokenizer, model)
    options = {"max_new_tokens": 6, "suppressed_ids": images.vision_ids(model)} | options
    sampler = rollout.Sampler([model], end_ids=end, pad_id=processor.tokenizer.pad_token_id, **options)
    assert sampler.engines[0]
    if fallback:
        sampler.engines = [None]
    return sampler


def rolled(loaded, group_size=2, temperature=1.0, seen=None, **options):
    processor, model, prompts, pictures = loaded
    seen = images.Images.of(model, processor, prompts, pictures) if seen is None else seen
    how = {"group_size": group_size, "temperature": temperature, "images": seen}
    return sampler_of(processor, model, **options).generate(prompts, **how)


def policy_of(model, **options):
    return LogProbs(model, 1.0, suppressed_ids=images.vision_ids(model), **options)


def own_positions(model, processor, ids, pictures):
    """Positions by transformers."""
    is_image = (torch.tensor([ids]) == processor.image_token_id).int()
    grids = processor.image_processor(images=pictures, return_tensors="pt")["image_grid_thw"]
    return model.model.get_rope_index(torch.tensor([ids]), mm_token_type_ids=is_image, image_grid_thw=grids)


def test_positions_are_those_of_transformers(loaded):
    processor, model, prompts, pictures = loaded
    seen = images.Images.of(model, processor, prompts, pictures)
    for i in range(2):
        position_ids, delta = own_positions(model, processor, prompts[i], pictures[i])
        assert torch.equal(seen.places[i][:3], position_ids[:, 0])
        assert seen.ends[i] == len(prompts[i]) + delta
    length = len(prompts[2])
    assert torch.equal(seen.places[2], torch.cat([torch.arange(length).expand(3, -1), torch.zeros(1, length).long()]))
    assert seen.ends[2] == length


def test_positions_by_hand(loaded):
    processor, model, *_ = loaded
    pad = processor.image_token_id
    places, end = images.positions([9, pad, pad, pad, pad, pad, pad, 9, pad, 9], [(1, 2, 3), (1, 1, 1)], model.config)
    assert places.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6],
        [0, 1, 1, 1, 1, 1, 1, 0, 1, 0],
    ]
    assert end == 7


def test_images_that_are_not_those_of_a_prompt_are_refused(loaded):
    processor, model, prompts, pictures = loaded
    of = images.Images.of
    with pytest.raises(ValueError, match="prompt 0: 1 images of 6 visual tokens for 19 image tokens"):
        of(model, processor, prompts, [pictures[0][:1], pictures[1], []])
    with pytest.raises(ValueError, match="prompt 2: 1 images of 4 visual tokens for 0 image tokens"):
        of(model, processor, prompts, [*pictures[:2], pictures[1]])
    with pytest.raises(ValueError, match=r"prompt 0: image tokens \d+ to \d+ are interrupted"):
        of(model, processor, prompts, [pictures[0][::-1], pictures[1], []])
    with pytest.raises(ValueError, match="3 prompts and images of 2"):
        of(model, processor, prompts, pictures[:2])
    sampler = sampler_of(processor, model)
    with pytest.raises(ValueError, match="prompt 0 has image tokens, but there are no images"):
        sampler.generate(prompts, group_size=1, temperature=0)
    seen = of(model, processor, prompts, pictures)
    with pytest.raises(ValueError, match="rows and images must be cut"):
        sampler.generate(prompts[::-1], group_size=1, temperature=0, images=seen)
    batch = rolled(loaded, seen=seen)
    with pytest.raises(ValueError, match="rows and images must be cut"):
        policy_of(model)(*batch.tokens[:4], seen.select(torch.tensor([0, 0, 1, 1, 1, 2])))


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("rollout_batch", [0, 1, 2])
def test_greedy_completions_are_those_of_generate(rollout_batch, fallback, loaded):
    processor, model, prompts, pictures = loaded
    batch = rolled(loaded, 1, 0.0, rollout_batch=rollout_batch, max_new_tokens=8, fallback=fallback)
    for i, (ids, own) in enumerate(zip(prompts, pictures, strict=True)):
        given = {"input_ids": torch.tensor([ids])}
        if own:
            given |= processor.image_processor(images=own, return_tensors="pt")
            given["mm_token_type_ids"] = (given["input_ids"] == processor.image_token_id).int()
        model.eval()
        out = model.generate(
            **given, attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False, max_new_tokens=8,
            suppress_tokens=images.vision_ids(model), pad_token_id=processor.tokenizer.pad_token_id,
        )[0, len(ids) :].tolist()  # fmt: skip
        model.train()
        n = int(batch.lengths[i])
        assert batch.completion_ids[i, :n].tolist() == out


def test_the_tower_runs_once_per_prompt_with_images(loaded):
    _, model, *_ = loaded
    calls = []
    handle = images.tower(model).register_forward_hook(lambda *args: calls.append(len(args[1][0])))
    batch = rolled(loaded, 4)
    minibatches = batch.minibatches(2, 100, True)
    logprobs.fill([micro for micros in minibatches for micro in micros], "old_logps", policy_of(model), model.device)
    handle.remove()
    assert calls == [76, 16]  # patches of 19 and 4 tokens: independent of group size and passes


@pytest.mark.parametrize("fallback", [False, True])
def test_log_probs_are_those_of_the_rollout(fallback, loaded):
    processor, model, *_ = loaded
    batch = rolled(loaded, 3, fallback=fallback)
    policy = policy_of(model)
    assert policy.packed  # the decoder is one of plain causal attention
    packed = policy(*batch.tokens)[0]
    torch.testing.assert_close(packed, batch.rollout_logps, atol=1e-5, rtol=0)
    policy.packed = False
    torch.testing.assert_close(policy(*batch.tokens)[0], batch.rollout_logps, atol=1e-5, rtol=0)
    # what a prompt shows matters, and where
    other = torch.tensor([1, 1, 1, 0, 0, 0, 2, 2, 2])
    wrong = images.Images.of(model, processor, *[[x[i] for i in (0, 1, 2)] for x in batch_of(processor)])
    wrong.features[:2] = [wrong.features[0].flip(0), wrong.features[1].flip(0)]
    assert (policy(*batch.tokens[:4], wrong.repeat(3))[0] - batch.rollout_logps)[other < 2].abs().max() > 1e-3


def test_groups_of_ragged_prompts_equal_one_prompt_at_a_time(loaded):
    processor, model, prompts, pictures = loaded
    batch = rolled(loaded, 2)
    sampler = sampler_of(processor, model)
    for i in range(3):
        seen = images.Images.of(model, processor, prompts[i : i + 1], pictures[i : i + 1])
        alone = sampler.generate(prompts[i : i + 1], group_size=2, temperature=1.0, prompt_numbers=[i], images=seen)
        part = batch.select(torch.arange(2 * i, 2 * i + 2))
        assert torch.equal(alone.completion_ids, part.completion_ids)
        torch.testing.assert_close(alone.rollout_logps, part.rollout_logps, atol=1e-5, rtol=0)
        assert torch.equal(seen.features[0], batch.images.features[i])


def test_a_prompt_may_begin_with_an_image(loaded):
    processor, model, _, pictures = loaded
    prompts = [[processor.image_token_id] * 4 + [60, 61], [62] * 12]  # the first with padding before its image
    own = [pictures[1], []]
    together = rolled((processor, model, prompts, own), 1)
    seen = images.Images.of(model, processor, prompts[:1], own[:1])
    alone = sampler_of(processor, model).generate(prompts[:1], group_size=1, temperature=1.0, images=seen)
    torch.testing.assert_close(alone.rollout_logps, together.select(torch.tensor([0])).rollout_logps, atol=1e-5, rtol=0)


def test_parts_of_a_batch_carry_their_images(loaded):
    _, model, *_ = loaded
    batch = rolled(loaded, 2)
    policy = policy_of(model)
    whole = policy(*batch.tokens)[0]
    for packed in (True, False):
        policy.packed = packed
        seen = []
        for micros in batch.minibatches(2, 70, packed):
            for micro in micros:
                logps = policy(*micro.to(torch.device("cpu")).tokens)[0]
                expected = whole[micro.rows, : logps.shape[1]]
                torch.testing.assert_close(logps, expected, atol=2e-6, rtol=0)
                seen += micro.rows.tolist()
        assert sorted(seen) == list(range(6))
    # filled together, where prompts of several micro-batches stand under one another
    policy.packed = True
    micros = [micro for micros in batch.minibatches(3, 1, True) for micro in micros]
    logprobs.fill(micros, "old_logps", policy, model.device, micro_batch_tokens=40)
    for micro in micros:
        torch.testing.assert_close(micro.old_logps, whole[micro.rows, : micro.old_logps.shape[1]], atol=2e-6, rtol=0)


def test_rows_put_into_a_batch_bring_their_images(loaded):
    processor, model, prompts, _ = loaded
    batch = rolled(loaded, 2)
    seen = images.Images.of(
        model, processor, prompts[:1], [[picture(*size, 77 + i) for i, size in enumerate(SIZES[0])]]
    )
    new = sampler_of(processor, model, max_new_tokens=4).generate(
        prompts[:1], group_size=2, temperature=1.0, prompt_numbers=[5], images=seen
    )
    put = batch.put(torch.tensor([2, 3]), new)  # in the place of the prompt with one image
    assert put.images.prompts.tolist() == [0, 0, 2, 2, 1, 1]  # the one that was replaced is let go
    assert len(put.images.features) == 3
    expected = torch.zeros_like(put.rollout_logps)
    for rows, part in (([0, 1], batch), ([4, 5], batch)):
        own = part.select(torch.tensor(rows)).rollout_logps
        expected[rows, : own.shape[1]] = own
    expected[[2, 3], : new.rollout_logps.shape[1]] = new.rollout_logps
    torch.testing.assert_close(policy_of(model)(*put.tokens)[0], expected, atol=1e-5, rtol=0)


def test_several_replicas_share_the_prompts_and_their_images(loaded):
    processor, model, prompts, pictures = loaded
    batch = rolled(loaded, 2)
    end = policies.end_token_ids(processor.tokenizer, model)
    sampler = rollout.Sampler(
        policies.replicate(model, (model.device,) * 2), end_ids=end, pad_id=processor.tokenizer.pad_token_id,
        max_new_tokens=6, suppressed_ids=images.vision_ids(model),
    )  # fmt: skip
    seen = images.Images.of(model, processor, prompts, pictures)
    again = sampler.generate(prompts, group_size=2, temperature=1.0, images=seen)
    assert torch.equal(again.completion_ids, batch.completion_ids)
    torch.testing.assert_close(again.rollout_logps, batch.rollout_logps, atol=1e-5, rtol=0)
    assert torch.equal(again.images.prompts, batch.images.prompts)


def test_a_reference_is_given_what_its_own_tower_sees(loaded):
    processor, model, prompts, pictures = loaded
    batch = rolled(loaded, 2)
    other = copy.deepcopy(model)
    with torch.no_grad():
        images.tower(other).patch_embed.proj.weight.mul_(-1)
    seen = images.Images.of(other, processor, prompts, pictures)
    expected = policy_of(other)(*batch.tokens[:4], seen.repeat(2))[0]
    assert (expected - policy_of(other)(*batch.tokens)[0]).abs().max() > 1e-3
    for limit in (0, 30):
        micros = [micro for micros in batch.minibatches(1, 50, True) for micro in micros]
        logprobs.fill(micros, "ref_logps", policy_of(other), model.device, limit, images=seen)
        for micro in micros:
            width = micro.ref_logps.shape[1]
            torch.testing.assert_close(micro.ref_logps, expected[micro.rows, :width], atol=2e-6, rtol=0)


def test_a_policy_with_adapters(loaded):
    peft = pytest.importorskip("peft")
    processor, model, prompts, pictures = loaded
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=r".*language_model.*(q_proj|up_proj)", init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(model), lora)
    assert images.vision_ids(adapted) == images.vision_ids(model)
    assert not any(p.requires_grad for p in images.tower(adapted).parameters())
    batch = rolled((processor, adapted, prompts, pictures), 2)
    assert not batch.images.pixels
    logps = policy_of(adapted)(*batch.tokens)[0]
    torch.testing.assert_close(logps, batch.rollout_logps, atol=1e-5, rtol=0)
    assert (logps - policy_of(model)(*batch.tokens)[0]).abs().max() > 1e-2
    surrogate(logps, batch).backward()
    assert all("lora" in name for name in gradients(adapted))
    assert all(g.abs().max() > 0 for g in gradients(adapted).values())


# ---- tokens that stand for images ----


def test_vision_tokens_are_never_sampled_and_have_no_probability(loaded):
    processor, model, *_ = loaded
    vision = images.vision_ids(model)
    assert vision == sorted(processor.tokenizer.convert_tokens_to_ids(list(images.SPECIALS)))
    weight = model.get_output_embeddings().weight
    before = weight.detach().clone()
    with torch.no_grad():  # as likely as can be
        weight[vision] = 4 * weight.abs().amax(0) * weight[vision[0]].sign()
    try:
        free = rolled(loaded, 8, suppressed_ids=())
        assert torch.isin(free.completion_ids, torch.tensor(vision)).any()
        batch = rolled(loaded, 8)
        assert not torch.isin(batch.completion_ids, torch.tensor(vision)).any()
        suppressed = policy_of(model)(*batch.tokens)[0]
        torch.testing.assert_close(suppressed, batch.rollout_logps, atol=1e-5, rtol=0)
        plain = LogProbs(model, 1.0)(*batch.tokens)[0]
        assert (suppressed - plain)[batch.sampled_mask].max() > 0.01  # renormalised without them
        # an image token that was sampled all the same is a token like any other: nothing breaks, nothing shifts
        torch.testing.assert_close(LogProbs(model, 1.0)(*free.tokens)[0], free.rollout_logps, atol=1e-5, rtol=0)
    finally:
        with torch.no_grad():
            weight.copy_(before)


@pytest.mark.parametrize("train_entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("head_trained", [False, True])
def test_the_head_without_some_tokens(train_entropy, softcap, head_trained):
    torch.manual_seed(0)
    hidden = torch.randn(7, 8, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=head_trained)
    bias = torch.randn(20, requires_grad=head_trained)
    suppressed, ids = torch.tensor([3, 4, 19]), torch.tensor([0, 1, 2, 5, 6, 18, 2])
    options = 0.7, softcap, False, train_entropy, suppressed
    logps, entropy = head._Head.apply(hidden, weight, bias, ids, *options)
    leaves = [hidden, *[weight, bias][: 2 * head_trained]]
    grad_logps, grad_entropy = torch.randn(7), torch.randn(7) * train_entropy
    loss = (logps * grad_logps).sum() + (entropy * grad_entropy).sum()
    found = torch.autograd.grad(loss, leaves)

    logits = hidden @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    kept = [i for i in range(20) if i not in suppressed.tolist()]
    distribution = torch.distributions.Categorical(logits=logits[:, kept] / 0.7)
    places = torch.tensor([kept.index(i) for i in ids.tolist()])
    expected = distribution.log_prob(places), distribution.entropy()
    torch.testing.assert_close(logps, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected[1], atol=1e-5, rtol=1e-5)
    loss = (expected[0] * grad_logps).sum() + (expected[1] * grad_entropy).sum()
    for ours, theirs in zip(found, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


# ---- gradients ----


def surrogate(logps, batch):
    return (logps * batch.sampled_mask * (1 + batch.rows[:, None])).sum() / 10


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_loss(loaded, batch):
    """The same loss through the whole model of transformers, pixels repeated per completion, one row at a time."""
    processor, model, prompts, pictures = loaded
    total = 0.0
    vision = torch.tensor(images.vision_ids(model))
    for row in range(len(batch)):
        prompt, n = row // 2, int(batch.lengths[row])
        ids = torch.tensor([prompts[prompt] + batch.completion_ids[row, :n].tolist()])
        given = {}
        if pictures[prompt]:
            given = dict(processor.image_processor(images=pictures[prompt], return_tensors="pt"))
            given["mm_token_type_ids"] = (ids == processor.image_token_id).int()
        logits = model(input_ids=ids, use_cache=False, **given).logits[0, -n - 1 : -1]
        logps = logits.index_fill(-1, vision, -torch.inf).log_softmax(-1).gather(-1, ids[0, -n:, None])
        total = total + logps.sum() * (1 + row) / 10
    return total


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_a_trained_tower_are_those_of_plain_autograd(checkpointing, family, folders):
    _, model = policies.load_policy(str(folders[family]), torch.device("cpu"), "fp32", checkpointing)
    processor = images.load_processor(folders[family])
    loaded = processor, model, *batch_of(processor)
    batch = rolled(loaded, 2)
    policy = policy_of(model)
    plain_loss(loaded, batch).backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    calls = []
    images.tower(model).register_forward_hook(lambda *args: calls.append(1))
    micros = [micro for micros in batch.minibatches(1, 50, policy.packed) for micro in micros]
    assert len(micros) > 2
    batch.images.refresh(model, batch.images.prompts)
    for micro in micros:
        surrogate(policy(*micro.tokens)[0], micro).backward()
    assert not any(name.startswith("model.visual") for name in gradients(model))
    batch.images.backward()
    assert calls == [1, 1]  # once per prompt with images
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert any(name.startswith("model.visual") for name in found)
    scale = max(g.abs().max() for g in expected.values())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5 * scale.item(), rtol=1e-4, msg=name)


def test_each_optimizer_step_sees_features_of_its_own_weights(family, folders):
    _, model = policies.load_policy(str(folders[family]), torch.device("cpu"), "fp32")
    processor = images.load_processor(folders[family])
    prompts, pictures = batch_of(processor)
    batch = rolled((processor, model, prompts, pictures), 2)
    before = [x.clone() for x in batch.images.features]
    minibatches = batch.minibatches(2, 1000, True)
    micro = minibatches[1][0]
    with torch.no_grad():
        for p in images.tower(model).parameters():
            p.mul_(1.1)
    micro_prompts = torch.tensor([0])
    batch.images.refresh(model, micro_prompts)
    again = images.Images.of(model, processor, prompts, pictures)
    assert torch.equal(micro.images.features[0], again.features[0])  # parts share what was computed anew
    assert not torch.equal(again.features[0], before[0])
    assert torch.equal(micro.images.features[1], before[1])  # not of this step
    batch.images.backward()  # nothing arrived
    assert not gradients(model)
    assert not any(x.requires_grad for x in batch.images.features)


def test_a_frozen_tower_is_not_run_again_and_gets_no_gradient(family, folders):
    _, model = policies.load_policy(str(folders[family]), torch.device("cpu"), "fp32")
    processor = images.load_processor(folders[family])
    loaded = processor, model, *batch_of(processor)
    images.freeze_vision(model)
    batch = rolled(loaded, 2)
    assert batch.images.pixels == []
    plain_loss(loaded, batch).backward()
    expected = gradients(model)
    assert not any(name.startswith("model.visual") for name in expected)
    model.zero_grad(set_to_none=True)
    images.tower(model).register_forward_hook(lambda *args: pytest.fail("the tower ran again"))
    policy = policy_of(model)
    batch.images.refresh(model, batch.images.prompts)
    for micros in batch.minibatches(1, 50, policy.packed):
        for micro in micros:
            surrogate(policy(*micro.tokens)[0], micro).backward()
    batch.images.backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    scale = max(g.abs().max() for g in expected.values())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5 * scale.item(), rtol=1e-4, msg=name)


def test_a_saved_policy_gives_the_same_log_probs(loaded, tmp_path):
    processor, model, prompts, pictures = loaded
    batch = rolled(loaded, 2)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    _, again = policies.load_policy(str(tmp_path), torch.device("cpu"), "fp32")
    assert type(again) is type(model)
    seen = images.Images.of(again, images.load_processor(tmp_path), prompts, pictures).repeat(2)
    assert torch.equal(policy_of(again)(*batch.tokens[:4], seen)[0], policy_of(model)(*batch.tokens)[0])
    assert policies.end_token_ids(processor.tokenizer, again) == [processor.tokenizer.eos_token_id]
