"""Which past outputs move when the future changes, of whole models and of each layer's heads; and what trains choices.

No gradient shows such a leak: a choice of keys that reads the future is not differentiated. Changing the future does.

Shapes: B sequences, N positions, P past positions, H heads, D head size, E hidden width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtx.attention.centroids import statistics_paused
from rtx.attention.choices import Blocks, Choice, Indexer, RandomBlocks
from rtx.attention.pattern import Pattern
from rtx.attention.patterns import Random
from rtx.attention.routing import Routing
from rtx.errors import RunFailed
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

Group = tuple[int, str]
"""A layer, 0 the lowest, and the name of a group of its heads."""


@dataclass
class Audit:
    """How far outputs at the positions of all prefixes moved, as `relative_change`: 1-d tensors."""

    tolerance: float
    """Changes up to here are no move."""
    repeat: float
    """Largest change of the logits when nothing at all changes: above the tolerance, the model draws or remembers."""
    logits: Tensor
    groups: dict[Group, Tensor]
    """Of each group of heads by itself, where the model's layers are known."""

    @property
    def sees_future(self) -> bool:
        """Whether an output of the past moved."""
        return bool((self.logits > self.tolerance).any()) or bool(self.origins)

    @property
    def origins(self) -> list[Group]:
        """The groups in which the past moves though the past of their layer's input does not."""
        return [group for group, change in self.groups.items() if (change > self.tolerance).any()]


def prefix_lengths(length: int, count: int) -> list[int]:
    """Return up to `count` prefix lengths from 1 to `length` - 1: powers of two and their neighbours, thinned out."""
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
    """Return the largest change of a unit of each vector over its largest unit, `[..., D]` to `[...]`, 0 to 2."""
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
        tolerance, seed: of the result; of the other tokens.
        on_progress: called with prefixes done and prefixes in all.
        heads: called behind `outputs` with the prefix (0: nothing changed), gives what heads put out, `[B, H, N, D]`.

    Raises:
        RunFailed: NaN or infinity among the outputs.
    """

    def run(ids_BN: Tensor) -> Tensor:
        with torch.random.fork_rng([ids_BN.device] if ids_BN.is_cuda else []):
            torch.manual_seed(seed)
            out_BNV = outputs(ids_BN)
        if not bool(out_BNV.isfinite().all()):
            raise RunFailed("outputs hold NaN or infinity; nothing can be said of what moves them")
        return out_BNV

    run(ids_BN)  # some modules settle when they are first called
    before_BNV = run(ids_BN)
    repeat = float(relative_change(before_BNV, run(ids_BN)).max())
    before, logits = heads(0), []
    groups: dict[Group, list[Tensor]] = {}
    for done, prefix in enumerate(prefixes, start=1):
        after_BNV = run(other_future(ids_BN, prefix, vocabulary, seed))
        logits.append(relative_change(before_BNV[:, :prefix], after_BNV[:, :prefix]).flatten())
        for group, out_BHND in heads(prefix).items():
            change_BHP = relative_change(before[group][:, :, :prefix], out_BHND[:, :, :prefix])
            groups.setdefault(group, []).append(change_BHP.amax(dim=1).flatten())
        on_progress(done, len(prefixes))
    return Audit(tolerance, repeat, torch.cat(logits), {group: torch.cat(x) for group, x in groups.items()})


def audit_model(
    model: Transformer, ids_BN: Tensor, prefixes: Sequence[int], *, streaming: bool = False, **options: Any
) -> Audit:
    """As `audit_outputs` for a decoder of ours in evaluation mode, and for each group of heads of each layer alone.

    A layer above a leak moves because its input does. So that a leak is found where it arises, the heads of each layer
    are run once more on a mixture: at the positions of the prefix the layer's input from the unchanged sequence, behind
    it its input from the changed one. What then moves at the positions of the prefix was moved by these heads;
    everything else in a block works on each position alone.

    Args:
        model: converted to float64 where the smallest changes are to be seen.
        ids_BN: what the positions read: `ids[:, i]` is the unit before the one that position i predicts, and
            `ids[:, 0]` stands for nothing (the model has its start vector there).
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
        found = {}
        for number, (layer, x_BNE, y_BNE) in enumerate(zip(layers, unchanged, inputs, strict=True)):
            split = layer.split(torch.cat([x_BNE[:, :prefix], y_BNE[:, prefix:]], dim=1))
            for name, pattern, relative, qkv in zip(layer.groups, layer.each(), layer.relative(), split, strict=True):
                found[number, name] = pattern(*qkv, rotate=layer.rotary, relative=relative, prefix=streaming)[0]
        return found

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0])))
        return audit_outputs(outputs, ids_BN, model.vocabulary, prefixes, heads=heads, **options)


def choice_gradients(model: Transformer, tokens_BN: Tensor) -> list[dict[str, Any]]:
    """Take a training pass, forward and backward, with a copy of the model: does each choice that should train do so?

    A choice of keys has no gradient of its own; what makes it must be trained by something else.

    Returns:
        A row for each group of heads that chooses: its layer, what trains its choice, the norm of the gradient of its
        queries or of the indexer (None: nothing should train, or it is not finite), and whether it is missing.
    """
    model = copy.deepcopy(model).train()
    model.zero_grad()
    devices = [tokens_BN.device] if tokens_BN.is_cuda else []
    with statistics_paused(), torch.random.fork_rng(devices), torch.enable_grad():
        nats_BN, auxiliary = model.loss(tokens_BN)
        (nats_BN.mean() + auxiliary).backward()
    rows = []
    for layer, block in enumerate(model.blocks):
        attention: MultiheadAttention = block.attention  # type: ignore[assignment]
        assert attention.qkv.weight.grad is not None
        queries = attention.qkv.weight.grad.split(attention.widths)  # then keys, then values
        for (name, pattern), query_grad in zip(attention.groups.items(), queries, strict=False):
            if isinstance(pattern, Routing | Random | Choice):
                grads = [p.grad for p in pattern.choice_parameters()] if isinstance(pattern, Indexer) else [query_grad]
                norm = float(torch.stack([x.norm() for x in grads if x is not None] or [torch.zeros(())]).norm())
                drawn = isinstance(pattern, Random | RandomBlocks)
                row = {"layer": layer, "heads": name, "trained_by": trained_by(pattern)}
                row["gradient"] = None if drawn or not math.isfinite(norm) else norm
                rows.append({**row, "missing": not drawn and not 0 < norm < math.inf})
    return rows


def trained_by(pattern: Pattern) -> str:
    """Return what trains a choice, in words."""
    if isinstance(pattern, Random | RandomBlocks):
        return "nothing: it is drawn"
    if isinstance(pattern, Indexer):
        return "the divergence of its scores to the attention"
    if isinstance(pattern, Routing):
        vectors = "queries and keys" if pattern.has_keys else "queries"
        pull = " and the commitment to centroids" if pattern.commitment else ""
        return f"its {vectors}, by the attention{pull}; centroids by k-means (update={pattern.centroids.update_rule})"
    compressed = isinstance(pattern, Blocks) and pattern.gate_H2D is not None
    return "the attention's own queries and keys" + (", and the compressed branch" if compressed else "")
