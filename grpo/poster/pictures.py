"""Images from files as policies and rewards see them: upright 8-bit RGB."""

import numpy as np
from PIL import Image, ImageOps

ORIENTATION = 0x0112  # EXIF tag; values 5 to 8 swap width and height
ORIENTED = ("JPEG", "WEBP")  # formats whose EXIF orientation is applied; in a PNG it may follow the pixels


def size(image: Image.Image) -> tuple[int, int]:
    """Width and height of `rgb(image)` in pixels, without decoding.

    Args:
        image: just opened.
    """
    swapped = image.format in ORIENTED and image.getexif().get(ORIENTATION) in range(5, 9)
    return (image.height, image.width) if swapped else image.size


def rgb(image: Image.Image) -> Image.Image:
    """Decodes an image to upright RGB: the first frame of an animation, colours without transparency.

    Args:
        image: just opened.
    """
    upright = ImageOps.exif_transpose(image) if image.format in ORIENTED else image
    if image.mode.startswith("I"):  # 16-bit grey: Pillow would clip it at 255, almost all white
        upright = Image.fromarray((np.asarray(upright) >> 8).clip(0, 255).astype(np.uint8))
    return upright.convert("RGB")
