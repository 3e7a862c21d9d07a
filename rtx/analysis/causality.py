"""Which past outputs move when the future changes, of whole models and of each layer's heads; and what trains choices.

No gradient shows such a leak: a choice of keys that reads the future is not differentiated. Changing the future does.

Shapes: B sequences, N positions, P past positions, H heads, D head size, E hidden width, V vocabulary.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtx.attention.blocks import RandomBlocks
from rtx.attention.centroids import after_step, all_centroids
from rtx.attention.clusters import Random
from rtx.attention.indexer import Indexer
from rtx.attention.lsh import Lsh
from rtx.attention.pattern import Pattern
from rtx.attention.probed import Probed
from rtx.attention.routing import Routing
from rtx.errors import RunFailed
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer
from rtx.settings.derived import ROUTED

Group = tuple[Any, str]  # a layer, 0 the lowest, and the name of a group of its heads
LOGITS: Group = ("", "logits")


@dataclass
class Audit:
    """How far outputs at the positions of all prefixes moved."""

    tolerance: float
    """Changes up to here are no move."""
    repeat: float
    """Largest change of the logits when nothing at all changes: above the tolerance, the model draws or remembers."""
    changes: dict[Group, Tensor]
    """Of the logits, and of each group of heads by itself: as `relative_change`, 1-d."""

    @property
    def sees_future(self) -> bool:
        """Whether an output of the past moved."""
        return any(bool((change > self.tolerance).any()) for change in self.changes.values())

    @property
    def origins(self) -> list[Group]:
        """The groups in which the past moves though the past of their layer's input does not."""
        return [
            group
            for group, change in self.changes.items()
            if group != LOGITS and (change > self.tolerance).any()
        ]


def other_future(ids_BN: Tensor, prefix: int, vocabulary: int, seed: int) -> Tensor:
    """Return token ids of which every one behind the prefix is another one than before, drawn by `seed`."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + prefix)
    shift_BF = torch.randint(
        1, vocabulary, (len(ids_BN), ids_BN.shape[1] - prefix), generator=generator
    )
    return torch.cat(
        [ids_BN[:, :prefix], (ids_BN[:, prefix:] + shift_BF.to(ids_BN.device)) % vocabulary], dim=1
    )


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest change of a unit of each vector over its largest unit, `[..., D]` to `[...]`, 0 to 2."""
    change, size = (
        (after - before).abs().amax(-1),
        torch.maximum(before.abs(), after.abs()).amax(-1),
    )
    return torch.where(size > 0, change / size.clamp_min(torch.finfo(size.dtype).tiny), 0.0)


@torch.no_grad()
def audit_outputs(
    outputs: Callable[[Tensor, int], dict[Group, Tensor]],
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
        outputs: token ids `[B, N]` and the prefix (0: nothing changed) to `LOGITS`, and what else is to be watched,
            `[B, ..., N, D]`; position i may read the ids 0 to i. Called anew with torch's generators in the same state
            each time, so that what it draws is no change.
        ids_BN: token ids, below `vocabulary`.
        prefixes: lengths from 1 to N - 1.
        tolerance, seed: of the result; of the other tokens.
        on_progress: called with prefixes done and prefixes in all.

    Raises:
        RunFailed: NaN or infinity among the outputs.
    """

    def run(ids_BN: Tensor, prefix: int = 0) -> dict[Group, Tensor]:
        with torch.random.fork_rng([ids_BN.device] if ids_BN.is_cuda else []):
            torch.manual_seed(seed)
            found = outputs(ids_BN, prefix)
        if not all(bool(out.isfinite().all()) for out in found.values()):
            raise RunFailed("outputs hold NaN or infinity; nothing can be said of what moves them")
        return found

    run(ids_BN)  # some modules settle when they are first called
    before = run(ids_BN)
    repeat = float(relative_change(before[LOGITS], run(ids_BN)[LOGITS]).max())
    changes: dict[Group, list[Tensor]] = {group: [] for group in before}
    for done, prefix in enumerate(prefixes, start=1):
        for group, after in run(other_future(ids_BN, prefix, vocabulary, seed), prefix).items():
            change = relative_change(before[group][..., :prefix, :], after[..., :prefix, :])
            changes[group].append(change.reshape(len(ids_BN), -1, prefix).amax(1).flatten())
        on_progress(done, len(prefixes))
    return Audit(tolerance, repeat, {group: torch.cat(found) for group, found in changes.items()})


def audit_model(
    model: Transformer,
    ids_BN: Tensor,
    prefixes: Sequence[int],
    *,
    streaming: bool = False,
    **options: Any,
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

    def outputs(ids_BN: Tensor, prefix: int) -> dict[Group, Tensor]:
        inputs.clear()
        hidden_BNS, _ = model(ids_BN.roll(-1, dims=1), streaming)
        found: dict[Group, Tensor] = {LOGITS: model.logits(hidden_BNS)}
        unchanged[:] = unchanged if prefix else inputs
        for number, (layer, x_BNE, y_BNE) in enumerate(zip(layers, unchanged, inputs, strict=True)):
            mixture_BNE = torch.cat([x_BNE[:, :prefix], y_BNE[:, prefix:]], dim=1)
            for group, qkv in zip(layer.head_groups(), layer.project(mixture_BNE), strict=True):
                found[number, group.name] = group(*qkv, streaming=streaming)[0]
        return found

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(
                layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
            )
        return audit_outputs(outputs, ids_BN, model.vocabulary, prefixes, **options)


def choice_gradients(model: Transformer, tokens_BN: Tensor) -> list[dict[str, Any]]:
    """Take a training pass, forward and backward, with a copy of the model: does each choice that should train do so?

    A choice of keys has no gradient of its own; what makes it must be trained by something else. A row for each group
    of heads that choose by content, or are drawn, has its layer, what trains its choice, the norm of the gradient of
    its queries, or of the least among parameters of its own (None: nothing should train, or it is not finite), and
    whether that is missing, or the step moves no centroid.
    """
    model = copy.deepcopy(model).train()
    model.zero_grad()
    devices = [tokens_BN.device] if tokens_BN.is_cuda else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        nats_BN, auxiliary = model.loss(tokens_BN)
        (nats_BN.mean() + auxiliary).backward()
    before = {store: store.centroid_HCD.clone() for store in all_centroids(model)}
    after_step(model)
    frozen = [
        store for store, old_HCD in before.items() if torch.allclose(store.centroid_HCD, old_HCD)
    ]
    rows = []
    for layer, block in enumerate(model.blocks):
        attention: MultiheadAttention = block.attention  # type: ignore[assignment]
        assert attention.qkv.weight.grad is not None
        weight_grads = attention.by_group(attention.qkv.weight.grad.split(attention.widths))
        for group, (query_grad, _, _) in zip(attention.head_groups(), weight_grads, strict=True):
            pattern = group.pattern
            if group.name == ROUTED or isinstance(pattern, Lsh):
                grads = [p.grad for p in pattern.parameters()] or [query_grad]
                norms = [0.0 if x is None else float(x.norm()) for x in grads]
                norm = min(norms, key=lambda norm: (math.isfinite(norm), norm))
                drawn = isinstance(pattern, Random | RandomBlocks)
                row = {"layer": layer, "heads": group.name, "trained_by": trained_by(pattern)}
                row["gradient"] = None if drawn or not math.isfinite(norm) else norm
                stays = isinstance(pattern, Routing | Probed) and pattern.centroids in frozen
                rows.append({**row, "missing": stays or not (drawn or 0 < norm < math.inf)})
    return rows


def trained_by(pattern: Pattern) -> str:
    """Return what trains a choice, in words."""
    if isinstance(pattern, Random | RandomBlocks):
        return "nothing: it is drawn"
    if isinstance(pattern, Lsh):
        return "its queries, by the attention; what they are hashed by is drawn"
    if isinstance(pattern, Indexer):
        return "the divergence of its scores to the attention"
    if isinstance(pattern, Probed):
        return "the attention's own queries and keys; centroids by k-means of the keys"
    if not isinstance(pattern, Routing):
        return "the attention's own queries and keys" + (
            ", parameters of its own" if [*pattern.parameters()] else ""
        )
    pull = " and the commitment to centroids" if pattern.commitment else ""
    vectors = "queries and keys" if pattern.has_keys else "queries"
    return f"its {vectors}, by the attention{pull}; centroids by k-means (update={pattern.centroids.update_rule})"
