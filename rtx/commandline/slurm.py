"""Jobs of Slurm on a cluster that keeps no accounts: submitit asks `sacct` how they end, which knows nothing there.

Without this the end of a job that was killed or cancelled would never be noticed.
"""

from __future__ import annotations

import re
import subprocess
import threading

import submitit
from submitit.slurm.slurm import SlurmInfoWatcher

LOOK_SECONDS = 20
"""Longest time between two looks at the queue, which forgets a job five minutes after its end (Slurm's MinJobAge)."""

ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
"""States of the queue that a job does not leave any more; submitit takes those that it does not know for such."""


class QueueWatcher(SlurmInfoWatcher):
    """Learns the states of jobs from `squeue`."""

    def __init__(self, delay_s: int) -> None:
        super().__init__(delay_s)
        self.guard = threading.Lock()
        self.listed: set[str] = set()
        """The jobs that have been seen in the queue."""

    def _make_command(self) -> list[str] | None:
        if not self._registered - self._finished:
            return None
        return ["squeue", "--me", "--states=all", "--noheader", "--format=%i|%T|%N"]

    def update(self) -> None:
        """Look at the queue; the threads of several cells do so one after the other, so that none has an old list."""
        with self.guard:
            super().update()

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Return the states of the queue's jobs; one that was there and is no more has ended."""
        text = string if isinstance(string, str) else string.decode()
        found = super().read_info(f"JobID|State|NodeList\n{text}")
        for stats in found.values():
            stats["State"] = stats["State"] if stats["State"] in (*ENDED, "PENDING") else "RUNNING"
        gone = self.listed - found.keys()
        self.listed |= found.keys() & self._registered
        return found | {job: {"JobID": job, "State": "COMPLETED"} for job in gone}


def watch_jobs() -> None:
    """Let submitit ask the queue where there are no accounts."""
    try:
        accounts = subprocess.run(["sacct", "--noheader"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        accounts = False
    if not accounts:
        submitit.SlurmJob.watcher = QueueWatcher(LOOK_SECONDS)


def kill_wait() -> float:
    """Return the seconds after which Slurm, having sent SIGTERM, kills a job; ten minutes where it does not say."""
    try:
        answer = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 600.0
    found = re.search(r"^KillWait\s*=\s*(\d+)", answer.stdout, re.MULTILINE)
    return float(found[1]) if found else 600.0
