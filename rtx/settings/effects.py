"""What another value of a key changes about a run.

Each key of `rtx/settings/schema.py` names one of these effects. The identity of a cell, the rows
of a report, what a resume may change and what the processes of a run must share follow from it
(`rtx/settings/identity.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Effect:
    """The answers to four questions about two runs that differ by one key."""

    about: str
    new_cell: bool
    """Whether they are two cells of a sweep: the value is part of a cell's hash."""
    new_row: bool
    """Whether they are two rows of a report, rather than repetitions in one row."""
    resumable: bool
    """Whether a run may be resumed with the other value."""
    shared: bool = True
    """Whether all processes of one run must have the same value."""


RESULTS = Effect(
    "other data, another model or another training: other results",
    new_cell=True,
    new_row=True,
    resumable=False,
)
REPETITION = Effect(
    "other random draws: the same experiment once more",
    new_cell=True,
    new_row=False,
    resumable=False,
)
CONTINUATION = Effect(
    "the results of the steps to come: how many they are, in which precision",
    new_cell=True,
    new_row=True,
    resumable=True,
)
SCHEDULE = Effect(
    "when a run validates and logs, and so which checkpoint is the best; not the training",
    new_cell=True,
    new_row=False,
    resumable=True,
)
ROUNDING = Effect(
    "where and in which order the same sums are computed: the last digits and the speed",
    new_cell=True,
    new_row=False,
    resumable=True,
)
COST = Effect(
    "memory, time and disk space of the same run, which may choose them itself",
    new_cell=False,
    new_row=False,
    resumable=True,
)
LOCATION = Effect(
    "where the data are on this machine; their fingerprint says whether they are the same",
    new_cell=True,
    new_row=False,
    resumable=True,
    shared=False,
)
NOTHING = Effect(
    "names, further records, and helpers of one process: no digit of a result",
    new_cell=False,
    new_row=False,
    resumable=True,
    shared=False,
)
