"""The cells of a sweep on this machine: one after the other, or several side by side.

Each runs in a process of its own, which a thread of this one waits for. (Hydra's joblib launcher would put worker
processes in between, of a package from 2022, which keep signals and kills from the cells and share out no threads.)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rtx.commandline.cells import Cell, InUse, Outcome
from rtx.commandline.children import Children
from rtx.config import Config
from rtx.errors import UserError
from rtx.training.launchers import cores

LOOK_SECONDS = 1.0
"""Time between two looks at a cell that another process works on."""

Work = Callable[[Cell, int], Outcome]
"""Runs a cell in one of the places side by side, which are numbered from 0; raises `InUse`."""


class Line:
    """The cells that wait; those that another process works on wait behind all others."""

    def __init__(self, cells: Sequence[Cell], children: Children) -> None:
        self.waiting = list(cells)
        self.later: list[Cell] = []
        self.told: set[int] = set()
        self.children = children
        self.guard = threading.Lock()

    def take(self) -> Cell | None:
        """Return the next cell, None where there is none left; waits before one that was in use is tried again."""
        with self.guard:
            if self.waiting:
                return self.waiting.pop(0)
            again = self.later.pop(0) if self.later else None
        if again is not None:
            self.children.stopping.wait(LOOK_SECONDS)
        return again

    def put_off(self, cell: Cell, who: str) -> None:
        """Take back a cell that is in use; say so once."""
        with self.guard:
            self.later.append(cell)
            if cell.number not in self.told:
                self.told.add(cell.number)
                print(f"\ncell {cell.number}: {who}; the others go first, then it is waited for", flush=True)


def run_cells(cells: Sequence[Cell], places: int, work: Work, children: Children) -> list[Outcome]:
    """Run every cell, some side by side; returns how each ended."""
    line, outcomes = Line(cells, children), []

    def run_next(place: int) -> None:
        while (cell := line.take()) is not None:
            try:
                outcomes.append(work(cell, place))
            except InUse as use:
                line.put_off(cell, str(use))
            except (UserError, OSError) as error:  # a full disk must not end the other cells
                outcomes.append(Outcome(cell.number, 2, "failed", str(error)))

    with ThreadPoolExecutor(places) as pool:
        for done in [pool.submit(run_next, place) for place in range(places)]:
            done.result()
    return outcomes


def share(config: Config, place: int, places: int) -> dict[str, str]:
    """Return the variables that give a cell its part of the machine: of the threads, and of the GPUs where several are.

    What the user has set stays: hardware.threads, OMP_NUM_THREADS, and hardware=ddp, whose processes share the GPUs.
    """
    variables: dict[str, str] = {}
    if places > 1 and config.hardware.threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = cores() // (places * (config.hardware.devices or 1))
        variables["OMP_NUM_THREADS"] = str(max(1, threads))
    devices = gpus() if places > 1 and config.hardware.name in ("auto", "gpu") else []
    if len(devices) > 1:
        variables["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
    return variables


def gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
