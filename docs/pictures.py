"""Pictures of the patterns, drawn by their own rules: `python docs/pictures.py docs/attention.md`.

Rows are queries from the top, columns are keys; two rows share a line of text.

Shapes: N positions, C clusters, D head size, W attention window.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from rtx import attention
from rtx.attention import Pattern
from rtx.attention.centroids import to_sphere

N, D, W, C = 32, 8, 8, 4


def sequence() -> tuple[Tensor, Tensor, Tensor]:
    """Return centroids `[1, C, D]`, and queries and keys `[1, 1, N, D]` scattered around them as a walk goes."""
    generator = torch.Generator().manual_seed(11)
    centroid_HCD = to_sphere(torch.randn(1, C, D, generator=generator))
    topic_N = torch.randint(C, (N,), generator=generator)
    near = [centroid_HCD[0, topic_N] + 0.8 * torch.randn(N, D, generator=generator) for _ in range(2)]
    return centroid_HCD, near[0][None, None], near[1][None, None]


def routed(selection: str, keys: str = "shared") -> Pattern:
    """Return a routing head whose centroids are those of the sequence."""
    store = attention.Centroids(1, C, D, window=W, length=N, decay=1.0, keys=keys)
    store.centroid_HCD.copy_(sequence()[0])
    store.threshold_HC.fill_(0.55 * D)
    return attention.Routing(store, selection=selection)


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
        }


@torch.no_grad()
def reads(pattern: Pattern) -> Tensor:
    """Return the mask `[N, N]` of which query reads which key, in any list."""
    _, q_BHND, k_BHND = sequence()
    given = pattern.inputs(q_BHND, k_BHND if pattern.has_keys else None, None)
    return pattern.rule(given, 0, False).any(0)


def draw(reads_NN: Tensor) -> str:
    """Return a picture as lines of text."""
    lines = []
    for upper_N, lower_N in zip(reads_NN[::2], reads_NN[1::2], strict=True):
        pairs = zip(upper_N.tolist(), lower_N.tolist(), strict=True)
        lines.append("".join("·▄▀█"[2 * upper + lower] for upper, lower in pairs))
    return "\n".join(lines)


def share(reads_NN: Tensor) -> str:
    """Return how many of the pairs that a causal pattern may read are read."""
    return f"{reads_NN.sum() / math.comb(len(reads_NN) + 1, 2):.0%} of all pairs j <= i"


def redraw(page: str) -> str:
    """Return a page with every picture drawn again: the text block behind `<!-- picture: name -->`.

    Raises:
        ValueError: a picture of an unknown pattern.
    """
    known = patterns()

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in known:
            raise ValueError(f"picture: {name}: must be one of {', '.join(known)}")
        seen_NN = reads(known[name])
        return f"<!-- picture: {name} -->\n```text\n{draw(seen_NN)}\n{share(seen_NN)}\n```"

    return re.sub(r"<!-- picture: (\S+) -->\n```text\n.*?\n```", block, page, flags=re.DOTALL)


def main() -> None:
    """Redraw the pictures of the pages named on the command line."""
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(redraw(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
