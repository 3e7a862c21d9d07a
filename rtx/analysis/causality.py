"""Which past outputs move when the future changes, of whole models and of each layer's heads.

No gradient reveals such a leak: a choice of keys that reads the future is not differentiated.
Changing the future reveals it.

Shapes: B sequences, N positions, P past positions of all prefixes, F future positions, E hidden
width, D width of a watched output, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtx.errors import RunFailed
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

Group = tuple[Any, str]
"""A layer, 0 the lowest, and the name of a group of its heads."""

LOGITS: Group = ("", "logits")

Outputs = dict[Group, Tensor]
"""The logits, and other outputs that are watched, each `[B, ..., N, D]`."""

Progress = Callable[[int, int], None]
"""Is called with the number of prefixes done, and of all prefixes."""


@dataclass
class Audit:
    """How far outputs at the positions of all prefixes moved."""

    tolerance: float
    """Changes up to this are no move."""
    repeat: float
    """Largest change of the logits when nothing changes. Above the tolerance, the model draws
    random numbers or has a memory of earlier calls."""
    changes: dict[Group, Tensor]
    """`relative_change` of the logits, and of each group of heads on its own, `[P]`."""

    @property
    def sees_future(self) -> bool:
        """Whether an output of the past moved."""
        return any(self.moved(change_P) for change_P in self.changes.values())

    @property
    def origins(self) -> list[Group]:
        """The groups in which the past moves although the past of their layer's input does not."""
        origins = []
        for group, change_P in self.changes.items():
            if group != LOGITS and self.moved(change_P):
                origins.append(group)
        return origins

    def moved(self, change_P: Tensor) -> bool:
        """Return whether any of the changes is a move."""
        return bool((change_P > self.tolerance).any())


def other_future(tokens_BN: Tensor, prefix: int, vocabulary: int, seed: int) -> Tensor:
    """Return tokens of which each one after the prefix is replaced by another, drawn by `seed`."""
    B, N = tokens_BN.shape
    generator = torch.Generator().manual_seed(seed * 1_000_003 + prefix)
    shift_BF = torch.randint(1, vocabulary, (B, N - prefix), generator=generator)
    past_BP = tokens_BN[:, :prefix]
    future_BF = tokens_BN[:, prefix:] + shift_BF.to(tokens_BN.device)
    return torch.cat([past_BP, future_BF % vocabulary], dim=1)


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest change in each vector over its largest number, `[..., D]` to `[...]`.

    It is between 0 and 2.
    """
    change = (after - before).abs().amax(-1)
    size = torch.maximum(before.abs(), after.abs()).amax(-1)
    least = torch.finfo(size.dtype).tiny
    return torch.where(size > 0, change / size.clamp_min(least), 0.0)


@torch.no_grad()
def audit_outputs(
    outputs: Callable[[Tensor, int], Outputs],
    ids_BN: Tensor,
    vocabulary: int,
    prefixes: Sequence[int],
    *,
    tolerance: float = 1e-9,
    seed: int = 0,
    on_progress: Progress = lambda done, total: None,
) -> Audit:
    """Change sequences after each prefix, and return how far outputs in the prefix move.

    Args:
        outputs: a function of token ids `[B, N]` and the prefix (0: nothing is changed) that
            returns `LOGITS` and whatever else is to be watched, `[B, ..., N, D]`. Position i may
            read the ids 0 to i. It is called with torch's generators in the same state each time,
            so that what it draws is no change.
        ids_BN: token ids, below `vocabulary`.
        prefixes: lengths from 1 to N - 1.
        tolerance: of the result.
        seed: of the other tokens.
        on_progress: is called with the number of prefixes done, and of all prefixes.

    Raises:
        RunFailed: an output is NaN or infinite.
    """
    # Some modules settle when they are first called.
    reproducibly(outputs, ids_BN, 0, seed)
    before = reproducibly(outputs, ids_BN, 0, seed)
    again = reproducibly(outputs, ids_BN, 0, seed)
    repeat = float(relative_change(before[LOGITS], again[LOGITS]).max())
    changes: dict[Group, list[Tensor]] = {group: [] for group in before}
    for done, prefix in enumerate(prefixes, start=1):
        changed_BN = other_future(ids_BN, prefix, vocabulary, seed)
        after = reproducibly(outputs, changed_BN, prefix, seed)
        for group in before:
            change_P = past_change(before[group], after[group], prefix)
            changes[group].append(change_P)
        on_progress(done, len(prefixes))
    joined = {group: torch.cat(change) for group, change in changes.items()}
    return Audit(tolerance, repeat, joined)


def reproducibly(
    outputs: Callable[[Tensor, int], Outputs],
    ids_BN: Tensor,
    prefix: int,
    seed: int,
) -> Outputs:
    """Return `outputs(ids_BN, prefix)`, with torch's generators seeded, and restored afterwards."""
    devices = []
    if ids_BN.is_cuda:
        devices = [ids_BN.device]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        results = outputs(ids_BN, prefix)
    if not all(bool(out.isfinite().all()) for out in results.values()):
        raise RunFailed("outputs hold NaN or infinity; nothing can be said of what moves them")
    return results


def past_change(before: Tensor, after: Tensor, prefix: int) -> Tensor:
    """Return how far a watched output moved at the positions of the prefix of each sequence.

    The result is one-dimensional. Of several vectors at a position, the largest change counts.
    """
    change = relative_change(before[..., :prefix, :], after[..., :prefix, :])
    change_BXP = change.reshape(len(before), -1, prefix)
    return change_BXP.amax(1).flatten()


def audit_model(
    model: Transformer,
    ids_BN: Tensor,
    prefixes: Sequence[int],
    *,
    streaming: bool = False,
    **options: Any,
) -> Audit:
    """Audit a decoder of ours in evaluation mode, and each group of heads of each layer.

    A layer above a leak moves because its input does. To find a leak where it arises, the heads of
    each layer run once more on a mixture: the layer's input from the unchanged sequence at the
    positions of the prefix, and its input from the changed one after it. Whatever then moves in the
    prefix was moved by these heads; everything else in a block works on each position alone.

    Args:
        model: in float64, if the smallest changes are to be seen.
        ids_BN: what the positions read: `ids[:, i]` is the token before the one that position i
            predicts. `ids[:, 0]` is not read: the model has its start vector there.
        prefixes: as for `audit_outputs`.
        streaming: audit the reading in which every selection is made from the prefix alone.
        options: as for `audit_outputs`.
    """
    layers = model.attentions()
    inputs: list[Tensor] = []
    unchanged: list[Tensor] = []

    def outputs(ids_BN: Tensor, prefix: int) -> Outputs:
        inputs.clear()
        hidden_BNS, _ = model(ids_BN.roll(-1, dims=1), streaming)
        if prefix == 0:
            unchanged[:] = inputs
        results: Outputs = {LOGITS: model.logits(hidden_BNS)}
        for number, layer in enumerate(layers):
            past_BPE = unchanged[number][:, :prefix]
            future_BFE = inputs[number][:, prefix:]
            mixture_BNE = torch.cat([past_BPE, future_BFE], dim=1)
            for name, out_BHND in head_outputs(layer, mixture_BNE, streaming).items():
                results[number, name] = out_BHND
        return results

    def note_input(layer: object, arguments: tuple[Any, ...]) -> None:
        inputs.append(arguments[0])

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(note_input))
        return audit_outputs(outputs, ids_BN, model.vocabulary, prefixes, **options)


def head_outputs(layer: MultiheadAttention, x_BNE: Tensor, streaming: bool) -> dict[str, Tensor]:
    """Return the outputs of each group of heads, `[B, H, N, D]`, by its name."""
    results = {}
    for group, qkv in zip(layer.head_groups(), layer.project(x_BNE), strict=True):
        results[group.name], _ = group(*qkv, streaming=streaming)
    return results
