"""Distillation from a teacher with another tokenizer: alignment, losses with their gradients, and runs that learn."""

import itertools
import json
import random
from types import SimpleNamespace

import pytest
import torch
from bounds import assert_rounded, rounding
from conftest import SCRIPTS, load_script, tiny_model
from test_logprobs import ROUNDINGS, assert_same_gradients, gradients
from test_scripts import refused
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common.distill import cross_losses, distillation, offpolicy
from common.distill.alignment import Span, Vocabulary, align, matches, translate, whole_characters
from common.distill.cross_teacher import CrossTeacher
from common.generation.batches import TeacherOutput
from common.maths import divergences
from common.maths.divergences import INSIDE, MATCH, START, span_divergence, span_sums, uld
from common.tasks import toy
from common.tasks.data import Example

CPU = torch.device("cpu")
BETAS = [0.0, 0.3, 1.0]
END = "<|end|>"
TEXTS = ["sort 7 3 1 9 4", "the cat sat on the mat, and the dog", "Hello World  HELLO", "caf\u00e9 na\u00efve",
         "\u4f60\u597d\u4e16\u754c", "x = f(12345)\n\treturn 1"]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)


def fast(tokenizer, end=END, **options) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<pad>", padding_side="left",
                                   chat_template=TEMPLATE, **options)  # fmt: skip


def byte_level(size=300, texts=TEXTS, normalizer=None, end=END, prefix=False) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of GPT-2, Qwen and Llama 3; more merges with a larger size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<pad>", end, "<|turn|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator(texts * 20, trainer)
    return fast(tokenizer, end, additional_special_tokens=["<|turn|>"])


def sentencepiece(size=400) -> PreTrainedTokenizerFast:
    """BPE with a space before every text and a fallback to bytes, as of Llama 2."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])  # fmt: skip
    specials = ["<unk>", "<pad>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials[:3], show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:3] * 20, trainer)
    # bytes stand in the vocabulary, but are no control tokens
    learned = Tokenizer.from_str(tokenizer.to_str())
    vocabulary = learned.get_vocab()
    vocabulary |= {token: len(vocabulary) + n for n, token in enumerate(specials[3:])}
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokenizer.model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")
    return fast(tokenizer, "</s>", unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    """A Unigram model with the Metaspace decoder, as of T5 and Gemma; it knows the characters of TEXTS only."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "<pad>", "</s>"], unk_token="<unk>",
                                      show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    return fast(tokenizer, "</s>", unk_token="<unk>")


def wordpiece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=["<unk>", "<pad>", END], show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    return fast(tokenizer, unk_token="<unk>")


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, Vocabulary]:
    made = dict(small=byte_level(280), large=byte_level(340), sentencepiece=sentencepiece(), metaspace=metaspace(),
                prefixed=byte_level(310, prefix=True))  # fmt: skip
    return {name: Vocabulary(tokenizer, name) for name, tokenizer in made.items()}


def random_text(rng: random.Random) -> str:
    """Characters of one to four bytes, spaces and words in any order."""
    kinds = [lambda: rng.choice(TEXTS), lambda: " " * rng.randint(1, 3), lambda: chr(rng.randint(33, 126)),
             lambda: chr(rng.randint(0xA1, 0x7FF)), lambda: chr(rng.randint(0x4E00, 0x9FFF)),
             lambda: chr(rng.randint(0x1F300, 0x1F6FF)), lambda: "\n"]  # fmt: skip
    return "".join(rng.choice(kinds)() for _ in range(rng.randint(1, 12)))


def assert_spans(own: list[bytes], other: list[bytes], spans: list[Span]) -> None:
    """They partition both sides, in order, of equal bytes; and none could be cut again."""
    assert (spans[0].start, spans[0].other_start) == (0, 0)
    assert (spans[-1].end, spans[-1].other_end) == (len(own), len(other))
    for left, right in itertools.pairwise(spans):
        assert (left.end, left.other_end) == (right.start, right.other_start)
    for start, end, other_start, other_end in spans:
        assert start < end and other_start < other_end
        mine, theirs = own[start:end], other[other_start:other_end]
        assert b"".join(mine) == b"".join(theirs)
        inner = [set(itertools.accumulate(map(len, side))) - {0, len(b"".join(mine))} for side in (mine, theirs)]
        assert not inner[0] & inner[1]


@pytest.mark.parametrize(("own", "other", "spans"), [
    ([b"ab", b"c"], [b"a", b"b", b"c"], [(0, 1, 0, 2), (1, 2, 2, 3)]),
    ([b"ab", b"cd"], [b"a", b"bc", b"d"], [(0, 2, 0, 3)]),
    ([b"a"], [b"a"], [(0, 1, 0, 1)]),
    ([b"", b"a", b"", b"b", b""], [b"a", b"b", b""], [(0, 3, 0, 1), (3, 5, 1, 3)]),  # tokens without text
    ([b"a", b"b", b"\xe4"], [b"a", b"b"], [(0, 1, 0, 1), (1, 2, 1, 2)]),  # cut off in a character
    ([b"a", b"bc"], [b"a", b"b"], [(0, 1, 0, 1)]), ([b""], [], []), ([], [], []),
])  # fmt: skip
def test_spans_by_hand(own, other, spans):
    assert align(own, other) == [Span(*span) for span in spans]


def test_a_text_that_the_teacher_changes_is_no_beginning():
    with pytest.raises(ValueError, match="must be the beginning of b'Ab'"):
        align([b"Ab"], [b"ab"])


def test_spans_of_random_cuts_partition_the_text():
    rng = random.Random(0)
    for _ in range(300):
        text = bytes(rng.randrange(256) for _ in range(rng.randint(1, 30)))
        sides = []
        for _ in range(2):
            cuts = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(rng.randint(0, 20)))})
            sides.append([text[a:b] for a, b in itertools.pairwise(cuts)])
        assert_spans(*sides, align(*sides))


@pytest.mark.parametrize(("own", "other"), [
    ("small", "large"), ("large", "small"), ("small", "sentencepiece"), ("sentencepiece", "large"),
    ("prefixed", "small"), ("large", "prefixed"), ("small", "small"),
])  # fmt: skip
def test_tokens_of_random_unicode_are_aligned_byte_by_byte(vocabularies, own, other):
    own, other, rng = vocabularies[own], vocabularies[other], random.Random(1)
    for _ in range(60):
        text = random_text(rng)
        ids = own.tokenizer.encode(text, add_special_tokens=False)
        [(read, tokens)] = translate([ids], own, other)
        pieces = own.of(ids)
        assert b"".join(tokens) == b"".join(pieces) and len(read) == len(tokens)
        assert b"".join(pieces).decode().removeprefix(" ") == text.removeprefix(" ")  # but for a space put before it
        assert_spans(pieces, tokens, align(pieces, tokens))


def test_a_text_may_be_cut_off_within_a_character_on_the_side_of_the_student(vocabularies):
    own, other, rng = vocabularies["small"], vocabularies["large"], random.Random(2)
    for _ in range(60):
        ids = own.tokenizer.encode(random_text(rng) + "\U0001f600", add_special_tokens=False)
        cut = ids[: rng.randint(1, len(ids))]
        pieces = own.of(cut)
        text = b"".join(pieces)
        [(_, tokens)] = translate([cut], own, other)
        readable = whole_characters(text).encode()
        assert b"".join(tokens) == readable and text.startswith(readable) and len(text) - len(readable) < 4
        spans = align(pieces, tokens)
        assert not spans or b"".join(pieces[: spans[-1].end]) == b"".join(tokens[: spans[-1].other_end])


def test_control_tokens_are_translated_by_name_and_text_never_becomes_one(vocabularies):
    own, other = vocabularies["small"], vocabularies["large"]
    turn = [vocabulary.tokenizer.convert_tokens_to_ids("<|turn|>") for vocabulary in (own, other)]
    ids = own.tokenizer.encode("a", add_special_tokens=False)
    assert turn[1] in translate([[*ids, turn[0], *ids]], own, other)[0][0]
    [(written, _)] = own.encode(["a<|turn|>"])
    assert turn[0] not in written and turn[1] not in translate([written], own, other)[0][0]
    # one without a counterpart is text
    [(read, tokens)] = translate([[*ids, turn[0]]], own, vocabularies["sentencepiece"])
    assert b"".join(tokens) == b"a<|turn|>" and len(read) > 2


@pytest.mark.parametrize(("tokenizer", "message"), [
    (wordpiece, "decodes by WordPiece: a text must be the concatenation"),
    (lambda: SimpleNamespace(), "is not a fast one"),
])  # fmt: skip
def test_tokenizers_whose_tokens_do_not_make_up_the_text_are_refused(tokenizer, message):
    with pytest.raises(ValueError, match=message):
        Vocabulary(tokenizer(), "it")


def test_tokens_of_equal_bytes_are_pairs_whatever_they_are_called(vocabularies):
    own, other = vocabularies["small"], vocabularies["sentencepiece"]
    ends = own.tokenizer.eos_token_id, other.tokenizer.eos_token_id
    mine, theirs = matches(own, other, (len(own.pieces), len(other.pieces)), ends)
    assert len(set(mine)) == len(set(theirs)) == len(mine) == len(theirs) and mine == sorted(mine)
    pairs = dict(zip(mine, theirs, strict=True))
    assert pairs[ends[0]] == ends[1]
    assert all(own.pieces[i] == other.pieces[j] for i, j in pairs.items() if i != ends[0])
    # a letter is the token of the letter, not that of its byte
    letter = own.tokenizer.convert_tokens_to_ids("t")
    assert pairs[letter] == other.tokenizer.convert_tokens_to_ids("t")
    # of equal vocabularies all are pairs, and ids beyond a head are left out
    same = list(range(len(own.pieces)))
    assert matches(own, own, (len(same), len(same)), (ends[0], ends[0])) == (same, same)
    assert matches(own, own, (270, 280), (ends[0], ends[0])) == (same[:270], same[:270])


# Losses


def numbers(*shape, seed=0, size=2.0) -> torch.Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_uld(student, teacher, temperature=1.0) -> torch.Tensor:
    """The definition, in double precision."""
    p, q = ((x.double() / temperature).softmax(-1).sort(-1, descending=True).values for x in (teacher, student))
    width = max(p.shape[-1], q.shape[-1])
    p, q = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (p, q))
    return (p - q).abs().sum(-1)


def test_uld_by_hand():
    student, teacher = torch.tensor([0.2, 0.7, 0.1]).log(), torch.tensor([0.4, 0.6]).log()
    assert uld(student, teacher).item() == pytest.approx(0.1 + 0.2 + 0.1)  # (0.7, 0.2, 0.1) and (0.6, 0.4, 0)
    assert uld(student.flip(0), teacher.flip(0)).item() == pytest.approx(0.4)  # it does not see which token
    assert uld(torch.tensor([1.0, -torch.inf]), torch.tensor([-torch.inf, 0.0, -torch.inf])).item() == 0.0
    assert uld(torch.tensor([1e4, -1e4]), torch.zeros(4)).item() == pytest.approx(0.75 + 0.75)
    assert uld(torch.zeros(3), torch.zeros(3)).item() == 0.0
    with pytest.raises(ValueError, match="temperature = 0"):
        uld(student, teacher, 0)


@pytest.mark.parametrize(("V", "W"), [(30, 50), (50, 30), (40, 40)])
def test_uld_and_its_gradient_are_those_of_the_definition(V, W):
    student, teacher = numbers(7, V).requires_grad_(), numbers(7, W, seed=1).requires_grad_()
    assert_rounded(uld(student, teacher, 0.7), exact_uld(student, teacher, 0.7).float(), 4 * max(V, W), 2.0)
    spans, given = torch.tensor([1, 2, 3, 0, 2, 1, 1]).int(), torch.tensor([0, 0, 0, 1, 1, 0, 0]).bool()
    ids = torch.arange(7)
    values, grad = divergences.sorted_probabilities(student.detach(), teacher.detach(), spans, given, torch.zeros(7),
                                                    ids, 0.7)  # fmt: skip
    starts = (spans == MATCH) | (spans == START)
    nll = torch.nn.functional.cross_entropy(student.double(), ids, reduction="none")
    expected = exact_uld(student, teacher.detach(), 0.7) * starts + nll * given
    assert_rounded(values[0], expected.float(), 4 * max(V, W), 8.0)
    exact = torch.autograd.grad(expected.sum(), student)[0]
    assert_rounded(grad, exact, 8 * max(V, W), 2.0)
    assert not grad[3 - 1].any() and values[4].tolist() == (spans > 0).float().tolist()
    # a step against the gradient is what finite differences say
    wide, step = student.detach().double(), 1e-6 * numbers(7, V, seed=3).double()
    moved = (exact_uld(wide + step, teacher, 0.7) - exact_uld(wide - step, teacher, 0.7)) * starts / 2
    found = (grad * step).sum(-1)[~given]
    torch.testing.assert_close(found, moved[~given].detach(), rtol=1e-3, atol=1e-10)
    # only the student learns
    uld(student, teacher).sum().backward()
    assert student.grad.any() and teacher.grad is None


def test_at_ties_and_extreme_logits_everything_is_finite():
    student, teacher = torch.zeros(4, 6), torch.zeros(4, 5)
    student[1], student[2, :3], teacher[3, 1:], student[3, 2] = -torch.inf, -torch.inf, -torch.inf, 1e4
    student[1, 0] = 0.0
    ids, one = torch.tensor([0, 0, 4, 2]), torch.ones(4)
    for found in (
        divergences.sorted_probabilities(student, teacher, one.int(), one.bool(), -one, ids, 1.0),
        *(divergences.spans(student, teacher, spans.int(), -one, logp, other, ids, torch.arange(5), torch.arange(5),
                            beta, 1.0)
          for beta in BETAS for spans in (one, 2 * one) for logp in (0 * one, -1e9 * one)
          for other in (0 * one, -1e9 * one)),
    ):  # fmt: skip
        assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("beta", BETAS)
def test_a_span_against_all_else(beta):
    student, teacher = torch.tensor([0.4]).log().requires_grad_(), torch.tensor([0.9]).log()
    value, slope = span_divergence(student, teacher, beta)
    pairs = (torch.stack([x.exp(), 1 - x.exp()], -1).log() for x in (student, teacher))
    whole = divergences.generalized_jsd(*pairs, beta)
    assert value.item() == pytest.approx(whole.item(), abs=1e-6)
    assert slope.item() == pytest.approx(torch.autograd.grad(whole.sum(), student)[0].item(), abs=1e-6)
    same = torch.tensor([-1e-9, -0.5, -700.0])  # sure of it, unsure, a long text
    assert span_divergence(same, same, beta)[0].abs().max() <= rounding(16, 32.0)


def test_sums_over_spans():
    spans = torch.tensor([[1, 2, 3, 3, 0, 2], [2, 3, 1, 0, 0, 0]])
    values = torch.tensor([[1.0, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32]])
    assert span_sums(values, spans).tolist() == [[1, 14, 14, 14, 0, 32], [3, 3, 4, 0, 0, 0]]


def test_advantages_are_those_of_the_span():
    spans = torch.tensor([[1, 2, 3, 0]]).int()
    given = TeacherOutput(token_logps=torch.tensor([[-1.0, -1.5, -1.5, 0.0]]), spans=spans)
    found = given.advantages(torch.tensor([[-2.0, -4.0, -1.0, -5.0]]))
    assert found.tolist() == [[1.0, 2.0, 2.0, 0.0]]  # -3 of the span for the teacher, -5 for the student
    assert given.shares["aligned"].tolist() == [[1, 1, 1, 0]]
    plain = TeacherOutput(token_logps=torch.tensor([[-1.0]]))
    assert plain.advantages(torch.tensor([[-3.0]])).item() == 2.0 and plain.shares == {}


# Teachers


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Random models with tokenizers of their own."""
    found = {}
    made = dict(small=byte_level(280), large=byte_level(340), lower=byte_level(300, normalizer=normalizers.Lowercase()),
                sentencepiece=sentencepiece(), copy=byte_level(280))  # fmt: skip
    for name, tokenizer in made.items():
        found[name] = tmp_path_factory.mktemp(name)
        tokenizer.save_pretrained(found[name])
        model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                           hidden_size=48 if name == "large" else 32)  # fmt: skip
        model.save_pretrained(found[name])
    return {name: str(folder) for name, folder in found.items()}


def load(folders, own, other, method="spans", **options):
    """A student's model and tokenizer, and its teacher."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folders[own]).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders[own])
    teacher = CrossTeacher(folders[other], [CPU], "fp32", student=tokenizer, student_size=len(tokenizer),
                           end_ids=[tokenizer.eos_token_id], method=method, temperature=0.7, compile=False,
                           **options)  # fmt: skip
    return model, tokenizer, teacher


def batch_of(tokenizer, texts, teacher, prompt="sort", cut=0):
    """Completions in a batch; the last `cut` tokens and the end are missing."""
    prompt_ids = tokenizer.encode(prompt)
    teacher.read_prompts([Example(0, prompt, prompt_ids, None, {})], apply_chat_template=False, system_prompt="",
                         template_kwargs={})  # fmt: skip
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    ids = [row[:-cut] if cut else [*row, tokenizer.eos_token_id] for row in ids]
    return offpolicy.batch([prompt_ids] * len(ids), ids, tokenizer.pad_token_id, [tokenizer.eos_token_id], CPU)


def own_logps(model, prompt, ids, temperature=0.7) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize(("own", "other"), [("small", "large"), ("large", "small"), ("small", "sentencepiece")])
@pytest.mark.parametrize("tokens_only", [False, True], ids=["states", "opd"])
def test_a_teacher_says_of_a_text_what_it_says_alone(folders, own, other, tokens_only):
    _, tokenizer, teacher = load(folders, own, other, tokens_only=tokens_only)
    texts = ["the cat \U0001f600 sat", "sort 7 3 1", "x"]
    batch = batch_of(tokenizer, texts, teacher)
    teacher.fill([batch], 1000)
    prompt = teacher.prompt_of(tokenizer.encode("sort"))
    assert (batch.teacher.spans > 0).equal(batch.completion_mask)  # all are aligned, the end token too
    for row, text in enumerate(texts):
        ids = [*teacher.tokenizer.encode(text, add_special_tokens=False), teacher.tokenizer.eos_token_id]
        logps = own_logps(teacher.model, prompt, ids)[range(len(ids)), ids]
        found = batch.teacher.token_logps[row]
        assert_rounded(found.sum(), logps.sum().float(), ROUNDINGS, 8.0 * len(ids))
        last = int(batch.lengths[row]) - 1
        assert batch.teacher.spans[row, last] == MATCH
        assert_rounded(found[last], logps[-1].float(), ROUNDINGS, 16.0)
    assert (batch.teacher.states is None) == tokens_only


def test_for_uld_the_state_of_a_span_is_that_before_its_first_token(folders):
    _, tokenizer, teacher = load(folders, "large", "small", method="uld")  # spans have several tokens of the teacher
    batch = batch_of(tokenizer, ["the cat sat", "sort 7 3 1"], teacher)
    teacher.fill([batch], 1000)
    prompt, several = teacher.prompt_of(tokenizer.encode("sort")), 0
    for row, reading in enumerate(teacher.readings([ids.tolist() for ids in batch.completions])):
        with torch.no_grad():
            states = teacher.model.model(input_ids=torch.tensor([[*prompt, *reading.ids]])).last_hidden_state[0]
        for start, _, other_start, other_end in reading.spans:
            several += other_end - other_start > 1
            found, alone = batch.teacher.states[row, start], states[len(prompt) + other_start - 1]
            assert_rounded(found, alone, ROUNDINGS, 8.0)
    assert several > 2


def test_what_the_teacher_cannot_read_is_left_out_of_the_loss(folders):
    model, tokenizer, teacher = load(folders, "small", "lower")
    batch = batch_of(tokenizer, ["the cat", "The Cat"], teacher)
    teacher.fill([batch], 1000)
    assert (batch.teacher.spans[0] > 0)[: batch.lengths[0]].all() and not batch.teacher.spans[1].any()
    student = cross_losses.CrossDivergences(model, 0.7, False, 0.5, teacher)
    _, values = student(*batch.tokens[:4], batch.completion_mask.float(), *batch.teacher.tensors)
    values = dict(zip(student.values, values.unbind(-1), strict=True))
    assert not values["divergence"][1].any() and values["divergence"][0].any()
    assert values["aligned"].sum() == batch.lengths[0]
    # a student that wrote it itself hears that it is improbable, and nothing of what follows
    batch.rollout_logps -= 1
    teacher.fill([batch], 1000)
    kinds, logps = batch.teacher.spans[1], batch.teacher.token_logps[1]
    assert kinds[0] == -START and not kinds[1:].any() and logps[0].item() == pytest.approx(-16.118, abs=1e-3)
    assert batch.teacher.shares["aligned"][1].sum() == 0 and batch.teacher.advantages(0 * logps)[1, 0] == logps[0]
    # cut off within a character: what stands before it is aligned, without an end
    batch = batch_of(tokenizer, ["the \U0001f600"], teacher, cut=1)
    teacher.fill([batch], 1000)
    kinds = batch.teacher.spans[0]
    assert kinds[0] > 0 and kinds[-1] == 0


@pytest.mark.parametrize(("pieces", "ended", "unreadable"), [
    ([b"a", b"\xe4", b"\xbd"], False, range(0)),  # only cut off
    ([b"a", b"\xe4", b"\xbd"], True, range(1, 4)),  # the end token comes within a character
    ([b"a", b"\xe4", b"\xbd", b"a", b"b"], True, range(1, 4)),  # the "a", which cannot stand there
    ([b"a", b"\xbd", b"b"], False, range(1, 2)), ([b"\xff"], True, range(1)),
    ([b"b", b"a", b"b"], True, range(0)),
])  # fmt: skip
def test_what_is_no_text_is_found_at_its_first_wrong_token(folders, pieces, ended, unreadable):
    _, tokenizer, teacher = load(folders, "small", "large")
    ids = [teacher.vocabularies[0].pieces.index(piece) for piece in pieces]
    [reading] = teacher.readings([[*ids, tokenizer.eos_token_id] if ended else ids])
    assert reading.unreadable == unreadable
    before = unreadable.start if unreadable else 1 if not ended else len(pieces) + 1
    assert (reading.spans[-1].end if reading.spans else 0) == before


def dense(model, teacher, batch, weights, beta) -> torch.Tensor:
    """The loss from whole logits and the definition of its terms, with the gradients of autograd."""
    loss, partner = 0.0, dict(zip(teacher.own.tolist(), teacher.other.tolist(), strict=True))
    for row, (prompt, ids) in enumerate(zip(batch.prompts, batch.completions, strict=True)):
        prompt, ids = prompt.tolist(), ids.tolist()
        [reading] = teacher.readings([ids])
        logq, logp = own_logps(model, prompt, ids), own_logps(teacher.model, teacher.prompt_of(prompt), reading.ids)
        logp = logp.detach()
        for start, end, other_start, other_end in reading.spans:
            mine, theirs = ids[start:end], reading.ids[other_start:other_end]
            if len(mine) == len(theirs) == 1 and partner.get(mine[0]) == theirs[0]:
                q, p = logq[start, teacher.own].softmax(-1), logp[other_start, teacher.other].softmax(-1)
            else:
                q, p = (x[range(a, b), tokens].sum().exp() for x, a, b, tokens in
                        ((logq, start, end, mine), (logp, other_start, other_end, theirs)))  # fmt: skip
                q, p = torch.stack([q, 1 - q]), torch.stack([p, 1 - p])
            if beta in (0.0, 1.0):
                a, b = (p, q) if beta == 0.0 else (q, p)
                value = (a * (a / b).log()).sum()
            else:
                mixed = beta * p + (1 - beta) * q
                value = beta * (p * (p / mixed).log()).sum() + (1 - beta) * (q * (q / mixed).log()).sum()
            loss = loss + weights[row, start] * value
    return loss


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("own", "other"), [("small", "large"), ("large", "small"), ("small", "sentencepiece")])
def test_loss_and_gradients_are_those_of_the_definition(folders, own, other, beta, monkeypatch):
    monkeypatch.setattr("common.model.head.CHUNK_TOKENS", 5)  # spans cross the ends of chunks
    model, tokenizer, teacher = load(folders, own, other)
    batch = batch_of(tokenizer, ["the cat \u4f60 sat on", "HELLO world", "12345"], teacher)
    teacher.fill([batch], 1000)
    kinds = batch.teacher.spans
    assert (kinds == MATCH).any() and (kinds == START).any() and (own == "large" or (kinds == INSIDE).any())
    weights = batch.completion_mask.float() / batch.completion_mask.sum(1, keepdim=True)
    student = cross_losses.CrossDivergences(model, 0.7, False, beta, teacher)
    loss, _ = student(*batch.tokens[:4], weights, *batch.teacher.tensors)
    expected = dense(model, teacher, batch, weights, beta)
    assert_rounded(loss, expected.float()[None], 2 * ROUNDINGS, 64.0)
    assert_same_gradients(gradients(model, loss.sum()), gradients(model, expected), terms=8 * ROUNDINGS)


@pytest.mark.parametrize("beta", BETAS)
def test_of_equal_tokenizers_spans_are_the_ordinary_divergence(folders, beta):
    model, tokenizer, teacher = load(folders, "small", "copy")
    batch = batch_of(tokenizer, ["the cat sat", "HELLO \u4f60"], teacher)
    teacher.fill([batch], 1000)
    assert (batch.teacher.spans == MATCH).equal(batch.completion_mask)
    weights = batch.completion_mask.float() / batch.completion_mask.sum()
    spans = cross_losses.CrossDivergences(model, 0.7, False, beta, teacher)
    plain = distillation.Divergences(model, 0.7, False, beta, len(tokenizer), teacher.head)
    found, values = spans(*batch.tokens[:4], weights, *batch.teacher.tensors)
    found_gradients = gradients(model, found.sum())
    expected, expected_values = plain(*batch.tokens[:4], weights, batch.teacher.states)
    assert_rounded(found, expected, ROUNDINGS, 32.0)
    assert_rounded(values[..., :6], expected_values, ROUNDINGS, 32.0)
    assert_same_gradients(found_gradients, gradients(model, expected.sum()), terms=2 * ROUNDINGS)


def test_prompts_must_leave_the_reply_at_the_same_place(folders):
    _, _, teacher = load(folders, "small", "large")
    row = Example(7, [{"role": "user", "content": "hi"}], [5, 6], None, {}, reply_start="<think>\n")
    options = dict(apply_chat_template=True, system_prompt="be brief", template_kwargs={})
    with pytest.raises(ValueError, match=r"row 7: the prompt ends in '<think>\\n' for the student, in ''"):
        teacher.read_prompts([row], **options)
    with pytest.raises(ValueError, match="must be one that read_prompts has seen"):
        teacher.prompt_of([5, 6])
    own = teacher.vocabularies[0].tokenizer
    own.chat_template = TEMPLATE.replace("{{ m['role']", "<|turn|>{{ m['role']").replace("a: ", "<|turn|>a: ")
    with pytest.raises(ValueError, match="row 8: the prompt is written in the student's chat template"):
        teacher.read_prompts([Example(8, "<|turn|>u: hi\n<|turn|>a: ", [5, 6], None, {})], **options)
    teacher.read_prompts([Example(7, row.prompt, [5, 6], None, {})], **options)
    written = teacher.tokenizer.decode(teacher.prompt_of([5, 6]))
    assert written == "s: be brief\nu: hi\na: "  # its template, and the system prompt of the run


def test_answers_of_the_teacher_come_in_the_tokens_of_the_student(folders):
    _, tokenizer, teacher = load(folders, "small", "large")
    batch_of(tokenizer, ["x"], teacher)
    options = dict(seed=0, temperature=1.0, max_new_tokens=6)
    rows = teacher.generate([tokenizer.encode("sort")] * 8, range(8), **options)
    assert all(1 <= len(row) <= 6 and max(row) < len(tokenizer) for row in rows)
    assert rows == teacher.generate([tokenizer.encode("sort")] * 8, range(8), **options)


@pytest.mark.parametrize(("options", "message"), [
    (dict(other_tokenizer="spans", teacher_url="http://127.0.0.1:1"), "a server takes tokens of its own tokenizer"),
    (dict(other_tokenizer="uld", loss="opd"), "loss = 'opd': ULD is a loss of its own"),
    (dict(other_tokenizer="uld", loss="jsd"), "loss = 'jsd': ULD is a loss of its own"),
    (dict(other_tokenizer="gold"), "other_tokenizer = 'gold': must be"),
], ids=str)  # fmt: skip
def test_what_makes_no_sense_is_refused(capsys, options, message):
    assert message in refused(capsys, "gkd", **options)


# Runs


def digits() -> list[dict]:
    """Rows such as {"prompt": "sort 7 3 1", "answer": "137"}: short, so that small models learn them in seconds."""
    rows = [{"prompt": "sort " + " ".join(few), "answer": "".join(sorted(few))}
            for few in itertools.permutations("123456789", 3)]  # fmt: skip
    return random.Random(0).sample(rows, len(rows))


def sorter(folder, tokenizer, upwards, downwards, steps, hidden=96) -> str:
    """A model that sorts digits, mostly upwards or downwards, with this tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden,
                         num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
                         tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                         pad_token_id=tokenizer.pad_token_id)  # fmt: skip
    model, rng, rows = LlamaForCausalLM(config), random.Random(1), digits()[:440]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 10, 2 - 2 * step / steps)
        ids, labels = [], []
        for i, row in enumerate(rng.sample(rows, upwards + downwards)):
            messages = [{"role": "user", "content": row["prompt"]}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            answer = row["answer"][:: 1 if i < upwards else -1]
            reply = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
            ids.append(torch.tensor(prompt + reply))
            labels.append(torch.tensor([-100] * len(prompt) + reply))
        pad = tokenizer.pad_token_id
        model(input_ids=pad_sequence(ids, True, pad), labels=pad_sequence(labels, True, -100)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def sorters(tmp_path_factory) -> dict:
    """A student with merges of digits that prefers the wrong direction, and a teacher that reads characters."""
    rows, data = digits(), tmp_path_factory.mktemp("digits")
    for name, part in (("train", rows[:440]), ("test", rows[440:])):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    texts = [row["answer"][::way] for row in rows for way in (1, -1)] + [row["prompt"] for row in rows]
    student = sorter(tmp_path_factory.mktemp("student"), byte_level(310, texts), 8, 8, 250)
    teacher = sorter(tmp_path_factory.mktemp("teacher"), toy._tokenizer(), 16, 0, 120)
    return dict(student_model=student, teacher_model=teacher, train_data=data / "train.jsonl",
                eval_data=data / "test.jsonl")  # fmt: skip


RUN = dict(steps=40, batch_size=16, group_size=4, max_new_tokens=10, eval_examples=64, eval_every=40, save_every=40,
           max_prompt_tokens=64, learning_rate=1e-3)  # fmt: skip


@pytest.mark.parametrize("options", [
    pytest.param(dict(other_tokenizer="spans"), marks=pytest.mark.parity),
    pytest.param(dict(other_tokenizer="spans", loss="opd", learning_rate=2e-4), marks=pytest.mark.parity),
    pytest.param(dict(other_tokenizer="spans", loss="jsd", lmbda=0.5, seq_kd=True), marks=pytest.mark.parity),
    pytest.param(dict(other_tokenizer="uld", lmbda=0), marks=pytest.mark.parity),
], ids=str)  # fmt: skip
def test_a_student_learns_from_a_teacher_with_another_tokenizer(launcher, sorters, tmp_path, options):
    run = launcher.run("gkd", tmp_path, rewards=load_script(SCRIPTS["gkd"]).REWARDS, **(RUN | sorters | options))
    first, last = (line for line in run.succeeded().lines if "eval_teacher_nll" in line)
    assert last["eval_teacher_nll"] < 0.7 * first["eval_teacher_nll"]
    assert last["eval_reward"] > first["eval_reward"] or options.get("loss") == "opd"  # which has more noise
    assert min(line["aligned"] for line in run.steps) > 0.8


def test_another_tokenizer_is_refused_by_default_and_the_choice_is_named(launcher, sorters, tmp_path):
    output = launcher.run("gkd", tmp_path, **RUN, **sorters).output
    assert "student and teacher have different tokenizers" in output
    assert "or set other_tokenizer to 'spans' or 'uld'" in output
