"""Pictures in files, as policies and rewards see them: upright, in RGB, with 8 bits."""

import numpy as np
from PIL import Image, ImageOps

ORIENTATION = 0x0112  # of EXIF; from 5 on, the sides are exchanged
TURNED = ("JPEG", "WEBP")  # what cameras write; of a PNG it may stand behind the pixels


def size(image: Image.Image) -> tuple[int, int]:
    """Returns width and height of what `rgb` gives, in pixels; nothing is unpacked.

    Args:
        image: just opened.
    """
    exchanged = image.format in TURNED and image.getexif().get(ORIENTATION) in range(5, 9)
    return (image.height, image.width) if exchanged else image.size


def rgb(image: Image.Image) -> Image.Image:
    """Returns the picture itself; of an animation the first, and of a transparent one what the colours say.

    Args:
        image: just opened.
    """
    upright = ImageOps.exif_transpose(image) if image.format in TURNED else image
    if image.mode.startswith("I"):  # grey of 16 bits: Pillow would cut it off at 255, which is next to black
        upright = Image.fromarray((np.asarray(upright) >> 8).clip(0, 255).astype(np.uint8))
    return upright.convert("RGB")
