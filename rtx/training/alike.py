"""Whether the processes of a run begin alike: each composes its configuration, opens its data, reads its checkpoint."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from rtx.errors import UserError
from rtx.identity import counts
from rtx.training.changes import differences
from rtx.training.job import Job
from rtx.training.ranks import Ranks


def check_alike(ranks: Ranks, job: Job) -> None:
    """Compare, before the first step, what the processes begin with; all of them call it.

    Where the data lie, and what cannot change a bit of the result, may differ.

    Raises:
        UserError: on all of them alike; names a process that differs from the first one, and both values.
    """
    if ranks.world == 1:
        return
    own = {"step": job.first_step, "data": job.data["fingerprint"], "config": job.plain_config}
    first, *others = ranks.gather({**own, "host": socket.gethostname()})
    for rank, other in enumerate(others, 1):
        if different := [f"{what} {theirs}, not {ours}" for what, ours, theirs in unlike(first, other)]:
            raise UserError(
                f"the processes of the run do not begin alike: process {rank} (on {other['host']}) has "
                f"{'; '.join(different)} as the first one (on {first['host']})"
            )


def unlike(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return what differs between what two processes begin with: its name, and both values."""
    fields = [
        (f"{key} =", a, b)
        for key, (a, b) in differences(first["config"], other["config"]).items()
        if key != "data.path" and counts(key)
    ]
    found = [("a checkpoint of step", first["step"], other["step"]), *fields]
    return [entry for entry in [*found, ("data of fingerprint", first["data"], other["data"])] if entry[1] != entry[2]]
