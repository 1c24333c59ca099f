"""Two tokenisations of one text: tokens as bytes, the spans that both have, and the tokens that both know.

A text that two tokenizers cut differently still has places where both have a token boundary. Between two of them
lies a span, some tokens of the student and some of the teacher, of the same bytes. Both sides condition it on the
same text, so that its probabilities compare: log p(span) is the sum of log p(token | everything before it).

Bytes, not characters: a token may hold a part of a character, and a completion that is cut off may end in one.

Source: GOLD, https://huggingface.co/spaces/HuggingFaceH4/on-policy-distillation (spans, tokens of equal text); ALM,
arXiv 2503.20083 (likelihoods of aligned chunks).
"""

import bisect
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from common.base.checks import require

# decoders under which a text is the concatenation of its tokens; WordPiece, for one, makes up the spaces
CONCATENATING = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
SPACE = "\u2581"  # stands for a space in the vocabularies of SentencePiece
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of byte fallback
# a text with digits, code, spaces, capitals, accents and other scripts, by which `Vocabulary` checks itself
_PROBE = "Is 12345+678 = 13023?\n\n  def f(x):\treturn x**2  # don't  caf\u00e9 cafe\u0301 \u4f60\u597d \u0416 A\u00a0b"


class Span(NamedTuple):
    """Tokens [start, end) of the student and [other_start, other_end) of the teacher, of the same bytes."""

    start: int
    end: int
    other_start: int
    other_end: int


def align(own: Sequence[bytes], other: Sequence[bytes]) -> list[Span]:
    """The shortest spans between places where both sides have a token boundary.

    Args:
        own: bytes of each token of the student.
        other: those of the teacher, of the same text or of its beginning.

    Returns:
        Spans in order. They cover all tokens if the texts are equal and not empty; else all up to the last boundary
        that both have. A token without bytes belongs to the span before it, or to the first one.

    Raises:
        ValueError: the teacher's tokens are not the beginning of the text.
    """
    text, other_text = b"".join(own), b"".join(other)
    require(text.startswith(other_text), f"the teacher's tokens say {other_text[:40]!r}",
            f"must be the beginning of {text[:40]!r}", "leave such a text out")  # fmt: skip
    ends, other_ends = (list(itertools.accumulate(map(len, tokens))) for tokens in (own, other))
    spans, start, other_start = [], 0, 0
    for end in sorted({*ends} & {*other_ends} - {0}):
        stop, other_stop = bisect.bisect_right(ends, end), bisect.bisect_right(other_ends, end)
        spans.append(Span(start, stop, other_start, other_stop))
        start, other_start = stop, other_stop
    return spans


def whole_characters(text: bytes) -> str:
    """The text up to the first byte that is no part of a whole character.

    Args:
        text: as a model may write it, which is not always UTF-8.
    """
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()


def first_wrong_byte(text: bytes, ended: bool) -> int | None:
    """Place of the first byte that cannot follow those before it; None if the text is only cut off.

    Args:
        text: not UTF-8.
        ended: nothing follows, so that a part of a character at the end is wrong; its place is that of the end.
    """
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return len(text) if ended else None
        return error.start if error.reason == "invalid start byte" else error.end
    return None


class Vocabulary:
    """What each token of a tokenizer stands for.

    Attributes:
        pieces: bytes by token id; None for an id without a token.
        special: control tokens by id, such as <|im_end|>; text never stands for one.
        strips: decoding removes a space from the beginning of a text, which encoding puts there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str):
        """Reads the vocabulary, and checks it on a text.

        Args:
            tokenizer: of student or teacher.
            name: of the model, for messages.

        Raises:
            ValueError: a text is not the concatenation of this tokenizer's tokens.
        """
        remedy = (
            "take a model with a byte-level or SentencePiece tokenizer, or distil with lmbda 0 and its answers as data"
        )
        rule = "a text must be the concatenation of its tokens, to find where both tokenizers cut it"
        backend = getattr(tokenizer, "backend_tokenizer", None)
        require(backend is not None, f"the tokenizer of {name!r} is not a fast one", rule, remedy)
        parts = _decoders(backend.decoder)
        kinds = {part["type"] for part in parts}
        require(bool(kinds) and kinds <= CONCATENATING,
                f"the tokenizer of {name!r} decodes by {', '.join(sorted(kinds)) or 'joining with spaces'}", rule,
                remedy)  # fmt: skip
        added = tokenizer.added_tokens_decoder
        self.tokenizer, self.name = tokenizer, name
        self.special = {id_: token.content for id_, token in added.items() if token.special}
        self.special |= {id_: tokenizer.convert_ids_to_tokens(id_) for id_ in tokenizer.all_special_ids}
        self.fallback: set[int] = set()  # ids that stand for a byte
        self.pieces: list[bytes | None] = [None] * (max(tokenizer.get_vocab().values()) + 1)
        for token, id_ in tokenizer.get_vocab().items():
            if id_ in added or id_ in self.special:
                self.pieces[id_] = token.encode()
            elif "ByteLevel" in kinds:
                self.pieces[id_] = b"".join(_BYTE_OF[c] if c in _BYTE_OF else c.encode() for c in token)
            elif "ByteFallback" in kinds and (found := _BYTE.fullmatch(token)):
                self.pieces[id_] = bytes([int(found[1], 16)])
                self.fallback.add(id_)
            else:
                for part in parts:
                    if part["type"] == "Metaspace":
                        token = token.replace(part["replacement"], " ")
                    elif part["type"] == "Replace":
                        token = token.replace(part["pattern"].get("String", SPACE), part["content"])
                self.pieces[id_] = token.encode()
        self.strips = any(part["type"] == "Strip" and part["start"] for part in parts) or any(
            part["type"] == "Metaspace" and part["prepend_scheme"] != "never" for part in parts
        )
        ids = tokenizer.encode(_PROBE, add_special_tokens=False)
        decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        require(b"".join(self.of(ids)).decode(errors="replace") == decoded,
                f"the tokenizer of {name!r} decodes {decoded[:20]!r}... from tokens that say something else", rule,
                remedy)  # fmt: skip

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """Bytes of the tokens of a text, as decoding gives them.

        Args:
            ids: from the beginning of the text; those without a token stand for nothing.
        """
        tokens = [(self.pieces[id_] or b"") if id_ < len(self.pieces) else b"" for id_ in ids]
        if self.strips and tokens and tokens[0].startswith(b" ") and ids[0] not in self.special:
            tokens[0] = tokens[0][1:]
        return tokens

    def encode(self, texts: Sequence[str]) -> list[tuple[list[int], list[bytes]]]:
        """Token ids and their bytes for texts without control tokens; what looks like one is text.

        Args:
            texts: of any length. A space that the tokenizer puts before a text is not counted.
        """
        texts = list(texts)
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        found = []
        for text, ids in zip(texts, encoded, strict=True):
            tokens = [(self.pieces[id_] or b"") if id_ < len(self.pieces) else b"" for id_ in ids]
            if tokens and tokens[0].startswith(b" ") and b"".join(tokens) == b" " + text.encode():
                tokens[0] = tokens[0][1:]
            found.append((ids, tokens))
        return found


def _decoders(decoder: object) -> list[dict]:
    """The parts of a decoder, as JSON."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _byte_characters() -> dict[str, bytes]:
    """Characters by which byte-level BPE writes bytes: printable ones for themselves, others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(0x100 + n): bytes([byte]) for n, byte in enumerate(others)
    }


_BYTE_OF = _byte_characters()


def matches(
    own: Vocabulary, other: Vocabulary, sizes: tuple[int, int], ends: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """Pairs of tokens that stand for the same bytes, or for the same control token.

    Args:
        own: the student's.
        other: the teacher's.
        sizes: rows of the two output heads; ids beyond are left out.
        ends: the end tokens, which are a pair whatever they are called.

    Returns:
        Ids of the student, and those of the teacher, in the order of the student's ids. No id comes twice: of several
        tokens with the same bytes, the first ones are a pair, and so on, those of byte fallback last.
    """
    sides = []
    for vocabulary, size, end in zip((own, other), sizes, ends, strict=True):
        by_key = defaultdict(list)
        for id_ in sorted(range(min(size, len(vocabulary.pieces))), key=lambda i: (i in vocabulary.fallback, i)):
            if vocabulary.pieces[id_] and id_ != end:
                by_key[id_ in vocabulary.special, vocabulary.pieces[id_]].append(id_)
        sides.append(by_key)
    pairs = [
        pair for key in sides[0].keys() & sides[1].keys() for pair in zip(sides[0][key], sides[1][key], strict=False)
    ]
    return tuple(map(list, zip(*sorted([*pairs, ends]), strict=True)))


def translate(
    rows: Sequence[Sequence[int]], source: Vocabulary, target: Vocabulary
) -> list[tuple[list[int], list[bytes]]]:
    """Texts in the tokens of another tokenizer.

    A control token becomes the one of the same name, if there is one; else it is text. A text ends where it stops to
    be UTF-8.

    Args:
        rows: token ids, each from the beginning of a text, without the end token.
        source: of these.
        target: of the result.

    Returns:
        Token ids of each text, and the bytes of each of them.
    """
    names = {content: id_ for id_, content in target.special.items()}
    parts: list[list[str | int]] = []
    for ids in rows:
        parts.append([])
        kinds = [names.get(source.special.get(id_)) for id_ in ids]
        for name, group in itertools.groupby(zip(kinds, source.of(ids), strict=True), key=lambda pair: pair[0]):
            pieces = [piece for _, piece in group]
            if name is not None:
                parts[-1] += [name] * len(pieces)
                continue
            text = b"".join(pieces)
            readable = whole_characters(text)
            parts[-1] += [readable] if readable else []
            if len(readable.encode()) < len(text):
                break
    encoded = iter(target.encode([part for row in parts for part in row if isinstance(part, str)]))
    found = []
    for row in parts:
        new = [next(encoded) if isinstance(part, str) else ([part], [target.pieces[part]]) for part in row]
        found.append(
            tuple([x for side in sides for x in side] for sides in zip(*new, strict=True)) if new else ([], [])
        )
    return found
