"""Folders of runs as `rtx train` leaves them, made up without training anything."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import yaml

from rtx.compose import compose, to_dict
from rtx.identity import digest
from rtx.report.run_records import flat

DATA = {"name": "text", "unit": "byte", "fingerprint": "f00d" * 4}
ENVIRONMENT = {
    "command": "/somewhere/rtx train data=text data.path=book.txt",
    "versions": {"rtx": "0.1", "torch": "2.11.0"},
    "git": {"commit": "0123456789abcdef", "changed": False},
    "gpu": None,
    "threads": 2,
    "cpus": 2,
    "python": "3.11.7",
    "platform": "Linux",
    "data": DATA,
}


@functools.cache
def base(experiment: str) -> dict[str, Any]:
    """The configuration of an experiment, as plain values."""
    return to_dict(compose([f"experiment={experiment}"]))


def config(experiment: str = "cifar10_grid", **values: Any) -> dict[str, Any]:
    """A configuration with some values changed; `routing__heads` is routing.heads."""
    made = copy.deepcopy(base(experiment))
    for name, value in values.items():
        section, _, key = name.rpartition("__")
        (made[section] if section else made)[key] = value
    return made


def write_run(
    folder: Path,
    made: dict[str, Any],
    *,
    bits: float | None = 3.0,
    state: str = "done",
    reason: str | None = None,
    data: dict[str, Any] | None = None,
    speed: float = 8.0,
    step: int = 2000,
    hash_name: bool = True,
) -> Path:
    """Write the records of a run below a folder, and return its own folder."""
    run = folder / (digest(flat(made)) if hash_name else "run")
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "last.ckpt").touch()
    (run / "samples").mkdir()
    (run / "samples" / "step9-seed0-1.txt").write_text("<b>def</b> f(x):\n    return \x1b x\n")
    (run / "config.yaml").write_text(yaml.safe_dump(made, sort_keys=False))
    data = data or DATA
    (run / "environment.json").write_text(json.dumps({**ENVIRONMENT, "data": data}))
    final = None if bits is None else {"bits": bits, "unit": data["unit"], "units": 1000, "se": 0.01}
    status = {"state": state, "reason": reason, "step": step, "steps": 200_000, "final": final, "host": "h", "pid": 1}
    (run / "status.json").write_text(json.dumps({**status, "heartbeat": "2020-01-01T00:00:00Z"}))
    units = made["trainer"]["batch_size"] * made["data"]["length"]
    rows = []
    for at in range(1, 21):
        value = (bits or 4.0) + 5.0 / at
        rows.append(
            {"kind": "train", "step": at * 100, "bits": value, "tokens_per_second": speed * units, "seconds": at}
        )
        rows.append({"kind": "valid", "step": at * 100, "val_bits": value + 0.02, "val_units": 500, "val_se": 0.01})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def write_eval(run: Path, bits: float, **values: Any) -> None:
    """Write the record of an evaluation of a run."""
    data = json.loads((run / "environment.json").read_text())["data"]
    record = {
        f"bits_per_{data['unit']}": bits,
        "standard_error": 0.01,
        "units": 5000,
        "partial": False,
        "windows": 5,
        "split": "test",
        "mode": "parallel",
        "ablate": "none",
        "length": 3072,
        "stride": 3072,
        "selection_sees_future": True,
        "own_data": True,
        "data": data,
        "checkpoint": {"name": "best", "step": 2000},
        **values,
    }
    (run / "eval").mkdir(exist_ok=True)
    (run / "eval" / f"{len(list((run / 'eval').iterdir()))}.json").write_text(json.dumps(record))


def write_divergence(run: Path, layers: int = 10, checkpoint: str = "best", share: float = 1.0, **values: Any) -> None:
    """Write the record of `rtx analyze divergence` of a run: 0.01 n + 0.1 k nats in layer n for the k-th kind."""
    kinds = (["local", "local"], ["local", "routed"], ["routed", "routed"])
    rows = [
        {"layer": n, "kind": kind, "mean": 0.01 * n + 0.1 * k, "deviation": 0.002, "share": share, "nats_R": [0.1]}
        for n in range(layers)
        for k, kind in enumerate(kinds)
    ]
    record = {
        "what": "divergence",
        "layers": rows,
        "bound": 0.693147,
        "checkpoint": {"name": checkpoint, "step": 2000},
        "analyze": {"split": "test", "draws": 10, "sequences": 1, "seed": 0, "checkpoint": checkpoint},
        "length": 4096,
        "data": json.loads((run / "environment.json").read_text())["data"],
        **values,
    }
    (run / "analysis").mkdir(exist_ok=True)
    (run / "analysis" / f"divergence-{checkpoint}.json").write_text(json.dumps(record))


def write_table_1(folder: Path, data: dict[str, Any] | None = None) -> Path:
    """Write the 27 runs of Table 1 with the paper's bits and speeds, 0.1 bits worse."""
    from rtx.report.paper import paper_tables

    for row in paper_tables()[0].rows:
        values: dict[str, Any] = {"routing__heads": 0} if row.kind in ("full", "local") else {}
        values |= {"model__base": "full"} if row.kind == "full" else {}
        if row.kind in ("routing", "random"):
            values |= {"routing__heads": row.routing_heads, "routing__layers": row.routing_layers}
            values |= {"routing__window": row.window}
        values |= {"routing__selection": "random"} if row.kind == "random" else {}
        assert row.value and row.steps_per_second
        write_run(folder, config(**values), bits=row.value + 0.1, speed=row.steps_per_second, data=data)
    return folder
