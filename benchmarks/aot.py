"""Compile the packed kernels for GPUs without one: registers, spilled bytes and shared memory of
each form.

`python benchmarks/aot.py` prints a row a form and writes benchmarks/results/aot.txt. The forms are
those that `rtx.attention.engine.packed_attention.attend` launches, with its tiles.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop(
    "TRITON_INTERPRET", None
)  # before Triton is imported: what it interprets it cannot compile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rtx.attention.engine import packed_kernels, packed_launch

RESULTS = Path(__file__).with_name("results") / "aot.txt"
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FLOAT32 = ("lse", "dlse", "delta", "share", "row_lse")
INT64 = ("hole_value", "hole_low", "hole_high", "seed")
INT32 = ("query_row", "key_row", "start", "stop", "low", "high", "first", "member")
SCALARS = ("scale", "dropout", "rescale")
ALIGNED = ("WIDTH", "q_b", "q_h", "q_n", "k_b", "k_h", "k_n", "v_b", "v_h", "v_n")
"""Strides and widths, all multiples of 16 where head sizes are."""
BY_ROW = ("reduce", "combine")
"""Kernels whose programs have rows instead of members."""
NUMBERS = (*ALIGNED, "H", "N", "P", "M", "last_distance", "R")


@dataclass(frozen=True)
class Form:
    """A kernel with what it is compiled for."""

    kernel: str
    size: int
    dtype: torch.dtype
    holes: int = 0
    distances: bool = False
    values: bool = False
    dropout: bool = False
    by_member: bool = False
    """With gradients of outputs and log-sums by member."""
    in_order: bool = False
    joined: bool = False
    """With log-sums and outputs of rows in the backward pass."""
    tile: packed_launch.Tile | None = None
    """Other than that of `packed_launch.TILES`."""

    @property
    def tile_used(self) -> packed_launch.Tile:
        return self.tile or packed_launch.tile_of(
            self.kernel, self.size, self.dtype, self.distances
        )

    @property
    def words(self) -> str:
        """What of the optional terms it has."""
        named = {"holes": self.holes, "distances": self.distances, "values": self.values}
        named |= {"dropout": self.dropout, "by_member": self.by_member, "in_order": self.in_order}
        named |= {"joined": self.joined}
        return "+".join(word for word, has in named.items() if has) or "-"

    def absent(self) -> list[str]:
        """Return the names of the pointers that a kernel of tiles does without."""
        names: list[str] = []
        if not self.holes:
            names += ["hole_value", "hole_low", "hole_high"]
        if not self.distances:
            names += ["logit_table", "dlogit_table"]
        if not self.values:
            names.append("dweight_table")
            if self.kernel == "dq":
                names.append("weight_table")
        if not self.dropout:
            names.append("seed")
        if not self.by_member:
            names.append("dlse")
        return names

    def constants(self) -> dict[str, Any]:
        """Return the values of the kernel's constants by name; None for pointers that it does
        without.
        """
        if self.kernel == "combine":
            return {"BR": 32, "BW": self.size}
        if self.kernel == "reduce":
            mean = not self.by_member
            absent = ["y"] if mean else ["lse", "share"]
            return {"HAS_Y": not mean, "MEAN": mean, "BR": 32, "BW": self.size} | dict.fromkeys(
                absent
            )
        flags = {
            "KEYS_BY_DISTANCE": self.distances,
            "VALUES_BY_DISTANCE": self.values,
            "DROPOUT": self.dropout,
        }
        flags |= {"DOUT_BY_MEMBER": self.by_member or self.in_order, "HAS_DLSE": self.by_member}
        flags |= {
            "HOLES": self.holes,
            "IN_ORDER": self.in_order,
            "SUMS_BY_MEMBER": not self.joined,
        }
        tile = self.tile_used
        tiles = {"BQ": tile.queries, "BK": tile.keys, "STAGES": tile.stages}
        sizes = packed_launch.head_sizes(self.size, self.size)
        return sizes | flags | tiles | dict.fromkeys(self.absent())


def forms() -> Iterator[Form]:
    """Yield every form of interest: all terms with bfloat16, and the plain form with the other
    types.
    """
    kernels = ("attend", "dq", "dkv")
    shaw: dict[str, Any] = {"distances": True, "values": True}
    dropped: dict[str, Any] = shaw | {"dropout": True}
    backward: list[dict[str, Any]] = [{"by_member": True}, {"joined": True}]
    terms: list[dict[str, Any]] = [
        {},
        {"in_order": True},
        *backward,
        {"holes": 1},
        {"dropout": True},
    ]
    terms += [{"distances": True}, shaw, shaw | {"in_order": True}, dropped, shaw | {"holes": 1}]
    for size in (64, 128):
        for kernel in kernels:
            for each in terms:
                if kernel != "attend" or each not in backward:  # which makes no difference there
                    yield Form(kernel, size, torch.bfloat16, **each)
        yield Form("weigh", size, torch.bfloat16, **shaw)
        yield Form("weigh", size, torch.bfloat16, **shaw, in_order=True)
        yield Form("weigh", size, torch.bfloat16, **dropped)
        for by_member in (False, True):
            yield Form("reduce", size, torch.bfloat16, by_member=by_member)
        yield Form("combine", size, torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        for kernel in kernels:
            yield Form(kernel, 64, dtype)
            yield Form(kernel, 128, dtype)
    for kernel in kernels:
        yield Form(kernel, 40, torch.bfloat16)


def compiled(form: Form, capability: int) -> Any:
    """Return the kernel that Triton makes of a form."""
    function = getattr(packed_kernels, f"{form.kernel}_kernel")
    kinds = (
        dict.fromkeys(FLOAT32, "*fp32")
        | dict.fromkeys(INT64, "*i64")
        | dict.fromkeys(INT32, "*i32")
    )
    kinds |= dict.fromkeys(SCALARS, "fp32") | dict.fromkeys(NUMBERS, "i32")
    names = function.arg_names
    constants = form.constants()
    signature = {name: kinds.get(name, f"*{TYPES[form.dtype]}") for name in names}
    signature |= {name: "constexpr" for name in constants if name in names}
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    strides = ALIGNED if form.size % 16 == 0 else ()
    aligned = [name for name in names if signature[name].startswith("*") or name in strides]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=attributes)
    warps = 4 if form.kernel in BY_ROW else form.tile_used.warps
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}
    )


def resources(made: Any, capability: int) -> tuple[int, int, int]:
    """Return registers of a thread, spilled bytes and shared bytes of a compiled kernel."""
    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(made.asm["ptx"])
        command = [
            PTXAS,
            "-v",
            f"--gpu-name=sm_{capability}{suffix}",
            ptx,
            "-o",
            Path(folder, "kernel.cubin"),
        ]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", printed)
    spilled = re.search(r"(\d+) bytes spill stores", printed)
    assert registers is not None and spilled is not None
    return int(registers[1]), int(spilled[1]), made.metadata.shared


def row(form: Form, capability: int) -> str:
    """Return a line of the table."""
    registers, spilled, shared = resources(compiled(form, capability), capability)
    tile = "32 rows" if form.kernel in BY_ROW else " ".join(map(str, form.tile_used))
    known = (
        f"sm_{capability} {form.kernel:<8}{TYPES[form.dtype]:<5}{form.size:>4} "
        f"{form.words:<25}{tile:<13}"
    )
    return f"{known}{registers:>10}{spilled:>9}{shared:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--targets", nargs="+", type=int, default=[90, 80], help="compute capabilities"
    )
    args = parser.parse_args()
    head = f"Triton {triton.__version__}; tile: queries, keys, warps, stages\n"
    head += f"{'for   kernel  type size terms':<43}{'tile':<13}"
    head += f"{'registers':>10}{'spilled':>9}{'shared':>8}"
    print(head)
    lines = [head]
    for capability in args.targets:
        for form in forms():
            lines.append(row(form, capability))
            print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
