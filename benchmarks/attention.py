"""Time attention alone: every pattern and public peers, in turn in one process, forward and forward+backward.

Run `python benchmarks/attention.py`; it writes `benchmarks/results/attention-<device>.json` and prints the same rows as
a table, then the exponent of the time's growth with N. Peers (extra `peers`) that are not installed are left out, and
the table says so. A row has: the pattern, its sizes, milliseconds (median), how many times faster than full attention
and than its peer, the peak of memory beyond inputs (allocations seen by torch's profiler on a CPU, CUDA's own count on
a GPU) and what share of the machine's matrix-product rate its useful pairs reach.

Times on a shared machine drift, so only the ratios of one run mean anything. Inputs are N(0, 1); modules are in
training mode, so that statistics of centroids are part of the time, here and at the peer.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.full import FullHeads
from rtx.attention.heads import Heads
from rtx.attention.kmeans import Centroids, update_centroids
from rtx.attention.local import LocalHeads
from rtx.attention.random import RandomHeads
from rtx.attention.routing import RoutingHeads
from rtx.attention.weights import Distances

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Size(NamedTuple):
    """One shape; `group` says which question it answers."""

    group: str
    N: int
    W: int
    C: int


SIZES = {
    "main": [Size("main", 8_192, 256, 32), Size("main", 16_384, 256, 64), Size("main", 3_072, 512, 6)],
    "growth": [Size("growth", N, N // C, C) for N, C in ((8_192, 64), (16_384, 128), (32_768, 128), (65_536, 256))],
    "memory": [Size("memory", N, 256, N // 256) for N in (8_192, 16_384, 32_768, 65_536)],
}
FULL_AT_MOST = 16_384
"""Full attention is timed up to this length."""
RIVAL = {
    "routing_topk": "peer_routing",
    "routing_causal": "peer_routing",
    "local": "peer_local",
    "sdpa_blocks": "peer_routing",
    "random": "peer_routing",
}


def ours(heads: Heads, relative: Distances | None = None, own_keys: bool = True) -> Attention:
    """Return a call of one of our head modules."""

    def call(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        out_BHND, loss = heads(q_BHND, k_BHND if own_keys else None, v_BHND, relative=relative)
        return out_BHND + loss

    return call


def routed(size: Size, args: argparse.Namespace, selection: str) -> RoutingHeads:
    """Return routing heads whose thresholds have seen one batch."""
    options: dict[str, Any] = {"window": size.W, "length": size.N, "decay": 0.999, "thresholds": selection == "causal"}
    centroids = Centroids(args.heads, size.C, args.dim, **options).to(args.device)
    heads = RoutingHeads(centroids, selection=selection, scale=args.dim**-0.5)
    heads.train()
    with torch.no_grad():
        heads(*make_inputs(size, args, seed=1)[:1], None, make_inputs(size, args, seed=2)[0])
    update_centroids(heads)
    return heads


def shaw(args: argparse.Namespace) -> Distances:
    """Return Shaw's tables for distances up to 255."""
    keys_MD, values_MD = (torch.randn(256, args.dim, device=args.device) * 0.02 for _ in range(2))
    return Distances(keys_MD.requires_grad_(), values_MD.requires_grad_())


def sdpa_blocks(size: Size, args: argparse.Namespace) -> Attention:
    """Return the floor of top-w: torch's attention on blocks that are already gathered, causal inside each."""

    def call(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        blocks = (x[:, :, : size.C * size.W].unflatten(2, (size.C, size.W)).flatten(0, 1) for x in (q_BHND, v_BHND))
        q_XCWD, v_XCWD = blocks
        return F.scaled_dot_product_attention(q_XCWD, q_XCWD, v_XCWD, is_causal=True)

    return call


def peer_routing(size: Size, args: argparse.Namespace) -> Attention:
    """Return KmeansAttention of routing_transformer with shared queries and keys."""
    from routing_transformer.routing_transformer import KmeansAttention  # pyright: ignore[reportMissingImports]

    module = KmeansAttention(size.C, size.W, args.heads, args.dim, causal=True, shared_qk=True).to(args.device).train()

    def call(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        out_BHND, loss = module(q_BHND, q_BHND, v_BHND)
        return out_BHND + loss

    return call


def peer_local(size: Size, args: argparse.Namespace) -> Attention:
    """Return LocalAttention of local-attention with one block of look-back."""
    from local_attention import LocalAttention  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"use_rotary_pos_emb": False, "look_backward": 1, "look_forward": 0}
    return LocalAttention(size.W, causal=True, **options).to(args.device)


def peer_lsh(size: Size, args: argparse.Namespace) -> Attention:
    """Return LSHAttention of reformer_pytorch, one hash round, buckets of W / 2."""
    from reformer_pytorch import LSHAttention  # pyright: ignore[reportMissingImports]

    module = LSHAttention(bucket_size=size.W // 2, n_hashes=1, causal=True).to(args.device).train()

    def call(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        return module(q_BHND.flatten(0, 1), v_BHND.flatten(0, 1))[0]

    return call


def make(name: str, size: Size, args: argparse.Namespace) -> Attention:
    """Return the attention of one row."""
    peers = {"peer_routing": peer_routing, "peer_local": peer_local, "peer_lsh": peer_lsh, "sdpa_blocks": sdpa_blocks}
    if name in peers:
        return peers[name](size, args)
    relative = shaw(args) if name.endswith("_shaw") else None
    kind = name.removesuffix("_shaw")
    if kind == "full":
        return ours(FullHeads())
    if kind == "local":
        return ours(LocalHeads(window=size.W), relative)
    if kind == "random":
        options: dict[str, Any] = {"window": size.W, "length": size.N, "seed": 0, "scale": args.dim**-0.5}
        return ours(RandomHeads(args.heads, size.C, **options).to(args.device), relative, own_keys=False)
    return ours(routed(size, args, kind.removeprefix("routing_")), relative, own_keys=False)


def make_inputs(size: Size, args: argparse.Namespace, seed: int = 0) -> list[Tensor]:
    """Return queries, keys and values `[B, H, N, D]`, each its own leaf."""
    generator = torch.Generator().manual_seed(seed)
    shape = (args.batch, args.heads, size.N, args.dim)
    drawn = (torch.randn(shape, generator=generator) for _ in range(3))
    return [x.to(args.device, getattr(torch, args.dtype)).requires_grad_() for x in drawn]


def once(attention: Attention, inputs: list[Tensor], gradient_BHND: Tensor | None) -> None:
    """Run it forward, and backward where there is a gradient."""
    if gradient_BHND is None:
        with torch.no_grad():
            attention(*inputs)
        return
    for leaf in inputs:
        leaf.grad = None
    out = attention(*inputs)
    out.backward(gradient_BHND.view(out.shape))


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
    """Return the largest sum of what was allocated at one time while it ran, gradients of inputs included."""
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
    """Return the machine's floating-point operations per second in large matrix products."""
    n = 4096 if args.device == "cpu" else 16_384
    x = torch.randn(n, n, device=args.device, dtype=getattr(torch, args.dtype))
    return 2e3 * n**3 / min(timed(lambda: torch.mm(x, x), args.device) for _ in range(4))


def operations(name: str, size: Size, args: argparse.Namespace, backward: bool) -> float:
    """Return the operations of the pairs that the pattern reads: two products forward, five backward."""
    N, W = size.N, size.W
    pairs = size.C * W * (W + 1) / 2
    if name.startswith("full"):
        pairs = N * (N + 1) / 2
    elif "local" in name:
        pairs = W * (W + 1) / 2 + (N - W) * W
    return 2.0 * args.dim * args.batch * args.heads * pairs * (7 if backward else 2)


def names_of(size: Size) -> list[str]:
    """Return the rows that are measured at a size."""
    names = ["local", "routing_topk", "routing_causal"]
    if size.group != "main":
        return names
    return ["full", *names, "random", "local_shaw", "routing_topk_shaw", "routing_causal_shaw", "sdpa_blocks", *PEERS]


PEERS = {"peer_routing": "routing_transformer", "peer_local": "local-attention", "peer_lsh": "reformer_pytorch"}


def installed(name: str) -> str | None:
    """Return the version of a distribution, None without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(size: Size, args: argparse.Namespace, rate: float) -> list[dict[str, Any]]:
    """Return the rows of one size: every pattern in turn, `repeats` times."""
    names = [name for name in names_of(size) if name not in PEERS or installed(PEERS[name])]
    names = [name for name in names if name != "full" or size.N <= FULL_AT_MOST]
    inputs = make_inputs(size, args)
    gradient_BHND = torch.randn(inputs[0].shape, device=args.device).to(inputs[0].dtype)
    calls = {name: make(name, size, args) for name in names}
    rows = []
    for what in ("forward", "forward+backward"):
        backward = gradient_BHND if what != "forward" else None
        runs = {name: functools.partial(once, calls[name], inputs, backward) for name in names}
        peaks = {name: peak_bytes(run, args.device) for name, run in runs.items()}
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.repeats):
            for name, run in runs.items():
                times[name].append(timed(run, args.device))
        median = {name: statistics.median(values) for name, values in times.items()}
        for name in names:
            rivals = [rival for rival in ("full", RIVAL.get(name.removesuffix("_shaw"))) if rival in median]
            useful = operations(name, size, args, backward is not None)
            rows.append(
                {
                    "what": what,
                    "group": size.group,
                    "pattern": name,
                    "N": size.N,
                    "W": size.W,
                    "C": size.C,
                    "B": args.batch,
                    "H": args.heads,
                    "D": args.dim,
                    "dtype": args.dtype,
                    "backend": "torch",
                    "ms": round(median[name], 2),
                    "ms_all": [round(value, 2) for value in times[name]],
                    "ratio": {rival: round(median[rival] / median[name], 2) for rival in rivals},
                    "peak_bytes": peaks[name],
                    "rate_share": round(1e3 * useful / median[name] / rate, 3),
                }
            )
            print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    """Print one line of the table."""
    ratios = "  ".join(f"{value:.2f}x {name}" for name, value in row["ratio"].items() if name != row["pattern"])
    per = row["peak_bytes"] / (row["N"] * row["B"] * row["H"])
    print(
        f"{row['what']:<17}{row['pattern']:<21}{row['N']:>7}{row['W']:>5}{row['C']:>5}{row['ms']:>10.1f} ms"
        f"{per / 1024:>7.2f} KiB{row['rate_share']:>7.1%}  {ratios}",
        flush=True,
    )


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the slope of log time over log N for each pattern of the growth group, forward+backward."""
    slopes = {}
    for name in dict.fromkeys(row["pattern"] for row in rows):
        points = [
            (math.log(row["N"]), math.log(row["ms"]))
            for row in rows
            if row["pattern"] == name and row["group"] == "growth" and row["what"] == "forward+backward"
        ]
        if len(points) > 2:
            slopes[name] = round(statistics.linear_regression(*zip(*points, strict=True)).slope, 3)
    return slopes


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"batch": 1, "heads": 8, "dim": 64, "threads": 2, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--groups", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", FutureWarning)  # a peer's dependency uses a deprecated name
    versions = {name: version for name in ("torch", *PEERS.values()) if (version := installed(name))}
    for name in PEERS.values():
        if name not in versions:
            print(f"no row of {name}: not installed (pip install 'rtx[peers]')")
    rate = product_rate(args)
    rows = [row for group in args.groups for size in SIZES[group] for row in measure(size, args, rate)]
    slopes = exponents(rows)
    print("growth of time with N:", ", ".join(f"{name} N^{slope:.2f}" for name, slope in slopes.items()))
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {args.threads} threads"
    common = {"machine": machine, "matrix_products_gflops": round(rate / 1e9, 1), "versions": versions}
    path = Path(__file__).parent / "results" / f"attention-{args.device.replace('cuda', 'gpu')}.json"
    path.write_text(json.dumps([row | common | {"exponents": slopes} for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
