"""Glyphs and widths from font files, and the characters that no font has.

Letters are set left to right without kerning, each from the first font that has it. Widths are measured at one large
size, so that whether a text fits into a box does not depend on the resolution.
"""

import hashlib
import io
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import ImageFont, features

INK = 64  # of 255: coverage from which a pixel counts as ink
_EM = 256  # px, font size at which widths are measured
_PROBE = 40  # px, font size at which letters are compared with the box for missing glyphs
_SAMPLE = 32.0  # px, font size at which ink is estimated
PACKAGES = {"CJK": "fonts-noto-cjk", "HIRAGANA": "fonts-noto-cjk", "KATAKANA": "fonts-noto-cjk",
            "HANGUL": "fonts-noto-cjk", "IDEOGRAPHIC": "fonts-noto-cjk", "FULLWIDTH": "fonts-noto-cjk"}  # fmt: skip
_NO_CHARACTER = "\ufffe"  # never assigned, so every font draws its box for missing glyphs


def packages(chars: Iterable[str]) -> list[str]:
    """The Debian packages of fonts that have most characters of the given scripts.

    Args:
        chars: single characters.
    """
    needed = set()
    for char in chars:
        script = unicodedata.name(char, "").replace("-", " ").partition(" ")[0]
        symbol = unicodedata.category(char)[0] == "S" or "\ufe00" <= char <= "\ufe0f"  # variants of emoji
        needed.add("fonts-symbola" if symbol else PACKAGES.get(script, "fonts-noto-core"))
    return sorted(needed)


def printable(chars: Iterable[str]) -> list[str]:
    """Those of the characters that a font may have: not U+FFFD, which stands for broken bytes, nor unassigned ones.

    Args:
        chars: single characters.
    """
    return sorted(c for c in set(chars) if c != "\ufffd" and unicodedata.category(c) not in ("Cn", "Co"))


def missing_text(chars: Iterable[str]) -> str:
    """Says which characters no font has, and what to do.

    Args:
        chars: single characters, at least one.
    """
    chars = sorted(set(chars))
    shown = " ".join(chars[:12]) + (f" and {len(chars) - 12} more" if len(chars) > 12 else "")
    return (f"no font has the characters {shown}, so each would be painted as a box: install fonts that have them "
            f"(apt install {' '.join(packages(chars))}) and name their files in --font_paths")  # fmt: skip


@dataclass(frozen=True)
class Glyph:
    """Coverage of one letter, its offset from the pen, and its number of ink pixels."""

    mask: np.ndarray  # uint8 [h, w]
    left: int
    top: int
    ink: int


class Fonts:
    """Letters from font files, and from Pillow's built-in font for characters that these lack.

    Args:
        paths: TrueType or OpenType files (.ttf, .otf, .ttc), in order of priority.

    Raises:
        ValueError: a file is not a font.
    """

    def __init__(self, paths: Sequence[str] = ()) -> None:
        self._faces, hashes = [], []
        for path in paths:
            try:
                face = ImageFont.truetype(path, _EM, layout_engine=ImageFont.Layout.BASIC)
                with open(path, "rb") as file:
                    hashes.append(hashlib.sha256(file.read()).hexdigest()[:16])
            except OSError as error:
                raise ValueError(
                    f"font {path!r}: {error}; name a .ttf or .otf file that is there, not one of bitmaps"
                ) from None
            self._faces.append(face)
        builtin = ImageFont.load_default(_EM).font_variant(layout_engine=ImageFont.Layout.BASIC)
        self._faces.append(builtin)
        hashes.append(hashlib.sha256(builtin.path.getvalue()).hexdigest()[:16] if _in_memory(builtin) else "builtin")
        #: everything that the pixels depend on, for fingerprints
        self.identity = f"fonts {' '.join(hashes)} freetype {features.version('freetype2')}"
        self._probes = [face.font_variant(size=_PROBE) for face in self._faces]
        self._boxes = [_mask(face, _NO_CHARACTER) for face in self._probes]
        self._widths: dict[str, tuple[int, float]] = {}  # character -> face, advance in font sizes
        self._missing: set[str] = set()
        self._sized: dict[tuple[int, float], ImageFont.FreeTypeFont] = {}
        self._glyphs: dict[tuple[str, float], Glyph] = {}
        self._bytes = 0  # of the glyphs

    def missing(self, text: str) -> set[str]:
        """Characters of a text that no font has, which all look like the same box."""
        for char in text:
            self._width(char)
        return self._missing.intersection(text)

    def length(self, line: str) -> float:
        """Width of a line in font sizes."""
        return sum(self._width(char)[1] for char in line)

    def pens(self, line: str, size: float) -> list[tuple[str, float]]:
        """The characters of a line with their pen positions in px, at a font size in px."""
        positions, pen = [], 0.0
        for char in line:
            positions.append((char, pen))
            pen += self._width(char)[1] * size
        return positions

    def glyph(self, char: str, size: float) -> Glyph:
        """One letter at a font size in px, rounded to a quarter."""
        drawn = max(1.0, round(round(size, 6) * 4) / 4)
        return self._glyphs.get((char, drawn)) or self._draw(char, drawn)

    def ink(self, char: str, size: float) -> float:
        """Estimated ink pixels of a letter, without drawing it at this size."""
        return self.glyph(char, _SAMPLE).ink * (size / _SAMPLE) ** 2

    def _width(self, char: str) -> tuple[int, float]:
        known = self._widths.get(char)
        if known is None:
            index = next((i for i, face in enumerate(self._probes) if _mask(face, char) != self._boxes[i]), None)
            if index is None:
                index = len(self._faces) - 1
                self._missing.add(char)
            known = self._widths[char] = index, self._faces[index].getlength(char) / _EM
        return known

    def _draw(self, char: str, size: float) -> Glyph:
        key = self._width(char)[0], size
        if len(self._sized) > 256:  # the policy chooses the sizes: bound the cache
            self._sized.clear()
        if len(self._glyphs) > 20_000 or self._bytes > 2**25:
            self._glyphs.clear()
            self._bytes = 0
        if key not in self._sized:
            self._sized[key] = self._faces[key[0]].font_variant(size=size)
        core, (left, top) = self._sized[key].getmask2(char, "L", anchor="ls")
        mask = np.frombuffer(bytes(core), np.uint8).reshape(core.size[1], core.size[0])
        glyph = self._glyphs[char, size] = Glyph(mask, int(left), int(top), int((mask >= INK).sum()))
        self._bytes += mask.nbytes
        return glyph


def _in_memory(face: ImageFont.FreeTypeFont) -> bool:
    return isinstance(face.path, io.BytesIO)


def _mask(face: ImageFont.FreeTypeFont, char: str) -> tuple[tuple[int, int], bytes]:
    core = face.getmask(char)
    return core.size, bytes(core)
