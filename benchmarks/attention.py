"""Time attention alone: every pattern and public peers, in turn in one process, forward and
forward+backward.

Run `python benchmarks/attention.py`, with `--device cuda` on a GPU. First every row of ours is
checked against the float64 oracle on a small shape, outputs and gradients (`--check`: nothing
else); a row that fails is not timed, and the command ends with 1. Then it times, writes
`benchmarks/results/attention-<device>.json`, and prints the same rows as a table last, with the
exponent of the time's growth with N. Rows that `--groups` or `--patterns` leave out stay in the
file as they were, and are not printed. Peers (extra `peers`) that are not installed are left out,
and a line says so. A row has: the pattern, its sizes, milliseconds (median), how many times faster
than our full attention, than torch's (`sdpa`) and than its peer, the peak of memory beyond inputs
(allocations seen by torch's profiler on a CPU, CUDA's own count on a GPU) and what share of the
machine's matrix-product rate its pairs reach. Patterns named `_shaw` have Shaw's terms, `_rotary`
rotary positions; what `_native` (compiled, CPU) and `_flex` (FlexAttention, GPU) run is torch's
kernels in the other rows. All of these say how they compare with the pattern alone. `lsh_rounds`
joins 4 hash rounds. `sdpa_blocks` is torch's attention on blocks that are already gathered. Rows of
causal selection also say how many members their clusters have (fewest, mean, most).

On a CPU the peers are timed twice, a process for each group of sizes: with the memory settings of
`rtx train` ("kept": freed memory kept), and with the system's own ("system"), which is what users
of an attention module get who know nothing of allocators.

Times on a shared machine drift, so only the ratios of one run mean anything. Inputs are N(0, 1);
modules are in training mode, so that statistics of centroids are part of the time, here and at the
peer.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # torch's profiler prints two lines at each start; read as torch loads

import torch
from ending import end_with_children
from machine import code, machine
from patterns import (
    INDEXED,
    PEERS,
    Attention,
    Size,
    cluster_sizes,
    differences,
    faster,
    installed,
    make,
    make_inputs,
    pairs,
    pattern_and_backend,
    without_positions,
)
from torch import Tensor

from rtx.training.hardware import keep_freed_memory

SIZES = {
    "short": [Size("short", 256, 64, 4), Size("short", 1_024, 128, 8)],
    "main": [
        Size("main", 8_192, 256, 32),
        Size("main", 16_384, 256, 64),
        Size("main", 3_072, 512, 6),
    ],
    "growth": [
        Size("growth", N, N // C, C)
        for N, C in ((8_192, 64), (16_384, 128), (32_768, 128), (65_536, 256))
    ],
}
RIVAL = {
    **dict.fromkeys(("routing_topk", "routing_causal", "random", "sdpa_blocks"), "peer_routing"),
    "local": "peer_local",
    **dict.fromkeys(("lsh", "lsh_reformer"), "peer_lsh"),
}
BOTH = ["full", "local", "routing_topk", "routing_causal"]
"""Rows of every table of the main sizes; with the system's memory only these and the peers are
timed.
"""
OTHERS = [
    "random",
    "routing_nearest",
    "routing_separate",
    "strided",
    "fixed",
    "lsh",
    "adaptive_span",
]
SHAW = ["local_shaw", "routing_topk_shaw", "routing_causal_shaw"]
ROTARY = ["local_rotary", "routing_topk_rotary", "routing_causal_rotary"]
KINDS = ["routing_projected", "lsh_reformer", "lsh_rounds", "exact", "blocks", "indexer"]
"""Further kinds of the patterns; they and rotary positions are timed at the first of the main sizes
only, and kinds by
the faster backend alone."""
TOLERANCE = 1e-4
"""Largest difference from the oracle, in float32."""
NARROW = 0.02
"""Largest norm of differences from the oracle in bfloat16 or float16, relative to the norm of what
is right.
"""


def sizes_of(groups: list[str]) -> list[Size]:
    """Return the sizes of groups, in order."""
    sizes: list[Size] = []
    for group in groups:
        sizes += SIZES[group]
    return sizes


def names_of(size: Size, memory: str, args: argparse.Namespace) -> list[str]:
    """Return the rows that are measured at a size: those of the patterns that are asked for."""
    every = all_names(size, memory, args)
    return [
        name for name in every if not args.patterns or pattern_and_backend(name)[0] in args.patterns
    ]


def all_names(size: Size, memory: str, args: argparse.Namespace) -> list[str]:
    """Return all rows of a size."""
    ours = [
        "local",
        "random",
        "routing_topk",
        "routing_causal",
    ]  # nothing has to select random members
    if size.group != "main" and args.device == "cuda":
        ours = ["full", *ours]
    if size.group == "main":
        ours = BOTH if memory == "system" else [*BOTH, *SHAW, *OTHERS]
    first = memory == "kept" and size == SIZES["main"][0]
    if first:
        ours = [*ours, *ROTARY]
    names: list[str] = []
    for name in ours:
        names += [name, *faster(name, args)]
    if first:  # torch's kernels alone would take minutes for some of these
        for name in KINDS:
            names += faster(name, args) or [name]
    if size.group != "main":
        return [*names, "sdpa"] if args.device == "cuda" else names
    return [
        *names,
        "sdpa",
        "sdpa_blocks",
        *(name for name, package in PEERS.items() if installed(package)),
    ]


def check(args: argparse.Namespace) -> list[str]:
    """Hold every row of ours against the oracle, and return those that fail."""
    names: dict[str, None] = {}
    for size in sizes_of(args.groups):
        names |= dict.fromkeys(names_of(size, "kept", args))
    wrong = []
    for name in names:
        if name.startswith(("sdpa", "peer_")):
            continue
        try:
            right, said = compared(name, args)
        except Exception as error:  # one row must not cost all others their time on a GPU
            right = False
            said = f"{type(error).__name__}: {error}"
        if not right:
            wrong.append(name)
        verdict = "checked" if right else "WRONG"
        print(f"{verdict} {name}: {said}", flush=True)
    return wrong


def compared(name: str, args: argparse.Namespace) -> tuple[bool, str]:
    """Return whether a row is near enough to the oracle, and how far it is from it in words."""
    difference, _ = differences(name, args, "float32")
    right = difference <= TOLERANCE
    said = f"{difference:.1e}"
    if args.dtype == "float32" or name in INDEXED:  # the latter choose in their inputs' type
        return right, said
    _, relative = differences(name, args, args.dtype)
    said = f"{said}, {args.dtype} {relative:.1e} of the norm"
    return right and relative <= NARROW, said


def once(attention: Attention, inputs: list[Tensor], gradient_BHND: Tensor | None) -> None:
    """Run it forward, and backward where there is a gradient."""
    if gradient_BHND is None:
        with torch.no_grad():
            attention(*inputs)
        return
    for leaf in inputs:
        leaf.grad = None
    found = attention(*inputs)
    out, *losses = found if isinstance(found, tuple) else (found,)
    losses = [loss.sum() for loss in losses if loss.requires_grad]
    torch.autograd.backward(
        [out, *losses], [gradient_BHND.view(out.shape), *(torch.ones_like(x) for x in losses)]
    )


def timed(run: Callable[[], object], device: str) -> float:
    """Return milliseconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def peak_bytes(run: Callable[[], None], device: str) -> int:
    """Return the largest sum of what was allocated at one time while it ran, gradients of inputs
    included.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    results: Any = getattr(profile.profiler, "kineto_results")  # noqa: B009  its type is not declared
    events = results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        held += change
        peak = max(peak, held)
    return peak


def product_rate(args: argparse.Namespace) -> float:
    """Return the floating-point operations per second of large matrix products."""
    n = 4096 if args.device == "cpu" else 16_384
    x = torch.randn(n, n, device=args.device, dtype=getattr(torch, args.dtype))
    return 2e3 * n**3 / min(timed(lambda: torch.mm(x, x), args.device) for _ in range(4))


def measure(size: Size, args: argparse.Namespace, memory: str) -> list[dict[str, Any]]:
    """Return the rows of one size: every pattern in turn, `repeats` times."""
    names = [name for name in names_of(size, memory, args) if name not in args.wrong]
    inputs = make_inputs(size, args)
    gradient_BHND = torch.randn(inputs[0].shape, device=args.device).to(inputs[0].dtype)
    calls = {name: make(name, size, args) for name in names}
    rows = []
    for what in ("forward", "forward+backward"):
        backward = gradient_BHND if what != "forward" else None
        runs = {name: functools.partial(once, calls[name], inputs, backward) for name in names}
        names = [name for name in names if runs_through(name, runs, args)]
        peaks = {}
        for name in names:
            for leaf in inputs:
                leaf.grad = None  # else the peak would begin by what the row before let go
            peaks[name] = peak_bytes(runs[name], args.device)
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.repeats):
            for name in names:
                times[name].append(timed(runs[name], args.device))
        for name in names:
            members = {"cluster_sizes": sizes} if (sizes := cluster_sizes(calls[name])) else {}
            rows.append(row(name, what, size, args, memory, times, peaks[name]) | members)
        print(f"timed: {memory} N={size.N} W={size.W} {what}", flush=True)
    return rows


def runs_through(name: str, runs: dict[str, Callable[[], None]], args: argparse.Namespace) -> bool:
    """Run a row once, and tell whether it could; what fails, for want of memory say, costs no other
    row its time.
    """
    try:
        runs[name]()
    except Exception as error:
        print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
        args.wrong.append(name)
    return name not in args.wrong


def row(
    name: str,
    what: str,
    size: Size,
    args: argparse.Namespace,
    memory: str,
    times: dict[str, list[float]],
    peak: int,
) -> dict[str, Any]:
    """Return one row of the results."""
    median = {other: statistics.median(values) for other, values in times.items()}
    pattern, backend = pattern_and_backend(name)
    plain = without_positions(pattern)
    rivals = [
        rival
        for rival in ("full", "sdpa", RIVAL.get(plain), plain)
        if rival in median and rival != name
    ]
    # Two products forward, five backward.
    useful = (
        2.0
        * args.dim
        * args.batch
        * args.heads
        * pairs(name, size)
        * (2 if what == "forward" else 7)
    )
    return {
        "what": what,
        "group": size.group,
        "pattern": pattern,
        **{"N": size.N, "W": size.W, "C": size.C, "B": args.batch, "H": args.heads, "D": args.dim},
        "dtype": args.dtype,
        "backend": backend,
        "memory": memory,
        "ms": round(median[name], 2),
        "ms_all": [round(value, 2) for value in times[name]],
        "ratio": {rival: round(median[rival] / median[name], 2) for rival in rivals},
        "peak_bytes": peak,
        "rate_share": round(1e3 * useful / median[name] / args.rate, 3),
    }


def print_row(row: dict[str, Any]) -> None:
    """Print one line of the table."""
    ratios = "  ".join(f"{value:.2f}x {name}" for name, value in row["ratio"].items())
    per = row["peak_bytes"] / (row["N"] * row["B"] * row["H"])
    if sizes := row.get("cluster_sizes"):
        ratios += f"  clusters of {sizes['min']} to {sizes['max']}, mean {sizes['mean']}"
    print(
        f"{row['memory']:<7}{row['what']:<17}{label(row):<29}{row['N']:>7}{row['W']:>5}{row['C']:>5}"
        f"{row['ms']:>9.1f} ms{per / 1024:>7.2f} KiB{row['rate_share']:>7.1%}  {ratios}",
        flush=True,
    )


def label(row: dict[str, Any]) -> str:
    """Return the pattern of a row, and its backend if that is not torch."""
    return row["pattern"] if row["backend"] == "torch" else f"{row['pattern']}_{row['backend']}"


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the slope of log time over log N for each pattern of the growth group,
    forward+backward.
    """
    slopes = {}
    for name in dict.fromkeys(label(row) for row in rows):
        points = [
            (math.log(row["N"]), math.log(row["ms"]))
            for row in rows
            if label(row) == name and row["group"] == "growth" and row["what"] == "forward+backward"
        ]
        if len(points) > 2:
            slopes[name] = round(statistics.linear_regression(*zip(*points, strict=True)).slope, 3)
    return slopes


def work(memory: str, groups: list[str], args: argparse.Namespace, door: Connection) -> None:
    """Be the process of one table: send its rows."""
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", FutureWarning)  # a peer's dependency uses a deprecated name
    if memory == "kept":
        keep_freed_memory()
    args.rate = product_rate(args)
    rows: list[dict[str, Any]] = []
    for size in sizes_of(groups):
        rows += measure(size, args, memory)
    versions = code() | {name: version for name in PEERS.values() if (version := installed(name))}
    place = {
        "machine": machine(args.device, args.threads),
        "matrix_products_gflops": round(args.rate / 1e9, 1),
    }
    common = place | {"versions": versions}
    door.send(([row | common for row in rows], args.wrong))


def table(memory: str, groups: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a process of its own, and add to `args.wrong` those that failed."""
    context = multiprocessing.get_context("spawn")
    door, other = context.Pipe()
    process = context.Process(target=work, args=(memory, groups, args, other), daemon=True)
    process.start()
    other.close()
    rows, args.wrong = door.recv()
    process.join()
    return rows


def tables(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of every table that is asked for."""
    rows: list[dict[str, Any]] = []
    # A process for each group: kept memory would add up to more than a machine has.
    for group in args.groups:
        rows += table("kept", [group], args)
    if args.device == "cpu" and "main" in args.groups:
        rows += table("system", ["main"], args)
    return rows


def rows_to_keep(
    recorded: list[dict[str, Any]], measured: list[dict[str, Any]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the recorded rows that stay: ratios are taken inside one group, and each row has the
    commit it is of.
    """
    anew = {(row["group"], label(row)) for row in measured}
    if not args.patterns:
        return [row for row in recorded if row["group"] not in args.groups]
    return [row for row in recorded if (row["group"], label(row)) not in anew]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {"batch": 1, "heads": 8, "dim": 64, "threads": 2, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--groups", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument(
        "--patterns", nargs="+", default=[], help="time these rows alone; default: all"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument(
        "--check", action="store_true", help="hold the rows against the oracle, and time nothing"
    )
    args = parser.parse_args()
    end_with_children()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; --device cpu needs none")
    args.wrong = check(args)
    if args.check:
        sys.exit(bool(args.wrong))
    for package in PEERS.values():
        if not installed(package):
            print(f"no row of {package}: not installed (pip install 'rtx[peers]')")
    rows = tables(args)
    path = (
        Path(__file__).parent / "results" / f"attention-{args.device.replace('cuda', 'gpu')}.json"
    )
    kept = rows_to_keep(json.loads(path.read_text()), rows, args) if path.exists() else []
    slopes = exponents([*rows, *kept])
    path.write_text(
        json.dumps([row | {"exponents": slopes} for row in (*rows, *kept)], indent=1) + "\n"
    )
    for each in rows:
        print_row(each)
    if kept:
        print(f"{path.name} keeps {len(kept)} rows of earlier records, which are not printed")
    measured = exponents(rows)
    if measured:
        print(
            "growth of time with N:",
            ", ".join(f"{name} N^{slope:.2f}" for name, slope in measured.items()),
        )
    sys.exit(f"not timed, see above: {', '.join(dict.fromkeys(args.wrong))}" if args.wrong else 0)


if __name__ == "__main__":
    main()
