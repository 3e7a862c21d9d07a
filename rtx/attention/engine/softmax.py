"""Softmax attention inside blocks of queries and keys, with what torch's kernels do not have.

That is terms by distance, dropout on a CPU, and log-sums. Let t be the distance of query i from key
j, which is i - j in positions; the last row of a table is for all larger distances. The logit of a
pair is

    scale * (q_i . k_j + q_i . keys[t] + bias[t]) + bias_by_distance[t],

and the output of a query is sum_j weight_ij (v_j + values[t]). `RelativeTables` has keys, bias and
values, and `LogitTerms.bias_HM` is bias_by_distance. Each of them is optional.

Shapes: G blocks, Q queries of a block, K keys of a block, D head size, H heads, M distances (rows
of a table).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.precision import no_autocast, wide_type


class RelativeTables(NamedTuple):
    """Tables by distance: row m is for distance m, and the last row also for larger distances.

    Shaw et al. 2018 (equations 3 and 4) have keys and values that all heads share. Transformer-XL
    (Dai et al. 2019, section 3.3) has keys and a bias for each head, and no values.
    """

    keys_MD: Tensor
    """`[M, D]`, or `[H, M, D]` with keys for each head."""
    values_MD: Tensor | None = None
    bias_HM: Tensor | None = None
    """Added to the product of query and key, before it is scaled."""

    def of_heads(self, head: Tensor | int) -> tuple[Tensor, Tensor | None]:
        """Return keys and bias of some heads, `[G, M, D]` and `[G, M]`.

        Keys that all heads share remain `[M, D]`.
        """
        keys = self.keys_MD
        if keys.dim() == 3:
            keys = keys[head]
        if self.bias_HM is None:
            return keys, None
        return keys, self.bias_HM[head]


class LogitTerms(NamedTuple):
    """The terms of logits and weights besides queries, keys and values."""

    scale: float
    dropout: float = 0.0
    """The share of weights that is set to zero."""
    relative: RelativeTables | None = None
    bias_HM: Tensor | None = None
    """Added to the scaled logits, by head and distance; -inf: not read.

    The last column is also for larger distances.
    """
    sink_IH: Tensor | None = None
    """The sinks: for each head a logit without a value in the softmax of its queries.

    If query heads are copies of sequences (`rtx.attention.grouped`), row i has the sinks of copy i
    of I; otherwise I = 1. `rtx.attention.engine.attend` and streams apply sinks; engines do not.
    """
    heads: int = 1
    """H, by which the head of a row is computed; `rtx.attention.engine.attend` sets it."""

    @property
    def by_distance(self) -> bool:
        """Whether anything depends on distances."""
        return self.relative is not None or self.bias_HM is not None


def soft_attend(
    q_GQD: Tensor,
    k_GKD: Tensor,
    v_GKD: Tensor,
    mask_GQK: Tensor,
    distance_GQK: Tensor | None,
    head_G: Tensor | None,
    terms: LogitTerms,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[G, Q, D]` and the log-sums `[G, Q]`, in float32 or wider.

    A log-sum is ln(sum of e^logit) over the keys that are read. A query that reads no key, or only
    keys with logits near the least number of the type, gets the output 0 and the log-sum -inf.

    Args:
        mask_GQK: true where a key is read, in a shape that broadcasts to `[G, Q, K]`.
        distance_GQK: distances of queries from keys; terms by distance need them.
        head_G: the head of each block; terms that differ from head to head need it.
    """
    wide = wide_type(q_GQD.dtype)
    if not k_GKD.shape[1]:
        G, Q, _ = q_GQD.shape
        out_GQD = v_GKD.new_zeros(G, Q, v_GKD.shape[2], dtype=wide)
        return out_GQD, out_GQD.new_full((G, Q), float("-inf"))
    # The logit of keys that are not read: finite, because the softmax of a row of -inf has the
    # gradient NaN.
    unread = torch.finfo(wide).min / 2
    relative = terms.relative
    with no_autocast(q_GQD):
        q_GQD = q_GQD.to(wide) * terms.scale
        k_GKD = k_GKD.to(wide)
        v_GKD = v_GKD.to(wide)
        entry_GQK = None
        if relative is not None:
            assert distance_GQK is not None
            entry_GQK = entries_of(distance_GQK, relative.keys_MD.shape[-2])
        logits_GQK = products(q_GQD, k_GKD, entry_GQK, head_G, terms)
        if terms.bias_HM is not None:
            assert distance_GQK is not None and head_G is not None
            bias_GQK = bias_by_distance(terms.bias_HM, distance_GQK, head_G, wide)
            logits_GQK += bias_GQK.clamp(min=unread)
        logits_GQK.masked_fill_(~mask_GQK, unread)
        weight_GQK = logits_GQK.softmax(-1)
        sum_GQ1, top_GQ1 = log_sums(logits_GQK, weight_GQK)
        weight_GQK = F.dropout(weight_GQK, terms.dropout, training=terms.dropout > 0)
        out_GQD = weight_GQK @ v_GKD
        if relative is not None and relative.values_MD is not None:
            assert entry_GQK is not None
            out_GQD = out_GQD + values_by_distance(weight_GQK, entry_GQK, relative.values_MD)
    # Logits of keys that are read are above half of `unread`.
    reads_nothing_GQ1 = top_GQ1 <= unread / 2
    sum_GQ1 = sum_GQ1.masked_fill(reads_nothing_GQ1, float("-inf"))
    return out_GQD.masked_fill(reads_nothing_GQ1, 0.0), sum_GQ1[..., 0]


def entries_of(distance_GQK: Tensor, rows: int) -> Tensor:
    """Return the row of a table for each distance; the table has `rows` rows."""
    return distance_GQK.clamp(0, rows - 1)


def products(
    q_GQD: Tensor,
    k_GKD: Tensor,
    entry_GQK: Tensor | None,
    head_G: Tensor | None,
    terms: LogitTerms,
) -> Tensor:
    """Return the logits without `terms.bias_HM`, `[G, Q, K]`.

    Args:
        q_GQD: queries, already scaled.
        entry_GQK: the row of each pair in the tables of `terms.relative`; None without tables.
    """
    if terms.relative is None:
        return q_GQD @ k_GKD.mT
    assert entry_GQK is not None
    heads = 0 if head_G is None else head_G
    keys, bias_GM = terms.relative.of_heads(heads)
    by_distance_GQM = q_GQD @ keys.to(q_GQD.dtype).mT
    if bias_GM is not None:
        bias_G1M = bias_GM.to(q_GQD.dtype)[:, None]
        by_distance_GQM = by_distance_GQM + bias_G1M * terms.scale
    by_distance_GQK = by_distance_GQM.gather(-1, entry_GQK)
    return torch.baddbmm(by_distance_GQK, q_GQD, k_GKD.mT)


def bias_by_distance(
    bias_HM: Tensor,
    distance_GQK: Tensor,
    head_G: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return what `LogitTerms.bias_HM` adds to the logits, `[G, Q, K]`.

    Later keys have negative distances; a bias is that of a key as far before the query.
    """
    bias_G1M = bias_HM.to(dtype)[head_G][:, None]
    bias_GQM = bias_G1M.expand(-1, distance_GQK.shape[1], -1)
    entry_GQK = entries_of(distance_GQK.abs(), rows=bias_HM.shape[-1])
    return bias_GQM.gather(-1, entry_GQK)


def log_sums(logits_GQK: Tensor, weight_GQK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sums and the highest logits, `[G, Q, 1]`.

    A weight is e^(logit - log-sum), so the log-sum is the highest logit less the logarithm of its
    weight; no exponential is computed a second time.
    """
    best_GQ1 = logits_GQK.argmax(-1, keepdim=True)
    top_GQ1 = logits_GQK.gather(-1, best_GQ1)
    top_weight_GQ1 = weight_GQK.gather(-1, best_GQ1)
    return top_GQ1 - top_weight_GQ1.log(), top_GQ1


def values_by_distance(weight_GQK: Tensor, entry_GQK: Tensor, values_MD: Tensor) -> Tensor:
    """Return what values by distance add to the outputs, `[G, Q, D]`.

    Weights are summed by distance first: a table is short.
    """
    G, Q, _ = weight_GQK.shape
    weight_GQM = weight_GQK.new_zeros(G, Q, len(values_MD))
    weight_GQM = weight_GQM.scatter_add(-1, entry_GQK, weight_GQK)
    return weight_GQM @ values_MD.to(weight_GQK.dtype)
