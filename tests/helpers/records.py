"""Folders of runs as `rtx train` leaves them, made up without training anything."""

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rtx.runs.records import TIMED_STEPS
from rtx.settings.compose import compose
from rtx.settings.identity import digest
from rtx.settings.schema import flat, to_dict

DATA = {"name": "text", "unit": "byte", "fingerprint": "f00d" * 4}
IMAGES = {"name": "cifar10", "unit": "dim", "fingerprint": "abcd" * 4}
LOCAL = {"routing__heads": 0, "routing__selection": "causal"}
FULL = {"routing__heads": 0, "model__base": "full"}
CAUSAL = {"routing__selection": "causal"}
ENVIRONMENT = {
    "command": "/somewhere/rtx train data=text data.path=book.txt",
    "versions": {"rtx": "0.1", "torch": "2.11.0"},
    "git": {"commit": "0123456789abcdef"},
    **{"gpu": None, "threads": 2, "python": "3.11.7"},
}


@functools.cache
def base(experiment: str) -> dict[str, Any]:
    return to_dict(compose(f"experiment={experiment}".split()))


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
    error: float = 0.02,
    curve: Mapping[int, tuple[float, float]] | None = None,
    environment: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write the records of a run below a folder and return its folder.

    `more` goes into its final score, `error` is the standard error of this score, `curve` has
    train_seconds and bits of validations by step.
    """
    run = folder / digest(flat(made))
    data = data or DATA
    (run / "checkpoints").mkdir(parents=True)
    # The C library writes ten times as fast, where it is there.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    (run / "config.yaml").write_text(yaml.dump(made, Dumper=dumper, sort_keys=False))
    (run / "environment.json").write_text(
        json.dumps({**ENVIRONMENT, "data": data, **(environment or {})})
    )
    final = None if bits is None else {"bits": bits, "unit": data["unit"], "units": 1000, **more}
    status = {
        "state": state,
        "reason": reason,
        "step": step,
        "steps": 200_000,
        "final": final,
        "host": "h",
        "pid": 1,
    }
    (run / "status.json").write_text(json.dumps({**status, "heartbeat": "2020-01-01T00:00:00Z"}))
    pace = speed * made["trainer"]["batch_size"] * made["data"]["length"]
    with open(run / "metrics.jsonl", "w") as file:
        for at, (seconds, bits_then) in (curve or {}).items():
            row = {
                "kind": "valid",
                "step": at,
                "val_bits": bits_then,
                "val_units": 500,
                "train_seconds": seconds,
            }
            file.write(json.dumps(row) + "\n")
        for at in range(1, 1 if curve else 21):
            value = (bits or 4.0) + 5.0 / at
            for row in (
                {"kind": "train", "step": at * 100, "bits": value, "tokens_per_second": pace},
                {"kind": "valid", "step": at * 100, "val_bits": value + 0.02, "val_units": 500},
            ):
                file.write(json.dumps(row) + "\n")
        if bits is not None:
            last = {
                "kind": "final",
                "step": step,
                "val_bits": bits,
                "val_units": 1000,
                "val_se": error,
            }
            file.write(json.dumps(last) + "\n")
    return run


def write_eval(run: Path, bits: float, **values: Any) -> None:
    data = json.loads((run / "environment.json").read_text())["data"]
    record = {
        f"bits_per_{data['unit']}": bits,
        "standard_error": 0.01,
        "units": 5000,
        "partial": False,
        "windows": 5,
    }
    record |= {
        "split": "test",
        "mode": "parallel",
        "ablate": "none",
        "length": 3072,
        "stride": 3072,
        "data": data,
    }
    record |= {
        "selection_sees_future": True,
        "own_data": True,
        "checkpoint": {"name": "best", "step": 2000},
        **values,
    }
    (run / "eval").mkdir(exist_ok=True)
    (run / "eval" / f"{len(list((run / 'eval').iterdir()))}.json").write_text(json.dumps(record))


def write_divergence(
    run: Path, layers: int = 10, checkpoint: str = "best", length: int = 4096
) -> None:
    """Write a record of `rtx analyze divergence`: 0.01 n + 0.1 k nats in layer n for kind k."""
    kinds = (["local", "local"], ["local", "routed"], ["routed", "routed"])
    rows = [
        {"layer": n, "kind": kind, "mean": 0.01 * n + 0.1 * k, "deviation": 0.002}
        for n in range(layers)
        for k, kind in enumerate(kinds)
    ]
    data = json.loads((run / "environment.json").read_text())["data"]
    record = {
        "what": "divergence",
        "layers": rows,
        "checkpoint": {"name": checkpoint, "step": 2000},
        "data": data,
    }
    record |= {"analyze": {"split": "test", "draws": 10, "sequences": 1}, "length": length}
    (run / "analysis").mkdir(exist_ok=True)
    (run / "analysis" / f"divergence-{checkpoint}.json").write_text(json.dumps(record))


def timed_row(
    milliseconds: float, experiment: str = "cifar10", reason: str | None = None, **values: Any
) -> dict[str, Any]:
    turns = [milliseconds, milliseconds * 1.01, milliseconds * 0.99]
    return {
        "config": config(experiment, **values),
        "ms_turns": turns,
        "parameters": 1000,
        "reason": reason,
    }


def steps_record(*rows: dict[str, Any], **facts: Any) -> dict[str, Any]:
    how = {
        "bench": {"turns": 3, "per_turn": 2, "warmup": 2},
        "ids": "training batches",
        "device": "CPU, 1 thread",
    }
    return {"what": TIMED_STEPS, **how, "time": "2026", "rows": rows, **facts}


def write_record(folder: Path, content: Any, name: str = "a") -> Path:
    (folder / "bench").mkdir(exist_ok=True, parents=True)
    path = folder / "bench" / f"steps-{name}.json"
    path.write_text(json.dumps(content))
    return path


def pretrained_record(text: str, above: Mapping[tuple[str, int], list[float]]) -> dict[str, Any]:
    """Return a record of `rtx analyze pretrained` of a model with two layers of two heads.

    Args:
        text: the name of the text.
        above: the bits above dense of each window, by selection and keys.
    """
    rows = []
    for (selection, keys), bits in above.items():
        row = {
            "label": selection,
            "choice": {"selection": selection, "keys": keys, "window": 8},
            "k": keys,
            "above": sum(bits) / len(bits),
            "above_of_windows": bits,
            "late": 0.1,
            "keys": 8.0 + keys,
            "pairs": 20.0 + keys,
            "kept": 0.5,
            "kept_of_heads": [[0.25, 0.5], [0.75, None]],
        }
        rows.append(row)
    windows = len(rows[0]["above_of_windows"])
    return {
        "what": "pretrained",
        "dense": {"bits": 3.0, "bits_per_byte": 1.0, "bits_of_windows": [3.0] * windows, "keys": 9},
        "weight": {
            "sinks": 0.3,
            "sinks_error": 0.1,
            "far": 0.4,
            "sinks_of_heads": [[0.1, 0.2], [0.3, 0.4]],
            "far_of_heads": [[0.5, 0.6], [0.7, 0.0]],
        },
        "rows": rows,
        "seconds": 1.0,
        "parameters": 100,
        "memory": 1000,
        "precision": "fp32",
        "analyze": {"model": "/models/small", "length": 64, "window": 8, "sinks": 4, "keys": "4,8"},
        "data": {**DATA, "fingerprint": text * 8, "source": {"place": f"/texts/{text}"}},
        "time": "2026-01-01T00:00:00Z",
    }
