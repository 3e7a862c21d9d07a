"""What a row of results says of where it was measured, and with which code."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from rtx import __version__
from rtx.runs.environment import code_commit

CPUS = Path("/proc/cpuinfo")


def machine(device: str, threads: int) -> str:
    """Return the name of the GPU, or that of the processor with its architecture and the threads
    used.
    """
    if device in ("cuda", "gpu"):
        return torch.cuda.get_device_name()
    return ", ".join([*filter(None, [processor()]), platform.machine(), f"{threads} threads"])


def processor() -> str:
    """Return the processor's name as Linux has it; elsewhere as Python has it, or nothing."""
    try:
        lines = CPUS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""
    )


def code() -> dict[str, str]:
    """Return the versions of rtx and torch, and the commit of a checkout (marked where files differ
    from it).
    """
    commit = (code_commit() or "").replace("-dirty", " with changes")
    return (
        {"rtx": __version__} | ({"commit": commit} if commit else {}) | {"torch": torch.__version__}
    )
