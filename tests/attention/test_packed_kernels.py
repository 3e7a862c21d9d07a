"""The packed kernels against a dense softmax in float64, on the GPU or else in Triton's
interpreter.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

# torch has no public names for fake tensors and for maps of nested tensors.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

pytest.importorskip("triton", reason="our GPU kernels need Triton")

from rtx.attention import engine
from rtx.attention.engine import packed_attention
from rtx.attention.engine.combine import Partial, combine
from rtx.attention.engine.lists import KernelLists, RowMembers, kernel_lists
from rtx.attention.engine.packed_attention import MERGES
from rtx.attention.engine.softmax import LogitTerms, RelativeTables
from rtx.attention.reads import Holes, MemberLists, RangeReads, Window, members_read

DEVICE = "cpu" if packed_attention.INTERPRETED else "cuda"
pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""The norm of a difference in relation to the norm of what is right."""
TYPES = list(TOLERANCE)


@pytest.fixture(autouse=True, scope="module")
def products_of_bfloat16() -> Iterator[None]:
    """Let the interpreter multiply numbers of bfloat16, of which it takes the bits for numbers."""
    if not packed_attention.INTERPRETED:
        yield
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widen(x: Any) -> Any:
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    plain = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            return plain(self, widen(a), widen(b), *more)
        return plain(self, a, b, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


@dataclass(frozen=True)
class Sizes:
    """Sizes of a case; by default the lists of all heads together are longer than a tile."""

    B: int = 2
    H: int = 2
    N: int = 24
    D: int = 16
    E: int = 16
    C: int = 3

    @property
    def rows(self) -> int:
        return self.B * self.H * self.N


BY_DISTANCE = Sizes(N=33)
"""For tables by distance: with fewer pairs the terms of a gradient nearly cancel, and its rounding
error exceeds the tolerance.
"""
SMALL = Sizes(B=1, H=1, N=33, C=2)
"""For what does not depend on sizes; a whole sequence is longer than a tile of float32."""


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE).requires_grad_()


def members(sizes: Sizes, share: float) -> MemberLists:
    """Rows of every list at random; the second list of a head has none."""
    row_XM = []
    count_L = []
    for head in range(sizes.B * sizes.H):
        for c in range(sizes.C):
            chosen_N = torch.rand(sizes.N) < (0 if c == 1 else share)
            row_XM.append(chosen_N.nonzero()[:, 0] + head * sizes.N)
            count_L.append(len(row_XM[-1]))
    return MemberLists(torch.cat(row_XM).to(DEVICE), torch.tensor(count_L).to(DEVICE))


def clusters(sizes: Sizes, window: int = 9, attend_self: bool = False) -> RangeReads:
    """Queries stand for keys."""
    both = members(sizes, 0.6)
    return members_read(both, both, sizes.N, window, attend_self)


def whole(sizes: Sizes, window: int = 9) -> RangeReads:
    """Every list is one sequence, in order."""
    row_R = torch.arange(sizes.rows, device=DEVICE)
    count_L = torch.full((sizes.B * sizes.H,), sizes.N, device=DEVICE)
    both = MemberLists(row_R, count_L)
    part = members_read(both, both, sizes.N, window)
    return part._replace(window=Window(sizes.N, window, memory=0))


def apart(sizes: Sizes) -> RangeReads:
    """Lists of queries and of keys; ranges whose bounds never fall, some of them empty."""
    queries = members(sizes, 0.4)
    keys = members(sizes, 0.7)
    start_P = []
    stop_P = []
    begin = 0
    for count_P, count_M in zip(queries.count_L.tolist(), keys.count_L.tolist(), strict=True):
        low_P = torch.randint(0, count_M + 1, (count_P,)).sort().values
        high_P = torch.randint(0, count_M + 1, (count_P,)).sort().values
        start_P.append(low_P + begin)
        stop_P.append(low_P.maximum(high_P) + begin)
        begin += count_M
    return RangeReads(
        queries, keys, torch.cat(start_P).to(DEVICE), torch.cat(stop_P).to(DEVICE), sizes.N
    )


def causal_apart(sizes: Sizes) -> RangeReads:
    return members_read(members(sizes, 0.4), members(sizes, 0.7), sizes.N, 9)


def with_hidden(part: RangeReads, dtype: torch.dtype) -> RangeReads:
    """Hide by positions and by random numbers, and all that every seventh query might read."""
    P = len(part.query.row_M)
    M = len(part.key.row_M)
    position_P = (part.query.row_M % part.length).cpu()
    random_P = torch.randint(0, 10, (P,))
    random_P[::7] = -1
    value_iM = torch.stack([(part.key.row_M % part.length).cpu(), torch.randint(0, 10, (M,))])
    low_iP = torch.stack([position_P - 3, random_P])
    high_iP = torch.stack([position_P, random_P + 3])
    high_iP[1, ::7] = 100
    return part._replace(holes=Holes(*(x.to(DEVICE, dtype) for x in (value_iM, low_iP, high_iP))))


def read_pairs(part: RangeReads) -> Tensor:
    """Return which query member reads which key member, `[P, M]`."""
    m = torch.arange(len(part.key.row_M), device=DEVICE)
    read_PM = (m >= part.start_P[:, None]) & (m < part.stop_P[:, None])
    for value_M, low_P, high_P in zip(*part.holes or (), strict=True):
        read_PM &= (value_M < low_P[:, None]) | (value_M >= high_P[:, None])
    return read_PM


def dense(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHNE: Tensor,
    part: RangeReads,
    terms: LogitTerms,
    merge: str,
    kept_PM: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what `packed_attention.attend` does, by definition; weights are dropped where
    `kept_PM` is False.
    """
    row_P = part.query.row_M
    row_M = part.key.row_M
    read_PM = read_pairs(part)
    q_PD = q_BHND.flatten(0, 2)[row_P]
    k_MD = k_BHND.flatten(0, 2)[row_M]
    v_ME = v_BHNE.flatten(0, 2)[row_M]
    logits_PM = q_PD @ k_MD.T
    distance_PM = (row_P % part.length)[:, None] - row_M % part.length
    entry_PM = distance_PM
    relative = terms.relative
    if relative is not None:
        head_P = row_P // part.length % q_BHND.shape[1]
        entry_PM = distance_PM.clamp(0, relative.keys_MD.shape[-2] - 1)
        keys_PTD = relative.keys_MD.expand(q_BHND.shape[1], -1, -1)[head_P]
        table_PT = torch.einsum("pd,ptd->pt", q_PD, keys_PTD)
        if relative.bias_HM is not None:
            table_PT = table_PT + relative.bias_HM[head_P]
        logits_PM = logits_PM + table_PT.gather(1, entry_PM)
    logits_PM = (logits_PM * terms.scale).masked_fill(~read_PM, -1e300)
    some_P = read_PM.any(1)
    rows = q_BHND.shape[:3].numel()
    lse_P = logits_PM.logsumexp(1).masked_fill(~some_P, -math.inf)
    lse_R = logits_PM.new_zeros(rows).index_add(0, row_P, lse_P.exp()).log()
    base_P = lse_R[row_P] if merge == "lse" else lse_P
    weight_PM = (logits_PM - base_P.masked_fill(~some_P, 0)[:, None]).exp().masked_fill(~read_PM, 0)
    if kept_PM is not None:
        weight_PM = weight_PM * kept_PM / (1 - terms.dropout)
    out_PE = weight_PM @ v_ME
    if relative is not None and relative.values_MD is not None:
        out_PE = out_PE + torch.einsum("pm,pme->pe", weight_PM, relative.values_MD[entry_PM])
    if merge == "none":
        return out_PE, lse_P
    times_R = out_PE.new_zeros(rows).index_add(0, row_P, some_P.to(out_PE.dtype))
    out_RE = out_PE.new_zeros(rows, out_PE.shape[1]).index_add(0, row_P, out_PE)
    if merge == "lse":
        return out_RE, lse_R
    return out_RE / times_R.clamp(min=1)[:, None], lse_P


def wide(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def differ(found: Tensor, right: Tensor) -> float:
    found = found.detach().double()
    right = right.detach()
    assert found.shape == right.shape
    assert found.isfinite().all()
    if right.norm() < 1e-9:  # 0 by definition: a sum of what differs in sign, so of rounding errors
        return float(found.norm()) / 100
    return float((found - right).norm() / right.norm())


def gradients(
    out: Tensor, lse_P: Tensor, leaves: list[Tensor], of_sums: bool
) -> tuple[Tensor, ...]:
    """Return gradients of a sum with fixed weights of outputs and, where wanted, of log-sums."""
    generator = torch.Generator().manual_seed(5)
    dout, dlse_P = (
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(DEVICE)
        for x in (out, lse_P)
    )
    total = (out.double() * dout).sum()
    if of_sums:
        total = total + (lse_P.double().masked_fill(lse_P == -math.inf, 0) * dlse_P).sum()
    return torch.autograd.grad(total, leaves)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: RangeReads,
    terms: LogitTerms,
    merge: str,
    lists: KernelLists | None = None,
    kept_PM: Tensor | None = None,
) -> None:
    """Hold outputs, log-sums and all gradients against the dense reference."""
    tables = [x for x in terms.relative or () if x is not None]
    right_q = wide(q)
    right_k = right_q if k is q else wide(k)
    right_v = wide(v)
    right_relative = None
    if terms.relative is not None:
        right_relative = RelativeTables._make(
            None if x is None else wide(x) for x in terms.relative
        )
    right_tables = [x for x in right_relative or () if x is not None]
    leaves = [q, v, *tables] if k is q else [q, k, v, *tables]
    right_leaves = (
        [right_q, right_v, *right_tables] if k is q else [right_q, right_k, right_v, *right_tables]
    )
    if lists is None:
        lists = kernel_lists(part, q.shape[:3].numel())
    out, lse_P = packed_attention.attend(q, k, v, lists, terms, merge)
    right_terms = terms._replace(relative=right_relative)
    right_out, right_lse_P = dense(right_q, right_k, right_v, part, right_terms, merge, kept_PM)
    P = len(right_lse_P)
    assert out.dtype == v.dtype and lse_P.dtype == torch.float32
    some_P = right_lse_P > -math.inf
    assert torch.equal(lse_P[:P] > -math.inf, some_P)
    assert (lse_P[P:] == -math.inf).all()
    if merge == "none":
        assert not out[P:].any()
        out = out[:P]
    of_sums = merge != "mean"
    found = [out, lse_P[:P][some_P], *gradients(out, lse_P[:P], leaves, of_sums)]
    expected = [
        right_out,
        right_lse_P[some_P],
        *gradients(right_out, right_lse_P, right_leaves, of_sums),
    ]
    differences = [differ(x, y) for x, y in zip(found, expected, strict=True)]
    assert max(differences) <= TOLERANCE[q.dtype], differences


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("dtype", TYPES)
def test_queries_that_stand_for_keys(dtype: torch.dtype, merge: str) -> None:
    sizes = Sizes()
    q, v = (draw(2, 2, sizes.N, 16, dtype=dtype) for _ in range(2))
    check(q, q, v, clusters(sizes), LogitTerms(0.25), merge)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("dtype", TYPES)
def test_keys_and_their_lists_apart(dtype: torch.dtype, merge: str) -> None:
    sizes = Sizes(D=16, E=32)
    q, k = (draw(2, 2, sizes.N, 16, dtype=dtype) for _ in range(2))
    check(q, k, draw(2, 2, sizes.N, 32, dtype=dtype), apart(sizes), LogitTerms(0.25), merge)


def test_keys_of_their_own_in_the_lists_of_the_queries() -> None:
    sizes = Sizes()
    q, k, v = (draw(2, 2, sizes.N, 16) for _ in range(3))
    check(q, k, v, clusters(sizes, attend_self=True), LogitTerms(0.25), "mean")


def test_queries_for_keys_in_lists_apart() -> None:
    sizes = Sizes()
    q, v = (draw(2, 2, sizes.N, 16) for _ in range(2))
    check(q, q, v, apart(sizes), LogitTerms(0.25), "mean")


@pytest.mark.parametrize(
    ("D", "E", "dtype"),
    [
        (40, 40, torch.float16),
        (64, 72, torch.float32),
        (64, 72, torch.float16),
        (100, 128, torch.float32),
    ],
)
def test_head_sizes_that_are_no_powers_of_2(D: int, E: int, dtype: torch.dtype) -> None:
    sizes = Sizes(B=1, N=40, D=D, E=E)
    q = draw(1, 2, sizes.N, D, dtype=dtype)
    v = draw(1, 2, sizes.N, E, dtype=dtype)
    check(q, q, v, clusters(sizes), LogitTerms(D**-0.5), "mean")


@pytest.mark.parametrize(
    ("kind", "merge"), [(torch.int64, "none"), (torch.int32, "mean"), (torch.int64, "lse")]
)
def test_hidden_pairs(kind: torch.dtype, merge: str) -> None:
    sizes = Sizes()
    q, k, v = (draw(2, 2, sizes.N, 16) for _ in range(3))
    part = with_hidden(apart(sizes), kind)
    seen = read_pairs(part).any(1) < (part.stop_P > part.start_P)
    assert seen.any(), "a range is hidden as a whole"
    check(q, k, v, part, LogitTerms(0.25), merge)


@pytest.mark.parametrize(("entries", "merge"), [(1, "mean"), (2, "lse"), (6, "mean"), (40, "lse")])
def test_keys_and_values_by_distance(entries: int, merge: str) -> None:
    sizes = replace(BY_DISTANCE, E=32)
    q = draw(2, 2, sizes.N, 16)
    v = draw(2, 2, sizes.N, 32)
    relative = RelativeTables(draw(entries, 16), draw(entries, 32))
    check(q, q, v, clusters(sizes), LogitTerms(0.25, relative=relative), merge)


@pytest.mark.parametrize(
    ("merge", "dtype"),
    [("none", torch.float16), ("mean", torch.bfloat16), ("lse", torch.float16)],
)
def test_short_types_by_distance(dtype: torch.dtype, merge: str) -> None:
    sizes = BY_DISTANCE
    q, k, v = (draw(2, 2, sizes.N, 16, dtype=dtype) for _ in range(3))
    relative = RelativeTables(draw(6, 16, dtype=dtype), draw(6, 16, dtype=dtype))
    check(q, k, v, causal_apart(sizes), LogitTerms(0.25, relative=relative), merge)


def test_distances_below_0_and_hidden_pairs_by_distance() -> None:
    sizes = BY_DISTANCE
    q, k, v = (draw(2, 2, sizes.N, 16) for _ in range(3))
    relative = RelativeTables(draw(6, 16), draw(6, 16))
    check(
        q, k, v, with_hidden(apart(sizes), torch.int64), LogitTerms(0.25, relative=relative), "mean"
    )


@pytest.mark.parametrize("merge", MERGES)
def test_keys_by_distance_of_each_head_with_a_bias(merge: str) -> None:
    sizes = BY_DISTANCE
    q, k, v = (draw(2, 2, sizes.N, 16) for _ in range(3))
    relative = RelativeTables(draw(2, 12, 16), None, draw(2, 12))
    check(q, k, v, causal_apart(sizes), LogitTerms(0.25, relative=relative), merge)


@pytest.mark.parametrize(
    ("N", "merge", "dtype"),
    [
        (33, "mean", torch.float32),
        (33, "lse", torch.float16),
        (33, "none", torch.bfloat16),
        (64, "mean", torch.float32),
        (64, "mean", torch.float16),
        (150, "none", torch.float32),
        (150, "lse", torch.float16),
        (150, "mean", torch.bfloat16),
    ],
)
def test_whole_sequences_in_order(dtype: torch.dtype, merge: str, N: int) -> None:
    sizes = Sizes(B=1, N=N, E=32)
    q, k = (draw(1, 2, N, 16, dtype=dtype) for _ in range(2))
    part = whole(sizes, window=40)
    assert kernel_lists(part, sizes.rows).in_order
    check(q, k, draw(1, 2, N, 32, dtype=dtype), part, LogitTerms(0.25), merge)


@pytest.mark.parametrize("entries", [0, 6, 200])
def test_queries_for_keys_of_whole_sequences(entries: int) -> None:
    sizes = Sizes(B=1, N=70)
    q, v = (draw(1, 2, sizes.N, 16) for _ in range(2))
    relative = (
        RelativeTables(draw(2, entries, 16), draw(entries, 16), draw(2, entries))
        if entries
        else None
    )
    check(q, q, v, whole(sizes), LogitTerms(0.25, relative=relative), "mean")


def test_dropout_in_whole_sequences() -> None:
    sizes = Sizes(B=1, H=1, N=80)
    q, k, v = (draw(1, 1, sizes.N, 16) for _ in range(3))
    part = whole(sizes, window=30)
    check(q, k, v, part, LogitTerms(0.25, 0.3), "mean", kept_PM=kept_pairs(part, 0.3))


def test_a_memory_is_read_by_none_of_its_own() -> None:
    sizes = Sizes(B=1, N=70)
    part = whole(sizes)
    is_memory_R = part.query.row_M % sizes.N < 20
    queries = part.query.keep(~is_memory_R)
    part = members_read(queries, part.key, sizes.N, 9)._replace(
        window=Window(sizes.N, 9, memory=20)
    )
    lists = kernel_lists(part, sizes.rows)
    assert not lists.in_order
    q, k, v = (draw(1, 2, sizes.N, 16) for _ in range(3))
    check(q, k, v, part, LogitTerms(0.25), "mean", lists)


@pytest.mark.parametrize("part_of", [apart, whole])
def test_views_of_one_projection(part_of: Callable[[Sizes], RangeReads]) -> None:
    sizes = Sizes(N=33)
    x = draw(2, sizes.N, 3, 2, 16)
    q, k, v = (y.transpose(1, 2) for y in x.unbind(2))
    assert not q.is_contiguous()
    part = part_of(sizes)
    terms = LogitTerms(0.25)
    found, _ = packed_attention.attend(q, k, v, kernel_lists(part, sizes.rows), terms, "mean")
    right_x = x.detach().double().requires_grad_()
    right_q, right_k, right_v = (y.transpose(1, 2) for y in right_x.unbind(2))
    right, _ = dense(right_q, right_k, right_v, part, terms, "mean", None)
    dout = torch.randn_like(found)
    (dx,) = torch.autograd.grad((found * dout).sum(), x)
    (right_dx,) = torch.autograd.grad((right * dout).sum(), right_x)
    assert max(differ(found, right), differ(dx, right_dx)) <= 1e-6


def test_strides_of_the_last_dimension() -> None:
    sizes = Sizes()
    q, k, v = (draw(2, 2, 16, sizes.N) for _ in range(3))
    part = apart(sizes)
    lists = kernel_lists(part, sizes.rows)
    terms = LogitTerms(0.25)
    found, _ = packed_attention.attend(q.mT, k.mT, v.mT, lists, terms, "mean")
    right, _ = dense(q.mT.double(), k.mT.double(), v.mT.double(), part, terms, "mean", None)
    assert differ(found, right) <= 1e-6


def nothing(sizes: Sizes, of_queries: bool, of_keys: bool) -> RangeReads:
    """Lists without query members, or without key members."""
    empty = MemberLists(
        torch.zeros(0, dtype=torch.int64, device=DEVICE),
        torch.zeros(12, dtype=torch.int64, device=DEVICE),
    )
    queries = members(sizes, 0.5) if of_queries else empty
    keys = members(sizes, 0.5) if of_keys else empty
    bound_P = torch.zeros_like(queries.row_M)
    return RangeReads(queries, keys, bound_P, bound_P, sizes.N)


@pytest.mark.parametrize(
    ("of_queries", "of_keys", "merge"),
    [
        (False, False, "none"),
        (False, True, "lse"),
        (True, False, "mean"),
        *((True, True, merge) for merge in MERGES),
    ],
)
def test_nobody_reads(of_queries: bool, of_keys: bool, merge: str) -> None:
    sizes = Sizes()
    q, k, v = (draw(2, 2, sizes.N, 16) for _ in range(3))
    relative = RelativeTables(draw(6, 16), draw(6, 16))
    part = nothing(sizes, of_queries, of_keys)
    lists = kernel_lists(part, sizes.rows)
    for terms in (LogitTerms(0.25), LogitTerms(0.25, relative=relative)):
        out, lse_P = packed_attention.attend(q, k, v, lists, terms, merge)
        assert out.shape == (len(part.start_P) if merge == "none" else sizes.rows, 16)
        assert not out.any() and (lse_P == -math.inf).all()
        for gradient in torch.autograd.grad(out.sum(), [q, k, v]):
            assert not gradient.any()


@pytest.mark.parametrize("merge", MERGES)
def test_room_for_more_members_than_there_are(merge: str) -> None:
    sizes = Sizes()
    q, k, v = (draw(2, 2, sizes.N, 16) for _ in range(3))
    part = apart(sizes)
    exact = kernel_lists(part, sizes.rows)
    room = 40
    zeros = torch.zeros(room, dtype=torch.int32, device=DEVICE)
    M = len(part.key.row_M)
    P_all = len(part.query.row_M) + room
    padded = exact._replace(
        query_row_P=torch.cat([exact.query_row_P, zeros]),
        key_row_M=torch.cat([exact.key_row_M, zeros]),
        start_P=torch.cat([exact.start_P, zeros + M]),
        stop_P=torch.cat([exact.stop_P, zeros + M]),
        low_M=torch.cat([exact.low_M, zeros + P_all]),
        high_M=torch.cat([exact.high_M, zeros + P_all]),
        query_members=RowMembers(
            exact.query_members.first_R1, torch.cat([exact.query_members.member_M, zeros])
        ),
        key_members=RowMembers(
            exact.key_members.first_R1, torch.cat([exact.key_members.member_M, zeros])
        ),
    )
    check(q, k, v, part, LogitTerms(0.25), merge, padded)


def kept_pairs(part: RangeReads, dropout: float) -> Tensor:
    """Return which weights the kernel keeps with the seed that torch's generator gives next: values
    tell the keys.
    """
    N = part.length
    q = torch.zeros(1, 1, N, 16, device=DEVICE)
    one_hot = torch.eye(N, device=DEVICE)[None, None]
    torch.manual_seed(11)
    out_PN, _ = packed_attention.attend(
        q, q, one_hot, kernel_lists(part, N), LogitTerms(0.25, dropout), "none"
    )
    torch.manual_seed(11)
    return out_PN[:, part.key.row_M] > 0


@pytest.mark.parametrize(
    ("merge", "by_distance"),
    [("none", True), ("mean", False), ("mean", True), ("lse", False)],
)
def test_dropout(merge: str, by_distance: bool) -> None:
    sizes = Sizes(B=1, H=1, N=40)
    q, v = (draw(1, 1, sizes.N, 16) for _ in range(2))
    relative = RelativeTables(draw(6, 16), draw(6, 16)) if by_distance else None
    part = clusters(sizes, window=20, attend_self=True)
    kept_PM = kept_pairs(part, 0.3)
    check(q, q, v, part, LogitTerms(0.25, 0.3, relative), merge, kept_PM=kept_PM)


def test_dropout_of_keys_apart_in_float16() -> None:
    sizes = Sizes(B=1, H=1, N=120)
    q, k, v = (draw(1, 1, sizes.N, 16, dtype=torch.float16) for _ in range(3))
    part = apart(sizes)
    check(q, k, v, part, LogitTerms(0.25, 0.4), "mean", kept_PM=kept_pairs(part, 0.4))


def test_rate_of_dropout() -> None:
    sizes = Sizes(B=1, H=1, N=120)
    part = clusters(sizes, window=60, attend_self=True)
    read_PM = read_pairs(part)
    kept_PM = kept_pairs(part, 0.3)
    pairs = int(read_PM.sum())
    deviation = math.sqrt(0.3 * 0.7 / pairs)
    dropped = 1 - float(kept_PM[read_PM].double().mean())
    assert abs(dropped - 0.3) < 4 * deviation
    same = float(
        (kept_PM[1:, :-1] == kept_PM[:-1, 1:])[(read_PM[1:, :-1] & read_PM[:-1, 1:])]
        .double()
        .mean()
    )
    assert abs(same - (0.3**2 + 0.7**2)) < 0.05, "neighbours are dropped independently"


def test_everything_dropped() -> None:
    sizes = Sizes(B=1, H=1)
    q, v = (draw(1, 1, sizes.N, 16) for _ in range(2))
    out, _ = packed_attention.attend(
        q, q, v, kernel_lists(clusters(sizes), sizes.N), LogitTerms(0.25, 1.0), "mean"
    )
    dq, dv = torch.autograd.grad(out.sum(), [q, v])
    assert not out.any() and not dq.any() and not dv.any()


@pytest.mark.parametrize("by_distance", [False, True])
def test_same_as_torch_s_kernels(by_distance: bool) -> None:
    sizes = BY_DISTANCE
    q, v = (draw(2, 2, sizes.N, 16) for _ in range(2))
    tables = [draw(6, 16), draw(6, 16)] if by_distance else []
    terms = LogitTerms(0.25, relative=RelativeTables(*tables) if tables else None)
    part = clusters(sizes)
    found, _ = packed_attention.attend(q, q, v, kernel_lists(part, sizes.rows), terms, "mean")
    right = engine.attend(q, q, v, [part], terms, "torch").flatten(0, 2)
    dout = torch.randn_like(right)
    mine, theirs = (torch.autograd.grad((x * dout).sum(), [q, v, *tables]) for x in (found, right))
    for x, y in zip([found, *mine], [right, *theirs], strict=True):
        assert differ(x, y.double()) <= 2e-6


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")
def test_nan_and_infinity_are_not_hidden(value: float, merge: str) -> None:
    sizes = Sizes()
    part = clusters(sizes, attend_self=True)
    q = draw(2, 2, sizes.N, 16).detach()
    v = draw(2, 2, sizes.N, 16)
    row = int(part.query.row_M[5])
    q.view(-1, 16)[row] = value
    lists = kernel_lists(part, sizes.rows)
    out, lse_P = packed_attention.attend(q, q, v, lists, LogitTerms(0.25), merge)
    bad_P = part.query.row_M == row
    bad = bad_P if merge == "none" else row
    assert out[bad].isnan().all()
    assert not (lse_P[row if merge == "lse" else bad_P] == -math.inf).any()


@pytest.mark.parametrize("merge", ["mean", "lse"])
def test_same_bits_twice(merge: str) -> None:
    sizes = Sizes(B=1)
    q, v = (draw(1, 2, sizes.N, 16) for _ in range(2))
    tables = [draw(6, 16), draw(6, 16)]
    lists = kernel_lists(clusters(sizes), sizes.rows)
    terms = LogitTerms(0.25, 0.2, RelativeTables(*tables))
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        out, lse_P = packed_attention.attend(q, q, v, lists, terms, merge)
        runs.append([out, lse_P, *torch.autograd.grad(out.square().sum(), [q, v, *tables])])
    for x, y in zip(*runs, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("merge", ["none", "lse"])
def test_gradients_of_log_sums_alone(merge: str) -> None:
    sizes = Sizes()
    q, k, v = (draw(2, 2, sizes.N, 16) for _ in range(3))
    part = apart(sizes)
    _, lse_P = packed_attention.attend(
        q, k, v, kernel_lists(part, sizes.rows), LogitTerms(0.25), merge
    )
    _, right_P = dense(q.double(), k.double(), v.double(), part, LogitTerms(0.25), merge, None)
    some_P = right_P > -math.inf
    found = torch.autograd.grad(lse_P[some_P].sum(), [q, k])
    right = torch.autograd.grad(right_P[some_P].sum(), [q, k])
    for x, y in zip(found, right, strict=True):
        assert differ(x, y.double()) <= 1e-6


@pytest.mark.parametrize(
    "dtype", [torch.float16] if packed_attention.INTERPRETED else [torch.float16, torch.bfloat16]
)
def test_one_softmax_over_lists_errs_no_more_than_outputs_of_lists_that_are_combined(
    dtype: torch.dtype,
) -> None:
    # The interpreter rounds to bfloat16 by cutting bits off.
    sizes = Sizes(B=1, N=120, D=64, E=64, C=6)
    q, k, v = (draw(1, 2, sizes.N, 64, dtype=dtype) for _ in range(3))
    part = causal_apart(sizes)
    lists = kernel_lists(part, sizes.rows)
    terms = LogitTerms(0.125)
    joined, _ = packed_attention.attend(q, k, v, lists, terms, "lse")
    by_member = Partial(part.query.row_M, *packed_attention.attend(q, k, v, lists, terms, "none"))
    combined = combine([by_member], sizes.rows).to(dtype)
    right, _ = dense(wide(q), wide(k), wide(v), part, terms, "lse", None)
    assert differ(joined, right) <= 1.01 * differ(combined, right)


def form(
    sizes: Sizes, is_whole: bool, by_distance: bool
) -> tuple[list[Tensor], KernelLists, LogitTerms]:
    """Inputs with or without terms by distance, of clusters or whole sequences."""
    part = whole(sizes) if is_whole else clusters(sizes)
    relative = RelativeTables(draw(6, 16), draw(6, 16)) if by_distance else None
    shape = (sizes.B, sizes.H, sizes.N, 16)
    leaves = [draw(*shape), draw(*shape), *(relative or ())[:2]]
    return leaves, kernel_lists(part, sizes.rows), LogitTerms(0.25, relative=relative)


@pytest.mark.parametrize(
    ("merge", "is_whole", "by_distance"),
    [("none", True, False), ("mean", False, True), ("lse", False, False)],
)
def test_compiled_as_one_graph(merge: str, is_whole: bool, by_distance: bool) -> None:
    def loss(q: Tensor, v: Tensor, lists: KernelLists, terms: LogitTerms) -> Tensor:
        out, lse_P = packed_attention.attend(q, q, v, lists, terms, merge)
        return out.square().sum() + lse_P.masked_fill(lse_P == -math.inf, 0).sum() * (
            merge != "mean"
        )

    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaves, lists, terms = form(SMALL, is_whole, by_distance)
    q, v = leaves[:2]
    plain = torch.autograd.grad(loss(q, v, lists, terms), leaves)
    found = torch.autograd.grad(compiled(q, v, lists, terms), leaves)
    for x, y in zip(found, plain, strict=True):
        assert torch.equal(x, y)


def test_dropout_in_a_compiled_graph() -> None:
    q, v = (draw(1, 1, SMALL.N, 16) for _ in range(2))
    lists = kernel_lists(clusters(SMALL), SMALL.rows)

    def out_of(q: Tensor, v: Tensor) -> Tensor:
        return packed_attention.attend(q, q, v, lists, LogitTerms(0.25, 0.5), "mean")[0]

    torch.compiler.reset()
    compiled = torch.compile(out_of, backend="aot_eager", fullgraph=True)
    one = compiled(q, v)
    other = compiled(q, v)
    assert not torch.equal(one, other), "every call draws a seed"
    torch.autograd.grad(one.sum(), [q, v])


@pytest.mark.parametrize("merge", MERGES)
def test_shapes_without_kernels(merge: str) -> None:
    sizes = Sizes()
    part = kernel_lists(clusters(sizes), sizes.rows)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        lists: KernelLists = tree_map_only(Tensor, mode.from_tensor, part)
        q, v = (torch.randn(2, 2, sizes.N, 16, device=DEVICE, requires_grad=True) for _ in range(2))
        keys, values = (torch.randn(6, 16, device=DEVICE, requires_grad=True) for _ in range(2))
        terms = LogitTerms(0.25, 0.1, RelativeTables(keys, values))
        out, lse = packed_attention.attend(q, q, v, lists, terms, merge)
        P = len(part.start_P)
        assert out.shape == (P if merge == "none" else sizes.rows, 16)
        assert lse.shape == (sizes.rows if merge == "lse" else P,) and lse.dtype == torch.float32
        found = torch.autograd.grad(out.sum(), [q, v, keys, values])
        assert [x.shape for x in found] == [x.shape for x in (q, v, keys, values)]


@pytest.mark.parametrize(
    ("in_order", "merge"), [(False, "none"), (True, "none"), (False, "mean"), (False, "lse")]
)
def test_operators_keep_the_rules_of_torch_s_library(in_order: bool, merge: str) -> None:
    lists = kernel_lists(whole(SMALL) if in_order else clusters(SMALL), SMALL.rows)
    tensors = [*lists[:6], *lists.query_members, *lists.key_members]
    q, v = (draw(1, 1, SMALL.N, 16) for _ in range(2))
    keys = draw(1, 6, 16)
    values = draw(6, 16)
    arguments = (q, None, v, tensors, [], keys, None, values, None, 0.25, 0.0, in_order, merge)
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(packed_attention.packed_attention, arguments, test_utils=tests)


def test_no_second_derivatives() -> None:
    sizes = Sizes()
    q, v = (draw(2, 2, sizes.N, 16) for _ in range(2))
    out, _ = packed_attention.attend(
        q, q, v, kernel_lists(clusters(sizes), sizes.rows), LogitTerms(0.25), "mean"
    )
    with pytest.raises(RuntimeError, match="first derivatives alone"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_autocast_changes_nothing() -> None:
    sizes = SMALL
    q, v = (draw(1, 1, sizes.N, 16) for _ in range(2))
    relative = RelativeTables(draw(6, 16), draw(6, 16))
    arguments = (
        q,
        q,
        v,
        kernel_lists(clusters(sizes), sizes.rows),
        LogitTerms(0.25, relative=relative),
        "mean",
    )
    plain, _ = packed_attention.attend(*arguments)
    with torch.autocast(DEVICE, torch.bfloat16):
        found, _ = packed_attention.attend(*arguments)
        dq = torch.autograd.grad(found.sum(), q)[0]
    assert torch.equal(found, plain)
    assert torch.equal(dq, torch.autograd.grad(plain.sum(), q)[0])


def test_types_that_differ_are_widened() -> None:
    sizes = Sizes()
    q = draw(2, 2, sizes.N, 16)
    v = draw(2, 2, sizes.N, 16, dtype=torch.bfloat16)
    lists = kernel_lists(clusters(sizes), sizes.rows)
    found, _ = packed_attention.attend(q, q, v, lists, LogitTerms(0.25), "mean")
    right, _ = packed_attention.attend(q, q, v.float(), lists, LogitTerms(0.25), "mean")
    assert torch.equal(found, right)
    dq, dv = torch.autograd.grad(found.sum(), [q, v])
    assert dq.dtype == torch.float32 and dv.dtype == torch.bfloat16


def test_refusals() -> None:
    sizes = Sizes()
    q = draw(2, 2, sizes.N, 16)
    lists = kernel_lists(clusters(sizes), sizes.rows)
    refused = [
        (q, LogitTerms(0.25, bias_HM=torch.zeros(2, 3)), "it has no adaptive spans"),
        (q.double(), LogitTerms(0.25), "it computes in float32, float16 or bfloat16"),
        (q[..., :8], LogitTerms(0.25), "it computes with heads of 16 to 128 units"),
        (q.repeat(1, 1, 1, 9), LogitTerms(0.25), "it computes with heads of 16 to 128 units"),
    ]
    assert packed_attention.refusal(q, q, LogitTerms(0.25)) is None
    for x, terms, why in refused:
        assert packed_attention.refusal(x, x, terms) == why
        with pytest.raises(ValueError, match=why):
            packed_attention.attend(x, x, x, lists, terms, "mean")


def test_refuses_what_is_not_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 1, 4, 16)
    monkeypatch.setattr(packed_attention, "INTERPRETED", False)
    assert packed_attention.refusal(q, q, LogitTerms(0.25)) == "it computes on a GPU"
    monkeypatch.setattr(packed_attention, "HAS_TRITON", False)
    assert packed_attention.refusal(q, q, LogitTerms(0.25)) == "Triton is not installed"
