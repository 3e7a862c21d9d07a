"""Attention of the newest position of each stream, over slots of its cache.

`attend_step` attends over one set of slots for each head, and `attend_lists` over several lists of
slots, whose outputs it merges.

Shapes: B streams, H heads that choose keys, G heads of keys and values, Q queries of a head at the
newest position (see `rtx.attention.pattern.Cache`), R = B * H * Q of them, K keys that they read, J
lists, S slots of a list, X = B * H, D head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine.combine import Partial, combine, sinks_alone, with_sink
from rtx.attention.engine.softmax import LogitTerms, soft_attend
from rtx.attention.grouped import expanded
from rtx.attention.precision import wide_type


def attend_step(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    mask_BH1K: Tensor | None,
    distance_BH1K: Tensor | None,
    terms: LogitTerms,
) -> Tensor:
    """Return softmax attention of the queries of each head, `[B, H, Q, D]`.

    All queries are at one position. If keys and values have fewer heads than queries, successive
    heads share them. Sinks are logits without a value, one for each head and query.

    Args:
        mask_BH1K: true at keys that are read, in a shape that broadcasts over B and H; None: all.
        distance_BH1K: distances of the query from the keys, which broadcast likewise; terms by
            distance need them.
    """
    if not terms.by_distance and terms.sink_IH is None:
        return F.scaled_dot_product_attention(
            q_BHQD,
            k_BGKD,
            v_BGKD,
            attn_mask=mask_BH1K,
            scale=terms.scale,
            enable_gqa=q_BHQD.shape[1] != k_BGKD.shape[1],
        )
    B, H, Q, _ = q_BHQD.shape
    _, G, K, _ = k_BGKD.shape
    queries_of_key_head = H // max(1, G)
    k_BHKD = expanded(k_BGKD, queries_of_key_head)
    v_BHKD = expanded(v_BGKD, queries_of_key_head)
    if mask_BH1K is None:
        mask_BH1K = q_BHQD.new_ones(1, 1, 1, K, dtype=torch.bool)
    distance_XQK = None
    if distance_BH1K is not None:
        distance_XQK = distance_BH1K.expand(B, H, Q, K).flatten(0, 1)
    head_H = torch.arange(H, device=q_BHQD.device)
    out_XQD, log_sum_XQ = soft_attend(
        q_BHQD.flatten(0, 1),
        k_BHKD.flatten(0, 1),
        v_BHKD.flatten(0, 1),
        mask_BH1K.expand(B, H, 1, K).flatten(0, 1),
        distance_XQK,
        head_H.repeat(B),
        terms,
    )
    if terms.sink_IH is not None:
        # With the log-sum s and the sink z, the weights become e^s / (e^s + e^z) times as large.
        sink_XQ = terms.sink_IH.T.repeat(B, 1)
        share_XQ = (log_sum_XQ - sink_XQ).sigmoid()
        out_XQD = out_XQD * share_XQ[..., None]
    return torch.unflatten(out_XQD.to(v_BGKD.dtype), 0, (B, H))


class ListSlots(NamedTuple):
    """The slots of J lists that newest positions read. A head may have several lists, or none."""

    stream_head_J: Tensor
    """The stream b and the head h that attend to each list, as b * H + h."""
    key_JSD: Tensor
    value_JSD: Tensor
    mask_JS: Tensor
    """True at slots that are read."""
    distance_JS: Tensor
    """The distance of the newest position from that of each slot."""


def attend_lists(q_BHQD: Tensor, slots: ListSlots, terms: LogitTerms, merge: str) -> Tensor:
    """Return the outputs of the newest positions, merged over lists, `[B, H, Q, D]`.

    With merge="mean" each list has its softmax, which includes the sink if `terms` has one, and the
    output of a query is the mean over its lists. With "lse" a query has one softmax over the slots
    of all its lists, which includes the sink once. A query without lists gets zero.
    """
    shape_BHQ = q_BHQD.shape[:3]
    partial = attend_each(q_BHQD, slots, terms, merge)
    partials = [partial]
    if merge == "lse" and terms.sink_IH is not None:
        streams = len(q_BHQD)
        sink_HQ = terms.sink_IH.T
        sink_XQ = sink_HQ.repeat(streams, 1)
        partials.append(sinks_alone(sink_XQ.flatten(), partial))
    out_RD = combine(partials, rows=shape_BHQ.numel())
    return out_RD.view(*shape_BHQ, -1)


def attend_each(q_BHQD: Tensor, slots: ListSlots, terms: LogitTerms, merge: str) -> Partial:
    """Return the outputs of the newest positions in each list, which `combine` merges.

    With merge="mean" all lists of a query have equal log-sums, so that they have equal weight.
    """
    H = q_BHQD.shape[1]
    Q = q_BHQD.shape[2]
    head_J = slots.stream_head_J % H
    q_XQD = q_BHQD.flatten(0, 1)
    q_JQD = q_XQD[slots.stream_head_J]
    needs_log_sums = merge == "lse" or terms.sink_IH is not None
    out_JQD, log_sum_JQ = attend_within_lists(q_JQD, head_J, slots, terms, needs_log_sums)
    query_Q = torch.arange(Q, device=head_J.device)
    first_row_J = slots.stream_head_J * Q
    row_JQ = first_row_J[:, None] + query_Q
    partial = Partial(
        row_JQ.flatten(),
        out_JQD.flatten(0, 1),
        log_sum_JQ.flatten(),
    )
    if merge == "lse":
        return partial
    if terms.sink_IH is not None:
        sink_HQ = terms.sink_IH.T
        sink_JQ = sink_HQ[head_J]
        return with_sink(partial, sink_JQ.flatten())
    return partial._replace(log_sum_S=torch.zeros_like(partial.log_sum_S))


def attend_within_lists(
    q_JQD: Tensor,
    head_J: Tensor,
    slots: ListSlots,
    terms: LogitTerms,
    needs_log_sums: bool,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of attention within each list, `[J, Q, D]`, and the log-sums `[J, Q]`.

    The log-sums exclude sinks. Use them only with `needs_log_sums`.

    Args:
        head_J: the head of each list, 0 to H - 1.
    """
    J, Q, _ = q_JQD.shape
    mask_J1S = slots.mask_JS[:, None]
    if needs_log_sums or terms.by_distance:
        distance_J1S = slots.distance_JS[:, None]
        distance_JQS = distance_J1S.expand(-1, Q, -1)
        return soft_attend(
            q_JQD,
            slots.key_JSD,
            slots.value_JSD,
            mask_J1S,
            distance_JQS,
            head_J,
            terms,
        )
    # The lists are a batch of J with one head each.
    out_J1QD = attend_step(
        q_JQD[:, None],
        slots.key_JSD[:, None],
        slots.value_JSD[:, None],
        mask_J1S[:, None],
        None,
        terms,
    )
    no_log_sum_JQ = q_JQD.new_zeros(J, Q, dtype=wide_type(q_JQD.dtype))
    return out_J1QD[:, 0], no_log_sum_JQ
