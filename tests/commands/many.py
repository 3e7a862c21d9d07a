"""Commands on several processes, whoever starts them, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from small_runs import Workshop

TWO = ("hardware.devices=2", "hardware.threads=1", "trainer.micro_batch_size=1")
"""Two processes on this machine, which take the four sequences of a step in two passes."""

LAUNCHERS = ("lightning", "torchrun", "srun", "machines")
"""Who starts the processes: the first of them, torchrun, Slurm's srun, or a user on each of two machines."""


def start(workshop: Workshop, launcher: str, run: Path, *arguments: str) -> list[subprocess.Popen[bytes]]:
    """Start a command on two processes, the first in front; what they say goes to a file beside the run.

    Slurm and the second machine are played by the variables that they would set.
    """
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    slurm = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    own: list[dict[str, str]] = {
        "srun": [port | slurm | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"],
        "machines": [port | {"NODE_RANK": rank} for rank in "01"],
    }.get(launcher, [{}])
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    where = ("hardware.devices=1", "hardware.nodes=2") if launcher == "machines" else ()
    command = [sys.executable, *(torchrun if launcher == "torchrun" else ()), "-m", "rtx", *arguments, *where]
    with open(run.with_suffix(".log"), "ab") as log:
        return [
            subprocess.Popen(
                command,
                env={**os.environ, **workshop.environment(run), **variables},
                stdout=log,
                stderr=log,
                process_group=0,
            )
            for variables in own
        ]


def ended(run: Path, processes: list[subprocess.Popen[bytes]], *codes: int) -> str:
    """Wait for processes that end with these codes (or all with 0), and return what they said."""
    for process, code in zip(processes, codes or [0] * len(processes), strict=True):
        assert process.wait(timeout=240) == code, said(run)
    return said(run)


def said(run: Path) -> str:
    """Return what the commands on a run have said so far."""
    return run.with_suffix(".log").read_text()


def children(process: int) -> list[int]:
    """Return the numbers of the processes that a process has started and that are still there."""
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
