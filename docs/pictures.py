"""Draw each pattern by its rule: `python docs/pictures.py` writes docs/pictures/<name>.svg.

Rows are queries from the top, columns are keys. Each cluster has a colour. Pairs that are read in
several clusters are grey.

Shapes: N positions, C clusters, D head size, W attention window, P lists of a head.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch
from torch import Tensor

from rtx import attention
from rtx.attention import Pattern
from rtx.attention.centroids import to_sphere

N = 32
D = 8
W = 8
C = 4
CELL = 8
"""Pixels of a pair."""
EDGE = 18
"""Pixels left of and above all pairs."""
COLOURS = ("#4878b8", "#e07b2a", "#3f9a5a", "#a865b5", "#777777")
"""Of the C clusters, and of pairs that are read in several."""
BACKGROUND = "#80808026"
"""Of the pairs that a causal pattern may read."""
UNREAD = -1
"""In place of the number of a colour."""
NOISE = 0.8
"""Deviation of queries and keys from the centroid that they are scattered around."""
FOLDER = Path(__file__).parent / "pictures"


def sequence() -> tuple[Tensor, Tensor, Tensor]:
    """Return centroids `[1, C, D]`, and queries and keys `[1, 1, N, D]` scattered around them.

    The query and the key of a position are near the same centroid, drawn at random.
    """
    generator = torch.Generator().manual_seed(11)
    centroid_HCD = to_sphere(torch.randn(1, C, D, generator=generator))
    topic_N = torch.randint(C, (N,), generator=generator)
    centre_ND = centroid_HCD[0, topic_N]
    q_ND = centre_ND + NOISE * torch.randn(N, D, generator=generator)
    k_ND = centre_ND + NOISE * torch.randn(N, D, generator=generator)
    return centroid_HCD, q_ND[None, None], k_ND[None, None]


def routed(selection: str, keys: str = "shared", causal: bool = True) -> Pattern:
    """Return a routing head whose centroids are those of the sequence."""
    store = attention.Centroids(1, C, D, window=W, length=N, decay=1.0, keys=keys)
    store.centroid_HCD.copy_(sequence()[0])
    store.threshold_HC.fill_(0.55 * D)
    return attention.ROUTING_CLASSES[selection](store, causal=causal)


def probed() -> Pattern:
    """Return a head of probed keys whose centroids are those of the sequence."""
    pattern = attention.Probed(1, D, clusters=C, decay=1.0, window=W)
    pattern.centroids.centroid_HCD.copy_(sequence()[0])
    return pattern


@torch.no_grad()
def patterns() -> dict[str, Pattern]:
    """Return what is drawn, by name: one head of each."""
    hashed = {"window": W, "rounds": 1, "buckets": C, "seed": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        span = attention.AdaptiveSpan(1, window=W, ramp=3)
        span.share_H.fill_(5 / W)
        return {
            "full": attention.Full(),
            "local": attention.Local(window=W),
            "recurrent": attention.Recurrent(length=W, memory=W // 2),
            "strided": attention.Strided(stride=W),
            "fixed": attention.Fixed(block=W, summary=2),
            "fixed-block": attention.FixedBlock(block=W),
            "fixed-summary": attention.FixedSummary(block=W, summary=2),
            "topk": routed("topk"),
            "causal": routed("causal"),
            "nearest": routed("nearest"),
            "separate": routed("topk", "separate"),
            "projected": routed("topk", "projected"),
            "random": attention.Random(1, C, window=W, length=N, seed=0),
            "lsh-causal": attention.Lsh(1, D, variant="causal", **hashed),
            "lsh-reformer": attention.Lsh(1, D, variant="reformer", **hashed),
            "span": span,
            "exact": attention.Exact(window=W),
            "blocks": attention.Blocks(1, D, window=W, block=W // 2),
            "indexer": attention.Indexer(1, D, window=W),
            "probed": probed(),
            "encoder": routed("topk", "separate", causal=False),
            "encoder-local": attention.Local(window=W, causal=False),
        }


@torch.no_grad()
def reads(pattern: Pattern) -> Tensor:
    """Return the mask `[P, N, N]` of which query reads which key in which list."""
    _, q_BHND, k_BHND = sequence()
    keys = k_BHND if pattern.has_keys else None
    qk = pattern.inputs(q_BHND, keys, None)
    return pattern.rule(qk, 0, False)


def draw(name: str, reads_PNN: Tensor) -> str:
    """Return a picture as SVG, with the share of all pairs that are read below it."""
    side = CELL * N
    share = share_read(reads_PNN)
    steps = [f"V{CELL * (n + 1)}H{CELL * (n + 2)}" for n in range(N - 1)]
    triangle = f"M0 0H{CELL}{''.join(steps)}V{side}H0z"
    paths = [
        f'<path fill="{colour}" d="{path}"/>\n'
        for colour, path in zip(COLOURS, paths_of_colours(reads_PNN), strict=True)
        if path
    ]
    size = f'viewBox="0 0 {side + EDGE} {side + 2 * EDGE}" width="{side + EDGE}"'
    font = 'font-family="sans-serif" font-size="11" fill="#808080"'
    keys = f'<text x="{EDGE}" y="12">key j \u2192</text>'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<title>{name}: {share}</title>
<g {font}>{keys}
<text transform="translate(12 {EDGE}) rotate(90)">query i \u2192</text>
<text x="{EDGE}" y="{side + EDGE + 14}">{share}</text></g>
<g transform="translate({EDGE} {EDGE})"><path fill="{BACKGROUND}" d="{triangle}"/>
{"".join(paths)}</g></svg>
"""


def share_read(reads_PNN: Tensor) -> str:
    """Return the share of pairs that are read: of those with j <= i, if no other is read."""
    is_read_NN = reads_PNN.any(0)
    if is_read_NN.triu(1).any():
        return f"{is_read_NN.sum() / N**2:.0%} of all pairs"
    return f"{is_read_NN.sum() / math.comb(N + 1, 2):.0%} of all pairs j \u2264 i"


def paths_of_colours(reads_PNN: Tensor) -> list[str]:
    """Return the squares of each colour as the path of an SVG; neighbours in a row are joined."""
    lists_NN = reads_PNN.sum(0)
    first_list_NN = reads_PNN.int().argmax(0)
    colour_NN = torch.where(lists_NN > 1, C, first_list_NN % C)
    colour_NN = colour_NN.masked_fill(lists_NN == 0, UNREAD)
    paths = ["" for _ in COLOURS]
    for row, colours in enumerate(colour_NN.tolist()):
        column = 0
        for colour, neighbours in itertools.groupby(colours):
            count = len(list(neighbours))
            if colour != UNREAD:
                width = CELL * count - 1
                corner = f"M{CELL * column} {CELL * row}"
                paths[colour] += f"{corner}h{width}v{CELL - 1}h-{width}z"
            column += count
    return paths


def main() -> None:
    """Draw every pattern."""
    FOLDER.mkdir(exist_ok=True)
    for name, pattern in patterns().items():
        (FOLDER / f"{name}.svg").write_text(draw(name, reads(pattern)), encoding="utf-8")


if __name__ == "__main__":
    main()
