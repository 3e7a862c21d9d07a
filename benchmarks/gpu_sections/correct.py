"""Section `correct`: patterns by every backend against the oracle; waits; compiled against eager.

Shapes: B sequences, H heads, N positions, D head size, C clusters, W keys of a query.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx import attention
from rtx.attention import Pattern, RelativeTables, oracle
from rtx.attention.engine import packed_attention

from .journal import Found, Row, place_of, said_of
from .whole_steps import COMPILED, EAGER, RECORDED, SMALL, Stepper, Variant

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Largest norm of a difference, in relation to the norm of what is right."""
COMPILED_TOLERANCE = 0.05
"""The same of gradients of a model in bfloat16: compiled and eager round in other places."""
INDEXED = ("exact", "blocks", "indexer", "probed", "probed-best")
"""Patterns that choose by rounded numbers: in a narrow type the oracle chooses other keys."""
BY_CONTENT = ("topk", "causal", "nearest", *INDEXED)
"""What the names of patterns begin with that choose keys by content."""
DISTANCES = 40
"""Rows of Shaw's tables."""


class Shape(NamedTuple):
    """Sizes of a check."""

    B: int = 2
    H: int = 2
    N: int = 150
    D: int = 64
    C: int = 6
    W: int = 32


TINY = Shape(B=1, H=1, N=20, D=16, C=3, W=6)


def rows(dry: bool) -> list[Row]:
    """Return the rows of this section."""
    shape, narrow = (TINY, torch.float16) if dry else (Shape(), torch.bfloat16)
    found = [pattern_row(kind, "auto", narrow, shape, False) for kind in makers(shape)]
    found += [waits_row(name, EAGER) for name in SMALL]
    found += [pattern_row(kind, "triton", narrow, shape, False) for kind in makers(shape)]
    found += compiled_rows("causal")
    for backend in ("triton", "auto", "torch"):
        for dtype in (narrow, torch.float32):
            for shaw in (False, True):
                found += [pattern_row(kind, backend, dtype, shape, shaw) for kind in makers(shape)]
    for name in SMALL:
        found += compiled_rows(name)
    return list({row.key: row for row in found}.values())


def compiled_rows(name: str) -> list[Row]:
    """Return the rows of a compiled model, with and without CUDA graphs."""
    found = [waits_row(name, COMPILED)]
    for how in (COMPILED, RECORDED):
        measure = functools.partial(compiled, name, how)
        found.append(Row(f"correct/{how}/{name}", measure, needs_cuda=True))
    return found


def pattern_row(kind: str, backend: str, dtype: torch.dtype, shape: Shape, shaw: bool) -> Row:
    """Return the row of a pattern."""
    words = [kind, backend, str(dtype).removeprefix("torch.")] + ["shaw"] * shaw
    same_on_cpu = is_chosen_narrow(kind, dtype)  # the reference runs there, too
    measure = functools.partial(check, kind, backend, dtype, shape, shaw)
    return Row(f"correct/{'/'.join(words)}", measure, needs_cuda=same_on_cpu)


def is_chosen_narrow(kind: str, dtype: torch.dtype) -> bool:
    """Tell whether a pattern chooses keys by numbers that are rounded to a narrow type."""
    return kind in INDEXED and dtype != torch.float32


def waits_row(name: str, how: str) -> Row:
    """Return the row that asks whether a training step waits for the GPU."""
    measure = functools.partial(waits, name, how)
    return Row(f"correct/waits/{name}/{how}", measure, needs_cuda=True)


def makers(shape: Shape) -> dict[str, Callable[[], Pattern]]:
    """Return what makes each pattern, without dropout: the oracle has none."""
    _, H, N, D, C, W = shape
    found: dict[str, Callable[[], Pattern]] = {
        "full": attention.Full,
        "local": lambda: attention.Local(window=W),
        "recurrent": lambda: attention.Recurrent(length=W, memory=W),
        "strided": lambda: attention.Strided(stride=C),
        "fixed": lambda: attention.Fixed(block=W, summary=W // 4),
        "lsh": lambda: attention.Lsh(H, D, window=W, buckets=4, rounds=1, seed=0),
        "random": lambda: attention.Random(H, C, window=W, length=N, seed=0),
    }
    for selection in ("topk", "causal", "nearest"):
        for keys in ("shared", "separate"):
            found[f"{selection}-{keys}"] = functools.partial(routing, shape, selection, keys)
    probed = functools.partial(attention.Probed, H, D, clusters=C, decay=0.99)
    found["probed"] = lambda: probed(window=W, qk_norm=True)
    found["probed-best"] = lambda: probed(window=W // 2, candidates=W, qk_norm=True)
    found["exact"] = lambda: attention.Exact(window=W)
    found["blocks"] = lambda: attention.Blocks(H, D, window=W, block=max(1, W // 4))
    found["indexer"] = lambda: attention.Indexer(H, D, window=W)
    return found


def routing(shape: Shape, selection: str, keys: str) -> Pattern:
    """Return routing heads whose thresholds are where random vectors fill clusters."""
    options: dict[str, Any] = {"window": shape.W, "length": shape.N, "decay": 0.9, "keys": keys}
    options["threshold_rate"] = 0.1 if selection == "causal" else 0.0
    store = attention.Centroids(shape.H, shape.C, shape.D, **options)
    return attention.ROUTING_CLASSES[selection](store)


def check(kind: str, backend: str, dtype: torch.dtype, shape: Shape, shaw: bool) -> Found:
    """Compare outputs and gradients with those of the oracle, and with those of a second pass."""
    device = "cpu" if packed_attention.INTERPRETED else "cuda"
    pattern = made(kind, shape)
    pattern.backend = backend
    leaves = drawn(shape, dtype, pattern.has_keys, shaw)
    here = {name: x.to(device).requires_grad_() for name, x in leaves.items()}
    found = outcome(pattern.to(device), here)
    again = outcome(pattern, here)
    same = all(torch.equal(x, y) for x, y in zip(found.values(), again.values(), strict=True))
    right = expected(kind, dtype, shape, shaw)
    errors = {name: relative(found[name], right[name]) for name in found}
    worst = max(errors.values())
    tolerance = TOLERANCES[dtype]
    return {
        "pass": worst <= tolerance and (same or backend != "triton" or kind in INDEXED),
        "error_norm": worst,
        "tolerance": tolerance,
        "errors": errors,
        "same_bits": same,
        "reference": reference_of(kind, dtype),
    }


def reference_of(kind: str, dtype: torch.dtype) -> str:
    """Return what a pattern is compared with.

    A pattern that chooses by content takes scores within a margin for equal, and the margin follows
    from the type that they are computed in: so the oracle chooses in float32, too.
    """
    if is_chosen_narrow(kind, dtype):
        return "torch backend on a CPU"
    return "oracle in float32" if kind.startswith(BY_CONTENT) else "oracle in float64"


def made(kind: str, shape: Shape) -> Pattern:
    """Return a pattern, in training mode, the same at every call."""
    torch.manual_seed(0)
    pattern = makers(shape)[kind]().train()
    if isinstance(pattern, attention.Probed):
        # Its centroids would start at keys of the first pass, and the oracle makes none.
        keys = drawn(shape, torch.float32, has_keys=True, shaw=False)["k"]
        pattern.centroids.seed_from([pattern.inputs(keys, keys, None).rotated_k_BHND])
    return pattern


def drawn(shape: Shape, dtype: torch.dtype, has_keys: bool, shaw: bool) -> dict[str, Tensor]:
    """Return random inputs by name, the same at every call."""
    torch.manual_seed(1)
    B, H, N, D = shape[:4]
    names = ["q", *["k"] * has_keys, "v"]
    found = {name: torch.randn(B, H, N, D).to(dtype) for name in names}
    if shaw:
        found |= {name: (0.3 * torch.randn(DISTANCES, D)).to(dtype) for name in ("keys", "values")}
    return found


@functools.cache
def expected(kind: str, dtype: torch.dtype, shape: Shape, shaw: bool) -> dict[str, Tensor]:
    """Return what is right: by the oracle, or by torch's kernels in the inputs' type."""
    reference = made(kind, shape)
    reference.backend = "torch"
    leaves = drawn(shape, dtype, reference.has_keys, shaw)
    if is_chosen_narrow(kind, dtype):
        return outcome(reference, {name: x.requires_grad_() for name, x in leaves.items()})
    wide = torch.float32 if kind.startswith(BY_CONTENT) else torch.float64
    widened = {name: x.to(wide).requires_grad_() for name, x in leaves.items()}
    return outcome(reference.to(wide), widened, functools.partial(oracle.attend_by_rule, reference))


def outcome(pattern: Pattern, leaves: dict[str, Tensor], attend: Any = None) -> dict[str, Tensor]:
    """Return on the CPU the outputs, and every leaf's gradient for fixed weights of them."""
    relative_terms = None
    if "keys" in leaves:
        relative_terms = RelativeTables(leaves["keys"], leaves["values"])
    found = (attend or pattern)(leaves["q"], leaves.get("k"), leaves["v"], relative=relative_terms)
    out = found[0] if isinstance(found, tuple) else found
    # Eighths, which no type rounds.
    weight = (torch.randint(-8, 9, out.shape, generator=torch.Generator().manual_seed(1)) / 8).to(
        out
    )
    gradients = torch.autograd.grad(
        (out * weight).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return {"out": out.detach().cpu()} | {
        name: x.cpu() for name, x in zip(leaves, gradients, strict=True)
    }


def relative(found: Tensor, right: Tensor) -> float:
    """Return the norm of the difference over the norm of what is right."""
    difference = (found.double() - right.double()).norm() / right.double().norm().clamp(min=1e-9)
    return float(f"{float(difference):.3g}")


def waits(name: str, how: str) -> Found:
    """Take a training step in which any wait for the GPU is an error, behind two without."""
    stepper = Stepper(SMALL[name], how, dry=False)
    stepper.step()
    stepper.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stepper.step()
    except RuntimeError as error:
        return {"pass": False, "waits": 1, "said": said_of(error), "at": place_of(error)}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return {"pass": True, "waits": 0}


def compiled(name: str, how: str) -> Found:
    """Compare a compiled model's loss and gradients with those of the same model run eagerly."""
    both = [gradients_of(SMALL[name], each) for each in (EAGER, how)]
    (loss, eager), (other, fast) = both
    error = relative(fast, eager)
    return {
        "pass": error <= COMPILED_TOLERANCE and abs(other - loss) <= COMPILED_TOLERANCE * loss,
        "error_norm": error,
        "tolerance": COMPILED_TOLERANCE,
        "loss_eager": loss,
        "loss_compiled": other,
    }


def gradients_of(variant: Variant, how: str) -> tuple[float, Tensor]:
    """Return a loss of a model, and all its gradients in one vector.

    It is the loss behind one step, which a model takes before its passes are recorded.
    """
    stepper = Stepper(variant, how, dry=False)
    if how != RECORDED:
        stepper.step()
    loss = stepper.backward()
    gradients = [p.grad for p in stepper.model.parameters() if p.grad is not None]
    return float(loss), torch.cat([gradient.flatten() for gradient in gradients]).cpu()
