"""The engine: softmax attention for every pattern, once it is known who reads whom.

`attend` runs one of three implementations that compute the same: torch's kernels on blocks cut from the lists, the
compiled kernel (`native.py`, a CPU with a C++ compiler), and FlexAttention (`flex.py`, a GPU with Triton).

Shapes: B sequences, H heads, N positions, D head size, R = B * H * N rows, L lists, P query members and M key members
of all lists together, G blocks of one form, Q query and K key slots of a block.
"""

from collections.abc import Iterable
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine import flex, native
from rtx.attention.engine.softmax import Terms, recomputed, soft_attend
from rtx.attention.packed import Indexed, Part, Reads

BACKENDS = ("auto", "torch", "native", "flex")
MERGES = ("mean", "lse")
MAX_SCORES_CPU, MAX_SCORES_GPU = 1 << 20, 1 << 26
"""Scores worked on at once, of one block at least: few enough for a CPU's cache, enough to fill a GPU."""
MIN_BLOCKS, MAX_MASK = 64, 1 << 24
"""What torch's kernels get at once: so many blocks at least, for many cores; masks of blocks with so many numbers."""


def attend(
    q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, parts: list[Part], terms: Terms, backend: str, merge: str = "mean"
) -> Tensor:
    """Return the outputs `[B, H, N, D]`; a position that reads nothing gets zero.

    A position in several lists of one part gets the mean over those in which it reads something (the
    paper's released code divides by their number + 0.01), or with merge="lse" one softmax over all of
    them, in which a key counts once for each of its lists. Several parts, which share no pair, and in
    each of which a position reads at most one list, are always joined so.
    """
    q_RD, v_RD = q_BHND.flatten(0, 2), v_BHND.flatten(0, 2)
    k_RD = q_RD if k_BHND is q_BHND else k_BHND.flatten(0, 2)
    terms = terms._replace(heads=q_BHND.shape[1])
    if not v_RD.numel() or not q_RD.numel():
        out_RD = torch.zeros_like(v_RD)
    elif merge == "mean" and len(parts) == 1:
        out_RD, _ = attend_part(q_RD, k_RD, v_RD, parts[0], terms, backend, joined=False)
    else:
        every_R = torch.arange(len(q_RD), device=q_RD.device)
        rows = [part.query.row_M if isinstance(part, Reads) else every_R for part in parts]
        found = (attend_part(q_RD, k_RD, v_RD, part, terms, backend, joined=True) for part in parts)
        out_RD = join([(row_P, *each) for row_P, each in zip(rows, found, strict=True)], len(q_RD))
    inputs = q_RD, k_RD, v_RD, *(terms.relative or ()), terms.bias_HM
    learned = [x for x in inputs if x is not None and x.requires_grad and torch.is_grad_enabled()]
    if learned and not out_RD.requires_grad:  # nobody reads: gradients are zero, whatever the values are
        out_RD = out_RD + sum(x[..., :0].sum() for x in learned)
    return out_RD.to(v_RD.dtype).view(*q_BHND.shape[:3], v_BHND.shape[-1])


def join(found: list[tuple[Tensor, Tensor, Tensor]], rows: int) -> Tensor:
    """Return one softmax over the keys of all lists that a row reads, `[rows, D]`; zero where it reads nothing.

    Args:
        found: rows `[S]`, their outputs `[S, D]`, each in one list, and the logarithms `[S]` of the summed exponentials
            there (-inf: no key); one after the other, as all outputs at once would be held twice more.
    """
    row_SX, out_SDX, sum_SX = zip(*found, strict=True)
    row_S, sum_S = torch.cat(row_SX), torch.cat(sum_SX)
    top_R = sum_S.new_full((rows,), float("-inf")).scatter_reduce(0, row_S, sum_S.detach(), "amax")
    weight_S = (sum_S - top_R.masked_fill(top_R.isinf(), 0)[row_S]).exp()
    total_R = weight_S.new_zeros(rows).index_add(0, row_S, weight_S)
    share_SX = (weight_S / total_R.masked_fill(total_R == 0, 1)[row_S]).split([len(row_S) for row_S in row_SX])
    out_RD = sum_S.new_zeros(rows, out_SDX[0].shape[1])  # wide, as log-sums are
    for row_S, out_SD, share_S in zip(row_SX, out_SDX, share_SX, strict=True):
        out_RD = out_RD.index_add(0, row_S, share_S[:, None] * out_SD)
    return out_RD


def attend_part(
    q_RD: Tensor, k_RD: Tensor, v_RD: Tensor, part: Part, terms: Terms, backend: str, joined: bool
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[R, D]`, or `joined` those of query members `[P, D]` with their log-sums `[P]`."""
    if backend == "auto":
        backend = fastest(q_RD, v_RD, part, terms)
    if backend == "native" and (why := native_refusal(q_RD, terms)):
        raise ValueError(f"backend='native' cannot run this ({why}): take backend='torch'")
    if isinstance(part, Indexed):
        return attend_indexed(q_RD, k_RD, v_RD, part, terms, backend)
    if backend == "native":
        return native.attend_ranges(q_RD, k_RD, v_RD, part, terms.scale, joined)
    if backend == "flex":
        return flex.attend(q_RD, k_RD, v_RD, part, terms, joined)
    return by_blocks(q_RD, k_RD, v_RD, part, terms, joined)


def fastest(q_RD: Tensor, v_RD: Tensor, part: Part, terms: Terms) -> str:
    """Return what `auto` takes: a compiled engine where it can run, for what is worth its compilation."""
    if native_refusal(q_RD, terms) is None and native.wanted("auto", part.length):
        return "native"
    if q_RD.is_cuda and isinstance(part, Reads) and not flex.refusal(q_RD, v_RD, terms) and flex.is_faster(part):
        return "flex"
    return "torch"


def native_refusal(q_RD: Tensor, terms: Terms) -> str | None:
    """Return why the compiled kernel cannot run this, None where it can."""
    if q_RD.device.type != "cpu" or q_RD.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return "it computes in float32 on a CPU"
    if terms.by_distance or terms.dropout:
        return "it has no dropout, Shaw's terms or adaptive spans"
    return None


class Block(NamedTuple):
    """Blocks of one form: the members (numbers into P and M) in their query and key slots."""

    query_GQ: Tensor
    real_GQ: Tensor
    """False for query slots behind the end of a list and for queries that see nothing."""
    key_GK: Tensor
    mask: Tensor | None
    """True where a key is read, `[G, Q, K]`, or `[Q, K]` for all blocks; None: the plain triangle."""

    def split(self, scores: int, plain: bool) -> list["Block"]:
        """Return some blocks at a time, with so many scores, or as many as torch's kernels want (`plain`)."""
        own = self.mask is not None and self.mask.dim() == 3
        scores, least = (MAX_MASK, 1) if plain and own else (scores, MIN_BLOCKS if plain else 1)
        size = max(least, scores // (self.query_GQ.shape[1] * self.key_GK.shape[1]))
        masks = self.mask.split(size) if self.mask is not None and own else repeat(self.mask)
        parts = (x.split(size) for x in (self.query_GQ, self.real_GQ, self.key_GK))
        return [Block(*each) for each in zip(*parts, masks, strict=False)]


def cut(part: Reads, triangles: bool) -> list[Block]:
    """Cut the lists into blocks of at most about eight forms.

    With `triangles`, a square list whose members all read from its beginning is one block, whose mask is the plain
    triangle if all read themselves. All others are cut into runs; their keys reach from the first that one of them
    reads to the last.
    """
    count_L, P = part.query.count_L, len(part.start_P)
    longest = int((part.stop_P - part.start_P).max()) if P else 0
    if not longest:
        return []
    first_L, quarter = part.query.first_L(), -(-longest // 4)
    last_L = (first_L + count_L - 1).clamp(min=0)
    whole_L = (count_L > 0) & (part.start_P[last_L] == first_L) & (triangles and part.query is part.key)
    size_L, blocks = -(-count_L // quarter) * quarter, []
    for size in size_L[whole_L].unique().tolist():
        of_size_L = whole_L & (size_L == size)
        begin_G = first_L[of_size_L]
        blocks.append(make_block(part, begin_G, count_L[of_size_L], begin_G, size, size))
    step = min(quarter, 512)
    runs_L = torch.where(whole_L, 0, -(-count_L // step))
    of_G = torch.arange(len(count_L), device=count_L.device).repeat_interleave(runs_L)
    done_G = (torch.arange(len(of_G), device=of_G.device) - (runs_L.cumsum(0) - runs_L)[of_G]) * step
    begin_G, left_G = first_L[of_G] + done_G, (count_L[of_G] - done_G).clamp(max=step)
    low_G = part.start_P[begin_G]
    width_G = -(-(part.stop_P[begin_G + left_G - 1] - low_G) // step) * step
    for width in width_G[width_G > 0].unique().tolist():
        of = width_G == width
        blocks.append(make_block(part, begin_G[of], left_G[of], low_G[of], step, width))
    return blocks


def make_block(part: Reads, begin_G: Tensor, left_G: Tensor, low_G: Tensor, queries: int, keys: int) -> Block:
    """Return blocks of `left_G` queries from `begin_G` on, over `keys` key slots from `low_G` on."""
    slot_Q, slot_K = (torch.arange(n, device=begin_G.device) for n in (queries, keys))
    query_GQ = begin_G[:, None] + slot_Q.minimum(left_G[:, None] - 1)
    inside_GQ = slot_Q < left_G[:, None]
    start_GQ, stop_GQ = part.start_P[query_GQ] - low_G[:, None], part.stop_P[query_GQ] - low_G[:, None]
    key_GK = (low_G[:, None] + slot_K).clamp(max=len(part.key.row_M) - 1)
    # What one block's queries read is mostly what all do: one mask then serves them.
    start_Q, stop_Q = (torch.where(inside_GQ, x, -1).amax(0) for x in (start_GQ, stop_GQ))
    alike = (~inside_GQ | ((start_GQ == start_Q) & (stop_GQ == stop_Q))).all()
    if bool(alike):
        start_GQ, stop_GQ = start_Q, stop_Q
        triangle = queries == keys and bool(((start_Q <= 0) & ((stop_Q == slot_Q + 1) | (stop_Q < 0))).all())
        if triangle and part.hidden is None:
            return Block(query_GQ, inside_GQ & (stop_GQ > start_GQ), key_GK, None)
    mask = (slot_K >= start_GQ[..., None]) & (slot_K < stop_GQ[..., None])
    for value_M, low_P, high_P in zip(*part.hidden or (), strict=True):
        value_G1K = value_M[key_GK][:, None]
        mask = mask & ((value_G1K < low_P[query_GQ][..., None]) | (value_G1K >= high_P[query_GQ][..., None]))
    real_GQ = inside_GQ & mask.any(-1)
    mask[..., 0] |= ~mask.any(-1)  # no softmax is empty; what such a query reads is thrown away
    return Block(query_GQ, real_GQ, key_GK, mask)


def by_blocks(
    q_RD: Tensor, k_RD: Tensor, v_RD: Tensor, part: Reads, terms: Terms, joined: bool
) -> tuple[Tensor, Tensor]:
    """Return what `attend_part` does, by torch's kernels, or by our own softmax for what they do not offer."""
    plain = not joined and not terms.by_distance and not (terms.dropout and q_RD.device.type == "cpu")
    most, forms = MAX_SCORES_CPU if q_RD.device.type == "cpu" else MAX_SCORES_GPU, cut(part, plain and not part.hidden)
    blocks = [piece for form in forms for piece in form.split(most, plain)]
    query_rows, key_rows = [part.query.row_M[b.query_GQ] for b in blocks], [part.key.row_M[b.key_GK] for b in blocks]
    weight_P = 1 / part.times_R(len(q_RD)).clamp(min=1)[part.query.row_M].double()
    size, wide = len(part.start_P if joined else q_RD), torch.promote_types(v_RD.dtype, torch.float32)
    total, sums = v_RD.new_zeros(size, v_RD.shape[-1], dtype=v_RD.dtype if plain else wide), []
    taken = take(q_RD, query_rows), take(k_RD, key_rows), take(v_RD, key_rows)
    for block, row_GQ, row_GK, q, k, v in zip(blocks, query_rows, key_rows, *taken, strict=True):
        target_S, real_S = (block.query_GQ if joined else row_GQ).flatten(), block.real_GQ.flatten()
        if plain:
            out_GQD = kernel(q, k, v, block.mask, terms)
        else:
            head_G = row_GQ[:, 0] // part.length % terms.heads
            out_GQD, sum_GQ = recomputed(soft_block, q, k, v, block.mask, row_GQ, row_GK, head_G, terms)
        out_SD = out_GQD.flatten(0, 1).to(total.dtype)
        if joined:
            sums.append((torch.where(real_S, target_S, size), sum_GQ.flatten()))
        else:
            out_SD = out_SD * weight_P[block.query_GQ.flatten(), None].to(out_SD.dtype)
        # What a slot without a query of its own gets is thrown away, NaN, too.
        total.index_add_(0, target_S, out_SD.masked_fill(~real_S[:, None], 0))
    sum_P = total.new_full((size + 1,), float("-inf"))  # one more takes what is thrown away
    sum_P = sum_P.index_copy(0, *map(torch.cat, zip(*sums, strict=True))) if sums else sum_P
    return total, sum_P[:size]


def kernel(q_GQD: Tensor, k_GKD: Tensor, v_GKD: Tensor, mask: Tensor | None, terms: Terms) -> Tensor:
    """Return the outputs `[G, Q, D]` by torch's attention kernels."""
    q, k, v = (x[:, None] for x in (q_GQD, k_GKD, v_GKD))
    seen = mask if mask is None or mask.dim() == 2 else mask[:, None]
    options = {"is_causal": mask is None, "dropout_p": terms.dropout, "scale": terms.scale}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, **options)[:, 0]


def soft_block(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, row_GQ: Tensor, row_GK: Tensor, head_G: Tensor, terms: Terms
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
    sizes, row_S = [row_GQ.numel() for row_GQ in rows], torch.cat([row_GQ.flatten() for row_GQ in rows])
    if len(row_S) != len(x_RD) or not torch.equal(row_S, torch.arange(len(row_S), device=row_S.device)):
        return Gather.apply(x_RD, *rows)
    return [x_SD.unflatten(0, row_GQ.shape) for x_SD, row_GQ in zip(x_RD.split(sizes), rows, strict=True)]


def attend_indexed(
    q_RD: Tensor, k_RD: Tensor, v_RD: Tensor, part: Indexed, terms: Terms, backend: str
) -> tuple[Tensor, Tensor]:
    """Return what `attend_part` does where every row names the rows that it reads, in order of the rows.

    Without the compiled kernel all scores of some queries are computed at a time, and masked: gathering the keys of
    each query takes longer, but for very long sequences.
    """
    N, heads, index_RK = part.length, len(q_RD) // part.length, part.index_RK
    if backend == "native":
        return native.Attention.apply(q_RD, None if k_RD is q_RD else k_RD, v_RD, terms.scale, heads, index_RK)
    most = MAX_SCORES_CPU if q_RD.device.type == "cpu" else MAX_SCORES_GPU
    asked_N, found = (index_RK >= 0).any(-1).view(heads, N).any(0).nonzero()[:, 0], []
    # Shorter prefixes for earlier queries, where starting kernels costs little; few scores need no second pass.
    step, few = min(most // N, N if q_RD.is_cuda else -(-N // 4)), len(q_RD) * N <= MAX_SCORES_CPU
    head_G = torch.arange(heads, device=q_RD.device) % terms.heads
    k, v, q, index = (x.unflatten(0, (heads, N)) for x in (k_RD, v_RD, q_RD, index_RK))
    if len(asked_N) < N:
        q, index = q.index_select(1, asked_N), index.index_select(1, asked_N)
    every = head_G, k, v, q, index
    for head_G, k, v, q, index in zip(*(x.split(max(1, most // N**2)) for x in every), strict=True):
        pieces = zip(*(x.split(max(1, step), dim) for x, dim in ((asked_N, 0), (q, 1), (index, 1))), strict=True)
        given = ((terms, N, max(piece[0].tolist(), default=0) + 1, head_G, k, v, *piece) for piece in pieces)
        outs, sums = zip(*(recomputed(soft_indexed, *each, kept=few) for each in given), strict=True)
        found.append((torch.cat(outs, 1), torch.cat(sums, 1)))
    out_GQD, sum_GQ = map(torch.cat, zip(*found, strict=True))
    out_GND = out_GQD.new_zeros(heads, N, v_RD.shape[1]).index_copy(1, asked_N, out_GQD)
    sum_GN = sum_GQ.new_full((heads, N), float("-inf")).index_copy(1, asked_N, sum_GQ)
    return out_GND.flatten(0, 1), sum_GN.flatten()


def soft_indexed(
    terms: Terms, N: int, keys: int, head_G: Tensor, k: Tensor, v: Tensor, position_Q: Tensor, q: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `soft_attend` does for queries at some positions, which read the first `keys` positions."""
    place_GQK = torch.where(index < 0, keys, index % N)  # one place more for what is none
    mask_GQK = place_GQK.new_zeros(*q.shape[:2], keys + 1, dtype=torch.bool).scatter_(2, place_GQK, True)
    distance_GQK = None
    if terms.by_distance:
        distance_QK = position_Q[:, None] - torch.arange(keys, device=q.device)
        distance_GQK = distance_QK.expand(len(q), -1, -1)
    return soft_attend(q, k[:, :keys], v[:, :keys], mask_GQK[..., :keys], distance_GQK, head_G, terms)
