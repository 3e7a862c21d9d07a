"""Attention and selection by clusters on a CPU by C++, which is compiled on first use and kept in the user's cache.

Shapes: G heads of all B sequences, H of one, N positions, R = G * N rows (row g * N + n is position n of head g), D
head size, C clusters, K columns of an index; P query members and M key members of all lists together. `native.cpp`,
`selection.cpp` and `probing.cpp` say what is computed.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.engine.problem import Problem, Result
from rtx.attention.once import derived_once
from rtx.attention.packed import Hidden, Indexed, Packed, Reads
from rtx.attention.ties import centroid_margin

SOURCES = [Path(__file__).with_name(name) for name in ("probing.cpp", "selection.cpp", "native.cpp")]
"""What is compiled, and what that includes."""
TUNING = {"x86_64": "-march=native -mprefer-vector-width=512", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
FLAGS = ("-O3 -std=c++17 -ffp-contract=fast -w -shared -fPIC -fopenmp " + TUNING.get(platform.machine(), "")).split()
FLOATS = ("q", "k", "v", "dout", "dlse", "weight")
INTS = ("query_row", "key_row", "start", "stop", "head_begin", "value", "low", "high", "index")
MIN_LENGTH = 1024
"""Positions from which `auto` takes the kernels: shorter runs do not wait for a compiler."""
ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)
Pair = tuple[Tensor, Tensor]
Selected = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class AttentionArguments(ctypes.Structure):
    """The arguments of the kernel, in its order."""

    _fields_ = (
        *((field, ctypes.c_void_p) for field in (*FLOATS, *INTS, "out", "lse", "dq", "dk", "dv", "delta", "row_lse")),
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
        *((field, ctypes.c_int64) for field in ("G", "H", "C", "N", "D", "M", "W", "first", "attend_self")),
    )


class Probed(NamedTuple):
    """Clusters of keys, and the queries that probe each."""

    key: Packed
    query: Packed
    start_P: Tensor
    stop_P: Tensor
    """Query member p reads the key members start_P[p] to stop_P[p] - 1."""


def wanted(backend: str, length: int) -> bool:
    """Tell whether kernels are to run: always by "native", and by "auto" from `MIN_LENGTH` on where they can be had."""
    return backend == "native" or (backend == "auto" and length >= MIN_LENGTH and library() is not None)


def refusal(problem: Problem) -> str | None:
    """Return why the compiled kernel cannot run the problem; None where it can."""
    q_BHND, terms = problem.q_BHND, problem.terms
    if q_BHND.device.type != "cpu" or q_BHND.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return "it computes in float32 on a CPU"
    if terms.by_distance or terms.dropout:
        return "it has no dropout, Shaw's terms or adaptive spans"
    return None


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums, see `Problem`."""
    q_RD, k_RD, v_RD = problem.rows()
    part = problem.part
    heads = len(q_RD) // part.length
    key_RD = None if problem.shared else k_RD
    if isinstance(part, Indexed):
        return Attention.apply(q_RD, key_RD, v_RD, problem.terms.scale, heads, part.index_RK)
    by_member, rows = problem.by_member, len(q_RD)
    name = f"native, by member {by_member}"
    reads = derived_once(part, name, lambda: kernel_ranges(part, rows, by_member))
    return Attention.apply(q_RD, key_RD, v_RD, problem.terms.scale, heads, *reads)


def attend_joined(problem: Problem) -> Tensor:
    """Return outputs by row, `[R, D]`: one softmax over the keys of all lists of a part in which a row reads."""
    q_RD, k_RD, v_RD = problem.rows()
    part = problem.part
    assert isinstance(part, Reads)
    heads, rows = len(q_RD) // part.length, len(q_RD)
    reads = derived_once(part, "native, by member True", lambda: kernel_ranges(part, rows, True))
    return Joined.apply(q_RD, None if problem.shared else k_RD, v_RD, problem.terms.scale, heads, *reads)


def kernel_ranges(part: Reads, rows: int, by_member: bool) -> list[Tensor]:
    """Return the lists as the kernel reads them, with weights of query members unless outputs are by member."""
    row_P, row_M = part.query.row_M, part.key.row_M
    begin = torch.searchsorted(row_P // part.length, torch.arange(rows // part.length + 1))
    hidden = part.hidden or Hidden(*(x.new_zeros(0, len(x)) for x in (row_M, row_P, row_P)))
    reads = [row_P, row_M, part.start_P, part.stop_P, begin, *(x.contiguous() for x in hidden)]
    if not by_member:
        reads.append(1 / part.times_R(rows).clamp(min=1)[row_P].float())
    return reads


class Attention(torch.autograd.Function):
    """All forms: `reads` are all of `INTS` but the last, and weights of query members unless outputs are to stand by
    member; or an index `[R, K]` alone.
    """

    @staticmethod
    def forward(
        ctx: Any, q_RD: Tensor, k_RD: Tensor | None, v_RD: Tensor, scale: float, heads: int, *reads: Tensor
    ) -> Pair:
        """Return outputs and log-sums, -inf where nothing is read; without keys, queries stand for them."""
        ctx.shared, ctx.scale, ctx.heads = k_RD is None, scale, heads
        q_RD, v_RD = q_RD.contiguous(), v_RD.contiguous()
        k_RD = q_RD if k_RD is None else k_RD.contiguous()
        by_member, lse = len(reads) == len(INTS) - 1, q_RD.new_empty(len(reads[0]))
        out = v_RD.new_zeros(len(lse) if by_member else len(v_RD), v_RD.shape[1])
        call(scale, heads, reads, q=q_RD, k=k_RD, v=v_RD, out=out, lse=lse)
        ctx.save_for_backward(q_RD, k_RD, v_RD, lse, *reads)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values; one for both where queries stand for keys."""
        if torch.is_grad_enabled():  # torch's once_differentiable lets torch.autograd.grad for one input pass
            raise RuntimeError("create_graph=True: this attention has first derivatives alone")
        q_RD, k_RD, v_RD, lse, *reads = ctx.saved_tensors
        given = dict(zip(("dout", "dlse"), (x.contiguous() for x in gradients), strict=True))
        dq_RD, dv_RD = torch.empty_like(q_RD), torch.empty_like(v_RD)
        dk_RD = dq_RD if ctx.shared else torch.empty_like(k_RD)
        call(ctx.scale, ctx.heads, reads, q=q_RD, k=k_RD, v=v_RD, lse=lse, dq=dq_RD, dk=dk_RD, dv=dv_RD, **given)
        return dq_RD, None if ctx.shared else dk_RD, dv_RD, *[None] * (2 + len(reads))


class Joined(torch.autograd.Function):
    """Ranges, and one softmax over all that a row reads; nothing by member is kept but numbers."""

    @staticmethod
    def forward(
        ctx: Any, q_RD: Tensor, k_RD: Tensor | None, v_RD: Tensor, scale: float, heads: int, *reads: Tensor
    ) -> Tensor:
        """Return outputs by row, zero where nothing is read; without keys, queries stand for them."""
        ctx.shared, ctx.scale, ctx.heads = k_RD is None, scale, heads
        q_RD, v_RD = q_RD.contiguous(), v_RD.contiguous()
        k_RD = q_RD if k_RD is None else k_RD.contiguous()
        lse_P, lse_R = q_RD.new_empty(len(reads[0])), q_RD.new_empty(len(q_RD))
        out_RD = torch.zeros_like(v_RD)
        call(scale, heads, reads, q=q_RD, k=k_RD, v=v_RD, out=out_RD, lse=lse_P, row_lse=lse_R)
        ctx.save_for_backward(q_RD, k_RD, v_RD, out_RD, lse_R, *reads)
        return out_RD

    @staticmethod
    def backward(ctx: Any, dout_RD: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values; one for both where queries stand for keys."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: this attention has first derivatives alone")
        q_RD, k_RD, v_RD, out_RD, lse_R, *reads = ctx.saved_tensors
        dout_RD = dout_RD.contiguous()
        row_P = reads[0]
        delta_P = (dout_RD * out_RD).sum(-1)[row_P]
        dq_RD, dv_RD = torch.empty_like(q_RD), torch.empty_like(v_RD)
        dk_RD = dq_RD if ctx.shared else torch.empty_like(k_RD)
        given = {"q": q_RD, "k": k_RD, "v": v_RD, "lse": lse_R[row_P], "dout": dout_RD, "delta": delta_P}
        call(ctx.scale, ctx.heads, reads, **given, dq=dq_RD, dk=dk_RD, dv=dv_RD)
        return dq_RD, None if ctx.shared else dk_RD, dv_RD, *[None] * (2 + len(reads))


def call(scale: float, heads: int, reads: Sequence[Tensor], **given: Tensor) -> None:
    """Let the kernel write the outputs among the given tensors."""
    given |= dict(zip((*INTS[:-1], "weight") if len(reads) > 1 else INTS[-1:], reads, strict=False))
    (R, D), Dv = given["q"].shape, given["v"].shape[1]
    P, M, X, K = (*map(len, (*reads[:2], reads[5])), -1) if len(reads) > 1 else (R, 0, 0, reads[0].shape[1])
    shapes = {"k": (R, D), "start": (P,), "stop": (P,), "weight": (P,)}
    shapes |= {"value": (X, M), "low": (X, P), "high": (X, P)}
    for name, x in given.items():
        kind = torch.int64 if name in INTS else torch.float32
        fits = x.shape == shapes.get(name, x.shape) and (name not in ("v", "index") or len(x) == R)
        if not fits or x.dtype != kind or x.device.type != "cpu" or not x.is_contiguous():
            raise ValueError(f"{name}: {[*x.shape]} of {x.dtype} on {x.device} does not fit queries {[R, D]}")
    pointers = {name: x.data_ptr() for name, x in given.items()}
    problem = AttentionArguments(**pointers, G=heads, R=R, P=P, M=M, X=X, K=K, D=D, Dv=Dv, scale=scale)
    run("rtx_attend", problem)


def select(
    centroid_HCD: Tensor, x_BHND: Tensor, threshold_HC: Tensor | None, *, window: int, nearest: bool
) -> Selected:
    """Return rows `[M]` and counts `[B * H * C]` of members, and the nearest centroids `[B, H, N]` where asked for.

    Members are what joins by thresholds or, without, the `window` best; a window of 0 asks for none. With thresholds
    the sums `[2, B, H, C]` of all scores of a centroid and of their squares come last.
    """
    B, H, N, D = x_BHND.shape
    C = centroid_HCD.shape[1]
    count_L = torch.zeros(B * H * C, dtype=torch.int64)
    nearest_BHN = torch.empty(B, H, N, dtype=torch.int64) if nearest else None
    moment_2BHC = None if threshold_HC is None else torch.empty(2, B, H, C, dtype=torch.float64)
    margin_HC = centroid_margin(centroid_HCD, torch.float32)
    floats = [None if x is None else x.detach().float().contiguous() for x in (centroid_HCD, x_BHND, threshold_HC)]
    given = [*floats, margin_HC, count_L, nearest_BHN, moment_2BHC]
    rows: list[Tensor] = []

    def allocate(members: int) -> int:
        rows.append(torch.empty(members, dtype=torch.int64))
        return rows[0].data_ptr()

    pointers = (None if x is None else x.data_ptr() for x in given)
    run("rtx_select", SelectionArguments(*pointers, ALLOCATE(allocate), B * H, H, C, N, D, window))
    return rows[0], count_L, nearest_BHN, moment_2BHC


def cluster_keys(centroid_HCD: Tensor, k_BHND: Tensor) -> Packed:
    """Return the keys of each cluster, `[B * H * C]` lists: each key is in that of its nearest centroid."""
    return run_probing(centroid_HCD, k_BHND)


def probe(
    centroid_HCD: Tensor, q_BHND: Tensor, k_BHND: Tensor, *, candidates: int, first: int, attend_self: bool
) -> Probed:
    """Return the clusters of keys that the queries from position `first` on probe.

    In front of a head's clusters there is a list of the positions before it, which read all up to themselves.
    """
    q_BHND = q_BHND.detach().contiguous()
    B, H = q_BHND.shape[:2]
    query_count_L = torch.empty(B * H * (centroid_HCD.shape[1] + 1), dtype=torch.int64)
    made: list[Tensor] = []

    def allocate(members: int) -> int:
        made.append(torch.empty(3, members, dtype=torch.int64))
        return made[0].data_ptr()

    keys = run_probing(
        centroid_HCD,
        k_BHND,
        early=first,
        more=1,
        q=q_BHND.data_ptr(),
        query_count=query_count_L.data_ptr(),
        allocate=ALLOCATE(allocate),
        M=candidates,
        first=first,
        attend_self=int(attend_self),
    )
    row_P, start_P, stop_P = made[0]
    return Probed(keys, Packed(row_P, query_count_L), start_P, stop_P)


def probe_best(
    centroid_HCD: Tensor, q_BHND: Tensor, k_BHND: Tensor, *, candidates: int, window: int, attend_self: bool
) -> Tensor:
    """Return the rows `[R, W]` of the `window` best keys, by q k^T, of those that each query probes; -1 for none."""
    q_BHND = q_BHND.detach().contiguous()
    B, H, N, _ = q_BHND.shape
    index_RW = torch.empty(B * H * N, window, dtype=torch.int64)
    run_probing(
        centroid_HCD,
        k_BHND,
        q=q_BHND.data_ptr(),
        index=index_RW.data_ptr(),
        M=candidates,
        W=window,
        attend_self=int(attend_self),
    )
    return index_RW


def run_probing(centroid_HCD: Tensor, k_BHND: Tensor, early: int = 0, more: int = 0, **queries: Any) -> Packed:
    """Run the kernel with what it is to do with queries, if anything; return the keys of each list.

    `early`: keys of the list in front of a head's clusters, `more`: 1 where there is one.
    """
    B, H, N, D = k_BHND.shape
    C = centroid_HCD.shape[1]
    centroid_HCD = centroid_HCD.detach().float().contiguous()
    k_BHND = k_BHND.detach().contiguous()
    row_M = torch.empty(B * H * (N + early), dtype=torch.int64)
    keys = Packed(row_M, torch.empty(B * H * (C + more), dtype=torch.int64))
    problem = ProbingArguments(
        centroid=centroid_HCD.data_ptr(),
        k=k_BHND.data_ptr(),
        key_row=keys.row_M.data_ptr(),
        key_count=keys.count_L.data_ptr(),
        G=B * H,
        H=H,
        C=C,
        N=N,
        D=D,
        **queries,
    )
    run("rtx_probe", problem)
    return keys


def run(name: str, problem: ctypes.Structure) -> None:
    """Run a kernel on as many threads as torch has."""
    if (kernels := library()) is None:
        raise RuntimeError("there is no attention kernel; hardware.attention=torch needs none")
    if status := getattr(kernels, name)(ctypes.byref(problem), torch.get_num_threads()):
        raise MemoryError("the attention kernel") if status == 2 else ValueError("members or rows are out of range")


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernels, compiled where no copy can be loaded; None, after a line on stderr, where that fails."""
    try:
        path = place()
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                return ctypes.CDLL(str(path))
        return compiled(path)
    except Exception as error:
        said = str(getattr(error, "stderr", None) or error).split()
        print("no attention kernel, torch's serve:", " ".join(said)[:200], file=sys.stderr)
        return None


def place() -> Path:
    """Return where the user's compiled copy is kept; its name tells source, flags and machine (homes are shared)."""
    made_of = f"{[path.read_text() for path in SOURCES]} {FLAGS} {platform.machine()} {platform.libc_ver()}"
    made_of += os.environ.get("CXX", "")
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().lower().splitlines()
        made_of += str(sorted({x for x in lines if x.startswith(("flags", "features", "model name", "cpu part"))}))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rtx"
    return folder / f"attention-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"


def compiled(path: Path) -> ctypes.CDLL:
    """Compile the kernels and load them, from the cache if that can be written."""
    commands = (command.split() for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"))
    command = next((command for command in commands if command and shutil.which(command[0])), None)
    if command is None:
        raise RuntimeError("no C++ compiler (CXX, c++, g++, clang++)")
    print("compiling the attention kernel (once, about 5 s)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="rtx-") as there:
        made = Path(there, path.name)
        subprocess.run([*command, *FLAGS, str(SOURCES[0]), "-o", str(made)], check=True, capture_output=True, text=True)
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.chmod(0o700)  # fails where it is somebody else's
            with tempfile.TemporaryDirectory(dir=path.parent) as beside:  # others see a whole file or none
                made = Path(shutil.copy(made, beside))
                with made.open("rb+") as file:
                    os.fsync(file.fileno())
                made = made.replace(path)
        return ctypes.CDLL(str(made))
