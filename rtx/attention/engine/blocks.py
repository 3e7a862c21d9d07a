"""Attention by PyTorch's kernels, on blocks cut from packed lists.

A block has consecutive query members of one list, and the key members that they read, which are
consecutive as well. PyTorch's kernels need equal shapes, so blocks are rounded up to a few *forms*:
blocks of one form have the same number of query slots and of key slots, and go through a kernel
together. For example, lists of 8, 4 and 7 members, in which every member reads all members up to
itself, become two forms:

    4 x 4   the list of 4
    8 x 8   the list of 8, and the list of 7 with 1 empty slot

Cutting depends on the numbers in the lists, so a CPU waits for a GPU. Lists that are used in
several passes are cut once (`RangeReads.derived`).

Shapes: R rows, L lists, P query members and M key members of all lists together, G blocks of one
form, Q query slots and K key slots of a block, S = G * Q query slots of all of them, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine.problem import Problem, Result
from rtx.attention.engine.rounding import whole_pieces
from rtx.attention.engine.softmax import LogitTerms, soft_attend
from rtx.attention.once import derived_once
from rtx.attention.precision import wide_type
from rtx.attention.reads import Holes, RangeReads
from rtx.attention.recompute import recomputed
from rtx.attention.typed_torch import tolist, unique

MAX_SCORES_CPU = 1 << 20
"""The most scores that a CPU computes at once; they fit in its cache. A block may have more."""
MAX_SCORES_GPU = 1 << 26
"""The most scores that a GPU computes at once; they keep it busy. A block may have more."""
MIN_BLOCKS = 64
"""The least number of blocks in one call of torch's kernels, which spreads them over cores."""
MAX_MASK = 1 << 24
"""The most elements of the masks in one call of torch's kernels, if every block has a mask."""
MAX_STEP = 512
"""The most queries of a run."""


class FormBlocks(NamedTuple):
    """Blocks of one form: which members are in their query slots and key slots."""

    query_GQ: Tensor
    """Numbers of query members; an empty slot repeats the last query of its block."""
    reads_GQ: Tensor
    """False for empty query slots and for queries that read nothing."""
    key_GK: Tensor
    """Numbers of key members."""
    mask: Tensor | None
    """True where a key is read: `[G, Q, K]`, or `[Q, K]` for one mask of all blocks.

    None: a query slot reads the key slots up to its own number.
    """

    @property
    def has_masks(self) -> bool:
        """Whether each block has another mask."""
        return self.mask is not None and self.mask.dim() == 3

    def split(self, size: int) -> list[FormBlocks]:
        """Return the blocks, `size` at a time."""
        queries = torch.split(self.query_GQ, size)
        reads = torch.split(self.reads_GQ, size)
        keys = torch.split(self.key_GK, size)
        masks: Sequence[Tensor | None] = [self.mask] * len(queries)
        if self.mask is not None and self.has_masks:
            masks = torch.split(self.mask, size)
        pieces = zip(queries, reads, keys, masks, strict=True)
        return [FormBlocks(*piece) for piece in pieces]


def refusal(problem: Problem) -> str | None:
    """Return why this engine cannot run the problem, or None if it can."""
    if not isinstance(problem.part, RangeReads):
        return "its keys are an index, not ranges of lists"
    return None


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums, see `Result`.

    `soft_attend` computes what torch's kernels do not: log-sums, terms by distance, and dropout on
    a CPU.
    """
    part = problem.part
    assert isinstance(part, RangeReads)
    on_cpu = problem.q_BHND.is_cpu
    by_torch = torch_computes(problem)
    triangles = by_torch and part.holes is None
    name = f"blocks, triangles {triangles}"
    forms = derived_once(part, name, lambda: cut(part, triangles))
    pieces: list[FormBlocks] = []
    for form in forms:
        size = blocks_at_once(form, by_torch, on_cpu)
        pieces += form.split(size)
    if problem.by_member:
        return attend_members(problem, pieces)
    return attend_rows(problem, pieces, by_torch)


def torch_computes(problem: Problem) -> bool:
    """Return whether torch's kernels can compute everything that the problem needs."""
    terms = problem.terms
    if problem.by_member or terms.by_distance:
        return False
    return not (terms.dropout and problem.q_BHND.is_cpu)


def blocks_at_once(form: FormBlocks, by_torch: bool, on_cpu: bool) -> int:
    """Return how many blocks of a form one call gets, at least one.

    The masks limit it in calls of torch's kernels in which every block has a mask, else the scores.
    """
    _, Q = form.query_GQ.shape
    _, K = form.key_GK.shape
    scores_of_block = Q * K
    if by_torch and form.has_masks:
        return max(1, MAX_MASK // scores_of_block)
    scores = MAX_SCORES_GPU
    if on_cpu:
        scores = MAX_SCORES_CPU
    least = 1
    if by_torch:
        least = MIN_BLOCKS
    return max(least, scores // scores_of_block)


def attend_rows(problem: Problem, pieces: list[FormBlocks], by_torch: bool) -> Result:
    """Return the outputs by row `[R, D]`, means over lists, and an empty tensor of log-sums."""
    part = problem.part
    assert isinstance(part, RangeReads)
    v_BHND = problem.v_BHND
    dtype = v_BHND.dtype
    if not by_torch:
        dtype = wide_type(dtype)
    rows = v_BHND.shape[:3].numel()
    out_RD = v_BHND.new_zeros(rows, v_BHND.shape[-1], dtype=dtype)
    lists_P = part.lists_read_P(rows)
    weight_P = 1 / lists_P.double()
    all_inputs = gathered(problem, pieces)
    for piece, inputs in zip(pieces, all_inputs, strict=True):
        out_GQD = outputs_of_blocks(problem, piece, inputs, by_torch)
        member_S = piece.query_GQ.flatten()
        weight_S = weight_P[member_S].to(dtype)
        weight_S1 = weight_S[:, None]
        out_SD = out_GQD.flatten(0, 1).to(dtype)
        out_SD = without_empty(out_SD * weight_S1, piece)
        row_S = inputs.row_GQ.flatten()
        out_RD.index_add_(0, row_S, out_SD)
    return out_RD, out_RD.new_empty(0)


def outputs_of_blocks(
    problem: Problem,
    piece: FormBlocks,
    inputs: BlockInputs,
    by_torch: bool,
) -> Tensor:
    """Return the outputs of some blocks, `[G, Q, D]`."""
    if by_torch:
        return attend_by_torch(inputs, piece.mask, problem.terms)
    out_GQD, _ = attend_with_log_sums(
        inputs,
        piece.mask,
        problem.part.length,
        problem.terms,
    )
    return out_GQD


def attend_members(problem: Problem, pieces: list[FormBlocks]) -> Result:
    """Return the outputs `[P, D]` and log-sums `[P]` of the query members, in float32 or wider."""
    part = problem.part
    assert isinstance(part, RangeReads)
    P = len(part.start_P)
    v_BHND = problem.v_BHND
    wide = wide_type(v_BHND.dtype)
    out_PD = v_BHND.new_zeros(P, v_BHND.shape[-1], dtype=wide)
    members: list[Tensor] = []
    sums: list[Tensor] = []
    all_inputs = gathered(problem, pieces)
    for piece, inputs in zip(pieces, all_inputs, strict=True):
        out_GQD, sum_GQ = attend_with_log_sums(
            inputs,
            piece.mask,
            part.length,
            problem.terms,
        )
        out_SD = out_GQD.flatten(0, 1).to(wide)
        out_SD = without_empty(out_SD, piece)
        member_S = piece.query_GQ.flatten()
        out_PD.index_add_(0, member_S, out_SD)
        reads_S = piece.reads_GQ.flatten()
        members.append(torch.where(reads_S, member_S, P))
        sums.append(sum_GQ.flatten())
    # The last entry receives the log-sums of empty slots.
    sum_P1 = out_PD.new_full((P + 1,), -math.inf)
    if sums:
        all_members = torch.cat(members)
        all_sums = torch.cat(sums)
        sum_P1 = sum_P1.index_copy(0, all_members, all_sums)
    return out_PD, sum_P1[:P]


def without_empty(out_SD: Tensor, piece: FormBlocks) -> Tensor:
    """Return the outputs of query slots; zeros for slots that read nothing, which may be NaN."""
    is_empty_S = ~piece.reads_GQ.flatten()
    is_empty_S1 = is_empty_S[:, None]
    return out_SD.masked_fill(is_empty_S1, 0)


class BlockInputs(NamedTuple):
    """The queries, keys and values of blocks, and the numbers of their rows."""

    row_GQ: Tensor
    row_GK: Tensor
    q_GQD: Tensor
    k_GKD: Tensor
    v_GKD: Tensor


def gathered(problem: Problem, pieces: list[FormBlocks]) -> Iterator[BlockInputs]:
    """Return the inputs of the pieces, one piece at a time."""
    part = problem.part
    assert isinstance(part, RangeReads)
    q_RD, k_RD, v_RD = problem.rows()
    query_rows = [part.query.row_M[piece.query_GQ] for piece in pieces]
    key_rows = [part.key.row_M[piece.key_GK] for piece in pieces]
    queries = take(q_RD, query_rows)
    keys = take(k_RD, key_rows)
    values = take(v_RD, key_rows)
    return map(BlockInputs, query_rows, key_rows, queries, keys, values)


def attend_by_torch(inputs: BlockInputs, mask: Tensor | None, terms: LogitTerms) -> Tensor:
    """Return the outputs `[G, Q, D]` by torch's attention kernels; each block is a sequence."""
    if mask is not None and mask.dim() == 3:
        mask = mask[:, None]
    out_G1QD = F.scaled_dot_product_attention(
        inputs.q_GQD[:, None],
        inputs.k_GKD[:, None],
        inputs.v_GKD[:, None],
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=terms.dropout,
        scale=terms.scale,
    )
    return out_G1QD[:, 0]


def attend_with_log_sums(
    inputs: BlockInputs,
    mask: Tensor | None,
    length: int,
    terms: LogitTerms,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[G, Q, D]` and log-sums `[G, Q]` by `soft_attend`.

    The backward pass computes intermediates again.

    Args:
        length: N.
    """
    head_G = head_of(inputs.row_GQ, length, terms.heads)
    return recomputed(
        attend_block,
        inputs.q_GQD,
        inputs.k_GKD,
        inputs.v_GKD,
        mask,
        inputs.row_GQ,
        inputs.row_GK,
        head_G,
        terms,
    )


def head_of(row_GQ: Tensor, length: int, heads: int) -> Tensor:
    """Return the head of each block, `[G]`: that of its first row, as row = (b * H + h) * N + n."""
    first_row_G = row_GQ[:, 0]
    head_of_all_G = first_row_G // length
    return head_of_all_G % heads


def attend_block(
    q_GQD: Tensor,
    k_GKD: Tensor,
    v_GKD: Tensor,
    mask: Tensor | None,
    row_GQ: Tensor,
    row_GK: Tensor,
    head_G: Tensor,
    terms: LogitTerms,
) -> tuple[Tensor, Tensor]:
    """Return the results of `soft_attend` for blocks of rows.

    Distances are differences of row numbers. Without a mask a query slot reads the key slots up to
    its own number.
    """
    if mask is None:
        Q = q_GQD.shape[1]
        K = k_GKD.shape[1]
        all_QK = q_GQD.new_ones(Q, K, dtype=torch.bool)
        mask = all_QK.tril()
    distance_GQK = None
    if terms.by_distance:
        row_GQ1 = row_GQ[:, :, None]
        row_G1K = row_GK[:, None]
        distance_GQK = row_GQ1 - row_G1K
    return soft_attend(q_GQD, k_GKD, v_GKD, mask, distance_GQK, head_G, terms)


class Runs(NamedTuple):
    """Runs of consecutive query members, each within one list."""

    begin_G: Tensor
    """The first query member of each run."""
    count_G: Tensor
    """The number of query members of each run."""
    low_G: Tensor
    """The first key member that one of them reads."""

    def where(self, chosen_G: Tensor) -> Runs:
        """Return the runs for which a mask is true."""
        return Runs(
            begin_G=self.begin_G[chosen_G],
            count_G=self.count_G[chosen_G],
            low_G=self.low_G[chosen_G],
        )


def cut(part: RangeReads, triangles: bool) -> list[FormBlocks]:
    """Return the lists, cut into blocks of few forms.

    With `triangles`, a list in which every query reads from the list's first member on is one
    square block. If every query also reads up to itself, the pairs are a triangle, and torch's
    causal kernel needs no mask. All other lists are cut into runs of queries. The keys of a run are
    those from the first that one of its queries reads to the last. For example, a triangle of four
    members, and six members that each read the last three, cut into runs of two queries:

        key       0 1 2 3                 key       0 1 2 3 4 5
        query 0   x . . .                 query 0   x               run 0: keys 0 to 1
        query 1   x x . .                 query 1   x x
        query 2   x x x .                 query 2   x x x           run 1: keys 0 to 3
        query 3   x x x x                 query 3     x x x
                                          query 4       x x x       run 2: keys 2 to 5
                                          query 5         x x x

    The sides of squares are rounded up to whole quarters of the longest range. A run has a step of
    queries, and its keys are rounded up to whole steps. A step is such a quarter, but at most
    MAX_STEP. So there are about four forms of squares and four of runs (more of runs if a range is
    longer than 4 * MAX_STEP).
    """
    count_L = part.query.count_L
    longest = 0
    if len(part.start_P):
        length_P = part.stop_P - part.start_P
        longest = int(length_P.max())
    if not longest:
        return []
    quarter = whole_pieces(longest, 4)
    blocks = []
    if triangles and part.query is part.key:
        is_square_L = read_from_the_first(part)
        blocks = squares_of(part, is_square_L, quarter)
        count_L = torch.where(is_square_L, 0, count_L)
    step = min(quarter, MAX_STEP)
    return blocks + cut_into_runs(part, count_L, step)


def squares_of(part: RangeReads, is_square_L: Tensor, quarter: int) -> list[FormBlocks]:
    """Return some lists as one square block each, whose side is a multiple of `quarter`."""
    count_L = part.query.count_L
    first_L = part.query.first_L()
    squares = Runs(begin_G=first_L, count_G=count_L, low_G=first_L)
    size_L = whole_pieces(count_L, quarter) * quarter
    blocks: list[FormBlocks] = []
    for size in tolist(unique(size_L[is_square_L])):
        is_of_size_L = is_square_L & (size_L == size)
        of_size = squares.where(is_of_size_L)
        blocks.append(make_blocks(part, of_size, size, size))
    return blocks


def read_from_the_first(part: RangeReads) -> Tensor:
    """Return in which lists every member reads from the list's first member on, `[L]`, bool.

    Starts never decrease from member to member, so the start of the last member decides.
    """
    count_L = part.query.count_L
    first_L = part.query.first_L()
    last_L = first_L + count_L - 1
    last_L = last_L.clamp(min=0)
    last_start_L = part.start_P[last_L]
    starts_at_first_L = last_start_L == first_L
    has_members_L = count_L > 0
    return has_members_L & starts_at_first_L


def cut_into_runs(part: RangeReads, count_L: Tensor, step: int) -> list[FormBlocks]:
    """Return the first `count_L` queries of each list, cut into blocks of `step` query slots.

    There is one form for each width: the number of keys from the first that a run reads to the
    last, rounded up to whole steps.
    """
    runs = runs_of(part, count_L, step)
    last_G = runs.begin_G + runs.count_G - 1
    high_G = part.stop_P[last_G]
    keys_G = high_G - runs.low_G
    width_G = whole_pieces(keys_G, step) * step
    reads_some_G = width_G > 0
    blocks: list[FormBlocks] = []
    for width in tolist(unique(width_G[reads_some_G])):
        of_width = runs.where(width_G == width)
        blocks.append(make_blocks(part, of_width, step, width))
    return blocks


def runs_of(part: RangeReads, count_L: Tensor, step: int) -> Runs:
    """Return the first `count_L` queries of each list, cut into runs of at most `step` queries."""
    runs_L = whole_pieces(count_L, step)
    number_L = torch.arange(len(count_L), device=count_L.device)
    list_G = number_L.repeat_interleave(runs_L)
    number_G = torch.arange(len(list_G), device=count_L.device)
    first_run_L = runs_L.cumsum(0) - runs_L
    run_of_list_G = number_G - first_run_L[list_G]
    # Those of the same list.
    queries_before_G = run_of_list_G * step
    first_L = part.query.first_L()
    begin_G = first_L[list_G] + queries_before_G
    queries_left_G = count_L[list_G] - queries_before_G
    return Runs(
        begin_G=begin_G,
        count_G=queries_left_G.clamp(max=step),
        low_G=part.start_P[begin_G],
    )


def make_blocks(part: RangeReads, runs: Runs, queries: int, keys: int) -> FormBlocks:
    """Return runs as blocks of `queries` query slots, and of `keys` key slots from `low_G` on.

    Query slots with the same number often read the same key slots in all blocks. Then there is one
    mask for all blocks, or none.
    """
    slot_Q = torch.arange(queries, device=runs.begin_G.device)
    slot_K = torch.arange(keys, device=runs.begin_G.device)
    begin_G1 = runs.begin_G[:, None]
    count_G1 = runs.count_G[:, None]
    low_G1 = runs.low_G[:, None]
    exists_GQ = slot_Q < count_G1
    query_GQ = begin_G1 + slot_Q.minimum(count_G1 - 1)
    last_key = len(part.key.row_M) - 1
    key_GK = (low_G1 + slot_K).clamp(max=last_key)
    start, stop = slot_ranges(part, runs, query_GQ, exists_GQ)
    is_one_range = start.dim() == 1 and part.holes is None
    if is_one_range and queries == keys and is_triangle(start, stop):
        reads_some = stop > start
        return FormBlocks(query_GQ, exists_GQ & reads_some, key_GK, mask=None)
    is_from_start = slot_K >= start[..., None]
    is_before_stop = slot_K < stop[..., None]
    mask = is_from_start & is_before_stop
    if part.holes is not None:
        mask = without_holes(mask, part.holes, query_GQ, key_GK)
    reads_some = mask.any(-1)
    reads_GQ = exists_GQ & reads_some
    # A softmax over no key would give NaN. So a query that reads nothing reads slot 0, and its
    # output is dropped.
    mask[..., 0] |= ~reads_some
    return FormBlocks(query_GQ, reads_GQ, key_GK, mask)


def slot_ranges(
    part: RangeReads,
    runs: Runs,
    query_GQ: Tensor,
    exists_GQ: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the first key slot that each query slot reads, and the one after the last.

    They are `[G, Q]`, or `[Q]` if all blocks have the same.

    Args:
        exists_GQ: false for empty query slots, whose ranges do not matter.
    """
    low_G1 = runs.low_G[:, None]
    start_GQ = part.start_P[query_GQ] - low_G1
    stop_GQ = part.stop_P[query_GQ] - low_G1
    start_Q = common_slots(start_GQ, exists_GQ)
    stop_Q = common_slots(stop_GQ, exists_GQ)
    is_same_start_GQ = start_GQ == start_Q
    is_same_stop_GQ = stop_GQ == stop_Q
    is_common_GQ = is_same_start_GQ & is_same_stop_GQ
    is_common_GQ |= ~exists_GQ
    if bool(is_common_GQ.all()):
        return start_Q, stop_Q
    return start_GQ, stop_GQ


def common_slots(slot_GQ: Tensor, exists_GQ: Tensor) -> Tensor:
    """Return for each query slot the key slot that all blocks have in common, if they do, `[Q]`.

    That is the largest of them: if all are equal, each of them is. Empty query slots do not count;
    -1 if the query slot is empty in all blocks.
    """
    existing_GQ = torch.where(exists_GQ, slot_GQ, -1)
    return existing_GQ.amax(0)


def is_triangle(start_Q: Tensor, stop_Q: Tensor) -> bool:
    """Return whether each query slot reads the key slots up to its own, or is empty: -1."""
    slot_Q = torch.arange(len(stop_Q), device=stop_Q.device)
    is_empty_Q = stop_Q < 0
    stops_after_slot_Q = stop_Q == slot_Q + 1
    starts_at_first_Q = start_Q <= 0
    has_form_Q = starts_at_first_Q & (is_empty_Q | stops_after_slot_Q)
    return bool(has_form_Q.all())


def without_holes(mask: Tensor, holes: Holes, query_GQ: Tensor, key_GK: Tensor) -> Tensor:
    """Return a mask of pairs without those that holes exclude, `[G, Q, K]`.

    The mask broadcasts to that shape; `query_GQ` and `key_GK` are the members in query and key
    slots.
    """
    for value_M, low_P, high_P in zip(*holes, strict=True):
        value_G1K = value_M[key_GK][:, None]
        low_GQ1 = low_P[query_GQ][..., None]
        high_GQ1 = high_P[query_GQ][..., None]
        is_from_low_GQK = value_G1K >= low_GQ1
        is_below_high_GQK = value_G1K < high_GQ1
        is_in_hole_GQK = is_from_low_GQK & is_below_high_GQK
        mask = mask & ~is_in_hole_GQK
    return mask


class TakeRows(torch.autograd.Function):
    """The result of `take`, whose backward pass adds all gradients to one tensor `[R, D]`.

    Indexing would make such a tensor for each tensor of row numbers, and then add these.
    """

    apply: Callable[..., tuple[Tensor, ...]]  # torch declares it without types

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*rows)
        ctx.shape = x_RD.shape
        pieces: list[Tensor] = []
        for row_GQ in rows:
            x_SD = x_RD.index_select(0, row_GQ.flatten())
            pieces.append(torch.unflatten(x_SD, 0, row_GQ.shape))
        return tuple(pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total_RD = gradients[0].new_zeros(ctx.shape)
        for row_GQ, gradient_GQD in zip(ctx.saved_tensors, gradients, strict=True):
            row_S = row_GQ.flatten()
            gradient_SD = gradient_GQD.flatten(0, 1)
            total_RD.index_add_(0, row_S, gradient_SD)
        of_rows = [None] * len(gradients)
        return total_RD, *of_rows


def take(x_RD: Tensor, rows: list[Tensor]) -> Iterable[Tensor]:
    """Return the rows `[G, Q, D]` of each tensor `[G, Q]` of row numbers.

    Without gradients they are copied one tensor at a time, when the caller iterates. With gradients
    on a CPU they are views of x, if the numbers are those of all rows in order. (This is so if
    every list is a whole sequence, and all have the same form.)
    """
    if not rows or not x_RD.requires_grad or not torch.is_grad_enabled():
        return (x_RD[row_GQ] for row_GQ in rows)
    if not x_RD.is_cpu or not are_all_in_order(rows, len(x_RD)):
        return TakeRows.apply(x_RD, *rows)
    counts = [row_GQ.numel() for row_GQ in rows]
    pieces = torch.split(x_RD, counts)
    views: list[Tensor] = []
    for x_SD, row_GQ in zip(pieces, rows, strict=True):
        views.append(torch.unflatten(x_SD, 0, row_GQ.shape))
    return views


def are_all_in_order(rows: list[Tensor], count: int) -> bool:
    """Return whether the row numbers are 0 to count - 1, in this order."""
    if sum(row_GQ.numel() for row_GQ in rows) != count:
        return False
    row_S = torch.cat([row_GQ.flatten() for row_GQ in rows])
    number_S = torch.arange(count, device=row_S.device)
    return torch.equal(row_S, number_S)
