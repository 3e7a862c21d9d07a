"""Attention as pictures: maps of queries by keys in the manner of the paper's Figure 1.

Colours are those of clusters; the lighter, the less weight: each halving of a weight is one of fifteen shades.

Shapes: P positions looked at, N keys, Y rows and X columns of a picture.
"""

from __future__ import annotations

import colorsys
import io
import itertools

import numpy as np

SHADES = 15
"""Shades of a read key; shade 15 is more than half the weight, shade 1 is 2^-14 or less."""

GOLDEN = 137.508
"""Degrees between the hues of one cluster and the next: neighbours differ, and none comes twice."""

PLAIN_HUE = 212.0
"""Hue of what is read by heads without clusters."""

SIDE = 512
"""Rows and columns of a map at the most; fewer positions are drawn larger."""

FUTURE, UNREAD, GAP = (226, 229, 233), (255, 255, 255), (120, 126, 134)


def shades(weight: np.ndarray) -> np.ndarray:
    """Return the shade of each weight, uint8 of the same shape: 0 where nothing is read, else 1 to 15."""
    with np.errstate(divide="ignore"):
        steps = np.ceil(np.log2(weight, where=weight > 0, out=np.zeros(weight.shape, np.float32)))
    return np.where(weight > 0, np.clip(SHADES + steps, 1, SHADES), 0).astype(np.uint8)


def hue(cluster: int) -> float:
    """Return the hue of a cluster in degrees; -1: none."""
    return PLAIN_HUE if cluster < 0 else (cluster * GOLDEN + 10) % 360


def palette(clusters: int) -> np.ndarray:
    """Return the colours of no cluster (entry 0) and of each cluster (entry 1 on), uint8 `[clusters + 1, 3]`."""
    colours = [colorsys.hls_to_rgb(hue(cluster) / 360, 0.42, 0.85) for cluster in range(-1, clusters)]
    return (np.array(colours) * 255).round().astype(np.uint8)


def attention_map(weight_PN: np.ndarray, cluster_PN: np.ndarray, at_P: np.ndarray, clusters: int) -> np.ndarray:
    """Return a picture `[Y, X, 3]` of what rows of queries read of columns of keys, from the top and from the left.

    Of more than `SIDE` columns, several keys share one, which shows the one with most weight. Keys behind a query are
    grey.
    """
    columns = min(SIDE, weight_PN.shape[1])
    edge_X = np.linspace(0, weight_PN.shape[1], columns + 1).round().astype(np.int64)
    weight_PX, cluster_PX = np.zeros((len(at_P), columns), np.float32), np.full((len(at_P), columns), -1)
    for x, (first, stop) in enumerate(itertools.pairwise(edge_X)):
        best_P = weight_PN[:, first:stop].argmax(1)
        weight_PX[:, x] = np.take_along_axis(weight_PN[:, first:stop], best_P[:, None], 1)[:, 0]
        cluster_PX[:, x] = np.take_along_axis(cluster_PN[:, first:stop], best_P[:, None], 1)[:, 0]
    picture = blended(np.array(UNREAD), palette(clusters)[cluster_PX + 1], opacity(weight_PX))
    picture[edge_X[:-1] > at_P[:, None]] = FUTURE
    return enlarged(picture, max(1, SIDE // max(picture.shape[:2])))


def opacity(weight: np.ndarray) -> np.ndarray:
    """Return how much of its colour a weight shows, from 0 to 1; the least that is read can still be seen."""
    shade = shades(weight)
    return np.where(shade > 0, 0.25 + 0.75 * shade / SHADES, 0.0)


def blended(below: np.ndarray, above: np.ndarray, opacity_YX: np.ndarray) -> np.ndarray:
    """Return colours `[Y, X, 3]` laid over others, uint8."""
    share = opacity_YX[..., None]
    return (below * (1 - share) + above * share).round().astype(np.uint8)


def enlarged(picture: np.ndarray, times: int) -> np.ndarray:
    """Return a picture whose every pixel is a square of `times` by `times`."""
    return picture.repeat(times, axis=0).repeat(times, axis=1)


def sheet(rows: list[list[np.ndarray]], gap: int = 6) -> np.ndarray:
    """Return pictures of equal size as one, in rows of equal length, on a grey ground."""
    height, width = rows[0][0].shape[:2]
    whole = (len(rows) * (height + gap) - gap, len(rows[0]) * (width + gap) - gap)
    page = np.full((*whole, 3), GAP, dtype=np.uint8)
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            top, left = y * (height + gap), x * (width + gap)
            page[top : top + height, left : left + width] = picture
    return page


def png(picture: np.ndarray) -> bytes:
    """Return a picture `[Y, X, 3]` as a PNG."""
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(target, "PNG", optimize=True)
    return target.getvalue()
