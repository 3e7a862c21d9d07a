"""Softmax attention over packed lists by our Triton kernels, as an operator with gradients.

`attend` is what others call. It takes these steps, all on the device and without a wait for it:

1. `attend_members` computes outputs and log-sums of query members. A row (a position of one
   sequence and head) has a member in every list that it belongs to, so it may have several outputs.
2. `merge` says what becomes of them: nothing ("none"), the mean over the members of each row
   ("mean", `mean_by_row`), or one softmax over all keys of a row's members ("lse",
   `combine_by_row`).

Where member p is row p (`KernelLists.in_order`), every row has one member. Then there is nothing to
merge, and `attend` calls the operator with "none", whatever its `merge` is.

The backward pass computes gradients by member, too, and adds them up by row. With "lse" it needs
outputs and log-sums of rows alone, so those of members are not kept. No sum is by atomic additions:
sums over the members of a row have a fixed order, so two runs give the same bits.

Terms by distance (`softmax.RelativeTables`; `packed_kernels.py` has the formulas) need no tensor
with an entry for each pair either:

- keys: logit_table[r, t] = q[r] . keys[t] + bias[t] is one matrix product; kernels look entries up.
- values: kernels add up the weights of each query member by distance, weight_table[p, t], and
  weight_table @ values is added to the outputs.

These tables have R * T and P * T entries, so T should be far less than N.

`packed_attention` and `packed_attention_backward` are custom operators of torch. The shapes of
their outputs follow from the shapes of their inputs, so `torch.compile` takes them into one graph.

Shapes: B sequences, H heads, N positions, R = B * H * N rows, P query members, M key members of all
lists together, T distances, D and E head sizes of keys and values.

Two letters stand for P or for R, by what `merge` is. The backward pass reads an output for each
log-sum, `[U, E]`; with "mean" these are the outputs of members, which are kept for it.

    merge             "none"   "mean"   "lse"
    G, of outputs     P        R        R
    U, of log-sums    P        P        R
"""

import importlib.util
import os
import shutil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.engine.lists import KernelLists
from rtx.attention.engine.packed_launch import (
    KernelInputs,
    ListTensors,
    combine_by_row,
    launch,
    list_tensors,
    mean_by_row,
    sum_by_row,
)
from rtx.attention.engine.softmax import LogitTerms
from rtx.attention.typed_torch import custom_op


def has_compiler() -> bool:
    """Return whether there is a C compiler: Triton compiles the code that launches kernels."""
    names = ["gcc", "clang"]
    if os.environ.get("CC"):
        names.append(os.environ["CC"])
    return any(shutil.which(name) for name in names)


INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
"""Whether Triton interprets kernels in Python, which it does on any device."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_COMPILER = has_compiler()
DEVICES = ("cuda", "meta")
"""Types of devices. Tensors on "meta" have shapes but no numbers, so they need no GPU: by these
`rtx.analysis` plans a run."""
MERGES = ("none", "mean", "lse")
"""What becomes of the outputs of members, see `attend`."""
TYPES = (torch.float32, torch.float16, torch.bfloat16)
MIN_SIZE = 16
"""The least head size: the least side of a matrix product in Triton."""
MAX_SIZE = 128
"""The greatest head size: with more, tiles do not fit into the registers."""


def device_refusal(device: torch.device) -> str | None:
    """Return why kernels cannot run on a device, or None if they can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if not INTERPRETED and device.type not in DEVICES:
        return "it computes on a GPU"
    if not INTERPRETED and not HAS_COMPILER:
        return "there is no C compiler, which Triton needs"
    return None


def can_run(device: torch.device) -> bool:
    """Return whether kernels can run on a device."""
    return device_refusal(device) is None


def refusal(q_BHND: Tensor, v_BHNE: Tensor, terms: LogitTerms) -> str | None:
    """Return why the kernels cannot run this, or None if they can."""
    if why := device_refusal(q_BHND.device):
        return why
    if terms.bias_HM is not None:
        return "it has no adaptive spans"
    if q_BHND.dtype not in TYPES or v_BHNE.dtype not in TYPES:
        return "it computes in float32, float16 or bfloat16"
    sizes = q_BHND.shape[-1], v_BHNE.shape[-1]
    if min(sizes) < MIN_SIZE or max(sizes) > MAX_SIZE:
        return f"it computes with heads of {MIN_SIZE} to {MAX_SIZE} units"
    return None


def attend(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHNE: Tensor,
    lists: KernelLists,
    terms: LogitTerms,
    merge: str,
) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sums, of rows or of query members:

    | merge | outputs | log-sums |
    |---|---|---|
    | "none" | `[P, E]` of query members | `[P]` |
    | "mean" | `[R, E]`, of each row the mean over its members that read something | `[P]` |
    | "lse" | `[R, E]`, of each row one softmax over the keys of all its members | `[R]` |

    A log-sum is the natural logarithm of the sum over the keys of a query member, or of a row's
    members, of exp(logit), in float32; with "mean" it passes no gradient on. What reads nothing has
    output 0 and log-sum -inf. Dropout acts on the weights after the softmax, scales those that
    remain by 1 / (1 - dropout), and does not change log-sums.

    Args:
        q_BHND: queries, a view with any strides; copied if the last stride is not 1. The same holds
            for keys and values.
        k_BHND: keys; the same object as `q_BHND` if queries serve as keys.
        v_BHNE: values, whose head size may differ.
        merge: one of `MERGES`.

    Raises:
        ValueError: for what `refusal` names.
        RuntimeError: in a backward pass with create_graph=True: there are no second derivatives.
    """
    assert merge in MERGES
    if why := refusal(q_BHND, v_BHNE, terms):
        raise ValueError(f"the packed kernels cannot run this ({why}): take backend='torch'")
    # Then dq + dk is one sum over the members of a row, see `row_gradients`.
    queries_are_keys = k_BHND is q_BHND and lists.key_row_M is lists.query_row_P
    dtype = torch.promote_types(q_BHND.dtype, k_BHND.dtype)
    dtype = torch.promote_types(dtype, v_BHNE.dtype)
    q_BHND = unit_stride(q_BHND.to(dtype))
    keys_HTD, bias_HT, values_TE = relative_terms(terms, heads=q_BHND.shape[1])
    seed_1 = None
    if terms.dropout:
        seed_1 = torch.randint(0, 2**63 - 1, (1,), device=q_BHND.device)
    out_GE, lse_U, _, _ = packed_attention(
        q_BHND,
        None if queries_are_keys else unit_stride(k_BHND.to(dtype)),
        unit_stride(v_BHNE.to(dtype)),
        list(list_tensors(lists)),
        [x.contiguous() for x in lists.holes or ()],
        keys_HTD,
        bias_HT,
        values_TE,
        seed_1,
        terms.scale,
        terms.dropout,
        lists.in_order,
        "none" if lists.in_order else merge,
    )
    return out_GE, lse_U


def unit_stride(x: Tensor) -> Tensor:
    """Return the tensor, or a copy, whose last stride is 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def relative_terms(
    terms: LogitTerms, heads: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return keys by distance `[H, T, D]`, their bias `[H, T]` and values by distance `[T, E]`."""
    if terms.relative is None:
        return None, None, None
    keys = terms.relative.keys_MD
    keys_HTD = keys.expand(heads, -1, -1) if keys.dim() == 2 else keys
    return keys_HTD, terms.relative.bias_HM, terms.relative.values_MD


@custom_op("rtx::packed_attention")
def packed_attention(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHNE: Tensor,
    lists: list[Tensor],
    holes: list[Tensor],
    keys_HTD: Tensor | None,
    bias_HT: Tensor | None,
    values_TE: Tensor | None,
    seed_1: Tensor | None,
    scale: float,
    dropout: float,
    in_order: bool,
    merge: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs `[G, E]`, log-sums `[U]`, and two tensors that only the backward pass needs.

    With "mean" these two are the outputs of members `[P, E]`, and the share of each member in its
    row's mean, which is the same for all members of a row, `[R]`. Otherwise both are empty.

    Args:
        k_BHND: None if queries serve as keys, with the same lists.
        lists: `ListTensors`.
        holes: the tensors of `rtx.attention.reads.Holes`, or none.
        in_order: of `KernelLists`; with merge "none" alone.
    """
    options = keys_HTD, bias_HT, values_TE, seed_1, scale, dropout, in_order
    inputs = kernel_inputs(q_BHND, k_BHND, v_BHNE, lists, holes, *options)
    # Triton launches on the current device, and operators compute in the types of their inputs.
    with torch.autocast(q_BHND.device.type, enabled=False), torch.cuda.device_of(q_BHND):
        out_PE, lse_P = attend_members(inputs)
        # Two tensors: an operator may not return one twice.
        unused = out_PE.new_empty(0), lse_P.new_empty(0)
        if merge == "none":
            return out_PE, lse_P, *unused
        out_RE = v_BHNE.new_empty(inputs.R, inputs.E)
        if merge == "lse":
            lse_R = lse_P.new_empty(inputs.R)
            combine_by_row(out_PE, inputs.lists.query_members, lse_P, out_RE, lse_R)
            return out_RE, lse_R, *unused
        share_R = lse_P.new_empty(inputs.R)
        mean_by_row(out_PE, inputs.lists.query_members, lse_P, out_RE, share_R)
        return out_RE, lse_P, out_PE, share_R


@packed_attention.register_fake
def _(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHNE: Tensor,
    lists: list[Tensor],
    holes: list[Tensor],
    keys_HTD: Tensor | None,
    bias_HT: Tensor | None,
    values_TE: Tensor | None,
    seed_1: Tensor | None,
    scale: float,
    dropout: float,
    in_order: bool,
    merge: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tensors of the shapes that `packed_attention` returns."""
    P = lists[0].shape[0]
    R = q_BHND.shape[:3].numel()
    E = v_BHNE.shape[-1]
    out_GE = v_BHNE.new_empty(P if merge == "none" else R, E)
    lse_U = q_BHND.new_empty(R if merge == "lse" else P, dtype=torch.float32)
    if merge == "mean":
        return out_GE, lse_U, v_BHNE.new_empty(P, E), lse_U.new_empty(R)
    return out_GE, lse_U, out_GE.new_empty(0), lse_U.new_empty(0)


@custom_op("rtx::packed_attention_backward")
def packed_attention_backward(
    dout_GE: Tensor,
    dlse_U: Tensor | None,
    out_UE: Tensor,
    lse_U: Tensor,
    share_R: Tensor,
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHNE: Tensor,
    lists: list[Tensor],
    holes: list[Tensor],
    keys_HTD: Tensor | None,
    bias_HT: Tensor | None,
    values_TE: Tensor | None,
    seed_1: Tensor | None,
    scale: float,
    dropout: float,
    in_order: bool,
    merge: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, and of keys, bias and values by distance.

    The gradient of an input that is None is empty, as an operator may not return None in a tuple.

    Args:
        dlse_U: None if nothing depends on the log-sums.
        out_UE, lse_U, share_R: of the forward pass; `share_R` is read with merge "mean" alone.
    """
    options = keys_HTD, bias_HT, values_TE, seed_1, scale, dropout, in_order
    inputs = kernel_inputs(q_BHND, k_BHND, v_BHNE, lists, holes, *options)
    with torch.autocast(q_BHND.device.type, enabled=False), torch.cuda.device_of(q_BHND):
        if merge == "mean":
            # A member gets the share of its row's gradient. All gradients of a member have the
            # factor exp(logit - lse), which becomes exp(logit - (lse - ln share)).
            lse_U = lse_U - share_R.log().index_select(0, inputs.lists.query_row_P)
        dout_GE = dout_GE.to(v_BHNE.dtype).contiguous()
        of_members = member_gradients(inputs, dout_GE, dlse_U, out_UE, lse_U, merge)
        dq_BHND, dk_BHND, dv_BHNE = row_gradients(
            inputs, of_members, queries_are_keys=k_BHND is None
        )
        dkeys_HTD, dbias_HT = logit_table_gradients(inputs, of_members.dlogit_table_PT, dq_BHND)
        dvalues_TE = values_gradient(inputs, of_members.weight_table_PT, dout_GE, merge)
        return dq_BHND, dk_BHND, dv_BHNE, dkeys_HTD, dbias_HT, dvalues_TE


@packed_attention_backward.register_fake
def _(
    dout_GE: Tensor,
    dlse_U: Tensor | None,
    out_UE: Tensor,
    lse_U: Tensor,
    share_R: Tensor,
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHNE: Tensor,
    lists: list[Tensor],
    holes: list[Tensor],
    keys_HTD: Tensor | None,
    bias_HT: Tensor | None,
    values_TE: Tensor | None,
    seed_1: Tensor | None,
    scale: float,
    dropout: float,
    in_order: bool,
    merge: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return tensors of the shapes that `packed_attention_backward` returns."""

    def gradient(x: Tensor | None) -> Tensor:
        return q_BHND.new_empty(0) if x is None else x.new_empty(x.shape)

    return (
        gradient(q_BHND),
        gradient(k_BHND),
        gradient(v_BHNE),
        gradient(keys_HTD),
        gradient(bias_HT),
        gradient(values_TE),
    )


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save on `ctx` what `gradients` reads."""
    q, k, v, lists, holes, keys, bias, values, seed, scale, dropout, in_order, merge = inputs
    out_GE, lse_U, out_PE, share_R = output
    out_UE = out_PE if merge == "mean" else out_GE
    forward = out_UE, lse_U, share_R, q, k, v, keys, bias, values, seed
    ctx.save_for_backward(*forward, *lists, *holes)
    ctx.list_count = len(lists)
    ctx.hole_count = len(holes)
    ctx.scale = scale
    ctx.dropout = dropout
    ctx.in_order = in_order
    ctx.merge = merge
    if merge == "mean":
        ctx.mark_non_differentiable(lse_U, out_PE, share_R)
    else:
        ctx.mark_non_differentiable(out_PE, share_R)
    ctx.set_materialize_grads(False)  # an output that nothing depends on has gradient None


def gradients(ctx: Any, dout_GE: Tensor | None, dlse_U: Tensor | None, *_: None) -> tuple[Any, ...]:
    """Return the gradient of every input of `packed_attention`; None if it has none."""
    # Not by torch's once_differentiable: it overlooks torch.autograd.grad of a single input.
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True: this attention has first derivatives alone")
    out_UE, lse_U, share_R, q, k, v, keys, bias, values, seed, *others = ctx.saved_tensors
    lists = others[: ctx.list_count]
    holes = others[ctx.list_count :]
    if dout_GE is None:
        G = len(share_R) if ctx.merge == "mean" else len(out_UE)
        shape_GE = (G, out_UE.shape[1])
        dout_GE = torch.zeros(shape_GE, dtype=out_UE.dtype, device=out_UE.device)
    dq, dk, dv, dkeys, dbias, dvalues = packed_attention_backward(
        dout_GE,
        dlse_U,
        out_UE,
        lse_U,
        share_R,
        q,
        k,
        v,
        lists,
        holes,
        keys,
        bias,
        values,
        seed,
        ctx.scale,
        ctx.dropout,
        ctx.in_order,
        ctx.merge,
    )
    of_inputs = (
        dq,
        None if k is None else dk,
        dv,
        [None] * ctx.list_count,
        [None] * ctx.hole_count,
        None if keys is None else dkeys,
        None if bias is None else dbias,
        None if values is None else dvalues,
    )
    of_options = None, None, None, None, None  # seed, scale, dropout, in_order, merge
    return *of_inputs, *of_options


packed_attention.register_autograd(gradients, setup_context=save_for_backward)


def kernel_inputs(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHNE: Tensor,
    lists: list[Tensor],
    holes: list[Tensor],
    keys_HTD: Tensor | None,
    bias_HT: Tensor | None,
    values_TE: Tensor | None,
    seed_1: Tensor | None,
    scale: float,
    dropout: float,
    in_order: bool,
) -> KernelInputs:
    """Return the inputs of kernels by the arguments of an operator, in its order."""
    return KernelInputs(
        q_BHND=q_BHND,
        k_BHND=q_BHND if k_BHND is None else k_BHND,
        v_BHNE=v_BHNE,
        lists=ListTensors._make(lists),
        holes=holes,
        keys_HTD=keys_HTD,
        bias_HT=bias_HT,
        values_TE=values_TE,
        seed_1=seed_1,
        scale=scale,
        dropout=dropout,
        in_order=in_order,
    )


def logit_table(inputs: KernelInputs) -> Tensor | None:
    """Return what a query adds to its product with a key, by row and distance `[R, T]`.

    None without keys by distance.
    """
    if inputs.keys_HTD is None:
        return None
    table_BHNT = inputs.q_BHND @ inputs.keys_HTD.to(inputs.q_BHND.dtype).mT
    if inputs.bias_HT is not None:
        table_BHNT = table_BHNT + inputs.bias_HT[:, None].to(table_BHNT.dtype)
    return table_BHNT.reshape(inputs.R, inputs.T)


def attend_members(inputs: KernelInputs) -> tuple[Tensor, Tensor]:
    """Return outputs `[P, E]` and log-sums `[P]` of query members."""
    start_P = inputs.lists.start_P
    stop_P = inputs.lists.stop_P
    out_PE = inputs.v_BHNE.new_empty(inputs.P, inputs.E)
    lse_P = out_PE.new_empty(inputs.P, dtype=torch.float32)
    table_RT = logit_table(inputs)
    launch("attend", inputs, table_RT, start=start_P, stop=stop_P, out=out_PE, lse=lse_P)
    if inputs.values_TE is not None:
        weight_table_PT = out_PE.new_zeros(inputs.P, inputs.T)
        launch(
            "weigh",
            inputs,
            table_RT,
            start=start_P,
            stop=stop_P,
            lse=lse_P,
            weight_table=weight_table_PT,
        )
        out_PE.addmm_(weight_table_PT, inputs.values_TE.to(out_PE.dtype))
    return out_PE, lse_P


class MemberGradients(NamedTuple):
    """What the backward kernels write, by member."""

    dq_PD: Tensor
    """Without what queries get through `logit_table`."""
    dk_MD: Tensor
    dv_ME: Tensor
    dlogit_table_PT: Tensor | None
    """With keys by distance."""
    weight_table_PT: Tensor | None
    """With values by distance: the weights of each query member, added up by distance."""


def member_gradients(
    inputs: KernelInputs,
    dout_GE: Tensor,
    dlse_U: Tensor | None,
    out_UE: Tensor,
    lse_U: Tensor,
    merge: str,
) -> MemberGradients:
    """Return gradients by member."""
    written = MemberGradients(
        dq_PD=dout_GE.new_empty(inputs.P, inputs.D),
        dk_MD=dout_GE.new_empty(inputs.M, inputs.D),
        dv_ME=dout_GE.new_empty(inputs.M, inputs.E),
        dlogit_table_PT=None if inputs.keys_HTD is None else dout_GE.new_zeros(inputs.P, inputs.T),
        weight_table_PT=None if inputs.values_TE is None else dout_GE.new_zeros(inputs.P, inputs.T),
    )
    table_RT = logit_table(inputs)
    dweight_table_GT = None
    if inputs.values_TE is not None:
        dweight_table_GT = dout_GE @ inputs.values_TE.to(dout_GE.dtype).mT
    both = {
        "lse": lse_U,
        "dout": dout_GE,
        "delta": lse_U.new_empty(inputs.P),  # "dq" writes it, "dkv" reads it
        "dweight_table": dweight_table_GT,
        "VALUES_BY_DISTANCE": inputs.values_TE is not None,
        "DOUT_BY_MEMBER": merge == "none",
        "SUMS_BY_MEMBER": merge != "lse",
    }
    launch(
        "dq",
        inputs,
        table_RT,
        **both,
        start=inputs.lists.start_P,
        stop=inputs.lists.stop_P,
        out=out_UE,
        dlse=None if dlse_U is None else dlse_U.contiguous(),
        dq=written.dq_PD,
        dlogit_table=written.dlogit_table_PT,
        weight_table=written.weight_table_PT,
        HAS_DLSE=dlse_U is not None,
    )
    launch(
        "dkv",
        inputs,
        table_RT,
        **both,
        low=inputs.lists.low_M,
        high=inputs.lists.high_M,
        dk=written.dk_MD,
        dv=written.dv_ME,
    )
    return written


def row_gradients(
    inputs: KernelInputs,
    of_members: MemberGradients,
    queries_are_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v: sums over the members of each row.

    Where queries serve as keys, the first is the sum of both gradients and the second is empty.
    """
    if inputs.in_order:
        return gradients_in_order(inputs, of_members, queries_are_keys)
    queries = inputs.lists.query_members
    keys = inputs.lists.key_members
    dq_BHND = inputs.q_BHND.new_empty(inputs.q_BHND.shape)
    dv_BHNE = inputs.v_BHNE.new_empty(inputs.v_BHNE.shape)
    sum_by_row(of_members.dv_ME, keys, dv_BHNE.flatten(0, 2))
    if queries_are_keys:
        sum_by_row(of_members.dq_PD, queries, dq_BHND.flatten(0, 2), plus_PW=of_members.dk_MD)
        return dq_BHND, inputs.q_BHND.new_empty(0), dv_BHNE
    dk_BHND = inputs.k_BHND.new_empty(inputs.k_BHND.shape)
    sum_by_row(of_members.dq_PD, queries, dq_BHND.flatten(0, 2))
    sum_by_row(of_members.dk_MD, keys, dk_BHND.flatten(0, 2))
    return dq_BHND, dk_BHND, dv_BHNE


def gradients_in_order(
    inputs: KernelInputs,
    of_members: MemberGradients,
    queries_are_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `row_gradients` does where member p is row p."""
    dq_BHND = of_members.dq_PD.view(inputs.q_BHND.shape)
    dk_BHND = of_members.dk_MD.view(inputs.k_BHND.shape)
    dv_BHNE = of_members.dv_ME.view(inputs.v_BHNE.shape)
    if queries_are_keys:
        return dq_BHND + dk_BHND, inputs.q_BHND.new_empty(0), dv_BHNE
    return dq_BHND, dk_BHND, dv_BHNE


def logit_table_gradients(
    inputs: KernelInputs,
    dlogit_table_PT: Tensor | None,
    dq_BHND: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys by distance and of their bias; empty where there are none.

    Adds to `dq_BHND`, in place, what queries get through the table.
    """
    dkeys_HTD = inputs.q_BHND.new_empty(0)
    dbias_HT = inputs.q_BHND.new_empty(0)
    if inputs.keys_HTD is None or dlogit_table_PT is None:
        return dkeys_HTD, dbias_HT
    dtable_RT = dlogit_table_PT
    if not inputs.in_order:
        dtable_RT = dq_BHND.new_empty(inputs.R, inputs.T)
        sum_by_row(dlogit_table_PT, inputs.lists.query_members, dtable_RT)
    dtable_BHNT = dtable_RT.view(*inputs.q_BHND.shape[:3], inputs.T)
    dq_BHND += dtable_BHNT @ inputs.keys_HTD.to(dq_BHND.dtype)
    dkeys_BHTD = dtable_BHNT.mT @ inputs.q_BHND
    dkeys_HTD = dkeys_BHTD.sum(0, dtype=torch.float32).to(inputs.keys_HTD.dtype)
    if inputs.bias_HT is not None:
        dbias_HT = dtable_BHNT.sum((0, 2), dtype=torch.float32).to(inputs.bias_HT.dtype)
    return dkeys_HTD, dbias_HT


def values_gradient(
    inputs: KernelInputs,
    weight_table_PT: Tensor | None,
    dout_GE: Tensor,
    merge: str,
) -> Tensor:
    """Return the gradient of values by distance; empty where there are none.

    They enter the outputs as weight_table @ values.
    """
    if inputs.values_TE is None or weight_table_PT is None:
        return inputs.q_BHND.new_empty(0)
    dout_PE = dout_GE
    if merge != "none":
        dout_PE = dout_GE.index_select(0, inputs.lists.query_row_P)
    return (weight_table_PT.mT @ dout_PE).to(inputs.values_TE.dtype)
