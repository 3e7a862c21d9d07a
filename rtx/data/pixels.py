"""One image file in memory -> its sub-pixels: row by row, red, green, blue (height, width, channel).

How other kinds of images become RGB (Pillow's `convert("RGB")`): grey is repeated three times, a palette is looked up,
an alpha channel is dropped and the colours stored behind it are kept, CMYK is converted without a profile. Of 16 bits a
channel the upper 8 are kept, grey ones too (which `convert` would clip). Orientation tags are not followed, and of an
animation the first image is taken.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rtx.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA", "JPEG2000", "AVIF", "QOI")
"""Formats that are read; others of Pillow's start programs (EPS) or hold no photographs."""
SUFFIXES = {
    **dict.fromkeys((".png", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".qoi"), False),
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".jp2", ".j2k", ".jpx", ".avif", ".avifs"), True),
}
"""Endings of the files that count as images, and whether such a file may have lost something."""
HEAD = 16  # bytes that tell a lossy file


class Want(NamedTuple):
    """What every image of a set is, or is made to be."""

    height: int
    width: int
    scaled: bool = False
    """Scale images of any size to this one with a box filter; else another size is refused."""
    lossy: bool = False
    """Whether lossy files are expected; else one is refused, for the set would be stamped wrongly."""

    @property
    def units(self) -> int:
        """Sub-pixels of an image."""
        return self.height * self.width * 3


def pixels(raw: bytes, where: str, want: Want) -> bytes:
    """Return the `height * width * 3` sub-pixels of an image file.

    Args:
        raw: the content of the file.
        where: file and row, for messages.
        want: the size it must have, or is scaled to.

    Raises:
        UserError: it cannot be decoded, is cut short, has another size, or is lossy where none is expected.
    """
    if not want.lossy and is_lossy(raw[:HEAD]):
        raise _unexpected_loss(where)
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # beyond 89 million pixels
            image = Image.open(io.BytesIO(raw), formats=FORMATS)  # reads the header alone
            if not want.scaled:
                check_size(where, image.height, image.width, want)
            if not want.lossy and "jpeg" in str(image.info.get("compression")):  # within a TIFF
                raise _unexpected_loss(where)
            return _fitted(_rgb(image, where), want).tobytes()
    except UserError:
        raise
    except Exception as error:  # decoders raise whatever they like: OSError, SyntaxError, struct.error, EOFError, ...
        raise _undecodable(raw, where, error) from error


def scaled(image_HWC: np.ndarray, want: Want) -> bytes:
    """Return the sub-pixels of an image that is an array, uint8 `[height, width, 3]`, scaled where that is wanted."""
    if image_HWC.shape[:2] == (want.height, want.width):
        return image_HWC.tobytes()
    from PIL import Image

    return _fitted(Image.fromarray(image_HWC), want).tobytes()


def image_size(raw: bytes, where: str) -> tuple[int, int]:
    """Return height and width of an image file from its header; raises UserError as `pixels`."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(raw), formats=FORMATS)
            return image.height, image.width
    except Exception as error:
        raise _undecodable(raw, where, error) from error


def is_lossy(head: bytes) -> bool:
    """Tell from the first 16 bytes whether an image file is of a format that loses something, or may have."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return head[12:16] != b"VP8L"
    # JPEG, the bare stream of JPEG 2000, then AVIF and JPEG 2000 by the name of their first box.
    return head[:3] == b"\xff\xd8\xff" or head[:4] == b"\xff\x4f\xff\x51" or head[4:8] in (b"ftyp", b"jP  ")


def check_size(where: str, height: int, width: int, want: Want) -> None:
    """Refuse an image of another size.

    Raises:
        UserError: says both sizes and what to do.
    """
    if (height, width) != (want.height, want.width):
        raise UserError(
            f"{where}: expected an image of {want.height} x {want.width} (height x width), found {height} x {width}; "
            f"leave it out, or scale all images: data.size={want.height} data.length={3 * want.height**2}"
        )


def _rgb(image: Image.Image, where: str) -> Image.Image:
    if image.mode == "RGB":
        return image
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UserError(
            f"{where}: expected 8 or 16 bits a channel, found mode {image.mode} with 32; save it with 8 or leave it out"
        )
    return image.convert("RGB")


def _fitted(image: Image.Image, want: Want) -> Image.Image:
    from PIL import Image

    same = image.size == (want.width, want.height)
    return image if same else image.resize((want.width, want.height), Image.Resampling.BOX)


def _undecodable(raw: bytes, where: str, error: Exception) -> UserError:
    kind = "nothing" if not raw else f"{len(raw):,} bytes that cannot be decoded ({_reason(error)})"
    return UserError(f"{where}: expected a whole image, found {kind}; get it anew, or leave it out")


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return "no image format that is read" if text.startswith("cannot identify") else text or type(error).__name__


def _unexpected_loss(where: str) -> UserError:
    return UserError(
        f"{where}: expected a lossless image like the first of the set, or as its name says, found a lossy one; "
        "keep lossy images (.jpg, .webp, ...) in a set of their own"
    )
