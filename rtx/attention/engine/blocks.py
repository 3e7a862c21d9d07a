"""Attention by PyTorch's kernels, on blocks cut from packed lists.

A block is a run of a list's queries and the keys that they read. Cutting looks at the lists, which
makes a CPU wait for a GPU: lists that serve many passes are cut once (`Reads.derived`).

Shapes: R rows, P query members and M key members of all lists together, G blocks of one form, Q query
and K key slots of a block, D head size.
"""

from collections.abc import Iterable
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine.problem import Problem, Result
from rtx.attention.engine.softmax import Terms, recomputed, soft_attend
from rtx.attention.once import derived_once
from rtx.attention.packed import Reads

MAX_SCORES_CPU = 1 << 20
"""Scores worked on at once, of one block at least: few enough for a CPU's cache."""
MAX_SCORES_GPU = 1 << 26
"""The same on a GPU: enough to fill it."""
MIN_BLOCKS = 64
"""Blocks that torch's kernels get at once at least, to share them out over many cores."""
MAX_MASK = 1 << 24
"""Numbers in the masks that torch's kernels get at once, where every block has its own."""
MAX_STEP = 512
"""Queries of a block at the most, where a list is cut into runs."""


class Block(NamedTuple):
    """Blocks of one form: the members (numbers into P and M) in their query and key slots."""

    query_GQ: Tensor
    real_GQ: Tensor
    """False for query slots behind the end of a list and for queries that read nothing."""
    key_GK: Tensor
    mask: Tensor | None
    """True where a key is read, `[G, Q, K]`, or `[Q, K]` for all blocks; None: the plain triangle."""

    def split(self, scores: int, plain: bool) -> list["Block"]:
        """Return some blocks at a time, with that many scores, or as many as torch's kernels want (`plain`)."""
        has_masks = self.mask is not None and self.mask.dim() == 3
        slots = self.query_GQ.shape[1] * self.key_GK.shape[1]
        if plain and has_masks:
            scores = MAX_MASK
        least = MIN_BLOCKS if plain and not has_masks else 1
        size = max(least, scores // slots)
        masks = self.mask.split(size) if self.mask is not None and has_masks else repeat(self.mask)
        parts = (x.split(size) for x in (self.query_GQ, self.real_GQ, self.key_GK))
        return [Block(*each) for each in zip(*parts, masks, strict=False)]


def refusal(problem: Problem) -> str | None:
    """Return why this engine cannot run the problem; None where it can."""
    if not isinstance(problem.part, Reads):
        return "its keys are an index, not ranges of lists"
    return None


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums, see `Problem`; by our own softmax where torch's kernels lack a term."""
    q_RD, k_RD, v_RD = problem.rows()
    part, terms, by_member = problem.part, problem.terms, problem.by_member
    assert isinstance(part, Reads)
    on_cpu = q_RD.device.type == "cpu"
    plain = not by_member and not terms.by_distance and not (terms.dropout and on_cpu)
    triangles = plain and not part.hidden
    forms = derived_once(part, f"blocks, triangles {triangles}", lambda: cut(part, triangles))
    most = MAX_SCORES_CPU if on_cpu else MAX_SCORES_GPU
    blocks = [piece for form in forms for piece in form.split(most, plain)]
    query_rows = [part.query.row_M[block.query_GQ] for block in blocks]
    key_rows = [part.key.row_M[block.key_GK] for block in blocks]
    taken = zip(take(q_RD, query_rows), take(k_RD, key_rows), take(v_RD, key_rows), strict=True)

    weight_P = 1 / part.times_R(len(q_RD)).clamp(min=1)[part.query.row_M].double()
    wide = torch.promote_types(v_RD.dtype, torch.float32)
    size = len(part.start_P if by_member else q_RD)
    total = v_RD.new_zeros(size, v_RD.shape[-1], dtype=v_RD.dtype if plain else wide)
    targets, sums = [], []
    for block, row_GQ, row_GK, (q, k, v) in zip(blocks, query_rows, key_rows, taken, strict=True):
        target_S = (block.query_GQ if by_member else row_GQ).flatten()
        real_S = block.real_GQ.flatten()
        if plain:
            out_GQD = by_torch(q, k, v, block.mask, terms)
        else:
            head_G = row_GQ[:, 0] // part.length % terms.heads
            out_GQD, sum_GQ = recomputed(soft_block, q, k, v, block.mask, row_GQ, row_GK, head_G, terms)
        out_SD = out_GQD.flatten(0, 1).to(total.dtype)
        if by_member:
            targets.append(torch.where(real_S, target_S, size))
            sums.append(sum_GQ.flatten())
        else:
            out_SD = out_SD * weight_P[block.query_GQ.flatten(), None].to(out_SD.dtype)
        # What a slot without a query gets is dropped, NaN included.
        total.index_add_(0, target_S, out_SD.masked_fill(~real_S[:, None], 0))
    sum_P = total.new_full((size + 1,), float("-inf"))  # one more takes what is dropped
    if sums:
        sum_P = sum_P.index_copy(0, torch.cat(targets), torch.cat(sums))
    return total, sum_P[:size]


def cut(part: Reads, triangles: bool) -> list[Block]:
    """Cut the lists into blocks of at most about eight forms.

    With `triangles`, a square list whose members all read from its beginning is one block, whose
    mask is the plain triangle if all read themselves. All others are cut into runs; their keys reach
    from the first that one of them reads to the last.
    """
    count_L = part.query.count_L
    longest = int((part.stop_P - part.start_P).max()) if len(part.start_P) else 0
    if not longest:
        return []
    first_L = part.query.first_L()
    quarter = -(-longest // 4)
    last_L = (first_L + count_L - 1).clamp(min=0)
    is_square = triangles and part.query is part.key
    whole_L = (count_L > 0) & (part.start_P[last_L] == first_L) & is_square
    size_L = -(-count_L // quarter) * quarter
    blocks = []
    for size in size_L[whole_L].unique().tolist():
        of_size_L = whole_L & (size_L == size)
        begin_G = first_L[of_size_L]
        blocks.append(make_block(part, begin_G, count_L[of_size_L], begin_G, size, size))
    return blocks + cut_into_runs(part, torch.where(whole_L, 0, count_L), min(quarter, MAX_STEP))


def cut_into_runs(part: Reads, count_L: Tensor, step: int) -> list[Block]:
    """Cut the first `count_L` queries of each list into runs of `step`, whose forms differ by the keys' number."""
    runs_L = -(-count_L // step)
    list_L = torch.arange(len(count_L), device=count_L.device)
    list_G = list_L.repeat_interleave(runs_L)
    number_G = torch.arange(len(list_G), device=count_L.device)
    done_G = (number_G - (runs_L.cumsum(0) - runs_L)[list_G]) * step
    begin_G = part.query.first_L()[list_G] + done_G
    left_G = (count_L[list_G] - done_G).clamp(max=step)
    low_G = part.start_P[begin_G]
    width_G = -(-(part.stop_P[begin_G + left_G - 1] - low_G) // step) * step
    blocks = []
    for width in width_G[width_G > 0].unique().tolist():
        of_width_G = width_G == width
        runs = begin_G[of_width_G], left_G[of_width_G], low_G[of_width_G]
        blocks.append(make_block(part, *runs, step, width))
    return blocks


def make_block(part: Reads, begin_G: Tensor, left_G: Tensor, low_G: Tensor, queries: int, keys: int) -> Block:
    """Return blocks of `left_G` queries from `begin_G` on, over `keys` key slots from `low_G` on."""
    slot_Q = torch.arange(queries, device=begin_G.device)
    slot_K = torch.arange(keys, device=begin_G.device)
    query_GQ = begin_G[:, None] + slot_Q.minimum(left_G[:, None] - 1)
    inside_GQ = slot_Q < left_G[:, None]
    start_GQ = part.start_P[query_GQ] - low_G[:, None]
    stop_GQ = part.stop_P[query_GQ] - low_G[:, None]
    key_GK = (low_G[:, None] + slot_K).clamp(max=len(part.key.row_M) - 1)
    # What one block's queries read is mostly what all do: one mask then serves them.
    start_Q = torch.where(inside_GQ, start_GQ, -1).amax(0)
    stop_Q = torch.where(inside_GQ, stop_GQ, -1).amax(0)
    alike = (~inside_GQ | ((start_GQ == start_Q) & (stop_GQ == stop_Q))).all()
    if bool(alike):
        start_GQ, stop_GQ = start_Q, stop_Q
        reads_on = ((start_Q <= 0) & ((stop_Q == slot_Q + 1) | (stop_Q < 0))).all()
        if part.hidden is None and queries == keys and bool(reads_on):
            return Block(query_GQ, inside_GQ & (stop_GQ > start_GQ), key_GK, None)
    mask = (slot_K >= start_GQ[..., None]) & (slot_K < stop_GQ[..., None])
    for value_M, low_P, high_P in zip(*part.hidden or (), strict=True):
        value_G1K = value_M[key_GK][:, None]
        below = value_G1K < low_P[query_GQ][..., None]
        mask = mask & (below | (value_G1K >= high_P[query_GQ][..., None]))
    real_GQ = inside_GQ & mask.any(-1)
    mask[..., 0] |= ~mask.any(-1)  # no softmax is empty; what such a query reads is dropped
    return Block(query_GQ, real_GQ, key_GK, mask)


def by_torch(q_GQD: Tensor, k_GKD: Tensor, v_GKD: Tensor, mask: Tensor | None, terms: Terms) -> Tensor:
    """Return the outputs `[G, Q, D]` by torch's attention kernels."""
    q, k, v = (x[:, None] for x in (q_GQD, k_GKD, v_GKD))
    if mask is not None and mask.dim() == 3:
        mask = mask[:, None]
    options = {"is_causal": mask is None, "dropout_p": terms.dropout, "scale": terms.scale}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)[:, 0]


def soft_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    row_GQ: Tensor,
    row_GK: Tensor,
    head_G: Tensor,
    terms: Terms,
) -> tuple[Tensor, Tensor]:
    """Return what `soft_attend` does for blocks of rows."""
    if mask is None:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    distance_GQK = row_GQ[:, :, None] - row_GK[:, None] if terms.by_distance else None
    return soft_attend(q, k, v, mask, distance_GQK, head_G, terms)


class Gather(torch.autograd.Function):
    """The rows `[G, Q, D]` of each `[G, Q]` of row numbers; their gradients are added up in one tensor."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*rows)
        ctx.shape = x_RD.shape
        return tuple(x_RD.index_select(0, row_GQ.flatten()).unflatten(0, row_GQ.shape) for row_GQ in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total_RD = gradients[0].new_zeros(ctx.shape)
        for row_GQ, gradient_GQD in zip(ctx.saved_tensors, gradients, strict=True):
            total_RD.index_add_(0, row_GQ.flatten(), gradient_GQD.flatten(0, 1))
        return total_RD, *[None] * len(gradients)


def take(x_RD: Tensor, rows: list[Tensor]) -> Iterable[Tensor]:
    """Return for each `[G, Q]` of row numbers the rows `[G, Q, D]`; views where these are all rows in order."""
    if not rows or not x_RD.requires_grad or not torch.is_grad_enabled():
        return (x_RD[row_GQ] for row_GQ in rows)  # one after the other
    row_S = torch.cat([row_GQ.flatten() for row_GQ in rows])
    every_S = torch.arange(len(row_S), device=row_S.device)
    if not x_RD.is_cpu or len(row_S) != len(x_RD) or not torch.equal(row_S, every_S):
        return Gather.apply(x_RD, *rows)
    pieces = x_RD.split([row_GQ.numel() for row_GQ in rows])
    return [x_SD.unflatten(0, row_GQ.shape) for x_SD, row_GQ in zip(pieces, rows, strict=True)]
