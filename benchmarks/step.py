"""Time one training step of whole models, in turn, each in its own process: ours, full attention,
and a public peer.

Run `python benchmarks/step.py`; it writes `benchmarks/results/step-<device>.json` and prints the
same rows as a table. The peer is the PyPI package routing_transformer (extra `peers`); without it
the row is left out and the table says so. Every model runs as its users run it: ours with the
memory settings of `rtx train` (freed memory kept), the peer with the system's own; the row
`peer_routing_kept` is the peer with ours, which its users would have to find. Full attention is
timed twice, too: `full` as we compute it, `full_torch` by torch's kernels
(hardware.attention=torch). Ours take the step of `rtx train` (`TrainingModule.take_step`), all
others a plain loop with Adam. Ours take products with weights from oneDNN, as hardware.products
does unless told otherwise, the peer from torch. The rows `weights` and `weights_torch` are floors:
these products of our top-w model by either, and nothing else. Times on a shared machine drift, so
only the ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from ending import end_with_children
from machine import code, machine
from torch import Tensor, nn

from rtx.model.transformer import Transformer
from rtx.settings.rules import resolve
from rtx.settings.schema import (
    Config,
    DataConfig,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    RoutingConfig,
    TrainerConfig,
)
from rtx.training.hardware import keep_freed_memory, resolve_hardware
from rtx.training.module import TrainingModule
from rtx.training.optimizers import build_optimizer

RIVALS = ("full", "full_torch", "peer_routing", "peer_routing_kept")

Step = Callable[[], None]


def ours(
    args: argparse.Namespace, selection: str | None, backend: Any = "auto", products: Any = "onednn"
) -> Config:
    """Return the configuration of one of our rows; no selection: full attention."""
    base = "local" if selection else "full"
    routed = args.heads // 2 if selection else 0
    return resolve(
        Config(
            data=DataConfig(length=args.length),
            hardware=HardwareConfig(
                attention=backend, products=products, precision="fp32", compile=False, graphs=False
            ),
            optimizer=OptimizerConfig(name="adam", lr=1e-4, schedule="constant", warmup=0),
            trainer=TrainerConfig(batch_size=1, micro_batch_size=1, clip=0.0),
            routing=RoutingConfig(
                selection=selection or "causal",
                update="nearest" if selection == "topk" else "members",
                heads=routed,
                layers=args.layers if selection else 0,
                window=args.window,
                clusters=args.clusters,
            ),
            model=ModelConfig(
                layers=args.layers,
                heads=args.heads,
                hidden=args.hidden,
                base=base,
                window=args.window,
                positions="none",
                ffn="gelu",
                ffn_hidden=4 * args.hidden,
            ),
        )
    )


def our_step(
    args: argparse.Namespace, selection: str | None, backend: str, tokens_BN: Tensor
) -> Step:
    """Return the step of one of our models, that of `rtx train`."""
    torch.manual_seed(0)
    config = ours(args, selection, backend)
    model = Transformer(config, 256).to(tokens_BN.device).train()
    module = TrainingModule(model, config, resolve_hardware(config))
    optimizer = build_optimizer(model, config.optimizer)
    steps = itertools.count(1)
    return lambda: module.take_step([tokens_BN], optimizer, next(steps))


def peer_step(args: argparse.Namespace, tokens_BN: Tensor) -> Step:
    """Return the step of routing_transformer's language model with the same sizes."""
    from routing_transformer import RoutingTransformerLM  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    model = RoutingTransformerLM(
        num_tokens=256,
        dim=args.hidden,
        depth=args.layers,
        heads=args.heads,
        dim_head=args.hidden // args.heads,
        max_seq_len=args.length,
        window_size=args.window,
        local_attn_window_size=args.window,
        n_local_attn_heads=args.heads // 2,
        causal=True,
        rel_pos_emb=False,
    ).to(tokens_BN.device)
    model.train()

    def loss() -> Tensor:
        logits_BNV, auxiliary = model(tokens_BN)
        cross_entropy = nn.functional.cross_entropy(
            logits_BNV[:, :-1].flatten(0, 1), tokens_BN[:, 1:].flatten()
        )
        return cross_entropy + auxiliary

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    return step


def weights_step(args: argparse.Namespace, products: str) -> Step:
    """Return the products of every linear layer of our top-w model with activations, forward and
    backward.
    """
    device = args.device
    model = Transformer(ours(args, "topk", products=products), 256).to(device)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = [
        torch.randn(args.length, linear.in_features, device=device, requires_grad=True)
        for linear in linears
    ]
    gradients = [torch.randn(args.length, linear.out_features, device=device) for linear in linears]

    def step() -> None:
        for linear, x_NE, gradient_NF in zip(linears, inputs, gradients, strict=True):
            torch.autograd.grad(linear(x_NE), [x_NE, *linear.parameters()], gradient_NF)

    return step


def make_step(name: str, args: argparse.Namespace) -> Step:
    """Return the step of one row."""
    generator = torch.Generator().manual_seed(0)
    tokens_BN = torch.randint(0, 256, (1, args.length), generator=generator).to(args.device)
    if args.device == "cpu" and name != "peer_routing":
        keep_freed_memory()
    if name.startswith("peer_routing"):
        return peer_step(args, tokens_BN)
    if name.startswith("weights"):
        return weights_step(args, "torch" if name == "weights_torch" else "onednn")
    selection = None if name.startswith("full") else name.removeprefix("routing_")
    return our_step(args, selection, backend_of(name), tokens_BN)


def backend_of(name: str) -> str:
    """Return what runs the attention of one of our rows."""
    return "torch" if name.endswith("_torch") else "auto"


def work(name: str, args: argparse.Namespace, door: Connection) -> None:
    """Be the process of one row: send the milliseconds of each step after one of warm-up."""
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", FutureWarning)  # the peer's dependencies use deprecated hooks
    step = make_step(name, args)
    step()
    for _ in range(args.steps):
        start = time.perf_counter()
        step()
        if args.device == "cuda":
            torch.cuda.synchronize()
        door.send(1e3 * (time.perf_counter() - start))


def measure(names: list[str], args: argparse.Namespace) -> dict[str, list[float]]:
    """Return milliseconds of each row's steps: `turns` times a process of its own for each row, one
    after the other.

    One process at a time, since each holds gigabytes.
    """
    context = multiprocessing.get_context("spawn")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.turns):
        for name in names:
            door, other = context.Pipe()
            process = context.Process(target=work, args=(name, args, other), daemon=True)
            process.start()
            other.close()
            times[name] += [door.recv() for _ in range(args.steps)]
            process.join()
    return times


def rows(times: dict[str, list[float]], args: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row for each model, with its ratios to the peer and to full attention (medians)."""
    median = {name: statistics.median(values) for name, values in times.items()}
    versions = code()
    if "peer_routing" in times:
        versions |= {
            name: importlib.metadata.version(name)
            for name in ("routing_transformer", "local-attention")
        }
    sizes = {name: getattr(args, name) for name in ("layers", "hidden", "heads")}
    return [
        {
            "what": "training step",
            "pattern": name,
            "N": args.length,
            "W": args.window,
            "C": args.clusters,
            **sizes,
            "backend": backend_of(name),
            "ms": round(median[name], 1),
            "ms_all": [round(value, 1) for value in times[name]],
            "ratio": {
                other: round(median[other] / median[name], 2) for other in RIVALS if other in median
            },
            "machine": machine(args.device, args.threads),
            "versions": versions,
        }
        for name in times
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"layers": 6, "hidden": 512, "heads": 8, "length": 8192, "window": 256, "clusters": 32}
    for name, value in {**sizes, "threads": 2, "turns": 3, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    end_with_children()
    names = ["routing_topk", "routing_causal", "full", "full_torch", "weights", "weights_torch"]
    if importlib.util.find_spec("routing_transformer"):
        names += ["peer_routing", "peer_routing_kept"]
    else:
        print("no peer row: routing_transformer is not installed (pip install 'rtx[peers]')")
    results = rows(measure(names, args), args)
    print(f"{'pattern':<20}{'ms':>10}" + "".join(f"{f'x {rival}':>22}" for rival in RIVALS))
    for row in results:
        ratio = row["ratio"]
        assert isinstance(ratio, dict)
        print(
            f"{row['pattern']:<20}{row['ms']:>10}"
            + "".join(f"{ratio.get(rival, ''):>22}" for rival in RIVALS)
        )
    path = Path(__file__).parent / "results" / f"step-{args.device.replace('cuda', 'gpu')}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
