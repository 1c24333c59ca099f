"""Images in prompts: processor, prompt tokens, features once per prompt, rollout, log-probabilities, gradients."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from bounds import assert_rounded
from PIL import Image
from test_rollout import in_double  # noqa: F401
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl import Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLForConditionalGeneration

from common.generation import drafts, rollout
from common.model import head, images, passes, sources
from common.model import models as policies
from common.model.logprobs import LogProbs

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *images.SPECIALS]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CPU = torch.device("cpu")
# the last has the most parts
CASES = [*(pytest.param(family, marks=pytest.mark.families) for family in FAMILIES[:2]), FAMILIES[2]]
# What rounds to fp32 also in fp64 models: norms over 32 numbers or 16, five in the decoder, of queries and keys in each
# layer, five in the tower. Log-probabilities reach -16
NORMS = dict(terms=14 * (32 + 8), magnitude=16.0, dtype=torch.float32)


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
              "initializer_range": 0.2, "hidden_size": 32}  # fmt: skip
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "mlp_ratio": 2}
        config, kind = Qwen2VLConfig, Qwen2VLForConditionalGeneration
    elif family == "qwen2_5_vl":
        vision |= {"intermediate_size": 64, "window_size": 56, "out_hidden_size": 32, "fullatt_block_indexes": [1]}
        config, kind = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    else:
        vision |= {"intermediate_size": 64, "out_hidden_size": 32, "num_position_embeddings": 64,
                   "deepstack_visual_indexes": [0, 1]}  # fmt: skip
        rope |= {"mrope_interleaved": True}
        size |= {"head_dim": 16}
        config, kind = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    size |= {"rope_parameters": rope}
    return kind(config(tie_word_embeddings=True, text_config=size, vision_config=vision, **ids)).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder per family, with the files that a hub repository of that family has."""
    tokenizer = build_tokenizer()
    made = {}
    for family in FAMILIES:
        made[family] = folder = tmp_path_factory.mktemp(family)
        pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16})
        for part in (build_model(family, tokenizer), tokenizer, pixels):
            part.save_pretrained(folder)
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


@pytest.mark.parametrize("family", CASES)
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


@pytest.mark.parametrize("family", CASES)
def test_prompts_encoded_from_sizes_are_those_of_the_processor(family, folders):
    processor = images.load_processor(folders[family])
    for own in ([(90, 60), (33, 200)], [(500, 31)], [(28, 28), (1, 40), (112, 112)], []):
        messages = [{"role": "system", "content": "you see"}, *chat("what is in the picture? ünï\n", len(own))]
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pictures = [picture(*size) for size in own] or None
        given = processor(text=[text], images=pictures, return_tensors="pt")
        assert images.encode(processor, messages, own) == given["input_ids"][0].tolist()


def test_max_pixels_caps_the_area_of_an_image(folders):
    for max_pixels, most in ((7100, 9), (3200, 4)):  # 28 x 28 pixels per token
        processor = images.load_processor(folders["qwen2_5_vl"], max_pixels)
        assert images.encode(processor, chat("?", 1), [(300, 300)]).count(processor.image_token_id) == most
        pixels = processor.image_processor(images=[picture(300, 300)], return_tensors="pt")
        assert pixels["image_grid_thw"].prod().item() == 4 * most
    with pytest.raises(ValueError, match="max_pixels = 100: must be 0 or at least 3136"):
        images.load_processor(folders["qwen2_5_vl"], 100)


@pytest.mark.parametrize("token", images.SPECIALS)
def test_a_text_that_holds_an_image_token_is_refused(token, processor):
    for messages in (chat(f"look: {token}", 1), [*chat("hi", 1), {"role": "assistant", "content": token}]):
        with pytest.raises(ValueError, match="read as an image"):
            images.encode(processor, messages, [(28, 28)])


def test_images_and_their_places_must_be_as_many(processor):
    for places, sizes, said in ((2, [(28, 28)], "1 images .* 2 places"), (1, [(28, 28)] * 2, "2 images .* 1 places"),
                                (1, [(1, 2000)], "1 x 2000 pixels .*: crop it")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            images.encode(processor, chat("?", places), sizes)


def test_other_models_are_refused(tmp_path, folders):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'llama': images are for qwen2_vl, qwen2_5_vl, qwen3_vl"):
        images.load_processor(tmp_path)
    assert not images.is_vlm(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no token <\|image_pad\|>, "):
        images.load_processor(tmp_path)
    assert all(images.is_vlm(str(folder)) for folder in folders.values())


SIZES = [[(90, 60), (40, 130), (30, 90)], [(64, 64)], []]  # 3, 1 and 0 images; as visual tokens 6 + 5 + 8, 4, 0


@pytest.fixture(scope="module", params=CASES)
def family(request) -> str:
    return request.param


def load(folder, checkpointing=False):
    """Processor, model in fp64 as the trainers load it, and three prompts with their images."""
    _, model = policies.load_policy(str(folder), CPU, "fp32", checkpointing)
    processor = images.load_processor(folder)
    return processor, model.double(), *batch_of(processor)


def batch_of(processor):
    texts = ["what is in the picture?", "a", "no picture, but a long line of text"]
    prompts = [images.encode(processor, chat(text, len(own)), own) for text, own in zip(texts, SIZES, strict=True)]
    pictures = [[picture(*size, seed=10 * i + k) for k, size in enumerate(own)] for i, own in enumerate(SIZES)]
    return prompts, pictures


def sampler_of(processor, model, fallback=False, num_replicas=1, **options):
    replicas = [model] if num_replicas == 1 else policies.replicate(model, (model.device,) * num_replicas)
    options = {"max_new_tokens": 6, "suppressed_ids": images.vision_ids(model)} | options
    end_ids, pad_id = sources.end_token_ids(processor.tokenizer, model), processor.tokenizer.pad_token_id
    sampler = rollout.Sampler(replicas, end_ids=end_ids, pad_id=pad_id, **options)
    assert all(sampler.engines)
    if fallback:
        sampler.engines = [None]
    return sampler


def rolled(loaded, group_size=2, temperature=1.0, seen=None, **options):
    processor, model, prompts, pictures = loaded
    seen = images.Images.of(model, processor, prompts, pictures) if seen is None else seen
    how = {"group_size": group_size, "temperature": temperature, "images": seen}
    return sampler_of(processor, model, **options).generate(prompts, **how)


@pytest.fixture(scope="module")
def loaded(family, folders):
    return load(folders[family])


@pytest.fixture(scope="module")
def batch(loaded):
    """Two completions per prompt."""
    return rolled(loaded)


def policy_of(model):
    return LogProbs(model, 1.0, suppressed_ids=images.vision_ids(model))


def given_to(processor, ids, pictures) -> dict:
    """What transformers takes for the images of a row."""
    if not pictures:
        return {}
    is_image = (torch.tensor([ids]) == processor.image_token_id).int()
    return {**processor.image_processor(images=pictures, return_tensors="pt"), "mm_token_type_ids": is_image}


def test_positions_are_those_of_transformers(loaded):
    processor, model, prompts, pictures = loaded
    seen = images.Images.of(model, processor, prompts, pictures)
    for i, (ids, own) in enumerate(zip(prompts, pictures, strict=True)):
        expected, delta = torch.arange(len(ids)).expand(3, -1), 0
        if own:
            given = given_to(processor, ids, own)
            given.pop("pixel_values")
            expected, delta = model.model.get_rope_index(torch.tensor([ids]), **given)
        assert torch.equal(seen.places[i][:3], expected.view(3, -1)) and seen.ends[i] == len(ids) + delta
        assert seen.places[i][3].tolist() == [token == processor.image_token_id for token in ids]


def test_images_that_are_not_those_of_a_prompt_are_refused(loaded, batch):
    processor, model, prompts, pictures = loaded
    for own, said in (([pictures[0][:1], pictures[1], []], "prompt 0: 1 images of 6 visual tokens for 19 image tokens"),
                      ([*pictures[:2], pictures[1]], "prompt 2: 1 images of 4 visual tokens for 0 image tokens"),
                      ([pictures[0][::-1], pictures[1], []], r"prompt 0: image tokens \d+ to \d+ are interrupted"),
                      (pictures[:2], "3 prompts and images of 2")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            images.Images.of(model, processor, prompts, own)
    sampler = sampler_of(processor, model)
    with pytest.raises(ValueError, match=r"prompt 0 has image tokens, .* images=Images.of"):
        sampler.generate(prompts, group_size=1, temperature=0)
    with pytest.raises(ValueError, match="images must be cut and ordered alike"):
        sampler.generate(prompts[::-1], group_size=1, temperature=0, images=batch.images.select(torch.arange(0, 6, 2)))
    with pytest.raises(ValueError, match="images must be cut and ordered alike"):
        policy_of(model)(*batch.tokens[:4], batch.images.select(torch.tensor([0, 0, 2, 2, 2, 4])))


@pytest.mark.parametrize(("rollout_batch", "fallback"), [(0, True), (2, False), (1, True)])
def test_greedy_completions_are_those_of_generate(rollout_batch, fallback, loaded):
    processor, model, prompts, pictures = loaded
    batch = rolled(loaded, 1, 0.0, rollout_batch=rollout_batch, max_new_tokens=8, fallback=fallback)
    model.eval()
    for i, (ids, own) in enumerate(zip(prompts, pictures, strict=True)):
        out = model.generate(
            torch.tensor([ids]), **given_to(processor, ids, own), attention_mask=torch.ones(1, len(ids)),
            do_sample=False, max_new_tokens=8, suppress_tokens=images.vision_ids(model), pad_token_id=0,
        )  # fmt: skip
        assert batch.completion_ids[i, : batch.lengths[i]].tolist() == out[0, len(ids) :].tolist()
    model.train()


def test_completions_about_images_are_the_same_with_drafts(loaded):
    processor, model, prompts, pictures = loaded
    sampler, earlier = sampler_of(processor, model), drafts.Earlier()
    how = dict(group_size=2, temperature=0, images=images.Images.of(model, processor, prompts, pictures))
    plain = sampler.generate(prompts, **how)
    earlier.put(range(3), plain.completions)
    drafted = sampler.generate(prompts, **how, earlier=earlier.of(range(3)))
    assert torch.equal(drafted.completion_ids, plain.completion_ids)
    assert not sampler.takes_drafts or torch.equal(drafted.drafted, drafted.lengths - 1)


def test_the_tower_runs_once_per_prompt_with_images(loaded):
    _, model, *_ = loaded
    calls = []
    handle = images.tower(model).register_forward_hook(lambda *args: calls.append(len(args[1][0])))
    batch = rolled(loaded, 4)
    minibatches = batch.minibatches(2, 100, True)
    passes.fill([micro for micros in minibatches for micro in micros], "old_logps", policy_of(model), model.device)
    handle.remove()
    assert calls == [76, 16]  # patches of 19 and 4 tokens: independent of group size and passes


@pytest.mark.parametrize("fallback", [False, True])
def test_log_probs_are_those_of_the_rollout(fallback, loaded):
    _, model, *_ = loaded
    batch, policy = rolled(loaded, fallback=fallback), policy_of(model)
    assert policy.packed  # the decoder is one of plain causal attention
    for policy.packed in (True, False):
        assert_rounded(policy(*batch.tokens)[0], batch.rollout_logps, **NORMS)
    # what a prompt shows matters, and where
    wrong = dataclasses.replace(batch.images, features=[x.flip(0) for x in batch.images.features])
    gap = (policy(*batch.tokens[:4], wrong)[0] - batch.rollout_logps).abs().amax(1)
    assert (gap[:4] > 0.01).all() and not (gap[4:] > 0.001).any()


def test_groups_of_ragged_prompts_equal_one_prompt_at_a_time_and_those_of_replicas(loaded, batch):
    processor, model, prompts, pictures = loaded
    sampler = sampler_of(processor, model)
    for i in range(3):
        seen = images.Images.of(model, processor, prompts[i : i + 1], pictures[i : i + 1])
        alone = sampler.generate(prompts[i : i + 1], group_size=2, temperature=1.0, prompt_numbers=[i], images=seen)
        part = batch.select(torch.arange(2 * i, 2 * i + 2))
        assert torch.equal(alone.completion_ids, part.completion_ids)
        assert_rounded(alone.rollout_logps, part.rollout_logps, **NORMS)
        assert torch.equal(seen.features[0], batch.images.features[i])  # the same operations in the same order
    again = rolled(loaded, num_replicas=2)
    assert torch.equal(again.completion_ids, batch.completion_ids)
    assert_rounded(again.rollout_logps, batch.rollout_logps, **NORMS)
    assert torch.equal(again.images.prompts, batch.images.prompts)


def test_parts_of_a_batch_carry_their_images(loaded, batch):
    _, model, *_ = loaded
    policy = policy_of(model)
    for policy.packed in (True, False):
        cut = [micro for micros in batch.minibatches(2, 70, policy.packed) for micro in micros]
        assert sorted(row for micro in cut for row in micro.rows.tolist()) == list(range(6))
        for micro in cut:
            found = policy(*micro.to(CPU).tokens)[0]
            assert_rounded(found, batch.rollout_logps[micro.rows, : micro.lengths.max()], **NORMS)
    # filled together, where prompts of several micro-batches stand under one another
    policy.packed = True
    micros = [micro for micros in batch.minibatches(3, 1, True) for micro in micros]
    passes.fill(micros, "old_logps", policy, CPU, micro_batch_tokens=40)
    for micro in micros:
        assert_rounded(micro.old_logps, batch.rollout_logps[micro.rows, : micro.lengths.max()], **NORMS)


def test_rows_put_into_a_batch_bring_their_images(loaded, batch):
    processor, model, prompts, _ = loaded
    shown = [[picture(*size, 77 + i) for i, size in enumerate(SIZES[0])]]
    new = rolled((processor, model, prompts[:1], shown), max_new_tokens=4)
    put = batch.put(torch.tensor([2, 3]), new)  # in the place of the prompt with one image
    assert put.images.prompts.tolist() == [0, 0, 2, 2, 1, 1]  # the one that was replaced is let go
    assert len(put.images.features) == 3
    expected = batch.rollout_logps.clone()
    expected[2:4] = 0
    expected[2:4, : new.rollout_logps.shape[1]] = new.rollout_logps
    assert_rounded(policy_of(model)(*put.tokens)[0], expected[put.rows, : put.lengths.max()], **NORMS)


def test_a_reference_is_given_what_its_own_tower_sees(loaded, batch):
    processor, model, prompts, pictures = loaded
    other = copy.deepcopy(model)
    with torch.no_grad():
        images.tower(other).patch_embed.proj.weight.mul_(-1)
    seen = images.Images.of(other, processor, prompts, pictures)
    expected = policy_of(other)(*batch.tokens[:4], seen.repeat(2))[0]
    assert (expected - policy_of(other)(*batch.tokens)[0]).abs().max() > 0.01
    for limit in (0, 30):
        micros = [micro for micros in batch.minibatches(1, 50, True) for micro in micros]
        passes.fill(micros, "ref_logps", policy_of(other), CPU, limit, images=seen)
        for micro in micros:
            assert_rounded(micro.ref_logps, expected[micro.rows, : micro.lengths.max()], **NORMS)


def test_a_policy_with_adapters(loaded):
    peft = pytest.importorskip("peft")
    processor, model, prompts, pictures = loaded
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=r".*language_model.*(q_proj|up_proj)", init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(model), lora)
    assert images.vision_ids(adapted) == images.vision_ids(model)
    assert not any(p.requires_grad for p in images.tower(adapted).parameters())
    batch = rolled((processor, adapted, prompts, pictures))
    assert not batch.images.pixels
    logps = policy_of(adapted)(*batch.tokens)[0]
    assert_rounded(logps, batch.rollout_logps, **NORMS)
    assert (logps - policy_of(model)(*batch.tokens)[0]).abs().max() > 0.01
    logps[batch.completion_mask].sum().backward()
    assert all("lora" in name and g.abs().max() > 0 for name, g in gradients(adapted).items())


def test_vision_tokens_are_never_sampled_and_have_no_probability(loaded):
    processor, _, prompts, pictures = loaded
    model = copy.deepcopy(loaded[1])
    vision = images.vision_ids(model)
    assert vision == sorted(processor.tokenizer.convert_tokens_to_ids(list(images.SPECIALS)))
    weight = model.get_output_embeddings().weight
    with torch.no_grad():  # as likely as can be
        weight[vision] = 4 * weight.abs().amax(0) * weight[vision[0]].sign()
    free, batch = (rolled((processor, model, prompts, pictures), 8, **how) for how in (dict(suppressed_ids=()), {}))
    assert torch.isin(free.completion_ids, torch.tensor(vision)).any()
    assert not torch.isin(batch.completion_ids, torch.tensor(vision)).any()
    suppressed = policy_of(model)(*batch.tokens)[0]
    assert_rounded(suppressed, batch.rollout_logps, **NORMS | dict(magnitude=64.0))  # so large are logits here
    plain = LogProbs(model, 1.0)
    assert (suppressed - plain(*batch.tokens)[0])[batch.completion_mask].max() > 0.01  # renormalised without them
    # an image token that was sampled all the same is a token like any other: nothing breaks, nothing shifts
    assert_rounded(plain(*free.tokens)[0], free.rollout_logps, **NORMS | dict(magnitude=64.0))


@pytest.mark.parametrize(
    ("train_entropy", "softcap", "head_trained"), [(True, None, True), (False, 5.0, True), (True, 5.0, False)]
)
def test_the_head_without_some_tokens(train_entropy, softcap, head_trained):
    torch.manual_seed(0)
    hidden = torch.randn(7, 8, requires_grad=True)
    weight, bias = torch.randn(20, 8, requires_grad=head_trained), torch.randn(20, requires_grad=head_trained)
    suppressed, ids = torch.tensor([3, 4, 19]), torch.tensor([0, 1, 2, 5, 6, 18, 2])
    found = head.logps_from_weight(hidden, weight, bias, ids, 0.7, softcap, False, train_entropy, suppressed)
    logits = hidden @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    kept = [i for i in range(20) if i not in suppressed.tolist()]
    distribution = torch.distributions.Categorical(logits=logits[:, kept] / 0.7)
    expected = distribution.log_prob(torch.tensor([kept.index(i) for i in ids.tolist()])), distribution.entropy()
    leaves = [hidden, *[weight, bias][: 2 * head_trained]]
    grads, factors = [], (torch.randn(7), torch.randn(7) * train_entropy)
    for values in (found, expected):
        loss = sum((value * factor).sum() for value, factor in zip(values, factors, strict=True))
        grads.append(torch.autograd.grad(loss, leaves))
    # sums over 8 numbers, 20 tokens and 7 rows, of products of up to 3 * 3 / 0.7
    for ours, theirs in zip((*found, *grads[0]), (*expected, *grads[1]), strict=True):
        assert_rounded(ours, theirs, terms=8 + 20 + 7 + 16, magnitude=13.0, dtype=torch.float32)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("checkpointing", "frozen"), [(False, False), (True, False), (False, True)])
def test_gradients_of_a_tower_are_those_of_plain_autograd(checkpointing, frozen, family, folders):
    loaded = processor, model, prompts, pictures = load(folders[family], checkpointing)
    if frozen:
        images.freeze_vision(model)
    batch, policy, calls = rolled(loaded), policy_of(model), []
    assert bool(batch.images.pixels) == (not frozen)
    # the same loss through the whole model of transformers, pixels repeated per completion, one row at a time
    vision = torch.tensor(images.vision_ids(model))
    for row, n in enumerate(batch.lengths.tolist()):
        ids = prompts[row // 2] + batch.completion_ids[row, :n].tolist()
        given = given_to(processor, ids, pictures[row // 2])
        logits = model(input_ids=torch.tensor([ids]), use_cache=False, **given).logits[0, -n - 1 : -1]
        logps = logits.index_fill(-1, vision, -torch.inf).log_softmax(-1)
        (logps[range(n), ids[-n:]].sum() * (1 + row) / 10).backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    images.tower(model).register_forward_hook(lambda *args: calls.append(1))
    micros = [micro for micros in batch.minibatches(1, 50, policy.packed) for micro in micros]
    assert len(micros) > 2
    batch.images.refresh(model, batch.images.prompts)
    for micro in micros:
        weights = micro.completion_mask * (1 + micro.rows[:, None]) / 10
        (policy(*micro.tokens)[0] * weights).sum().backward()
    assert not any(name.startswith("model.visual") for name in gradients(model))
    batch.images.backward()
    assert calls == [1, 1] * (not frozen)  # once per prompt with images
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert any(name.startswith("model.visual") for name in found) == (not frozen)
    scale = max(g.abs().max() for g in expected.values()).item()
    # fp32 are the head, with sums over the vocabulary and all tokens, and the norms
    terms = model.config.text_config.vocab_size + int(batch.lengths.sum()) + NORMS["terms"]
    for name in expected:
        assert_rounded(found[name], expected[name], terms=terms, magnitude=scale, dtype=torch.float32)


def test_each_optimizer_step_sees_features_of_its_own_weights(family, folders):
    loaded = processor, model, prompts, pictures = load(folders[family])
    batch = rolled(loaded)
    before = [x.clone() for x in batch.images.features]
    micro = batch.minibatches(2, 1000, True)[1][0]
    with torch.no_grad():
        for p in images.tower(model).parameters():
            p.mul_(1.1)
    batch.images.refresh(model, torch.tensor([0]))
    again = images.Images.of(model, processor, prompts, pictures)
    assert torch.equal(micro.images.features[0], again.features[0])  # parts share what was computed anew
    assert not torch.equal(again.features[0], before[0])
    assert torch.equal(micro.images.features[1], before[1])  # not of this step
    batch.images.backward()  # nothing arrived
    assert not gradients(model) and not any(x.requires_grad for x in batch.images.features)
