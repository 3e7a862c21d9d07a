"""Maps and pictures of attention: shades, colours, and which pixel shows what."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from rtx.report.maps import (
    FUTURE,
    UNREAD,
    attention_map,
    hue,
    palette,
    png,
    shades,
    sheet,
)


def test_each_halving_of_a_weight_is_a_shade_less() -> None:
    weights = np.array([0, 1, 0.9, 0.5, 0.3, 0.25, 2.0**-14, 2.0**-30], np.float32)
    assert shades(weights).tolist() == [0, 15, 15, 14, 14, 13, 1, 1]


def test_clusters_have_colours_of_their_own() -> None:
    colours = palette(40)
    assert colours.shape == (41, 3) and len({tuple(colour) for colour in colours}) == 41
    apart = [abs(hue(a) - hue(a + 1)) % 360 for a in range(40)]
    assert min(min(d, 360 - d) for d in apart) > 90


def test_a_map_shows_who_reads_whom_in_which_cluster() -> None:
    weight_PN = np.array([[1, 0, 0, 0], [0.5, 0, 0.5, 0]], np.float32)
    cluster_PN = np.array([[1, -1, -1, -1], [0, -1, 1, -1]])
    picture = attention_map(weight_PN, cluster_PN, np.array([0, 2]), clusters=2)
    assert picture.shape == (2 * 128, 4 * 128, 3)
    small = picture[::128, ::128]
    assert small[0, 0].tolist() == palette(2)[2].tolist(), "all weight: the cluster's own colour"
    assert small[0, 1:].tolist() == [list(FUTURE)] * 3
    assert small[1, 1].tolist() == list(UNREAD) and small[1, 3].tolist() == list(FUTURE)
    assert small[1, 0].tolist() != small[1, 2].tolist()
    assert (picture == small.repeat(128, 0).repeat(128, 1)).all()


def test_keys_that_share_a_column_show_the_strongest() -> None:
    weight_PN = np.zeros((1, 1024), np.float32)
    weight_PN[0, [10, 11]] = 0.25, 0.75
    cluster_PN = np.full((1, 1024), -1)
    cluster_PN[0, [10, 11]] = 0, 1
    picture = attention_map(weight_PN, cluster_PN, np.array([1023]), clusters=2)
    assert picture.shape == (1, 512, 3)
    assert (picture[0, 5] == palette(2)[2]).all() and (picture[0, 4] == UNREAD).all()


def test_pictures_stand_in_rows() -> None:
    cells = [[np.full((4, 5, 3), 10 * y + x, np.uint8) for x in range(3)] for y in range(2)]
    page = sheet(cells, gap=2)
    assert page.shape == (10, 19, 3)
    assert page[6, 7, 0] == 11 and page[0, 14, 0] == 2 and page[4, 0, 0] not in (0, 10)
    with Image.open(io.BytesIO(png(page))) as image:
        assert (np.asarray(image) == page).all()
