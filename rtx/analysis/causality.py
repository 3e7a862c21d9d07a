"""Which past outputs move when the future changes: of whole models, and of each layer's heads by themselves.

No gradient shows such a leak: a choice of keys that reads the future is not differentiated. Changing the future does.

Shapes: B sequences, N positions, P past positions, H heads, D head size, E hidden width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

Group = tuple[int, str]
"""A layer, 0 the lowest, and the name of a group of its heads."""


@dataclass
class Moves:
    """What moved of one kind of output, over all prefixes and sequences; past positions alone are looked at."""

    largest: float = 0.0
    """Largest relative change, as `relative_change`."""
    moved: int = 0
    """Positions that changed by more than the tolerance, of `past`."""
    past: int = 0

    def add(self, change_BP: Tensor, tolerance: float) -> None:
        """Take in the relative changes of the positions of a prefix."""
        self.largest = max(self.largest, float(change_BP.max()))
        self.moved += int((change_BP > tolerance).sum())
        self.past += change_BP.numel()


@dataclass
class Audit:
    """What moved of a model: its logits and, where its layers are known, each group of heads by itself."""

    repeat: float
    """Largest relative change of the logits when nothing at all changes: above 0, the model draws or remembers."""
    logits: Moves = field(default_factory=Moves)
    groups: dict[Group, Moves] = field(default_factory=dict)

    @property
    def sees_future(self) -> bool:
        """Whether an output of the past moved."""
        return self.logits.moved > 0 or bool(self.origins)

    @property
    def origins(self) -> list[Group]:
        """The groups in which the past moves though the past of their layer's input does not."""
        return [group for group, moves in self.groups.items() if moves.moved]


def prefix_lengths(length: int, count: int) -> list[int]:
    """Return up to `count` prefix lengths from 1 to `length` - 1, both included, in order.

    They are the powers of two with both neighbours (where blocks and windows begin), thinned out evenly.
    """
    powers = (1 << power for power in range(length.bit_length() + 1))
    near = {size for power in powers for size in (power - 1, power, power + 1) if 0 < size < length}
    lengths = sorted(near | {length - 1})
    return [lengths[at] for at in np.linspace(0, len(lengths) - 1, min(count, len(lengths))).astype(int)]


def other_future(ids_BN: Tensor, prefix: int, vocabulary: int, seed: int) -> Tensor:
    """Return token ids of which every one behind the prefix is another one than before, drawn by `seed`."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + prefix)
    shift_BF = torch.randint(1, vocabulary, (len(ids_BN), ids_BN.shape[1] - prefix), generator=generator)
    return torch.cat([ids_BN[:, :prefix], (ids_BN[:, prefix:] + shift_BF.to(ids_BN.device)) % vocabulary], dim=1)


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest change of a unit of each vector over its largest unit, before or after: `[..., D]` to `[...]`.

    It lies between 0 and 2; two zero vectors give 0.
    """
    change, size = (after - before).abs().amax(-1), torch.maximum(before.abs(), after.abs()).amax(-1)
    return torch.where(size > 0, change / size.clamp_min(torch.finfo(size.dtype).tiny), 0.0)


@torch.no_grad()
def audit_outputs(
    outputs: Callable[[Tensor], Tensor],
    ids_BN: Tensor,
    vocabulary: int,
    prefixes: Sequence[int],
    *,
    tolerance: float = 1e-9,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    heads: Callable[[int], dict[Group, Tensor]] = lambda prefix: {},
) -> Audit:
    """Change the future of sequences behind each prefix, and see which outputs at its positions move.

    Args:
        outputs: token ids `[B, N]` to logits `[B, N, V]`; position i may read the ids 0 to i. Called anew with torch's
            generators in the same state each time, so that what it draws is no change.
        ids_BN: token ids, below `vocabulary`.
        prefixes: from 1 to N - 1, as `prefix_lengths`.
        tolerance: relative changes up to here are no move.
        seed: of the other tokens.
        on_progress: called with prefixes done and prefixes in all.
        heads: called behind `outputs` with the prefix (0: nothing changed), gives what heads put out, `[B, H, N, D]`.

    Raises:
        ValueError: outputs of another shape, or NaN or infinity among them.
    """
    run(outputs, ids_BN, seed)  # some modules settle when they are first called
    before_BNV = run(outputs, ids_BN, seed)
    audit = Audit(float(relative_change(before_BNV, run(outputs, ids_BN, seed)).max()))
    before = heads(0)
    for done, prefix in enumerate(prefixes, start=1):
        after_BNV = run(outputs, other_future(ids_BN, prefix, vocabulary, seed), seed)
        audit.logits.add(relative_change(before_BNV[:, :prefix], after_BNV[:, :prefix]), tolerance)
        for group, out_BHND in heads(prefix).items():
            change_BHP = relative_change(before[group][:, :, :prefix], out_BHND[:, :, :prefix])
            audit.groups.setdefault(group, Moves()).add(change_BHP.amax(dim=1), tolerance)
        on_progress(done, len(prefixes))
    return audit


def run(outputs: Callable[[Tensor], Tensor], ids_BN: Tensor, seed: int) -> Tensor:
    """Return checked outputs, torch's generators seeded before and put back after."""
    with torch.random.fork_rng([ids_BN.device] if ids_BN.is_cuda else []):
        torch.manual_seed(seed)
        out = outputs(ids_BN)
    if not isinstance(out, Tensor) or out.ndim != 3 or out.shape[:2] != ids_BN.shape:
        shown = list(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise ValueError(f"outputs must be logits [{ids_BN.shape[0]}, {ids_BN.shape[1]}, vocabulary], not {shown}")
    if not bool(out.isfinite().all()):
        raise ValueError("outputs hold NaN or infinity; nothing can be said of what moves them")
    return out


def audit_model(
    model: Transformer, ids_BN: Tensor, prefixes: Sequence[int], *, streaming: bool = False, **options: Any
) -> Audit:
    """As `audit_outputs` for a decoder of ours in evaluation mode, and for each group of heads of each layer alone.

    A layer above a leak moves because its input does. So that a leak is found where it arises, the heads of each layer
    are run once more on a mixture: at the positions of the prefix the layer's input from the unchanged sequence, behind
    it its input from the changed one. What then moves at the positions of the prefix was moved by these heads;
    everything else in a block works on each position alone. A position of a group counts as moved where the output of
    any of its heads did.

    Args:
        model: converted to float64 where the smallest changes are to be seen.
        ids_BN: what the positions read. Position 0 of the model reads its start vector and position i the unit before
            the one it predicts, so `ids[:, i]` is what position i reads, and `ids[:, 0]` stands for nothing.
        streaming: audit the reading in which every decision is made from the prefix alone.
        prefixes, options: as for `audit_outputs`.
    """
    layers: list[MultiheadAttention] = [block.attention for block in model.blocks]  # type: ignore[misc]
    inputs: list[Tensor] = []
    unchanged: list[Tensor] = []

    def outputs(ids_BN: Tensor) -> Tensor:
        inputs.clear()
        hidden_BNS, _ = model(ids_BN.roll(-1, dims=1), streaming)
        return model.logits(hidden_BNS)

    def heads(prefix: int) -> dict[Group, Tensor]:
        unchanged.extend([] if prefix else inputs)
        mixed = [torch.cat([x[:, :prefix], y[:, prefix:]], dim=1) for x, y in zip(unchanged, inputs, strict=True)]
        found = [head_outputs(layer, x_BNE, streaming) for layer, x_BNE in zip(layers, mixed, strict=True)]
        return {(at, name): out_BHND for at, of_layer in enumerate(found) for name, out_BHND in of_layer.items()}

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0])))
        return audit_outputs(outputs, ids_BN, model.vocabulary, prefixes, heads=heads, **options)


def head_outputs(attention: MultiheadAttention, x_BNE: Tensor, streaming: bool) -> dict[str, Tensor]:
    """Return what each group of a layer's heads gives, `[B, H, N, D]`, before the layer's output matrix joins them."""
    every = zip(attention.groups, attention.each(), attention.relative(), attention.split(x_BNE), strict=True)
    return {
        name: pattern(q, k, v, rotate=attention.rotary, relative=relative, prefix=streaming)[0]
        for name, pattern, relative, (q, k, v) in every
    }
