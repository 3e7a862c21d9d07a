from __future__ import annotations

import numpy as np
import pytest
from image_cases import random_images
from PIL import Image

from rtx.data.sheet import BACKGROUND, GAP, contact_sheet, png_grid
from rtx.errors import UserError


def test_a_sheet_shows_images_taken_evenly(tmp_path):
    images = random_images(100, 6, 4)
    path = contact_sheet(images.reshape(-1), (6, 4), tmp_path / "sheet.png", count=10)
    sheet = np.asarray(Image.open(path))
    columns = 4
    assert sheet.shape == (3 * (6 + GAP) - GAP, columns * (4 + GAP) - GAP, 3)
    for place in range(10):
        top, left = place // columns * (6 + GAP), place % columns * (4 + GAP)
        assert (sheet[top : top + 6, left : left + 4] == images[place * 10]).all()
    assert (sheet[6:8] == BACKGROUND).all() and (sheet[16:, 12:] == BACKGROUND).all()
    assert [entry.name for entry in tmp_path.iterdir()] == ["sheet.png"]


def test_fewer_images_than_asked_for_and_one_alone(tmp_path):
    images = random_images(3, 5, 5)
    sheet = np.asarray(Image.open(contact_sheet(images.reshape(-1), (5, 5), tmp_path / "a.png")))
    assert sheet.shape == (5 + GAP + 5, 5 + GAP + 5, 3)
    (tmp_path / "b.png").write_bytes(png_grid([images[0].reshape(-1)], (5, 5)))
    assert (np.asarray(Image.open(tmp_path / "b.png")) == images[0]).all()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        contact_sheet(random_images(1).reshape(-1), (32, 32), tmp_path / "none" / "a.png")
