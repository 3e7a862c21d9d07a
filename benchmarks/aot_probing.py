"""Compile the kernels that probe for GPUs without one: registers and spilled bytes of each form.

`python benchmarks/aot_probing.py` prints a row a form and writes
benchmarks/results/aot-probing.txt. The forms are those that `rtx.attention.engine.triton_probing`
launches.
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

from rtx.attention.engine import probing_kernels
from rtx.attention.engine.triton_probing import probe_options, score_constants

RESULTS = Path(__file__).with_name("results") / "aot-probing.txt"
FLOAT32 = ("x", "centroid", "half_square", "radius", "unit", "score", "margin")
NUMBERS = (
    "N",
    "H",
    "C",
    "T",
    "S",
    "target",
    "early",
    "capacity",
    "begin_n",
    "early_members",
    "key_members",
)
EVEN = ("N", "C", "S", "begin_n")
"""Numbers that are multiples of 16 in most runs."""
UNALIGNED = ("total",)
"""torch's allocations are aligned, but this is the last number of a tensor."""


class Form(NamedTuple):
    """A kernel with the constants and options that it is compiled for."""

    kernel: Any
    constants: dict[str, Any]
    options: dict[str, int]


def forms() -> Iterator[Form]:
    """Yield the kernels as they are launched for heads of 64 and 128 numbers."""
    four = {"num_warps": 4, "num_stages": 1}
    for size in (64, 128):
        for precision in ("tf32x3", "ieee"):
            constants = score_constants(size, precision)
            for kernel in (probing_kernels.cluster_kernel, probing_kernels.score_kernel):
                yield Form(kernel, constants, four)
    for clusters in (32, 128, 512, 1024, 4095):
        constants, options = probe_options(clusters)
        for attend_self in (True, False):
            yield Form(probing_kernels.probe_kernel, constants | {"SELF": attend_self}, options)
    for of_keys in (True, False):
        yield Form(probing_kernels.tally_kernel, {"BT": 8, "KEYS": of_keys}, four)
    yield Form(probing_kernels.key_kernel, {"BN": 128}, four)
    for attend_self in (True, False):
        own = {"SELF": attend_self}
        yield Form(probing_kernels.write_kernel, own, {"num_warps": 1})
        yield Form(probing_kernels.reader_kernel, own | {"BN": 128}, four)
    yield Form(probing_kernels.place_kernel, {"BP": 512}, four)


def compiled(form: Form, capability: int) -> Any:
    """Return the kernel that Triton makes of a form."""
    names = form.kernel.arg_names
    kinds = dict.fromkeys(FLOAT32, "*fp32") | dict.fromkeys(NUMBERS, "i32")
    kinds |= dict.fromkeys(form.constants, "constexpr")
    signature = {name: kinds.get(name, "*i32") for name in names}
    pointers = {name for name in names if signature[name].startswith("*")}
    aligned = (pointers - {*UNALIGNED}) | ({*EVEN} & {*names})
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(form.kernel, signature, constexprs=form.constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=form.options)


def row(form: Form, capability: int) -> str:
    """Return a line of the table."""
    registers, spilled, shared = resources(compiled(form, capability), capability)
    constants = " ".join(f"{name}={value}" for name, value in form.constants.items())
    name = f"sm_{capability} {form.kernel.__name__.removesuffix('_kernel'):<10}{constants:<50}"
    return f"{name}{form.options['num_warps']:>7}{registers:>11}{spilled:>9}{shared:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    targets = {"nargs": "+", "type": int, "default": [90, 80]}
    parser.add_argument("--targets", help="compute capabilities", **targets)
    args = parser.parse_args()
    columns = (
        f"{'for   kernel    constants':<66}{'warps':>7}{'registers':>11}{'spilled':>9}{'shared':>8}"
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
