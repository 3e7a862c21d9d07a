"""Commands on several processes, whoever starts them, for tests."""

from __future__ import annotations

import socket
from pathlib import Path

from small_runs import Process, Workshop

TWO = ("hardware.devices=2", "hardware.threads=1", "trainer.micro_batch_size=1")
"""Two processes on this machine, which take the four sequences of a step in two passes."""


def start(workshop: Workshop, launcher: str, run: Path, *arguments: str) -> list[Process]:
    """Start a command on two processes, the first in front; what they say goes to a file beside the run.

    Who starts them is `rtx` (the first starts the other) or `torchrun`, each as a user would; or they are forked
    with their imports behind them, and find the variables that Slurm sets (`srun`).
    """
    if launcher == "srun":
        return [workshop.fork(run, *arguments, **place) for place in slurm()]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    return [workshop.begin(run, *arguments, starter=torchrun if launcher == "torchrun" else ())]


def slurm() -> list[dict[str, str]]:
    """Return the variables that srun sets for each of two processes."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    shared |= {"SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    return [{**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]


def ended(run: Path, processes: list[Process], code: int = 0) -> str:
    """Wait for processes that all end with this code, and return what they said."""
    for process in processes:
        assert process.wait() == code, said(run)
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
