"""The oracle: softmax attention with the mask of a pattern's rule, written for clarity, not speed.

Tests compare the outputs, gradients and streams of every pattern with it in float64. A rule is a
mask `[C, N, N]`, true where the query (first) reads the key (second) in a list. The output of a
position is the mean over the lists in which it reads something, or one softmax over all of them.

In cross-attention the keys have another N than the queries: masks are `[C, N of queries, N of
keys]`.

Shapes: B sequences, H heads, N positions, D head size, C lists of a head, M distances.
"""

from collections.abc import Callable
from functools import partial
from math import inf

import torch
from torch import Tensor

from rtx.attention.documents import Documents
from rtx.attention.engine.softmax import LogitTerms, RelativeTables
from rtx.attention.padding import QKV
from rtx.attention.pattern import Pattern, Rotate
from rtx.attention.reads import QueriesKeys
from rtx.attention.typed_torch import tolist, unique


def attend_by_rule(
    pattern: Pattern,
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    *,
    rotate: Rotate | None = None,
    relative: RelativeTables | None = None,
    streaming: bool = False,
    documents: Documents | None = None,
) -> Tensor:
    """Return the outputs `[B, H, N, D]` of a pattern by its rule, without padding and dropout.

    Each document is a sequence by itself.
    """
    if documents is not None:
        attend_alone = partial(
            attend_by_rule, rotate=rotate, relative=relative, streaming=streaming
        )
        qkv = (q_BHND, k_BHND, v_BHND)
        return attend_documents(attend_alone, pattern, qkv, documents)
    D = q_BHND.shape[-1]
    terms = pattern.terms(D, relative)
    outs: list[Tensor] = []
    for b, q_HND in enumerate(q_BHND):
        k_1HND = None
        if k_BHND is not None:
            k_1HND = k_BHND[b, None]
        qk = pattern.inputs(q_HND[None], k_1HND, rotate)
        outs.append(attend_sequence(pattern, qk, v_BHND[b], terms, streaming))
    if not outs:
        return v_BHND.new_zeros(*q_BHND.shape[:3], v_BHND.shape[3])
    return torch.stack(outs)


def attend_sequence(
    pattern: Pattern,
    qk: QueriesKeys,
    v_GND: Tensor,
    terms: LogitTerms,
    streaming: bool,
) -> Tensor:
    """Return the outputs of all query heads of one sequence by the rule, `[H, N, D]`.

    Args:
        qk: of this sequence.
        v_GND: the values of key-value heads.
        terms: the terms of logits besides queries and keys.
    """
    queries_of_key_head = pattern.queries_of_key_head
    G, _, value_size = v_GND.shape
    outs: list[Tensor] = []
    for h in range(G * queries_of_key_head):
        key_head = h // queries_of_key_head
        # The number of the head that chooses the keys: the query head itself, or, if query heads
        # choose together, their key-value head. The logits are those of the query head either way.
        head = h
        qk_of_logits = qk
        if pattern.chooses_together:
            head = key_head
            qk_of_logits = of_query_head(qk, h % queries_of_key_head)
        mask_CNN = pattern.rule(qk, head, streaming)
        if not pattern.attend_self:
            mask_CNN = others_if_any(mask_CNN)
        sink = None
        if pattern.sink_H is not None:
            sink = pattern.sink_H[h]
        v_ND = v_GND[key_head]
        out_ND, _ = dense(
            qk_of_logits.rotated_q_BHND[0, head],
            qk_of_logits.rotated_k_BHND[0, head],
            v_ND,
            mask_CNN,
            terms,
            head=head,
            merge=pattern.merge,
            sink=sink,
        )
        out_ND = pattern.finish_by_rule(out_ND, qk_of_logits, v_ND, head, terms)
        outs.append(out_ND)
    if not outs:
        return v_GND.new_zeros(0, qk.q_BHND.shape[2], value_size)
    return torch.stack(outs)


def of_query_head(qk: QueriesKeys, number: int) -> QueriesKeys:
    """Return the queries of one of the query heads that choose together, with the keys.

    Args:
        qk: of one sequence.
        number: of the query head among those of its key-value head.
    """
    assert qk.each_q_xHND is not None and qk.rotated_each_q_xHND is not None
    return qk._replace(
        q_BHND=qk.each_q_xHND[number : number + 1],
        rotated_q_BHND=qk.rotated_each_q_xHND[number : number + 1],
    )


def attend_documents(
    attend_alone: Callable[..., Tensor],
    pattern: Pattern,
    qkv: QKV,
    documents: Documents,
) -> Tensor:
    """Return the outputs `[B, H, N, D]` of documents, each attended by itself.

    Args:
        attend_alone: takes the pattern, and queries, keys and values of a document.
    """
    q_BHND, k_BHND, v_BHND = qkv
    no_sequences = v_BHND.new_zeros(0, *q_BHND.shape[1:3], v_BHND.shape[-1])
    sequences = [no_sequences]
    for b, first_N in enumerate(documents.first_BN):
        sequence = slice(b, b + 1)
        outs: list[Tensor] = []
        for first in tolist(unique(first_N)):
            is_in_document_N = first_N == first
            q_1HJD = q_BHND[sequence, :, is_in_document_N]
            v_1HJD = v_BHND[sequence, :, is_in_document_N]
            k_1HJD = None
            if k_BHND is not None:
                k_1HJD = k_BHND[sequence, :, is_in_document_N]
            outs.append(attend_alone(pattern, q_1HJD, k_1HJD, v_1HJD))
        sequences.append(torch.cat(outs, dim=2))
    return torch.cat(sequences)


def others_if_any(mask_CNN: Tensor) -> Tensor:
    """Return the mask without pairs of a position with itself, where the position reads others."""
    N = mask_CNN.shape[-1]
    is_self_NN = torch.eye(N, dtype=torch.bool, device=mask_CNN.device)
    others_CNN = mask_CNN & ~is_self_NN
    has_others_CN1 = others_CNN.any(-1, keepdim=True)
    return torch.where(has_others_CN1, others_CNN, mask_CNN)


def dense(
    q_ND: Tensor,
    k_ND: Tensor,
    v_ND: Tensor,
    mask_CNN: Tensor,
    terms: LogitTerms,
    head: int = 0,
    merge: str = "mean",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[N, D]` of one head of one sequence, and its weights `[C, N, N]`.

    Args:
        mask_CNN: which keys each position reads in each list.
        terms: the other terms of logits and weights; the dropout is ignored.
        head: the number of the head, which selects its terms.
        merge: "mean": a position gets the mean over the lists in which it reads something. "lse":
            one softmax over all its lists.
        sink: a logit without a value in every softmax, a scalar; None: there is none.
    """
    query_N = torch.arange(len(q_ND), device=q_ND.device)
    key_N = torch.arange(len(k_ND), device=q_ND.device)
    distance_NN = query_N[:, None] - key_N
    distance_NN = distance_NN.abs()
    logits_NN = logits(q_ND, k_ND, distance_NN, terms, head)
    weight_CNN = weights(logits_NN, mask_CNN, merge, sink)
    out_ND = weight_CNN.sum(0) @ v_ND
    relative = terms.relative
    if relative is not None and relative.values_MD is not None:
        values_NND = rows_by_distance(relative.values_MD, distance_NN)
        of_distances_ND = torch.einsum("cnm,nmd->nd", weight_CNN, values_NND)
        out_ND = out_ND + of_distances_ND
    return out_ND, weight_CNN


def logits(q_ND: Tensor, k_ND: Tensor, distance_NN: Tensor, terms: LogitTerms, head: int) -> Tensor:
    """Return the logits of one head, `[N, N]`; `rtx.attention.engine.softmax` has the formula."""
    products_NN = q_ND @ k_ND.T
    if terms.relative is not None:
        keys_MD, bias_M = terms.relative.of_heads(head)
        keys_NND = rows_by_distance(keys_MD, distance_NN)
        of_distances_NN = torch.einsum("nd,nmd->nm", q_ND, keys_NND)
        products_NN = products_NN + of_distances_NN
        if bias_M is not None:
            products_NN = products_NN + rows_by_distance(bias_M, distance_NN)
    logits_NN = terms.scale * products_NN
    if terms.bias_HM is not None:
        bias_M = terms.bias_HM[head]
        logits_NN = logits_NN + rows_by_distance(bias_M, distance_NN)
    return logits_NN


def rows_by_distance(table: Tensor, distance_NN: Tensor) -> Tensor:
    """Return the row of a table for each distance; larger distances get the last row."""
    last = len(table) - 1
    return table[distance_NN.clamp(max=last)]


def weights(logits_NN: Tensor, mask_CNN: Tensor, merge: str, sink: Tensor | None = None) -> Tensor:
    """Return the weight of each key in each list for each query, `[C, N, N]`.

    The weights of a query sum to 1 without a sink, or to 0 where it reads nothing.
    """
    mask_CNN = mask_CNN & (logits_NN > -inf)
    over: tuple[int, ...] = (-1,)
    if merge == "lse":
        over = (0, -1)
    reads_some_CN1 = mask_CNN.any(over, keepdim=True)
    # A query that reads nothing gets a softmax over all keys, as one over none would be NaN; the
    # product with the mask then makes it zero.
    is_in_softmax_CNN = mask_CNN | ~reads_some_CN1
    logits_CNN = torch.where(is_in_softmax_CNN, logits_NN, -inf)
    logits_CNN = logits_CNN.nan_to_num(0.0, neginf=-inf)
    log_sum_CN1 = logits_CNN.logsumexp(over, keepdim=True)
    if sink is not None:
        log_sum_CN1 = torch.logaddexp(log_sum_CN1, sink)
    softmax_CNN = (logits_CNN - log_sum_CN1).exp()
    lists_N1 = reads_some_CN1.sum(0)
    lists_N1 = lists_N1.clamp(min=1)
    return softmax_CNN * mask_CNN / lists_N1
