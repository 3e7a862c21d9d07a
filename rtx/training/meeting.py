"""Where the processes of a run that others start wait for each other, and learn which of them cannot begin.

Until they have met nobody knows of an error of another process, and each would wait for half an hour. torchrun ends all
of them by itself, and rtx looks after those that it starts; srun, and a user with several machines, do not.
"""

from __future__ import annotations

import select
import socket
import time
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed hands it on without saying so

from rtx.errors import RunFailed, UserError
from rtx.training.fit import cluster_environment
from rtx.training.hardware import Hardware
from rtx.training.signals import started_by_another

COME_SECONDS = 120.0
"""Time for all processes to come: they start together, and import torch."""

READY_SECONDS = 1800.0
"""Time to be ready: each machine may have data to prepare."""

POLL_SECONDS = 0.2
PROBLEM = "rtx/problem"


class Meeting:
    """A context that a process enters as it begins, and stays in; it does nothing where nobody has to meet.

    An error that leaves it before all are ready is told to the others, at torch's own store: the first process keeps it
    at MASTER_ADDR and MASTER_PORT, and its process group finds it there later.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware, self.rank = hardware, hardware.rank
        srun = hardware.launcher == "srun"
        by_hand = hardware.launcher == "lightning" and hardware.nodes > 1 and not started_by_another()
        self.needed = hardware.world > 1 and (srun or by_hand)
        self.ranks = range(0, hardware.world, 1 if srun else hardware.devices)
        """Those that meet; where one starts the others of its machine, that one."""
        self.complete = False
        """Whether all were ready: from then on they fail together, and the first process says why."""
        self.joined = False
        self.store: TCPStore | None = None
        self.line: socket.socket | None = None
        """An idle connection to the first process, which ends with it."""

    @property
    def heard(self) -> bool:
        """Whether the first process says why this one ends; where it only may, on the screen that srun has for all."""
        return self.complete or (self.joined and self.hardware.launcher == "srun")

    def __enter__(self) -> Meeting:
        """Come to the meeting point.

        Raises:
            UserError: nobody can meet there.
            RunFailed: the first process does not come.
        """
        if not self.needed:
            return self
        place = cluster_environment(self.hardware)
        self.where = f"MASTER_ADDR={place.main_address} MASTER_PORT={place.main_port}"
        if self.rank:
            self.line = self.reach(place.main_address, place.main_port)
        limit = timedelta(seconds=COME_SECONDS)
        try:
            self.store = TCPStore(
                place.main_address,
                place.main_port,
                None,
                not self.rank,
                limit,
                wait_for_workers=False,
                multi_tenant=True,
            )
            self.store.set(self.key("here", self.rank), "")
        except dist.DistError as error:
            raise UserError(f"{self.where}: the first process cannot be met there: {error}".splitlines()[0]) from error
        self.joined = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.store and error and not self.complete and not self.first_ends(0.0):
            known = "user" if isinstance(error, UserError) else "run"
            reason = f"process {self.rank} (on {socket.gethostname()}): {error or type(error).__name__}"
            self.store.set(PROBLEM, f"{known} {reason}")
        self.store = None
        if self.line:
            self.line.close()

    def wait_for_all(self) -> None:
        """Wait until all processes are ready to begin.

        Raises:
            UserError: another one tells a mistake of the user.
            RunFailed: another one cannot begin, does not come, or is gone.
        """
        if self.store:
            try:
                self.watch(self.store)
            except dist.DistError as error:
                raise self.first_is_gone() from error
        self.complete = True

    def watch(self, store: TCPStore) -> None:
        """Look for the others until they are ready, or something is wrong (as `wait_for_all`)."""
        store.set(self.key("ready", self.rank), "")
        begun = time.monotonic()
        while not store.check([self.key("ready", rank) for rank in self.ranks]):
            if store.check([PROBLEM]):
                known, _, reason = store.get(PROBLEM).decode().partition(" ")
                raise (UserError if known == "user" else RunFailed)(reason)
            for what, limit in (("here", COME_SECONDS), ("ready", READY_SECONDS)):
                missing = [rank for rank in self.ranks if not store.check([self.key(what, rank)])]
                if missing and time.monotonic() - begun > limit:
                    late = f"process {missing[0]} of {self.hardware.world} is not {what} after {limit:g} s"
                    hint = "each must be started, with the same hardware.nodes and hardware.devices"
                    raise RunFailed(f"{late} ({self.where}); {hint}")
            if self.first_ends(POLL_SECONDS):
                raise self.first_is_gone()

    def key(self, what: str, rank: int) -> str:
        """Return the entry by which a process says something; of another number of processes it is another."""
        return f"rtx/{what}/{rank} of {self.hardware.world}"

    def first_ends(self, seconds: float) -> bool:
        """Wait so many seconds, or until the first process has ended: then True."""
        return bool(select.select([self.line] if self.line else [], [], [], seconds)[0])

    def first_is_gone(self) -> RunFailed:
        """Return the error that says so."""
        return RunFailed(f"the first process of the run ended before the first step, and says why ({self.where})")

    def reach(self, address: str, port: int) -> socket.socket:
        """Connect to the first process, as soon as it is there.

        Raises:
            RunFailed: it does not come.
        """
        late = time.monotonic() + COME_SECONDS
        while time.monotonic() < late:
            try:
                return socket.create_connection((address, port), timeout=COME_SECONDS)
            except OSError:
                time.sleep(POLL_SECONDS)
        raise RunFailed(f"the first process of the run is not here after {COME_SECONDS:g} s ({self.where})")
