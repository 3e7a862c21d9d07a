"""Which past outputs move when the future changes: of whole models, and of each layer's heads by themselves.

No gradient shows such a leak: a choice of keys that reads the future is not differentiated. Changing the future does.

Shapes: B sequences, N positions, P past positions, H heads, D head size, E hidden width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

Outputs = Callable[[Tensor], Tensor]
"""Token ids `[B, N]` to logits `[B, N, V]`."""


@dataclass
class PrefixMoves:
    """What moved of the past when everything behind a prefix changed."""

    prefix: int
    """Positions of the prefix; they keep their token ids."""
    largest: float
    """Largest relative change of a past position, as `relative_change`."""
    moved: int
    """Past positions that changed by more than the tolerance, over all sequences."""
    past: int
    """Past positions looked at: prefix times sequences."""
    first: int | None
    """First position that moved, None where none did."""
    last: int | None
    """Last position that moved."""


@dataclass
class Moves:
    """What moved of one kind of output, over all prefixes."""

    prefixes: list[PrefixMoves] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """Largest relative change of a past position."""
        return max((row.largest for row in self.prefixes), default=0.0)

    @property
    def share(self) -> float:
        """Share of past positions that moved, over prefixes and sequences."""
        past = sum(row.past for row in self.prefixes)
        return sum(row.moved for row in self.prefixes) / past if past else 0.0

    @property
    def reach(self) -> tuple[int, int] | None:
        """First and last position that moved, None where none did."""
        seen = [at for row in self.prefixes for at in (row.first, row.last) if at is not None]
        return (min(seen), max(seen)) if seen else None

    def add(self, prefix: int, change_BP: Tensor, tolerance: float) -> None:
        """Take in the relative changes of the positions of a prefix."""
        moved_BP = change_BP > tolerance
        at = moved_BP.any(dim=0).nonzero()[:, 0].tolist()
        first, last = (at[0], at[-1]) if at else (None, None)
        self.prefixes.append(
            PrefixMoves(prefix, float(change_BP.max()), int(moved_BP.sum()), moved_BP.numel(), first, last)
        )


Group = tuple[int, str]
"""A layer, 0 the lowest, and the name of a group of its heads."""


@dataclass
class Audit:
    """What moved of a model: its logits and, where its layers are known, each group of heads by itself."""

    logits: Moves = field(default_factory=Moves)
    groups: dict[Group, Moves] = field(default_factory=dict)
    repeat: float = 0.0
    """Largest relative change of the logits when nothing at all changes: above 0, the model draws or remembers."""

    @property
    def sees_future(self) -> bool:
        """Whether an output of the past moved."""
        return self.logits.share > 0 or bool(self.origins)

    @property
    def origins(self) -> list[Group]:
        """The groups in which the past moves though the past of their layer's input does not."""
        return [group for group, moves in self.groups.items() if moves.share > 0]


def prefix_lengths(length: int, count: int) -> list[int]:
    """Return up to `count` prefix lengths from 1 to `length` - 1, both included, in order.

    They are 1, 2 and the powers of two with both neighbours (where blocks and windows begin), evenly thinned out where
    they are too many, and filled up with evenly spaced lengths where they are too few.

    Raises:
        ValueError: a length below 2, which has no future, or a count below 1.
    """
    if length < 2 or count < 1:
        raise ValueError(f"length={length}, count={count}: must be at least 2 and at least 1")
    powers = (1 << power for power in range(length.bit_length() + 1))
    lengths = {near for power in powers for near in (power - 1, power, power + 1) if 0 < near < length} | {length - 1}
    if len(lengths) > count:
        ordered = sorted(lengths)
        steps = max(1, count - 1)
        return sorted({ordered[(len(ordered) - 1) * step // steps] for step in range(count)})
    missing = count - len(lengths)
    return sorted(lengths | {max(1, (length - 1) * step // (missing + 1)) for step in range(1, missing + 1)})


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


def audit_outputs(
    outputs: Outputs,
    ids_BN: Tensor,
    vocabulary: int,
    prefixes: Sequence[int],
    *,
    tolerance: float = 1e-9,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
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

    Raises:
        ValueError: outputs of another shape, or NaN or infinity among them.
    """
    run(outputs, ids_BN, seed)  # some modules settle when they are first called
    before_BNV = run(outputs, ids_BN, seed)
    audit = Audit(repeat=float(relative_change(before_BNV, run(outputs, ids_BN, seed)).max()))
    for done, prefix in enumerate(prefixes, start=1):
        after_BNV = run(outputs, other_future(ids_BN, prefix, vocabulary, seed), seed)
        audit.logits.add(prefix, relative_change(before_BNV[:, :prefix], after_BNV[:, :prefix]), tolerance)
        on_progress(done, len(prefixes))
    return audit


@torch.no_grad()
def run(outputs: Outputs, ids_BN: Tensor, seed: int) -> Tensor:
    """Return checked outputs, torch's generators seeded before and put back after."""
    devices = [ids_BN.device] if ids_BN.is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        out = outputs(ids_BN)
    if not isinstance(out, Tensor) or out.ndim != 3 or out.shape[:2] != ids_BN.shape or not out.is_floating_point():
        shown = f"a {out.dtype} tensor {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise ValueError(f"outputs must be logits [{ids_BN.shape[0]}, {ids_BN.shape[1]}, vocabulary], not {shown}")
    if not bool(out.isfinite().all()):
        raise ValueError("outputs hold NaN or infinity; nothing can be said of what moves them")
    return out


def next_logits(model: Transformer, streaming: bool = False) -> Outputs:
    """Return the logits of a decoder of ours as a function of the ids that its positions read, `[B, N]`.

    Position 0 of the model reads its start vector and position i the unit before the one it predicts. So `ids[:, i]`
    stands for what position i reads, and `ids[:, 0]` for nothing.
    """

    def outputs(ids_BN: Tensor) -> Tensor:
        hidden_BNS, _ = model(ids_BN.roll(-1, dims=1), streaming)
        return model.logits(hidden_BNS)

    return outputs


@torch.no_grad()
def audit_model(
    model: Transformer,
    ids_BN: Tensor,
    prefixes: Sequence[int],
    *,
    streaming: bool = False,
    tolerance: float = 1e-9,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """As `audit_outputs` for a decoder of ours in evaluation mode, and for each group of heads of each layer alone.

    A layer above a leak moves because its input does. So that a leak is found where it arises, each attention layer is
    run once more on a mixture: at the positions of the prefix its input from the unchanged sequence, behind it its
    input from the changed one. What then moves at the positions of the prefix was moved by this layer, and the outputs
    of its groups (before the layer's output matrix joins them) say by which heads. Everything else in a block works on
    each position alone. A position of a group counts as moved where the output of any of its heads did.

    Args:
        model: converted to float64 where the smallest changes are to be seen.
        ids_BN: as `next_logits` takes them.
        streaming: audit the reading in which every decision is made from the prefix alone.
        prefixes, tolerance, seed, on_progress: as `audit_outputs`.
    """
    layers: list[MultiheadAttention] = [block.attention for block in model.blocks]  # type: ignore[misc]
    outputs = next_logits(model, streaming)
    with recorded(layers) as record:
        before_BNV = run(outputs, ids_BN, seed)
        inputs, heads = dict(record.inputs), dict(record.heads)
        audit = Audit(repeat=float(relative_change(before_BNV, run(outputs, ids_BN, seed)).max()))
        audit.groups = {group: Moves() for group in heads}
        for done, prefix in enumerate(prefixes, start=1):
            after_BNV = run(outputs, other_future(ids_BN, prefix, model.vocabulary, seed), seed)
            audit.logits.add(prefix, relative_change(before_BNV[:, :prefix], after_BNV[:, :prefix]), tolerance)
            run_mixed(layers, inputs, dict(record.inputs), prefix, streaming)
            for group, moves in audit.groups.items():
                change_BHP = relative_change(heads[group][:, :, :prefix], record.heads[group][:, :, :prefix])
                moves.add(prefix, change_BHP.amax(dim=1), tolerance)
            on_progress(done, len(prefixes))
    return audit


def run_mixed(
    layers: Sequence[MultiheadAttention],
    before: dict[int, Tensor],
    after: dict[int, Tensor],
    prefix: int,
    streaming: bool,
) -> None:
    """Run each layer on its input from `before` at the positions of the prefix, and on that from `after` behind it."""
    for layer, attention in enumerate(layers):
        attention(torch.cat([before[layer][:, :prefix], after[layer][:, prefix:]], dim=1), streaming)


@dataclass
class Record:
    """What the attention layers last read, `[B, N, E]`, and what their groups of heads last gave, `[B, H, N, D]`."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    heads: dict[Group, Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def recorded(layers: Sequence[MultiheadAttention]) -> Iterator[Record]:
    """Record the layers while the context lasts."""
    record = Record()

    def keep_input(layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, arguments: record.inputs.__setitem__(layer, arguments[0])

    def keep_heads(group: Group) -> Callable[[nn.Module, tuple[Any, ...], tuple[Tensor, Tensor]], None]:
        return lambda module, arguments, out: record.heads.__setitem__(group, out[0])

    with contextlib.ExitStack() as hooks:
        for layer, attention in enumerate(layers):
            hooks.enter_context(attention.register_forward_pre_hook(keep_input(layer)))
            for name, group in attention.groups.items():
                hooks.enter_context(group.register_forward_hook(keep_heads((layer, name))))
        yield record
