"""Pictures of the patterns, drawn by their own rules: `python docs/pictures.py` writes docs/pictures/<name>.svg.

Rows are queries from the top, columns are keys. Each cluster has a colour; grey: read in several.

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

N, D, W, C = 32, 8, 8, 4
CELL, EDGE = 8, 18  # pixels of a pair, and left of and above all pairs
COLOURS = ("#4878b8", "#e07b2a", "#3f9a5a", "#a865b5")
SEVERAL, MAY = (
    "#777777",
    "#80808026",
)  # read in several clusters; a pair that a causal pattern may read
FOLDER = Path(__file__).parent / "pictures"


def sequence() -> tuple[Tensor, Tensor, Tensor]:
    """Return centroids `[1, C, D]`, and queries and keys `[1, 1, N, D]` scattered around them as a walk goes."""
    generator = torch.Generator().manual_seed(11)
    centroid_HCD = to_sphere(torch.randn(1, C, D, generator=generator))
    topic_N = torch.randint(C, (N,), generator=generator)
    near = [
        centroid_HCD[0, topic_N] + 0.8 * torch.randn(N, D, generator=generator) for _ in range(2)
    ]
    return centroid_HCD, near[0][None, None], near[1][None, None]


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
    given = pattern.inputs(q_BHND, k_BHND if pattern.has_keys else None, None)
    return pattern.rule(given, 0, False)


def draw(name: str, reads_PNN: Tensor) -> str:
    """Return a picture as SVG, with the share of all pairs that are read below it."""
    lists_NN, first_NN = reads_PNN.sum(0), reads_PNN.int().argmax(0)
    colour_NN = torch.where(lists_NN > 1, C, first_NN % C).masked_fill(lists_NN == 0, -1)
    paths = dict.fromkeys((*COLOURS, SEVERAL), "")
    for row, colours in enumerate(colour_NN.tolist()):
        for colour, run in itertools.groupby(enumerate(colours), key=lambda pair: pair[1]):
            columns = [column for column, _ in run]
            if colour >= 0:
                width = CELL * len(columns) - 1
                paths[(*COLOURS, SEVERAL)[colour]] += (
                    f"M{CELL * columns[0]} {CELL * row}h{width}v{CELL - 1}h-{width}z"
                )
    pairs = math.comb(N + 1, 2)
    whose = " j \u2264 i"
    if lists_NN.triu(1).any():
        pairs = N**2
        whose = ""
    side, share = CELL * N, f"{(lists_NN > 0).sum() / pairs:.0%} of all pairs{whose}"
    stairs = "".join(f"V{CELL * (n + 1)}H{CELL * (n + 2)}" for n in range(N - 1))
    drawn = "".join(
        f'<path fill="{colour}" d="{path}"/>\n' for colour, path in paths.items() if path
    )
    size = f'viewBox="0 0 {side + EDGE} {side + 2 * EDGE}" width="{side + EDGE}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<title>{name}: {share}</title>
<g font-family="sans-serif" font-size="11" fill="#808080"><text x="{EDGE}" y="12">key j \u2192</text>
<text transform="translate(12 {EDGE}) rotate(90)">query i \u2192</text>
<text x="{EDGE}" y="{side + EDGE + 14}">{share}</text></g>
<g transform="translate({EDGE} {EDGE})"><path fill="{MAY}" d="M0 0H{CELL}{stairs}V{side}H0z"/>
{drawn}</g></svg>
"""


def main() -> None:
    """Draw every pattern."""
    FOLDER.mkdir(exist_ok=True)
    for name, pattern in patterns().items():
        (FOLDER / f"{name}.svg").write_text(draw(name, reads(pattern)), encoding="utf-8")


if __name__ == "__main__":
    main()
