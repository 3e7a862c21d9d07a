"""Compile the kernels of selection and of norms for GPUs without one: registers and spilled bytes
of each form.

`python benchmarks/aot_selection.py` prints a row a form and writes
benchmarks/results/aot-selection.txt. The forms are those that
`rtx.attention.engine.triton_selection` and `rtx.attention.engine.norm` launch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Before Triton is imported: what it interprets it cannot compile.
os.environ.pop("TRITON_INTERPRET", None)

import triton
from aot import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rtx.attention.engine import norm_kernels, selection_kernels, top_kernels
from rtx.attention.engine.norm import tile_constants
from rtx.attention.engine.triton_selection import (
    EMIT_TILE,
    MARK_TILE,
    PIECE,
    RANGE_TILE,
    SAMPLE,
    TALLY_TILE,
    TILE,
    chunk_of,
)

RESULTS = Path(__file__).with_name("results") / "aot-selection.txt"
FLOAT32 = (
    "x",
    "centroid",
    "threshold",
    "margin",
    "part",
    "score",
    "value",
    "best",
    "edge",
    "floor",
)
STRIDES = ("x_b", "x_h", "x_n", "dx_b", "dx_h", "dx_n")
"""All multiples of 16 where head sizes are."""
NUMBERS = (
    *STRIDES,
    "R",
    "N",
    "H",
    "C",
    "K",
    "L",
    "T",
    "W",
    "group_stride",
    "rank",
    "capacity",
    "window",
)
NORMS = {"x": "*bf16", "dx": "*bf16", "narrow": "*bf16", "dnarrow": "*bf16", "epsilon": "fp32"}
NORMS |= {"wide": "*fp32", "dwide": "*fp32"}
"""Types of arguments of the kernels of `norm_kernels`."""
INT64 = {"emit_kernel": ["last"], "range_kernel": ["slot_M", "bound_L1"]}
INT16 = {"emit_kernel": ["list_S"], "range_kernel": ["list_M"]}
FLOAT64 = {"moment_kernel": ["part", "moment"], "sum_kernel": ["part"]}


class Form(NamedTuple):
    """A kernel with the constants that it is compiled for."""

    kernel: Any
    constants: dict[str, Any]
    warps: int = 4


def forms() -> Iterator[Form]:
    """Yield the kernels as they are launched for heads of 64 to 256 numbers."""
    for size in (64, 128, 256):
        for precision in ("tf32x3", "ieee"):
            chunk = chunk_of(size, precision)
            sizes = {"D": size, "CHUNK": chunk, "BN": TILE, "PRECISION": precision}
            for thresholds in (True, False):
                yield Form(selection_kernels.score_kernel, sizes | {"THRESHOLDS": thresholds})
    yield Form(selection_kernels.tally_kernel, {"BN": TALLY_TILE})
    yield Form(selection_kernels.emit_kernel, {"BN": EMIT_TILE})
    for attend_self in (True, False):
        yield Form(selection_kernels.range_kernel, {"BM": RANGE_TILE, "SELF": attend_self})
        yield Form(selection_kernels.top_range_kernel, {"BM": RANGE_TILE, "SELF": attend_self})
    for size in (64, 128):
        sizes = {"D": size, "PIECE": PIECE, "BN": 32, "BD": 64}
        for precision in ("tf32x3", "ieee"):
            yield Form(selection_kernels.product_kernel, sizes | {"PRECISION": precision})
        yield Form(selection_kernels.moment_kernel, {"D": size, "BD": size, "ROWS": 16})
    yield Form(top_kernels.earliest_kernel, {"BN": 1024})
    yield Form(top_kernels.floor_kernel, {"SAMPLE": SAMPLE}, warps=8)
    yield Form(top_kernels.mark_kernel, {"BW": MARK_TILE})
    for capacity in (1024, 4096):
        yield Form(top_kernels.list_kernel, {"CAPACITY": capacity, "BW": 2048})
        yield Form(top_kernels.top_kernel, {"CAPACITY": capacity, "BN": 2048}, warps=8)
    for size in (64, 128):
        yield Form(selection_kernels.sum_kernel, {"D": size, "CHUNK": size, "BM": 32})
    for size in (64, 128):
        sizes = {**tile_constants(size), "NARROW": True}
        yield Form(norm_kernels.normalise_kernel, sizes)
        yield Form(norm_kernels.normalise_backward_kernel, sizes | {"WIDE": False})


def signature_of(form: Form) -> dict[str, str]:
    """Return the type of every argument of a form's kernel; "constexpr" for constants."""
    name = form.kernel.__name__
    kinds = dict.fromkeys(FLOAT32, "*fp32") | dict.fromkeys(NUMBERS, "i32")
    kinds |= dict.fromkeys(INT64.get(name, ()), "*i64")
    kinds |= dict.fromkeys(INT16.get(name, ()), "*i16")
    kinds |= dict.fromkeys(FLOAT64.get(name, ()), "*fp64")
    if name.startswith("normalise"):
        kinds |= NORMS
    kinds |= dict.fromkeys(form.constants, "constexpr")
    return {argument: kinds.get(argument, "*i32") for argument in form.kernel.arg_names}


def compiled(form: Form, capability: int) -> Any:
    """Return the kernel that Triton makes of a form."""
    names = form.kernel.arg_names
    signature = signature_of(form)
    # torch's allocations are aligned.
    aligned = {name for name in names if signature[name].startswith("*") or name in STRIDES}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(form.kernel, signature, constexprs=form.constants, attrs=attributes)
    options = {"num_warps": form.warps, "num_stages": 1}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def row(form: Form, capability: int) -> str:
    """Return a line of the table."""
    registers, spilled, shared = resources(compiled(form, capability), capability)
    constants = " ".join(f"{name}={value}" for name, value in form.constants.items())
    name = f"sm_{capability} {form.kernel.__name__.removesuffix('_kernel'):<19}{constants:<76}"
    return f"{name}{registers:>10}{spilled:>9}{shared:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    targets = {"nargs": "+", "type": int, "default": [90, 80]}
    parser.add_argument("--targets", help="compute capabilities", **targets)
    args = parser.parse_args()
    columns = (
        f"{'for   kernel             constants':<101}{'registers':>10}{'spilled':>9}{'shared':>8}"
    )
    lines = [f"Triton {triton.__version__}\n{columns}"]
    print(lines[0])
    for capability in args.targets:
        for form in forms():
            lines.append(row(form, capability))
            print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
