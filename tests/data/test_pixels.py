from __future__ import annotations

import io

import numpy as np
import pytest
from image_cases import encoded, random_images
from PIL import Image

from rtx.data.pixels import Want, is_lossy, pixels
from rtx.errors import UserError

HERE = "cats.parquet: row 3"
WANT = Want(8, 6)
IMAGE = random_images(1, 8, 6)[0]


def read(raw: bytes, want: Want = WANT) -> np.ndarray:
    return np.frombuffer(pixels(raw, HERE, want), dtype=np.uint8).reshape(want.height, want.width, 3)


def refusal(raw: bytes, want: Want = WANT) -> str:
    with pytest.raises(UserError) as caught:
        pixels(raw, HERE, want)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "TGA"])
def test_pixels_are_raster_red_green_blue(kind):
    assert (read(encoded(IMAGE, kind)) == IMAGE).all()
    assert pixels(encoded(IMAGE), HERE, WANT)[:6] == bytes([*IMAGE[0, 0], *IMAGE[0, 1]])


def test_other_kinds_of_images_become_rgb():
    grey = IMAGE[:, :, 0]
    assert (read(encoded(grey)) == grey[:, :, None]).all()
    sixteen = grey.astype(np.uint16) * 256 + 77
    assert (read(encoded(sixteen)) == grey[:, :, None]).all()  # the upper 8 bits; Pillow's own conversion would clip
    palette = Image.fromarray(IMAGE).quantize(16)
    assert (read(encoded(palette)) == np.asarray(palette.convert("RGB"))).all()
    palette.info["transparency"] = bytes(range(16))
    assert (
        read(encoded(palette)) == np.asarray(Image.open(io.BytesIO(encoded(palette))).convert("RGBA"))[..., :3]
    ).all()
    see_through = np.concatenate([IMAGE, np.zeros((8, 6, 1), np.uint8)], axis=2)
    assert (read(encoded(see_through)) == IMAGE).all()  # alpha is dropped, the colours behind it kept
    bits = Image.fromarray(grey > 127)
    assert set(np.unique(read(encoded(bits)))) == {0, 255}


def test_another_size_is_refused_or_scaled():
    raw = encoded(random_images(1, 12, 12)[0])
    said = refusal(raw)
    assert said.startswith(f"{HERE}: expected an image of 8 x 6 (height x width), found 12 x 12")
    assert "data.size=8 data.length=192" in said
    flat = np.arange(144, dtype=np.uint8).reshape(12, 12, 1).repeat(3, 2)
    means = flat.reshape(4, 3, 4, 3, 3).mean((1, 3))
    found = read(encoded(flat), Want(4, 4, scaled=True))
    assert np.abs(found - means).max() <= 0.5  # a box filter: the mean of each block


def test_lossy_images_are_told_apart():
    for kind, lossy in (("JPEG", True), ("WEBP", True), ("PNG", False), ("BMP", False), ("GIF", False)):
        assert is_lossy(encoded(IMAGE, kind)[:16]) == lossy
    lossless = io.BytesIO()
    Image.fromarray(IMAGE).save(lossless, "WEBP", lossless=True)
    assert not is_lossy(lossless.getvalue()[:16]) and (read(lossless.getvalue()) == IMAGE).all()
    assert "found a lossy one" in refusal(encoded(IMAGE, "JPEG"))
    assert read(encoded(IMAGE, "JPEG"), WANT._replace(lossy=True)).shape == (8, 6, 3)
    tiff = io.BytesIO()
    Image.fromarray(IMAGE).save(tiff, "TIFF", compression="jpeg")
    assert "found a lossy one" in refusal(tiff.getvalue())


def test_what_cannot_be_decoded_is_named():
    raw = encoded(IMAGE)
    assert refusal(b"").startswith(f"{HERE}: expected a whole image, found nothing")
    assert "no image format that is read" in refusal(b"<html>404</html>")
    for cut in (20, len(raw) // 2, len(raw) - 60):
        assert refusal(raw[:cut]).startswith(
            f"{HERE}: expected a whole image, found {cut} bytes that cannot be decoded"
        )
    altered = bytearray(raw)
    altered[len(raw) // 2] ^= 0xFF
    assert "cannot be decoded" in refusal(bytes(altered))
    assert "no image format that is read" in refusal(encoded(IMAGE, "EPS"))  # would start Ghostscript
    assert "mode F" in refusal(encoded(Image.fromarray(np.zeros((8, 6), np.float32)), "TIFF"))


def test_an_image_that_unpacks_to_gigabytes_is_refused_by_its_header():
    header = bytearray(encoded(Image.new("L", (1, 1))))
    header[16:24] = (60_000).to_bytes(4, "big") * 2
    import zlib

    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    assert "cannot be decoded" in refusal(bytes(header), Want(8, 8, scaled=True))
    header[16:24] = (9_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    assert "found 9000 x 9000" in refusal(bytes(header))
