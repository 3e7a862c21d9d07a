"""What the processes of a run tell each other besides gradients. With one process: nothing happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rtx.errors import RunFailed


class Ranks:
    """The processes of a run. Messages travel over CPU memory, so that agreeing on a stop never waits for a GPU."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.group: Any = None

    def connect(self) -> None:
        """Open the channel, once the process group exists; all ranks call it."""
        if self.world > 1 and dist.get_backend() != "gloo":
            self.group = dist.new_group(backend="gloo")

    def largest(self, *values: int) -> list[int]:
        """Return the largest of each value over the ranks."""
        return self._reduce(torch.tensor(values), dist.ReduceOp.MAX)

    def total(self, *values: float) -> list[float]:
        """Return the sum of each value over the ranks."""
        return self._reduce(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM)

    def _reduce(self, values: torch.Tensor, how: Any) -> list[Any]:
        if self.world > 1:
            dist.all_reduce(values, how, group=self.group)
        return values.tolist()

    def gather(self, own: Any) -> list[Any]:
        """Return what every rank gives, in their order."""
        everyone: list[Any] = [own] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, own, group=self.group)
        return everyone

    def first_only(self, work: Callable[[], None]) -> None:
        """Do something on the first rank; then all go on, or all fail.

        Raises:
            RunFailed: the work raised it.
        """
        problem: list[str] = [""]
        if self.rank == 0:
            try:
                work()
            except RunFailed as error:
                problem = [str(error)]
        if self.world > 1:
            dist.broadcast_object_list(problem, group=self.group)
        if problem[0]:
            raise RunFailed(problem[0])
