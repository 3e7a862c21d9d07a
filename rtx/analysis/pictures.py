"""Pictures of the patterns, drawn by what they read: `python -m rtx.analysis.pictures docs/attention.md`.

A picture is asked of the pattern itself: with the unit vectors as values, the output of a position is its weight on
each key. Rows are queries from the top, columns are keys; two rows share a line of text.

Shapes: N positions, M of them as the keys of another sequence, D head size.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rtx.attention import adaptive_span, cross_routing, fixed, full, local, lsh, random, rotations, routing, strided
from rtx.attention.kmeans import to_sphere

N, D, W, C = 32, 8, 8, 4
M, PADDED = 24, 4
"""Keys of the other sequence, and how many of them, the last, are padding."""

WITHOUT_MASK = ("separate-unmasked", "cross")
"""Pictures of patterns that read later positions, too, or another sequence."""

Pattern = Callable[[Tensor, Tensor, Tensor], Tensor]


def sequence() -> tuple[Tensor, Tensor, Tensor]:
    """Return centroids `[1, C, D]`, and queries and keys `[1, 1, N, D]` scattered around them as a walk goes."""
    generator = torch.Generator().manual_seed(11)
    centroid_HCD = to_sphere(torch.randn(1, C, D, generator=generator))
    topic_N = torch.randint(C, (N,), generator=generator)
    near = [centroid_HCD[0, topic_N] + 0.8 * torch.randn(N, D, generator=generator) for _ in range(2)]
    return centroid_HCD, near[0][None, None], near[1][None, None]


def patterns() -> dict[str, Pattern]:
    """Return what is drawn, by name."""
    centroid_HCD = sequence()[0]
    routed = {"window": W, "threshold_HC": torch.full((1, C), 0.55 * D)}
    crossed = {"window": W, "context_window": M // C, "context_mask_BM": torch.arange(M)[None] < M - PADDED}
    draw_HDD = torch.randn(1, D, D, generator=torch.Generator().manual_seed(5))
    projected = {"window": W, "projection_HDD": torch.linalg.qr(draw_HDD).Q}
    hashed = {"rotation_HTDF": rotations(1, 1, D, C, seed=2), "window": W}
    return {
        "full": full,
        "local": lambda q, k, v: local(q, k, v, window=W),
        "strided": lambda q, k, v: strided(q, k, v, stride=W),
        "fixed": lambda q, k, v: fixed(q, k, v, block=W, summary=2),
        "topk": lambda q, k, v: routing(q, None, v, centroid_HCD, selection="topk", window=W),
        "causal": lambda q, k, v: routing(q, None, v, centroid_HCD, selection="causal", **routed),
        "nearest": lambda q, k, v: routing(q, None, v, centroid_HCD, selection="nearest", window=W),
        "separate": lambda q, k, v: routing(q, k, v, centroid_HCD, selection="topk", window=W),
        "separate-unmasked": lambda q, k, v: routing(q, k, v, centroid_HCD, selection="topk", window=W, causal=False),
        "cross": lambda q, k, v: cross_routing(q, k[:, :, :M], v[:, :, :M, :M], centroid_HCD, **crossed),
        "projected": lambda q, k, v: routing(q, k, v, centroid_HCD, selection="topk", **projected),
        "random": lambda q, k, v: random(q, None, v, clusters=C, window=W, seed=0),
        "lsh-causal": lambda q, k, v: lsh(q, v, variant="causal", **hashed),
        "lsh-reformer": lambda q, k, v: lsh(q, v, variant="reformer", **hashed),
        "span": lambda q, k, v: adaptive_span(q, k, v, torch.tensor([5.0]), window=W, ramp=3),
    }


def reads(pattern: Pattern) -> Tensor:
    """Return the mask `[N, N]` (`[N, M]` where keys are another sequence's) of which query reads which key."""
    _, q_BHND, k_BHND = sequence()
    return pattern(q_BHND, k_BHND, torch.eye(N)[None, None])[0, 0] != 0


def draw(reads_NN: Tensor) -> str:
    """Return a picture as lines of text."""
    lines = []
    for upper_N, lower_N in zip(reads_NN[::2], reads_NN[1::2], strict=True):
        pairs = zip(upper_N.tolist(), lower_N.tolist(), strict=True)
        lines.append("".join("·▄▀█"[2 * upper + lower] for upper, lower in pairs))
    return "\n".join(lines)


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
        causal = name not in WITHOUT_MASK
        share = seen_NN.sum() / (math.comb(N + 1, 2) if causal else seen_NN.numel())
        pairs = "all pairs j <= i" if causal else "all pairs"
        return f"<!-- picture: {name} -->\n```text\n{draw(seen_NN)}\n{share:.0%} of {pairs}\n```"

    return re.sub(r"<!-- picture: (\S+) -->\n```text\n.*?\n```", block, page, flags=re.DOTALL)


def main() -> None:
    """Redraw the pictures of the pages named on the command line."""
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(redraw(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
