"""Grouped queries: several query heads share the keys and values of one head (Ainslie et al. 2023).

With H query heads and G key-value heads, I = H / G query heads share each key-value head: head g
has the query heads g I to g I + I - 1. A pattern chooses in one of two ways which keys they read:

    own      every query head chooses by its query. Keys and values count once for each query head.
    shared   the query heads of a key-value head *choose together*: they read the same keys, chosen
             by the mean of their queries. A score that is a product with a key is then the mean of
             their scores.

For the second way all sequences are copied I times. Copy i has query head i of each key-value head,
so a copy has G heads, and all copies read by the same lists. Copies follow one another: first all
sequences with their first query heads, then all with their second ones.

Example: H = 4, G = 2, so I = 2. Key-value head 0 has the query heads 0 and 1, and key-value head 1
has 2 and 3. The first copy of each sequence has the query heads 0 and 2, the second one 1 and 3.

Shapes: B sequences, H query heads, G key-value heads, I query heads of a key-value head, x = I * B
copies of sequences, N positions, D head size, S slots of a cache, K keys that a query reads.
"""

import torch
from torch import Tensor

from rtx.attention.reads import Holes, IndexReads, MemberLists, QueriesKeys, RangeReads, Reads


def expanded(x_BGND: Tensor, queries_of_key_head: int) -> Tensor:
    """Return keys or values once for each query head, `[B, H, N, D]`.

    Args:
        queries_of_key_head: I.
    """
    if queries_of_key_head == 1:
        return x_BGND
    return x_BGND.repeat_interleave(queries_of_key_head, dim=1)


def first_of_each(x_BHND: Tensor, queries_of_key_head: int) -> Tensor:
    """Return the vectors of the first query head of each key-value head, `[B, G, N, D]`.

    It undoes `expanded`.
    """
    return x_BHND[:, ::queries_of_key_head]


def group_mean(q_BHND: Tensor, queries_of_key_head: int) -> Tensor:
    """Return the mean of the queries that share a key-value head, `[B, G, N, D]`."""
    if queries_of_key_head == 1:
        return q_BHND
    q_BGIND = torch.unflatten(q_BHND, 1, (-1, queries_of_key_head))
    return q_BGIND.mean(2)


def heads_to_copies(q_BHND: Tensor, copies: int) -> Tensor:
    """Return the query heads as `copies` copies of all sequences, `[x, G, N, D]`."""
    q_BGIND = torch.unflatten(q_BHND, 1, (-1, copies))
    q_IBGND = q_BGIND.permute(2, 0, 1, 3, 4)
    return q_IBGND.flatten(0, 1)


def copies_to_heads(out_xGND: Tensor, copies: int) -> Tensor:
    """Return the vectors of all query heads, `[B, H, N, D]`; it undoes `heads_to_copies`."""
    out_IBGND = torch.unflatten(out_xGND, 0, (copies, -1))
    out_BGIND = out_IBGND.permute(1, 2, 0, 3, 4)
    return out_BGIND.flatten(1, 2)


def repeated_inputs(qk: QueriesKeys, copies: int) -> QueriesKeys:
    """Return the queries and keys by which sequences choose, for `copies` copies of all sequences.

    `each_q_xHND` and `rotated_each_q_xHND` are None in the result.
    """
    q_xGND = repeated_sequences(qk.q_BHND, copies)
    rotated_q_xGND = repeated_sequences(qk.rotated_q_BHND, copies)
    k_xGND = q_xGND
    rotated_k_xGND = rotated_q_xGND
    if qk.k_BHND is not qk.q_BHND:
        k_xGND = repeated_sequences(qk.k_BHND, copies)
        rotated_k_xGND = repeated_sequences(qk.rotated_k_BHND, copies)
    documents = qk.documents
    if documents is not None:
        documents = documents.repeated(copies)
    return QueriesKeys(
        q_xGND,
        k_xGND,
        rotated_q_xGND,
        rotated_k_xGND,
        memory=qk.memory,
        documents=documents,
        counts=qk.counts,
    )


def repeated_sequences(x_BGND: Tensor, copies: int) -> Tensor:
    """Return the vectors of `copies` copies of all sequences, `[x, G, N, D]`."""
    return x_BGND.repeat(copies, 1, 1, 1)


def for_attention(qk: QueriesKeys, copies: int) -> QueriesKeys:
    """Return the queries and keys by which all query heads attend, as x sequences.

    Args:
        copies: how often the keys of `qk` are repeated: I times, or once if they have been repeated
            by `repeated_inputs`.
    """
    assert qk.each_q_xHND is not None and qk.rotated_each_q_xHND is not None
    return QueriesKeys(
        q_BHND=qk.each_q_xHND,
        k_BHND=repeated_sequences(qk.k_BHND, copies),
        rotated_q_BHND=qk.rotated_each_q_xHND,
        rotated_k_BHND=repeated_sequences(qk.rotated_k_BHND, copies),
        memory=qk.memory,
    )


def repeated_reads(part: Reads, copies: int, rows: int) -> Reads:
    """Return which query reads which keys in `copies` copies of all sequences.

    Args:
        rows: the number of rows of one copy, B * G * N.
    """
    if isinstance(part, IndexReads):
        indexes: list[Tensor] = []
        is_row_RK = part.index_RK >= 0
        for copy in range(copies):
            first_row = copy * rows
            indexes.append(part.index_RK + is_row_RK * first_row)
        return part._replace(index_RK=torch.cat(indexes))
    queries = repeated_lists(part.query, copies, rows)
    keys = queries
    if part.key is not part.query:
        keys = repeated_lists(part.key, copies, rows)
    holes = part.holes
    if holes is not None:
        # Bounds and values are compared within a copy alone, so they stay as they are.
        repeated_holes = [x.repeat(1, copies) for x in holes]
        holes = Holes(*repeated_holes)
    members = len(part.key.row_M)
    return RangeReads(
        queries,
        keys,
        shifted(part.start_P, copies, members),
        shifted(part.stop_P, copies, members),
        part.length,
        holes,
        part.most,
        part.window,
    )


def repeated_lists(lists: MemberLists, copies: int, rows: int) -> MemberLists:
    """Return the lists of `copies` copies of all sequences; see `repeated_reads`."""
    return MemberLists(
        row_M=shifted(lists.row_M, copies, rows),
        count_L=lists.count_L.repeat(copies),
    )


def shifted(x_M: Tensor, copies: int, step: int) -> Tensor:
    """Return `copies` copies of numbers, each larger by `step` than the one before.

    Example: 1, 4 in three copies with a step of 10 are 1, 4, 11, 14, 21, 24.
    """
    shifted_copies = [x_M + copy * step for copy in range(copies)]
    return torch.cat(shifted_copies)


def vectors_in_slots(x_BGSD: Tensor, slot_BHK1: Tensor) -> Tensor:
    """Return the vectors in the slots that each query head reads, `[B, H, K, D]`.

    Args:
        slot_BHK1: the slots, in a shape that broadcasts over B and H.
    """
    B, G, S, D = x_BGSD.shape
    H = slot_BHK1.shape[1]
    if H in (1, G):
        return x_BGSD.take_along_dim(slot_BHK1, 2)
    queries_of_key_head = H // G
    x_BG1SD = x_BGSD[:, :, None]
    x_BGISD = x_BG1SD.expand(B, G, queries_of_key_head, S, D)
    slot_BGIK1 = torch.unflatten(slot_BHK1, 1, (G, queries_of_key_head))
    x_BGIKD = x_BGISD.take_along_dim(slot_BGIK1, 3)
    return x_BGIKD.flatten(1, 2)


def unrotated_queries(qk: QueriesKeys) -> Tensor:
    """Return the queries of the newest position, before rotation, `[B, H, Q, D]`."""
    if qk.each_q_xHND is None:
        return qk.q_BHND
    return as_queries(qk.each_q_xHND, len(qk.q_BHND))


def rotated_queries(qk: QueriesKeys) -> Tensor:
    """Return the rotated queries of the newest position, `[B, H, Q, D]`."""
    if qk.rotated_each_q_xHND is None:
        return qk.rotated_q_BHND
    return as_queries(qk.rotated_each_q_xHND, len(qk.q_BHND))


def as_queries(q_xH1D: Tensor, streams: int) -> Tensor:
    """Return query heads that choose together as queries of one head, `[B, H, Q, D]`.

    Args:
        q_xH1D: the query heads as copies of the streams, see `grouped.heads_to_copies`.
        streams: B.
    """
    q_xHD = q_xH1D[:, :, 0]
    q_QBHD = torch.unflatten(q_xHD, 0, (-1, streams))
    return q_QBHD.permute(1, 2, 0, 3)


def as_heads(out_BHQD: Tensor) -> Tensor:
    """Return the outputs of all query heads, `[B, H * Q, 1, D]`."""
    if out_BHQD.shape[2] == 1:
        return out_BHQD
    out_of_heads = out_BHQD.flatten(1, 2)
    return out_of_heads[:, :, None]
