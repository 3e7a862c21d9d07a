"""Compile the Triton kernels for an H100 or H200 (compute capability 9.0), and print the shared memory each takes.

A GPU is not needed. Run it without TRITON_INTERPRET, which would replace the compiler.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

from rtx.attention import triton_kernels as kernels
from rtx.attention import triton_select as selection
from rtx.attention.triton_clusters import choose_shape, pace

INTEGERS = {"row_M": "*i64", "first_T": "*i64", "member_M": "*i64", "begin_R1": "*i64"}
INTEGERS |= {"count_T": "*i32", "slot_T": "*i32", "window": "i32", "M": "i32", "R": "i32"}
INTEGERS |= {"real_BN": "*u8", "bits_LX": "*u8", "count_LG": "*i32", "begin_LG": "*i64", "nearest_BHN": "*i64"}
INTEGERS |= {"H": "i32", "C": "i32", "N": "i32", "blocks": "i32"}
SINGLES = {"norm_M": "*fp32", "share_M": "*fp32", "delta_M": "*fp32", "scale": "fp32", "log_scale": "fp32"}
SINGLES |= {"centroid_HCD": "*fp32", "threshold_HC": "*fp32"}


def compile_one(label: str, kernel: Any, element: str, **constants: Any) -> None:
    """Compile one kernel; pointers that no table names hold `element`."""
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    kinds = {name: (INTEGERS | SINGLES).get(name, "*" + element) for name in kernel.arg_names}
    # Torch's memory begins at multiples of 16 bytes, which lets the compiler load several elements at once.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind[0] == "*"}
    kinds |= dict.fromkeys(constants, "constexpr")
    aligned = {key: value for key, value in aligned.items() if kernel.arg_names[key[0]] not in constants}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=aligned)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert done.asm["cubin"]
    print(f"{label}: {done.metadata.shared}")


def main() -> None:
    """Compile all."""
    for dtype, element in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        rows = torch.empty(0, 64, dtype=dtype)
        shape = choose_shape(rows, rows, window=256)
        both = shape._asdict() | {"SKIP": 1}
        forward = both | pace(shape, dtype, backward=False)
        compile_one(f"forward {element}", kernels.forward_tiles, element, **forward)
        for shared in (True, False):
            backward = both | pace(shape, dtype, backward=True)
            label = f"backward {element} {'shared' if shared else 'own'} keys"
            compile_one(label, kernels.backward_tiles, element, SHARED=shared, **backward)
        sizes = {"WIDE_E": 64, "SPAN": 32}
        compile_one(f"prepare {element}", kernels.prepare_members, element, E=64, **sizes)
        sizes = {
            "D": 64,
            "DEPTH": selection.DEPTH,
            "STEP": 32,
            "WIDTH": selection.BLOCK,
            "num_warps": 8,
            "num_stages": 3,
        }
        compile_one(f"score {element}", selection.score_blocks, element, MASKED=True, **sizes)
        compile_one(f"sum {element}", kernels.sum_members, element, D=64, WIDE_D=64, SPAN=32, MEAN=True)
    sizes = {"LENGTH": selection.SPAN, "WIDTH": selection.BLOCK}
    compile_one("write members", selection.write_members, "i64", **sizes)


if __name__ == "__main__":
    main()
