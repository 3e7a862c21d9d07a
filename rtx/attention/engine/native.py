"""Attention and selection by clusters on a CPU, by C++ kernels.

compiler.py compiles them at their first use. native.cpp, selection.cpp and probing.cpp explain what
they compute. This module passes tensors to them by pointers. It checks shapes and types before,
because a kernel would read beyond the end of a tensor that is too short.

Shapes: G heads of all B sequences, H of one, N positions, R = G * N rows (row g * N + n is position
n of head g), D head size, C clusters, K columns of an index, W members of a cluster; L lists, P
query members and M key members of all lists together.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.engine.compiler import library
from rtx.attention.engine.problem import PRODUCTS_ALONE, Problem, Result
from rtx.attention.once import derived_once
from rtx.attention.reads import Holes, IndexReads, MemberLists, RangeReads
from rtx.attention.ties import centroid_margin

FLOATS = ("q", "k", "v", "dout", "dlse", "weight")
"""Inputs of the attention kernel in float32, in its order; native.cpp explains each."""
INTS = (
    "query_row",
    "key_row",
    "start",
    "stop",
    "head_begin",
    "value",
    "low",
    "high",
    "index",
)
"""Its inputs in int64: packed lists, then an index."""
MIN_LENGTH = 1024
"""The length from which `auto` uses the kernels; shorter runs do not wait for a compiler."""
ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)
"""A function that a kernel calls for memory, once it knows for how many members."""


class AttentionArguments(ctypes.Structure):
    """The arguments of the attention kernel, in its order."""

    _fields_ = (
        *((field, ctypes.c_void_p) for field in (*FLOATS, *INTS)),
        *((field, ctypes.c_void_p) for field in ("out", "lse", "dq", "dk", "dv")),
        *((field, ctypes.c_void_p) for field in ("delta", "row_lse")),
        *((field, ctypes.c_int64) for field in ("G", "R", "P", "M", "X", "K", "D", "Dv")),
        ("scale", ctypes.c_float),
    )


class SelectionArguments(ctypes.Structure):
    """The arguments of the kernel that selects, in its order."""

    _fields_ = (
        *((field, ctypes.c_void_p) for field in ("centroid", "x", "threshold", "margin")),
        *((field, ctypes.c_void_p) for field in ("count", "nearest", "moment")),
        ("allocate", ALLOCATE),
        *((field, ctypes.c_int64) for field in ("G", "H", "C", "N", "D", "W")),
    )


class ProbingArguments(ctypes.Structure):
    """The arguments of the kernel that probes clusters of keys, in its order."""

    _fields_ = (
        *((field, ctypes.c_void_p) for field in ("centroid", "q", "k")),
        *((field, ctypes.c_void_p) for field in ("key_row", "key_count", "query_count", "index")),
        ("allocate", ALLOCATE),
        *((field, ctypes.c_int64) for field in ("G", "H", "C", "N", "D", "M", "W")),
        *((field, ctypes.c_int64) for field in ("early", "attend_self")),
    )


class Selection(NamedTuple):
    """The members of clusters, by scores."""

    row_M: Tensor
    """Their rows, cluster after cluster of each head."""
    count_L: Tensor
    """Their number in each cluster."""
    nearest_BHN: Tensor | None
    """The cluster that scores each position highest; None: not computed."""
    moment_2BHC: Tensor | None
    """The sums over all positions of scores, and of their squares, float64; None without
    thresholds."""


class ProbedLists(NamedTuple):
    """Lists of keys, and of the queries that read in each; see reads.py."""

    key: MemberLists
    query: MemberLists
    start_P: Tensor
    stop_P: Tensor
    """Query member p reads the key members start_P[p] to stop_P[p] - 1."""


def wanted(backend: str, length: int) -> bool:
    """Return whether a backend uses the kernels for sequences of a length.

    "native" always does, and "auto" from `MIN_LENGTH` positions on, if the kernels can be loaded or
    compiled. The first call may compile them.
    """
    if backend == "native":
        return True
    return backend == "auto" and length >= MIN_LENGTH and library() is not None


def refusal(problem: Problem) -> str | None:
    """Return why the compiled kernel cannot run the problem, or None if it can."""
    q_BHND = problem.q_BHND
    terms = problem.terms
    if not q_BHND.is_cpu or q_BHND.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return "it computes in float32 on a CPU"
    if terms.by_distance or terms.dropout:
        return PRODUCTS_ALONE
    return None


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums, see `Result`."""
    return Attention.apply(*inputs_of(problem))


def attend_combined(problem: Problem) -> Tensor:
    """Return outputs by row, `[R, D]`, of one softmax over all keys of each row.

    The part must have lists, and `problem.by_member` be true.
    """
    return CombinedAttention.apply(*inputs_of(problem))


class RangeTensors(NamedTuple):
    """Packed lists by the kernel's names, int64; native.cpp explains each."""

    query_row: Tensor
    key_row: Tensor
    start: Tensor
    stop: Tensor
    head_begin: Tensor
    value: Tensor
    low: Tensor
    high: Tensor
    weight: Tensor | None = None
    """The weight of each query member, float32: outputs are weighted sums by row. None: outputs are
    by query member."""


class IndexTensors(NamedTuple):
    """An index by the kernel's name, which hides `tuple.index`."""

    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


KernelReads = RangeTensors | IndexTensors


def inputs_of(problem: Problem) -> tuple[Any, ...]:
    """Return the arguments of `Attention` and `CombinedAttention`."""
    q_RD, k_RD, v_RD = problem.rows()
    key_RD = None
    if not problem.shared:
        key_RD = k_RD
    heads = len(q_RD) // problem.part.length
    return q_RD, key_RD, v_RD, problem.terms.scale, heads, kernel_reads(problem)


def kernel_reads(problem: Problem) -> KernelReads:
    """Return which query reads which keys, as the kernel needs it."""
    part = problem.part
    by_member = problem.by_member
    if isinstance(part, IndexReads):
        return IndexTensors(part.index_RK)
    rows = problem.q_BHND.shape[:3].numel()
    name = f"native, by member {by_member}"
    return derived_once(part, name, lambda: kernel_ranges(part, rows, by_member))


def kernel_ranges(part: RangeReads, rows: int, by_member: bool) -> RangeTensors:
    """Return packed lists as the kernel reads them.

    Without `by_member` the kernel adds up weighted outputs. The weight of a query member is 1
    divided by the number of lists in which its row reads something.
    """
    row_P = part.query.row_M
    row_M = part.key.row_M
    heads = rows // part.length
    # The query members head_begin[g] to head_begin[g + 1] - 1 are those of head g.
    head_P = row_P // part.length
    head_begin = torch.searchsorted(head_P, torch.arange(heads + 1))
    holes = part.holes
    if holes is None:
        nothing_0P = row_P.new_zeros(0, len(row_P))
        holes = Holes(row_M.new_zeros(0, len(row_M)), nothing_0P, nothing_0P)
    weight_P = None
    if not by_member:
        lists_P = part.lists_read_P(rows)
        weight_P = 1 / lists_P.float()
    return RangeTensors(
        query_row=row_P,
        key_row=row_M,
        start=part.start_P,
        stop=part.stop_P,
        head_begin=head_begin,
        value=holes.value_iM.contiguous(),
        low=holes.low_iP.contiguous(),
        high=holes.high_iP.contiguous(),
        weight=weight_P,
    )


class Attention(torch.autograd.Function):
    """Attention by the kernel, with gradients of queries, keys and values.

    Without keys (`k_RD` is None) the queries serve as keys.
    """

    apply: Callable[..., Result]  # torch declares it without types

    @staticmethod
    def forward(
        ctx: Any,
        q_RD: Tensor,
        k_RD: Tensor | None,
        v_RD: Tensor,
        scale: float,
        heads: int,
        reads: KernelReads,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and log-sums, -inf for queries that read nothing."""
        remember(ctx, k_RD is None, scale, heads, reads)
        q_RD, k_RD, v_RD = contiguous(q_RD, k_RD, v_RD)
        outputs = len(v_RD)
        # The log-sums are of query members; with an index these are the rows.
        lse = q_RD.new_empty(len(reads[0]))
        if isinstance(reads, RangeTensors) and reads.weight is None:
            outputs = len(lse)
        out = v_RD.new_zeros(outputs, v_RD.shape[1])
        call(scale, heads, reads, q=q_RD, k=k_RD, v=v_RD, out=out, lse=lse)
        ctx.save_for_backward(q_RD, k_RD, v_RD, lse, *reads)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        q_RD, k_RD, v_RD, lse, *saved_reads = ctx.saved_tensors
        dout = gradients[0].contiguous()
        dlse = gradients[1].contiguous()
        tensors = {"q": q_RD, "k": k_RD, "v": v_RD, "lse": lse, "dout": dout, "dlse": dlse}
        return input_gradients(ctx, ctx.form(*saved_reads), tensors)


class CombinedAttention(torch.autograd.Function):
    """Attention by ranges with one softmax over everything that a row reads, and its gradients.

    A row may have several query members, each with its range. The kernel combines their outputs, so
    outputs and log-sums are by row, and nothing by member is saved for the backward pass. Without
    keys (`k_RD` is None) the queries serve as keys.
    """

    apply: Callable[..., Tensor]  # torch declares it without types

    @staticmethod
    def forward(
        ctx: Any,
        q_RD: Tensor,
        k_RD: Tensor | None,
        v_RD: Tensor,
        scale: float,
        heads: int,
        reads: RangeTensors,
    ) -> Tensor:
        """Return outputs by row, zero for rows that read nothing."""
        remember(ctx, k_RD is None, scale, heads, reads)
        q_RD, k_RD, v_RD = contiguous(q_RD, k_RD, v_RD)
        # The kernel writes the log-sums of members before those of rows.
        lse_P = q_RD.new_empty(len(reads.query_row))
        lse_R = q_RD.new_empty(len(q_RD))
        out_RD = torch.zeros_like(v_RD)
        call(scale, heads, reads, q=q_RD, k=k_RD, v=v_RD, out=out_RD, lse=lse_P, row_lse=lse_R)
        ctx.save_for_backward(q_RD, k_RD, v_RD, out_RD, lse_R, *reads)
        return out_RD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        q_RD, k_RD, v_RD, out_RD, lse_R, *saved_reads = ctx.saved_tensors
        reads = ctx.form(*saved_reads)
        dout_RD = gradients[0].contiguous()
        row_P = reads.query_row
        lse_P = lse_R[row_P]
        delta_R = (dout_RD * out_RD).sum(-1)
        tensors = {"q": q_RD, "k": k_RD, "v": v_RD, "lse": lse_P, "dout": dout_RD}
        return input_gradients(ctx, reads, {**tensors, "delta": delta_R[row_P]})


def remember(ctx: Any, shared: bool, scale: float, heads: int, reads: KernelReads) -> None:
    """Store on `ctx` what the backward pass needs besides tensors.

    Args:
        shared: whether queries serve as keys.
    """
    ctx.shared = shared
    ctx.scale = scale
    ctx.heads = heads
    ctx.form = type(reads)


def contiguous(q_RD: Tensor, k_RD: Tensor | None, v_RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous queries, keys and values; without keys, the queries serve as keys."""
    q_RD = q_RD.contiguous()
    if k_RD is None:
        return q_RD, q_RD, v_RD.contiguous()
    return q_RD, k_RD.contiguous(), v_RD.contiguous()


def input_gradients(
    ctx: Any,
    reads: KernelReads,
    tensors: dict[str, Tensor],
) -> tuple[Tensor | None, ...]:
    """Run the kernel's backward pass; return a gradient for each argument of the forward pass.

    If queries serve as keys, the gradient of queries is that of both.

    Args:
        tensors: the kernel's other tensors, by its names.
    """
    # Not by torch's once_differentiable: it overlooks torch.autograd.grad of a single input.
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True: this attention has first derivatives alone")
    dq_RD = torch.empty_like(tensors["q"])
    dk_RD = dq_RD
    gradient_of_keys = None
    if not ctx.shared:
        dk_RD = torch.empty_like(tensors["k"])
        gradient_of_keys = dk_RD
    dv_RD = torch.empty_like(tensors["v"])
    call(ctx.scale, ctx.heads, reads, **tensors, dq=dq_RD, dk=dk_RD, dv=dv_RD)
    return dq_RD, gradient_of_keys, dv_RD, None, None, None


def call(scale: float, heads: int, reads: KernelReads, **tensors: Tensor) -> None:
    """Run the attention kernel, which writes into `out` and `lse`, or into `dq`, `dk` and `dv`."""
    for name, x in reads._asdict().items():
        if x is not None:
            tensors[name] = x
    sizes = sizes_of(tensors)
    check(tensors, sizes)
    pointers = {name: x.data_ptr() for name, x in tensors.items()}
    run("rtx_attend", AttentionArguments(**pointers, **sizes._asdict(), G=heads, scale=scale))


class Sizes(NamedTuple):
    """Sizes of the kernel's tensors."""

    R: int
    P: int
    M: int
    X: int
    """The number of conditions of holes; `rtx.attention.reads.Holes` calls it i."""
    K: int
    """Columns of the index; -1: there are ranges."""
    D: int
    Dv: int
    """Head size of values."""


def sizes_of(tensors: dict[str, Tensor]) -> Sizes:
    """Return the sizes, by the tensors' names."""
    R, D = tensors["q"].shape
    Dv = tensors["v"].shape[1]
    if "index" in tensors:
        return Sizes(R=R, P=R, M=0, X=0, K=tensors["index"].shape[1], D=D, Dv=Dv)
    P = len(tensors["query_row"])
    M = len(tensors["key_row"])
    return Sizes(R=R, P=P, M=M, X=len(tensors["value"]), K=-1, D=D, Dv=Dv)


def check(tensors: dict[str, Tensor], sizes: Sizes) -> None:
    """Raise a ValueError for a tensor that the kernel would misread, or read beyond its end."""
    R = sizes.R
    P = sizes.P
    M = sizes.M
    X = sizes.X
    shapes = {"k": (R, sizes.D), "v": (R, sizes.Dv), "index": (R, sizes.K)}
    shapes |= {"start": (P,), "stop": (P,), "weight": (P,)}
    shapes |= {"value": (X, M), "low": (X, P), "high": (X, P)}
    for name, x in tensors.items():
        dtype = torch.int64 if name in INTS else torch.float32
        has_shape = name not in shapes or x.shape == shapes[name]
        if not has_shape or x.dtype != dtype or not x.is_cpu or not x.is_contiguous():
            message = f"{name}: {[*x.shape]} of {x.dtype} on {x.device} does not fit queries"
            raise ValueError(f"{message} {[R, sizes.D]}")


def select(
    centroid_HCD: Tensor,
    x_BHND: Tensor,
    threshold_HC: Tensor | None,
    *,
    window: int,
    nearest: bool,
) -> Selection:
    """Return the members of every cluster by scores, the dot products of centroids with vectors.

    With thresholds a position joins every cluster whose threshold its score reaches. It always
    joins the cluster whose threshold it exceeds most, or misses least. Without thresholds the
    members of a cluster are the `window` positions with the highest scores; with a window of 0
    there are none.

    Args:
        nearest: also return the cluster that scores each position highest.
    """
    B, H, N, D = x_BHND.shape
    C = centroid_HCD.shape[1]
    count_L = torch.zeros(B * H * C, dtype=torch.int64)
    nearest_BHN = None
    if nearest:
        nearest_BHN = torch.empty(B, H, N, dtype=torch.int64)
    moment_2BHC = None
    margin_HC = centroid_margin(centroid_HCD, torch.float32)
    centroid_HCD = centroid_HCD.detach().float().contiguous()
    x_BHND = x_BHND.detach().float().contiguous()
    if threshold_HC is not None:
        threshold_HC = threshold_HC.detach().float().contiguous()
        moment_2BHC = torch.empty(2, B, H, C, dtype=torch.float64)
    rows: list[Tensor] = []

    def allocate(members: int) -> int:
        rows.append(torch.empty(members, dtype=torch.int64))
        return rows[0].data_ptr()

    arguments = SelectionArguments(
        centroid=centroid_HCD.data_ptr(),
        x=x_BHND.data_ptr(),
        threshold=pointer(threshold_HC),
        margin=margin_HC.data_ptr(),
        count=count_L.data_ptr(),
        nearest=pointer(nearest_BHN),
        moment=pointer(moment_2BHC),
        allocate=ALLOCATE(allocate),
        G=B * H,
        H=H,
        C=C,
        N=N,
        D=D,
        W=window,
    )
    run("rtx_select", arguments)
    return Selection(rows[0], count_L, nearest_BHN, moment_2BHC)


def pointer(x: Tensor | None) -> int | None:
    """Return the address of a tensor's numbers; None, which is a null pointer, for None."""
    if x is None:
        return None
    return x.data_ptr()


def cluster_keys(centroid_HCD: Tensor, k_BHND: Tensor) -> MemberLists:
    """Return the keys of each cluster, in B * H * C lists; the closest centroid has the key."""
    return run_probing(centroid_HCD, k_BHND)


def probe(
    centroid_HCD: Tensor,
    q_BHND: Tensor,
    k_BHND: Tensor,
    *,
    candidates: int,
    early: int,
    attend_self: bool,
) -> ProbedLists:
    """Return the keys that each query probes, in B * H * (C + 1) lists.

    The first list of a head has the positions before `early`, each of which reads all keys up to
    itself. The others are its clusters: their keys, and the queries from position `early` on that
    probe them.

    Args:
        candidates: m; see `rtx.attention.probed`.
    """
    B, H = q_BHND.shape[:2]
    query_count_L = torch.empty(B * H * (centroid_HCD.shape[1] + 1), dtype=torch.int64)
    made: list[Tensor] = []

    def allocate(members: int) -> int:
        made.append(torch.empty(3, members, dtype=torch.int64))
        return made[0].data_ptr()

    keys = run_probing(
        centroid_HCD,
        k_BHND,
        q_BHND,
        early=early,
        query_count=query_count_L.data_ptr(),
        allocate=ALLOCATE(allocate),
        M=candidates,
        attend_self=int(attend_self),
    )
    row_P, start_P, stop_P = made[0]
    return ProbedLists(keys, MemberLists(row_P, query_count_L), start_P, stop_P)


def probe_best(
    centroid_HCD: Tensor,
    q_BHND: Tensor,
    k_BHND: Tensor,
    *,
    candidates: int,
    window: int,
    attend_self: bool,
) -> Tensor:
    """Return the rows of the `window` best keys, by q k^T, that each query probes, `[R, W]`.

    -1 names no row.

    Args:
        candidates: m; see `rtx.attention.probed`.
    """
    index_RW = torch.empty(q_BHND.shape[:3].numel(), window, dtype=torch.int64)
    run_probing(
        centroid_HCD,
        k_BHND,
        q_BHND,
        index=index_RW.data_ptr(),
        M=candidates,
        W=window,
        attend_self=int(attend_self),
    )
    return index_RW


def run_probing(
    centroid_HCD: Tensor,
    k_BHND: Tensor,
    q_BHND: Tensor | None = None,
    early: int | None = None,
    **more: Any,
) -> MemberLists:
    """Run the probing kernel, and return the keys of each list.

    Args:
        q_BHND: None: only sort keys into clusters.
        early: the number of positions in the list before a head's clusters; None: no such list.
        more: other fields of `ProbingArguments`, which concern queries.
    """
    B, H, N, D = k_BHND.shape
    C = centroid_HCD.shape[1]
    centroid_HCD = centroid_HCD.detach().float().contiguous()
    k_BHND = k_BHND.detach().contiguous()
    assert k_BHND.dtype == torch.float32
    if q_BHND is not None:
        assert q_BHND.shape == k_BHND.shape and q_BHND.dtype == k_BHND.dtype
        q_BHND = q_BHND.detach().contiguous()
        more["q"] = q_BHND.data_ptr()
    members = B * H * N
    lists = B * H * C
    if early is not None:
        more["early"] = early
        members += B * H * early
        lists += B * H
    row_M = torch.empty(members, dtype=torch.int64)
    keys = MemberLists(row_M, torch.empty(lists, dtype=torch.int64))
    arguments = ProbingArguments(
        centroid=centroid_HCD.data_ptr(),
        k=k_BHND.data_ptr(),
        key_row=keys.row_M.data_ptr(),
        key_count=keys.count_L.data_ptr(),
        G=B * H,
        H=H,
        C=C,
        N=N,
        D=D,
        **more,
    )
    run("rtx_probe", arguments)
    return keys


def run(name: str, arguments: ctypes.Structure) -> None:
    """Run a kernel on as many threads as torch has.

    Raises:
        RuntimeError: the kernels can neither be loaded nor compiled.
        ValueError: a row belongs to another head, a range leaves the key members, or ranges fall.
        MemoryError: there is too little memory.
    """
    kernels = library()
    if kernels is None:
        raise RuntimeError("there is no attention kernel; hardware.attention=torch needs none")
    kernel = getattr(kernels, name)
    status = kernel(ctypes.byref(arguments), torch.get_num_threads())
    if status == 2:
        raise MemoryError("the attention kernel")
    if status:
        raise ValueError("members or rows are out of range")
