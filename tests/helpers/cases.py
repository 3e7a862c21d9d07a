"""Every pattern with drawn options, the tensors that it attends over, and common checks."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

from rtx import attention
from rtx.attention import Pattern, PositionPattern, RelativeTables, oracle
from rtx.model.positions import rotate

KINDS = (
    *(
        "full",
        "local",
        "recurrent",
        "recurrent-same",
        "strided",
        "fixed",
        "fixed_block",
        "fixed_summary",
        "span",
    ),
    "pairs",
    *("lsh", "reformer", "random", "random-keys"),
    *(
        f"{how}-{keys}"
        for how in ("topk", "causal", "nearest")
        for keys in ("shared", "separate", "projected")
    ),
    *(
        "exact",
        "blocks",
        "compressed",
        "blocks_random",
        "indexer",
        "indexer-dense",
        "probed",
        "probed-best",
    ),
)
CLUSTERED = tuple(
    kind for kind in KINDS if kind.partition("-")[0] in ("random", "topk", "causal", "nearest")
)
SEES_FUTURE = tuple(kind for kind in KINDS if kind == "reformer" or kind.startswith("topk"))


@dataclass(frozen=True)
class Case:
    """What a pattern is made of: sizes, and options that the kinds that have them read."""

    B: int = 2
    H: int = 2
    N: int = 17
    D: int = 4
    C: int = 3
    W: int = 5
    attend_self: bool = True
    distances: int = 0
    """Rows of Shaw's tables; 0: none."""
    rotary: bool = False
    scaled: bool = False
    merge: str = "mean"
    rounds: int = 2
    seed: int = 0


CASES = st.builds(
    Case,
    B=st.integers(1, 2),
    H=st.integers(1, 3),
    N=st.integers(1, 30),
    D=st.sampled_from((2, 4, 6)),
    C=st.integers(1, 5),
    W=st.integers(1, 33),
    attend_self=st.booleans(),
    distances=st.sampled_from((0, 1, 2, 7, 40)),
    rotary=st.booleans(),
    scaled=st.booleans(),
    merge=st.sampled_from(("mean", "lse")),
    rounds=st.integers(1, 3),
    seed=st.integers(0, 1 << 20),
)


MIXED = (
    Case(N=15, rotary=True, scaled=True, rounds=1, seed=6),
    Case(B=1, H=3, N=17, D=6, C=2, W=7, attend_self=False, distances=7, merge="lse", seed=9),
    Case(H=1, N=14, D=2, C=5, W=4, distances=40, rotary=True, merge="lse", rounds=3, seed=14),
)
"""Together these have both values of each switch, each merge and each number of rounds. Every
window is shorter than N. `check` streams them after prompts of 6, 9 and 14 positions; 14 are all.
"""
EDGES = (
    Case(H=1, N=1),
    Case(N=3, C=5, W=40, distances=2),
    Case(N=9, W=1, attend_self=False),
)
"""A single position; more clusters than positions, and a window longer than the sequence; a window
of one position."""


class Dilated(PositionPattern):
    """Local attention with gaps that widen from head to head; pairs of positions define it."""

    def __init__(self, *, window: int, stride: int, **options: Any) -> None:
        super().__init__(**options)
        self.window = window
        self.stride = stride

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        stride = self.stride + head
        distance = i - j
        return (distance % stride == 0) & (distance < self.window * stride)


def make(kind: str, case: Case, **options: Any) -> Pattern:
    """Return a pattern of a kind in evaluation mode, in float64 where it has parameters."""
    torch.manual_seed(case.seed)
    options = {"scale": 0.7 if case.scaled else None} | options
    own: dict[str, Any] = {"attend_self": case.attend_self} | options
    clustered: dict[str, Any] = {"merge": case.merge} | own
    H = case.H
    W = case.W
    D = case.D
    seed = case.seed
    length = max(1, case.N)
    summary = 1 + seed % W
    some = {"window": W, "block": 1 + seed % min(W, 4)}
    chosen = {**own, "qk_norm": bool(seed % 2)}
    hashed = {"window": W, "rounds": case.rounds, "buckets": 4, "seed": seed}
    how, _, keys = kind.partition("-")
    memory = W if keys else case.C - 1
    made = {
        "full": lambda: attention.Full(**own),
        "local": lambda: attention.Local(window=W, **own),
        "recurrent": lambda: attention.Recurrent(
            length=W, memory=memory, same_length=bool(keys), **own
        ),
        "strided": lambda: attention.Strided(stride=W, **own),
        "fixed": lambda: attention.Fixed(block=W, summary=summary, **own),
        "fixed_block": lambda: attention.FixedBlock(block=W, **own),
        "fixed_summary": lambda: attention.FixedSummary(block=W, summary=summary, **own),
        "pairs": lambda: Dilated(window=W, stride=case.C, **own),
        "span": lambda: attention.AdaptiveSpan(H, window=W, ramp=1 + case.C, cost=0.1, **options),
        "lsh": lambda: attention.Lsh(H, D, **hashed, **options),
        "reformer": lambda: attention.Lsh(H, D, variant="reformer", **hashed, **options),
        "random": lambda: attention.Random(
            H, case.C, window=W, length=length, seed=seed, has_keys=bool(keys), **clustered
        ),
        "exact": lambda: attention.Exact(window=W, **chosen),
        "blocks": lambda: attention.Blocks(H, D, **some, **chosen),
        "compressed": lambda: attention.Blocks(H, D, compressed=True, **some, **chosen),
        "blocks_random": lambda: attention.RandomBlocks(H, D, seed=seed, **some, **chosen),
        "probed": lambda: attention.Probed(
            H,
            D,
            clusters=case.C,
            decay=0.9,
            window=W,
            candidates=W + summary if keys else None,
            **chosen,
        ),
        "indexer": lambda: attention.Indexer(
            H, D, window=W, width=3, warmup=2 if keys else 0, **chosen
        ),
    }
    if how in made:
        pattern = made[how]()
    else:
        rate = 0.1 if how == "causal" else 0.0
        store = attention.Centroids(
            H, case.C, D, window=W, length=length, decay=0.9, threshold_rate=rate, keys=keys
        )
        pattern = attention.ROUTING_CLASSES[how](store, **clustered)
        for threshold_HC in (store.threshold_HC, store.key_threshold_HC):
            if threshold_HC is not None:
                threshold_HC.copy_(0.5 * torch.randn(H, case.C))
    with torch.no_grad():
        for name, parameter in pattern.named_parameters():
            parameter.copy_(
                torch.rand_like(parameter) if name == "share_H" else torch.randn_like(parameter)
            )
    return pattern.double().eval()


def tensors(pattern: Pattern, case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Return queries, keys, values, rotary angles and Shaw's tables of a case, with gradients."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    heads = case.H
    if pattern.chooses_together:
        heads = case.H * pattern.queries_of_key_head
    shared = heads // pattern.queries_of_key_head
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    q, k, v = (
        draw(case.B, number, case.N, case.D).to(dtype).requires_grad_()
        for number in (heads, shared, shared)
    )
    relative = None
    if case.distances:
        relative = RelativeTables(
            *(draw(case.distances, case.D).to(dtype).requires_grad_() for _ in range(2))
        )
    turn = rotate if case.rotary else None
    return {
        "q": q,
        "k": k if pattern.has_keys else None,
        "v": v,
        "rotate": turn,
        "relative": relative,
    }


def run(function: Any, given: dict[str, Any], **more: Any) -> Tensor:
    """Return the outputs of a pattern, or of the oracle's function, for tensors."""
    found = function(
        given["q"],
        given["k"],
        given["v"],
        rotate=given["rotate"],
        relative=given["relative"],
        **more,
    )
    return found[0] if isinstance(found, tuple) else found


def drawn(
    kind: str, case: Case, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Pattern, dict[str, Any]]:
    pattern = make(kind, case, **options).to(dtype)
    return pattern, tensors(pattern, case, dtype)


def gradients(pattern: Pattern, given: dict[str, Any], out: Tensor) -> dict[str, Tensor]:
    """Return gradients of a random projection of the outputs by name; zeros for none."""
    named: dict[str, Tensor] = {
        name: given[name] for name in ("q", "k", "v") if given[name] is not None
    }
    relative = given["relative"]
    named |= (
        {} if relative is None else {"keys_MD": relative.keys_MD, "values_MD": relative.values_MD}
    )
    named |= {
        name: parameter
        for name, parameter in pattern.named_parameters()
        if name in ("share_H", "gate_H2D", "sink_H")
    }
    weight = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).to(out.dtype)
    gradients = torch.autograd.grad(
        (out * weight).sum(), list(named.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(named, gradients, strict=True))


def stream(pattern: Pattern, given: dict[str, Any], prompt: int) -> Tensor:
    """Return the outputs of a prompt in one pass and of the positions behind it one at a time."""
    q = given["q"]
    k = given["k"]
    v = given["v"]
    rotate = given["rotate"]
    cache = pattern.start(given["relative"])

    def inputs(here: slice):
        return pattern.inputs(
            q[:, :, here], None if k is None else k[:, :, here], rotate, here.start
        )

    head = {
        **given,
        "q": q[:, :, :prompt],
        "k": None if k is None else k[:, :, :prompt],
        "v": v[:, :, :prompt],
    }
    outs = [run(pattern, head, streaming=True)]
    cache.prefill(inputs(slice(0, prompt)), v[:, :, :prompt])
    for position in range(prompt, q.shape[2]):
        outs.append(
            cache.decode(
                inputs(slice(position, position + 1)), v[:, :, position : position + 1], position
            )
        )
    return torch.cat(outs, dim=2)


def check(pattern: Pattern, case: Case) -> None:
    """Compare outputs and gradients with the oracle, and streams with decisions from the prefix."""
    here = tensors(pattern, case)
    found = [run(pattern, here, streaming=prefix) for prefix in (False, True)]
    for prefix, ours in zip((False, True), found, strict=True):
        if prefix and pattern.strictly_causal:
            torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
        else:
            theirs = run(partial(oracle.attend_by_rule, pattern), here, streaming=prefix)
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
            mine = gradients(pattern, here, ours)
            its = gradients(pattern, here, theirs)
            torch.testing.assert_close(mine, its, rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        # From no position to all of them, by the seed of a case.
        prompt = case.seed % (case.N + 1)
        streamed = stream(pattern, here, prompt)
        torch.testing.assert_close(streamed, found[True], rtol=1e-9, atol=1e-9)
