"""Pictures of the patterns, drawn by what they read: `python -m rtx.analysis.pictures docs/attention.md`.

A picture is asked of the pattern itself: with the unit vectors as values, the output of a position is its weight on
each key. Rows are queries from the top, columns are keys; two rows share a line of text.

Shapes: N positions, M positions of another sequence, D head size.
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

N, M, D, W, C = 32, 24, 8, 8, 4

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
    chosen = {"selection": "topk", "window": W}
    # Orthonormal; not by `kmeans.orthonormal`, which draws from the generator of the process.
    projection_1DD = torch.linalg.qr(torch.randn(1, D, D, generator=torch.Generator().manual_seed(3))).Q
    hashed = {"rotation_HTDF": rotations(1, 1, D, C, seed=2), "window": W}
    return {
        "full": full,
        "local": lambda q, k, v: local(q, k, v, window=W),
        "strided": lambda q, k, v: strided(q, k, v, stride=W),
        "fixed": lambda q, k, v: fixed(q, k, v, block=W, summary=2),
        "topk": lambda q, k, v: routing(q, None, v, centroid_HCD, **chosen),
        "causal": lambda q, k, v: routing(q, None, v, centroid_HCD, selection="causal", **routed),
        "nearest": lambda q, k, v: routing(q, None, v, centroid_HCD, selection="nearest", window=W),
        "separate": lambda q, k, v: routing(q, k, v, centroid_HCD, **chosen),
        "projected": lambda q, k, v: routing(q, k, v, centroid_HCD, projection_HDD=projection_1DD, **chosen),
        "encoder": lambda q, k, v: routing(q, None, v, centroid_HCD, causal=False, **chosen),
        "cross": lambda q, k, v: cross_routing(
            q, k[:, :, :M], v[:, :, :M, :M], centroid_HCD, window=W, context_window=W // 2
        ),
        "random": lambda q, k, v: random(q, None, v, clusters=C, window=W, seed=0),
        "lsh-causal": lambda q, k, v: lsh(q, v, variant="causal", **hashed),
        "lsh-reformer": lambda q, k, v: lsh(q, v, variant="reformer", **hashed),
        "span": lambda q, k, v: adaptive_span(q, k, v, torch.tensor([5.0]), window=W, ramp=3),
    }


def reads(pattern: Pattern) -> Tensor:
    """Return the mask `[N, N]` of which query reads which key; `[N, M]` for keys of another sequence."""
    _, q_BHND, k_BHND = sequence()
    return pattern(q_BHND, k_BHND, torch.eye(N)[None, None])[0, 0] != 0


def draw(reads_NN: Tensor) -> str:
    """Return a picture as lines of text."""
    lines = []
    for upper_N, lower_N in zip(reads_NN[::2], reads_NN[1::2], strict=True):
        pairs = zip(upper_N.tolist(), lower_N.tolist(), strict=True)
        lines.append("".join("·▄▀█"[2 * upper + lower] for upper, lower in pairs))
    return "\n".join(lines)


def share(reads_NN: Tensor) -> str:
    """Return how many of the pairs are read: of those that a causal pattern may read, else of all."""
    if reads_NN.shape[0] == reads_NN.shape[1] and not reads_NN.triu(1).any():
        return f"{reads_NN.sum() / math.comb(len(reads_NN) + 1, 2):.0%} of all pairs j <= i"
    return f"{reads_NN.float().mean():.0%} of all pairs"


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
