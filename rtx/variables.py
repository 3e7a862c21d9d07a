"""Environment variables by which the processes of rtx know who started them."""

import os

PARENT_VARIABLE = "RTX_PARENT"
"""Process id of a run's first process, set for the other processes of that run."""
SWEEP_VARIABLE = "RTX_SWEEP"
"""Process id of the process that started a run: a sweep, or a caller from Python.

The run stops when that process ends.
"""


def started_by_another() -> bool:
    """Whether the first process of a run has started this one."""
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    return not is_first_here and os.environ.get(PARENT_VARIABLE) == str(os.getppid())
