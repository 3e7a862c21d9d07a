"""Jobs of Slurm on a cluster that keeps no accounts: submitit asks `sacct` how they end, which knows nothing there.

Without this the end of a job that was killed or cancelled would never be noticed.
"""

from __future__ import annotations

import subprocess

import submitit
from submitit.slurm.slurm import SlurmInfoWatcher

LOOK_SECONDS = 20
"""Longest time between two looks at the queue, which forgets a job five minutes after its end (Slurm's MinJobAge)."""


class QueueWatcher(SlurmInfoWatcher):
    """Learns the states of jobs from `squeue`."""

    def _make_command(self) -> list[str] | None:
        if not self._registered - self._finished:
            return None
        return ["squeue", "--me", "--states=all", "--noheader", "--format=%i|%T|%N"]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Return the states of the queue's jobs; one that was there and is no more has ended."""
        listed = string if isinstance(string, str) else string.decode()
        found = super().read_info(f"JobID|State|NodeList\n{listed}")
        gone = (self._registered & self._info_dict.keys()) - found.keys()
        return found | {job: {"JobID": job, "State": "COMPLETED"} for job in gone}


def watch_jobs() -> None:
    """Let submitit ask the queue where there are no accounts."""
    try:
        accounts = subprocess.run(["sacct", "--noheader"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        accounts = False
    if not accounts:
        submitit.SlurmJob.watcher = QueueWatcher(delay_s=LOOK_SECONDS)
