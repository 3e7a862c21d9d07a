"""The engine: softmax attention for every pattern, once it is known who reads whom.

`attend` runs one of three implementations that compute the same: torch's kernels on blocks cut from the lists, the
compiled kernel (`native.py`, a CPU with a C++ compiler), and FlexAttention (`flex.py`, a GPU with Triton).

Shapes: B sequences, H heads, N positions, D head size, R = B * H * N rows, L lists, P query members and M key members
of all lists together, G blocks of one form, Q query and K key slots of a block.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention import flex, native
from rtx.attention.packed import Indexed, Part, Reads
from rtx.attention.softmax import Terms, recomputed, soft_attend

BACKENDS = ("auto", "torch", "native", "flex")
MERGES = ("mean", "lse")
MAX_SCORES_CPU, MAX_SCORES_GPU = 1 << 20, 1 << 26
"""Scores of our own softmax worked on at once: few enough for a CPU's cache, enough to fill a GPU."""
MAX_MASK = 1 << 24
"""Numbers of a mask held at once."""


def attend(
    q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, parts: list[Part], terms: Terms, backend: str, merge: str = "mean"
) -> Tensor:
    """Return the outputs `[B, H, N, D]`; a position that reads nothing gets zero.

    A position in several lists of one part gets the mean over those in which it reads something (the paper, section
    4.1), or with merge="lse" one softmax over all of them, in which a key counts once for each of its lists. Several
    parts, which share no pair, and in each of which a position reads at most one list, are always joined so.
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


def cut(part: Reads, triangles: bool) -> list[Block]:
    """Cut the lists into blocks of at most about eight forms.

    With `triangles`, a square list whose members all read from its beginning is one block, whose mask is the plain
    triangle. All others are cut into runs; their keys reach from the first that one of them reads to the last.
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
    blocks, size = cut(part, triangles=plain and part.hidden is None), len(part.start_P if joined else q_RD)
    query_rows, key_rows = [part.query.row_M[b.query_GQ] for b in blocks], [part.key.row_M[b.key_GK] for b in blocks]
    weight_P = 1 / part.times_R(len(q_RD)).clamp(min=1)[part.query.row_M].double()
    # One row more takes what is thrown away.
    wide = torch.promote_types(v_RD.dtype, torch.float32)
    total = v_RD.new_zeros(size + 1, v_RD.shape[-1], dtype=v_RD.dtype if plain else wide)
    sum_P = total.new_full((size + 1,), float("-inf"))
    taken = take(q_RD, query_rows), take(k_RD, key_rows), take(v_RD, key_rows)
    for block, row_GQ, row_GK, q, k, v in zip(blocks, query_rows, key_rows, *taken, strict=True):
        target_S = torch.where(block.real_GQ, block.query_GQ if joined else row_GQ, size).flatten()
        if plain:
            out_GQD = kernel(q, k, v, block.mask, terms)
        else:
            out_GQD, sum_GQ = soft_block(part.length, block, row_GQ, row_GK, q, k, v, terms)
        if joined:
            sum_P = sum_P.index_copy(0, target_S, sum_GQ.flatten())
        else:
            out_GQD = out_GQD * weight_P[block.query_GQ][..., None].to(out_GQD.dtype)
        total.index_add_(0, target_S, out_GQD.flatten(0, 1).to(total.dtype))
    return total[:size], sum_P[:size]


def kernel(q_GQD: Tensor, k_GKD: Tensor, v_GKD: Tensor, mask: Tensor | None, terms: Terms) -> Tensor:
    """Return the outputs `[G, Q, D]` by torch's attention kernels, for some blocks at a time where each has a mask."""
    options = {"is_causal": mask is None, "dropout_p": terms.dropout, "scale": terms.scale}
    shared = mask is None or mask.dim() == 2
    piece = max(1, len(q_GQD) if mask is None or shared else MAX_MASK // mask[0].numel())
    outs = []
    for first in range(0, len(q_GQD), piece):
        q, k, v = (x[first : first + piece, None] for x in (q_GQD, k_GKD, v_GKD))
        seen = mask if mask is None or shared else mask[first : first + piece, None]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, **options)[:, 0])
    return torch.cat(outs)


def soft_block(
    length: int, block: Block, row_GQ: Tensor, row_GK: Tensor, q_GQD: Tensor, k_GKD: Tensor, v_GKD: Tensor, terms: Terms
) -> tuple[Tensor, Tensor]:
    """Return what `soft_attend` does for blocks of one form, some at a time; scores are not kept for the gradient."""
    mask = block.mask
    if mask is None:
        mask = torch.ones(q_GQD.shape[1], k_GKD.shape[1], dtype=torch.bool, device=q_GQD.device).tril()

    def read(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, row_Q: Tensor, row_K: Tensor) -> tuple[Tensor, Tensor]:
        distance_GQK = row_Q[:, :, None] - row_K[:, None] if terms.by_distance else None
        return soft_attend(q, k, v, seen, distance_GQK, row_Q[:, 0] // length % terms.heads, terms)

    most = MAX_SCORES_CPU if q_GQD.device.type == "cpu" else MAX_SCORES_GPU
    given = q_GQD, k_GKD, v_GKD, mask.expand(len(q_GQD), -1, -1), row_GQ, row_GK
    pieces = zip(*(x.split(max(1, most // (q_GQD.shape[1] * k_GKD.shape[1]))) for x in given), strict=True)
    outs, sums = zip(*(recomputed(read, *piece) for piece in pieces), strict=True)
    return torch.cat(outs), torch.cat(sums)


def take(x_RD: Tensor, rows: list[Tensor]) -> list[Tensor]:
    """Return for each `[G, Q]` of row numbers the rows `[G, Q, D]`, by one gather, so that they share one gradient."""
    if not rows:
        return []
    row_S = torch.cat([row_GQ.flatten() for row_GQ in rows])
    whole = len(row_S) == len(x_RD) and torch.equal(row_S, torch.arange(len(row_S), device=row_S.device))
    taken_SD = x_RD if whole else x_RD.index_select(0, row_S)
    parts = taken_SD.split([row_GQ.numel() for row_GQ in rows])
    return [part_SD.view(*row_GQ.shape, x_RD.shape[-1]) for part_SD, row_GQ in zip(parts, rows, strict=True)]


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
