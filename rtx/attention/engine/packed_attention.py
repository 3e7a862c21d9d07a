"""The engine by kernels of its own for GPUs: softmax attention over packed lists, in Triton.

Nothing waits for the device, nothing is gathered beforehand, and nothing is added up by atomic
operations: outputs and gradients are computed by member, then combined over the members of each row in
a fixed order. Two runs therefore give the same bits.

`packed_attention` and its backward pass are operators of torch's library, whose outputs' shapes follow
from the inputs' shapes: `torch.compile` takes them into its graph.

Terms by distance become a table `[R, distances]` of what a row's query adds to its logits, one matrix
product; the kernels look entries up. Values by distance are one matrix product with a table of the
weights of every query member by distance, which a kernel writes.

Shapes: B sequences, H heads, N positions, R = B * H * N rows, P query members, M key members of all
lists together, T distances, D and E head sizes of keys and values.
"""

import importlib.util
import math
import os
import shutil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.engine.lists import KernelLists
from rtx.attention.engine.softmax import Terms

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
"""Whether Triton runs kernels in Python, on any device."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_COMPILER = any(shutil.which(name) for name in (os.environ.get("CC") or "gcc", "gcc", "clang"))
"""Whether there is a C compiler, by which Triton makes what starts its kernels."""
DEVICES = ("cuda", "meta")
"""Of the latter tensors have shapes alone: what runs there needs no GPU, and cannot look at numbers."""
TYPES = (torch.float32, torch.float16, torch.bfloat16)
MIN_SIZE, MAX_SIZE = 16, 128
"""Head sizes: the least of a matrix product in Triton, and the most for which tiles fit the registers."""


class Tile(NamedTuple):
    """Query and key members of a program, its warps, and how many tiles are on the way from memory at once."""

    queries: int
    keys: int
    warps: int
    stages: int


WIDE_TILES = Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)
"""In float32, which no tensor core multiplies in full precision: for heads of up to 64 units, and of up to 128."""
TILES = {
    # for heads of up to 64 units, and of up to 128; the same with terms by distance
    "attend": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    "weigh": (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    "dq": (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 64, 8, 1), Tile(32, 64, 8, 1)),
    "dkv": (Tile(64, 64, 4, 2), Tile(32, 64, 4, 3), Tile(32, 64, 8, 1), Tile(32, 64, 8, 2)),
}
"""By benchmarks/results/aot.txt: such that next to nothing spills from the 255 registers of a thread."""


class Members(NamedTuple):
    """Who reads whom: the tensors of `KernelLists`, in its order."""

    query_row_P: Tensor
    key_row_M: Tensor
    start_P: Tensor
    stop_P: Tensor
    low_M: Tensor
    high_M: Tensor
    query_first_R1: Tensor
    query_member_P: Tensor
    key_first_R1: Tensor
    key_member_M: Tensor


class KernelProblem(NamedTuple):
    """What is attended over: the inputs of `packed_attention`."""

    q_BHND: Tensor
    k_BHND: Tensor
    v_BHNE: Tensor
    of: Members
    hidden: list[Tensor]
    keys_HTD: Tensor | None
    bias_HT: Tensor | None
    values_TE: Tensor | None
    seed_1: Tensor | None
    scale: float
    dropout: float

    @property
    def rows(self) -> int:
        """R."""
        return self.q_BHND.shape[:3].numel()

    @property
    def entries(self) -> int:
        """T, at least 1."""
        return 1 if self.keys_HTD is None else self.keys_HTD.shape[1]

    def table_RT(self) -> Tensor | None:
        """Return what is added to a row's products, by distance."""
        if self.keys_HTD is None:
            return None
        table_BHNT = self.q_BHND @ self.keys_HTD.to(self.q_BHND.dtype).mT
        if self.bias_HT is not None:
            table_BHNT = table_BHNT + self.bias_HT[:, None].to(table_BHNT.dtype)
        return table_BHNT.reshape(self.rows, self.entries)


def device_refusal(device: torch.device) -> str | None:
    """Return why kernels cannot run on a device, None where they can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if not INTERPRETED and device.type not in DEVICES:
        return "it computes on a GPU"
    if not INTERPRETED and not HAS_COMPILER:
        return "there is no C compiler, which Triton needs"
    return None


def can_run(device: torch.device) -> bool:
    """Tell whether kernels can run on a device."""
    return device_refusal(device) is None


def refusal(q_BHND: Tensor, v_BHND: Tensor, terms: Terms) -> str | None:
    """Return why the kernels cannot run this, None where they can."""
    if why := device_refusal(q_BHND.device):
        return why
    if terms.bias_HM is not None:
        return "it has no adaptive spans"
    if q_BHND.dtype not in TYPES or v_BHND.dtype not in TYPES:
        return "it computes in float32, float16 or bfloat16"
    sizes = q_BHND.shape[-1], v_BHND.shape[-1]
    if min(sizes) < MIN_SIZE or max(sizes) > MAX_SIZE:
        return f"it computes with heads of {MIN_SIZE} to {MAX_SIZE} units"
    return None


def attend(
    q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, lists: KernelLists, terms: Terms, joined: bool
) -> tuple[Tensor, Tensor]:
    """Return outputs and the natural logarithms `[P]` of the summed exponentials of every query member.

    A member that reads nothing has zeros and -inf. With dropout, weights are dropped after the softmax
    and the others scaled by 1 / (1 - dropout); log-sums are those without dropout.

    Args:
        q_BHND: views with any strides; those whose last stride is not 1 are copied.
        k_BHND: the queries themselves where queries stand for keys.
        v_BHND: values, of a head size of their own.
        joined: outputs `[P, D]` by query member. Without, those of rows `[R, D]`, the mean over the
            lists in which a row reads something; zeros where there is none.

    Raises:
        ValueError: for what `refusal` names.
        RuntimeError: in the backward pass with create_graph=True; there are first derivatives alone.
    """
    if why := refusal(q_BHND, v_BHND, terms):
        raise ValueError(f"the packed kernels cannot run this ({why}): take backend='torch'")
    shared = k_BHND is q_BHND and lists.key_row_M is lists.query_row_P
    dtype = torch.promote_types(torch.promote_types(q_BHND.dtype, k_BHND.dtype), v_BHND.dtype)
    q_BHND, v_BHND = (unit_stride(x.to(dtype)) for x in (q_BHND, v_BHND))
    tables = relative_terms(terms, q_BHND.shape[1])
    seed_1 = None
    if terms.dropout:
        seed_1 = torch.randint(0, 2**63 - 1, (1,), device=q_BHND.device)
    k = None if shared else unit_stride(k_BHND.to(dtype))
    tensors = [*lists[:6], *lists.query_members, *lists.key_members]
    hidden = [x.contiguous() for x in lists.hidden or ()]
    options = seed_1, terms.scale, terms.dropout, joined
    out, lse_P, _, _ = packed_attention(q_BHND, k, v_BHND, tensors, hidden, *tables, *options)
    return out, lse_P


def unit_stride(x: Tensor) -> Tensor:
    """Return the tensor or a copy whose last stride is 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def relative_terms(terms: Terms, heads: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return keys by head and distance, the bias by head and distance, and values by distance."""
    if terms.relative is None:
        return None, None, None
    keys, values_TE, bias_HT = terms.relative
    keys_HTD = keys.expand(heads, -1, -1) if keys.dim() == 2 else keys
    return keys_HTD, bias_HT, values_TE


def problem_of(
    q_BHND: Tensor, k_BHND: Tensor | None, v_BHNE: Tensor, lists: list[Tensor], *others: Any
) -> KernelProblem:
    """Return what an operator was called with; without keys, queries stand for them."""
    k_BHND = q_BHND if k_BHND is None else k_BHND
    return KernelProblem(q_BHND, k_BHND, v_BHNE, Members._make(lists), *others)


@torch.library.custom_op("rtx::packed_attention", mutates_args=())
def packed_attention(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHNE: Tensor,
    lists: list[Tensor],
    hidden: list[Tensor],
    keys_HTD: Tensor | None,
    bias_HT: Tensor | None,
    values_TE: Tensor | None,
    seed_1: Tensor | None,
    scale: float,
    dropout: float,
    joined: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs (of rows, or `joined` of members), log-sums, and what the backward pass needs.

    That are, unless `joined`, outputs by member `[P, E]` and 1 / the lists in which a row reads `[R]`.
    """
    terms = keys_HTD, bias_HT, values_TE, seed_1, scale, dropout
    x = problem_of(q_BHND, k_BHND, v_BHNE, lists, hidden, *terms)
    with torch.autocast(q_BHND.device.type, enabled=False), torch.cuda.device_of(q_BHND):
        out_PE, lse_P = attend_members(x)
        nothing = v_BHNE.new_empty(0)
        if joined:
            return out_PE, lse_P, nothing, lse_P.new_empty(0)
        out_RE = v_BHNE.new_empty(x.rows, v_BHNE.shape[-1])
        share_R = lse_P.new_empty(x.rows)
        combine(out_PE, None, x.of.query_first_R1, x.of.query_member_P, out_RE, lse_P, share_R)
        return out_RE, lse_P, out_PE, share_R


@packed_attention.register_fake
def _(q_BHND, k_BHND, v_BHNE, lists, *others):
    P, E, rows = lists[0].shape[0], v_BHNE.shape[-1], q_BHND.shape[:3].numel()
    out_PE = v_BHNE.new_empty(P, E)
    lse_P = q_BHND.new_empty(P, dtype=torch.float32)
    if others[-1]:
        return out_PE, lse_P, v_BHNE.new_empty(0), lse_P.new_empty(0)
    return v_BHNE.new_empty(rows, E), lse_P, out_PE, lse_P.new_empty(rows)


@torch.library.custom_op("rtx::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    dout: Tensor,
    dlse_P: Tensor | None,
    out_PE: Tensor,
    lse_P: Tensor,
    share_R: Tensor | None,
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHNE: Tensor,
    lists: list[Tensor],
    hidden: list[Tensor],
    keys_HTD: Tensor | None,
    bias_HT: Tensor | None,
    values_TE: Tensor | None,
    seed_1: Tensor | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values, and keys, bias and values by distance.

    Where there is no such input, the gradient is empty. Shares are given where outputs are of rows.
    """
    terms = keys_HTD, bias_HT, values_TE, seed_1, scale, dropout
    x = problem_of(q_BHND, k_BHND, v_BHNE, lists, hidden, *terms)
    with torch.autocast(q_BHND.device.type, enabled=False), torch.cuda.device_of(q_BHND):
        if share_R is not None:  # each member's share of its row's gradient
            dout = dout * share_R[:, None]
        dout = dout.to(v_BHNE.dtype).contiguous()
        joined = share_R is None
        of_members = member_gradients(x, dout, dlse_P, out_PE, lse_P, joined)
        dq_BHND, dk_BHND, dv_BHNE = row_gradients(x, of_members, k_BHND is None)
        dkeys_HTD, dbias_HT = key_table_gradients(x, of_members, dq_BHND)
        dvalues_TE = q_BHND.new_empty(0)
        if values_TE is not None and of_members.weights_PT is not None:
            dout_PE = dout if joined else dout.index_select(0, x.of.query_row_P)
            dvalues_TE = (of_members.weights_PT.mT @ dout_PE).to(values_TE.dtype)
        return dq_BHND, dk_BHND, dv_BHNE, dkeys_HTD, dbias_HT, dvalues_TE


@packed_attention_backward.register_fake
def _(dout, dlse_P, out_PE, lse_P, share_R, q_BHND, k_BHND, v_BHNE, lists, hidden, *others):
    wanted = [k_BHND, *others[:3]]
    dk, *tables = (q_BHND.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)
    return q_BHND.new_empty(q_BHND.shape), dk, v_BHNE.new_empty(v_BHNE.shape), *tables


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward pass needs."""
    q, k, v, lists, hidden, keys, bias, values, seed, scale, dropout, joined = inputs
    out, lse_P, out_PE, share_R = output
    ctx.options = scale, dropout, joined, len(lists), len(hidden)
    members = out if joined else out_PE
    ctx.save_for_backward(members, lse_P, share_R, q, k, v, keys, bias, values, seed, *lists, *hidden)
    ctx.mark_non_differentiable(out_PE, share_R)
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, dout: Tensor | None, dlse_P: Tensor | None, *_: None) -> tuple[Any, ...]:
    """Return the gradients of the inputs of `packed_attention`."""
    if torch.is_grad_enabled():  # torch's once_differentiable lets torch.autograd.grad for one input pass
        raise RuntimeError("create_graph=True: this attention has first derivatives alone")
    out_PE, lse_P, share_R, q, k, v, keys, bias, values, seed, *others = ctx.saved_tensors
    scale, dropout, joined, lists, hidden = ctx.options
    if dout is None:
        dout = out_PE.new_zeros(out_PE.shape if joined else (len(share_R), out_PE.shape[1]))
    saved = out_PE, lse_P, None if joined else share_R, q, k, v, others[:lists], others[lists:]
    tables = keys, bias, values
    dq, dk, dv, *dtables = packed_attention_backward(dout, dlse_P, *saved, *tables, seed, scale, dropout)
    dtables = [None if x is None else d for x, d in zip(tables, dtables, strict=True)]
    nones = [None] * lists, [None] * hidden
    return dq, None if k is None else dk, dv, *nones, *dtables, None, None, None, None


packed_attention.register_autograd(gradients, setup_context=save)


def attend_members(x: KernelProblem) -> tuple[Tensor, Tensor]:
    """Return outputs `[P, E]` and log-sums `[P]` of query members."""
    P, E = len(x.of.query_row_P), x.v_BHNE.shape[-1]
    out_PE = x.v_BHNE.new_empty(P, E)
    lse_P = out_PE.new_empty(P, dtype=torch.float32)
    table_RT = x.table_RT()
    ranges = {"start": x.of.start_P, "stop": x.of.stop_P, "lse": lse_P}
    launch("attend", x, table_RT, **ranges, out=out_PE)
    if x.values_TE is not None:
        weights_PT = out_PE.new_zeros(P, x.entries)
        launch("weigh", x, table_RT, **ranges, weights=weights_PT)
        out_PE.addmm_(weights_PT, x.values_TE.to(out_PE.dtype))
    return out_PE, lse_P


class MemberGradients(NamedTuple):
    """Gradients by member."""

    dq_PD: Tensor
    dk_MD: Tensor
    dv_ME: Tensor
    dtable_PT: Tensor | None
    weights_PT: Tensor | None
    """The weights, not gradients: what the gradients of values by distance are made of."""


def member_gradients(
    x: KernelProblem, dout: Tensor, dlse_P: Tensor | None, out_PE: Tensor, lse_P: Tensor, joined: bool
) -> MemberGradients:
    """Return the gradients by member."""
    P, M, D, E = len(x.of.query_row_P), len(x.of.key_row_M), x.q_BHND.shape[-1], x.v_BHNE.shape[-1]
    found = MemberGradients(
        dq_PD=dout.new_empty(P, D),
        dk_MD=dout.new_empty(M, D),
        dv_ME=dout.new_empty(M, E),
        dtable_PT=None if x.keys_HTD is None else dout.new_zeros(P, x.entries),
        weights_PT=None if x.values_TE is None else dout.new_zeros(P, x.entries),
    )
    table_RT = x.table_RT()
    value_table = None if x.values_TE is None else dout @ x.values_TE.to(dout.dtype).mT
    both = {"lse": lse_P, "dout": dout, "delta": torch.empty_like(lse_P), "value_table": value_table}
    both |= {"VALUES": value_table is not None, "JOINED": joined}
    dlse_P = None if dlse_P is None else dlse_P.contiguous()
    of_queries = {"start": x.of.start_P, "stop": x.of.stop_P, "out": out_PE, "dlse": dlse_P, "dq": found.dq_PD}
    of_queries |= {"dtable": found.dtable_PT, "weights": found.weights_PT, "SUMS": dlse_P is not None}
    launch("dq", x, table_RT, **both, **of_queries)
    launch("dkv", x, table_RT, **both, low=x.of.low_M, high=x.of.high_M, dk=found.dk_MD, dv=found.dv_ME)
    return found


def row_gradients(x: KernelProblem, of_members: MemberGradients, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; with queries for keys one, and an empty one of keys."""
    dq_BHND, dv_BHNE = (y.new_empty(y.shape) for y in (x.q_BHND, x.v_BHNE))
    dk_BHND = x.q_BHND.new_empty(0 if shared else x.k_BHND.shape)
    of_queries = x.of.query_first_R1, x.of.query_member_P
    of_keys = x.of.key_first_R1, x.of.key_member_M
    combine(of_members.dq_PD, of_members.dk_MD if shared else None, *of_queries, dq_BHND.flatten(0, 2))
    if not shared:
        combine(of_members.dk_MD, None, *of_keys, dk_BHND.flatten(0, 2))
    combine(of_members.dv_ME, None, *of_keys, dv_BHNE.flatten(0, 2))
    return dq_BHND, dk_BHND, dv_BHNE


def key_table_gradients(x: KernelProblem, of_members: MemberGradients, dq_BHND: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and bias by distance; add what queries get from these keys."""
    dkeys_HTD, dbias_HT = x.q_BHND.new_empty(0), x.q_BHND.new_empty(0)
    if x.keys_HTD is None or of_members.dtable_PT is None:
        return dkeys_HTD, dbias_HT
    dtable_RT = dq_BHND.new_empty(x.rows, x.entries)
    combine(of_members.dtable_PT, None, x.of.query_first_R1, x.of.query_member_P, dtable_RT)
    dtable_BHNT = dtable_RT.view(*x.q_BHND.shape[:3], x.entries)
    dq_BHND += dtable_BHNT @ x.keys_HTD.to(dq_BHND.dtype)
    wide = torch.float32
    dkeys_HTD = (dtable_BHNT.mT @ x.q_BHND).sum(0, dtype=wide).to(x.keys_HTD.dtype)
    if x.bias_HT is not None:
        dbias_HT = dtable_BHNT.sum((0, 2), dtype=wide).to(x.bias_HT.dtype)
    return dkeys_HTD, dbias_HT


def launch(name: str, x: KernelProblem, table_RT: Tensor | None, **more: Any) -> None:
    """Run a kernel over all query members, or "dkv" over all key members."""
    from rtx.attention.engine import packed_kernels  # imports Triton, which need not be here

    D, E, P, M = x.q_BHND.shape[-1], x.v_BHNE.shape[-1], len(x.of.query_row_P), len(x.of.key_row_M)
    tile = tile_of(name, max(D, E), x.q_BHND.dtype, table_RT is not None)
    programs = -(-M // tile.keys) if name == "dkv" else -(-P // tile.queries)
    if not programs:
        return
    assert all(each.stride(-1) == 1 for each in (x.q_BHND, x.k_BHND, x.v_BHNE))
    value_XM, low_XP, high_XP = x.hidden or (None, None, None)
    strides = [*x.q_BHND.stride()[:3], *x.k_BHND.stride()[:3], *x.v_BHNE.stride()[:3]]
    getattr(packed_kernels, f"{name}_kernel")[(programs,)](
        *(x.q_BHND, x.k_BHND, x.v_BHNE, x.of.query_row_P, x.of.key_row_M, value_XM, low_XP, high_XP),
        *(table_RT, x.seed_1, *strides, *x.q_BHND.shape[1:3], P, M, x.entries - 1, x.scale),
        *(x.dropout, 1 / (1 - x.dropout) if x.dropout < 1 else math.inf),
        **more,
        **sizes(D, E),
        X=0 if value_XM is None else len(value_XM),
        BY_DISTANCE=table_RT is not None,
        DROPOUT=x.dropout > 0,
        BQ=tile.queries,
        BK=tile.keys,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


def sizes(D: int, E: int) -> dict[str, int]:
    """Return head sizes and the powers of 2 to which kernels pad them."""
    padded = {"D_PADDED": 1 << (D - 1).bit_length(), "DV_PADDED": 1 << (E - 1).bit_length()}
    return {"D": D, "DV": E} | padded


def tile_of(name: str, size: int, dtype: torch.dtype, by_distance: bool) -> Tile:
    """Return the tile of a kernel for heads of at most so many units."""
    if dtype == torch.float32:
        return WIDE_TILES[size > 64]
    return TILES[name][2 * by_distance + (size > 64)]


def combine(
    x_PW: Tensor,
    y_PW: Tensor | None,
    first_R1: Tensor,
    member_P: Tensor,
    out_RW: Tensor,
    lse_P: Tensor | None = None,
    share_R: Tensor | None = None,
) -> None:
    """Write the sum over each row's members, of x and y; with log-sums the mean over those that read something."""
    from rtx.attention.engine import packed_kernels  # imports Triton, which need not be here

    R, width = out_RW.shape
    if not R:
        return
    rows, columns = 32, min(128, 1 << (width - 1).bit_length())
    kernel: Any = packed_kernels.combine_kernel
    kernel[(-(-R // rows), -(-width // columns))](
        *(x_PW, y_PW, first_R1, member_P, lse_P, out_RW, share_R, R, width),
        TWO=y_PW is not None,
        MEAN=lse_P is not None,
        BR=rows,
        BW=columns,
        num_warps=4,
    )
