"""The processes that the first one on a machine starts for a run: how they start, and what we do if one dies."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

LOOK_SECONDS = 0.5
"""Time between two looks at the processes."""

PATIENCE_SECONDS = 10.0
"""Time that the main thread is given to notice by itself that another process is gone, at its next exchange with it."""


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher without its observer: that one kills the first process, too, which then can say nothing."""

    lost: Callable[[str], object] = staticmethod(lambda how: None)
    """Called, by another thread, with how a process ended that should not have, if the work still goes on then."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other processes of this machine, then call a function."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=self.watch, args=(self.procs,), name="children", daemon=True).start()
        return function(*args, **kwargs)

    def watch(self, children: Sequence[subprocess.Popen[bytes]]) -> None:
        """Look after the children until all have left, or one has ended otherwise than with 0."""
        while any(child.poll() is None for child in children) or any(child.returncode for child in children):
            if ended := next((child for child in children if child.returncode), None):
                time.sleep(PATIENCE_SECONDS)
                self.lost(how_it_ended(ended))
                return
            time.sleep(LOOK_SECONDS)


def how_it_ended(child: subprocess.Popen[bytes]) -> str:
    """Return who ended how, in words."""
    code = child.returncode
    try:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    except ValueError:
        how = f"was killed by signal {-code}"
    return f"process {child.pid} of the run {how}"
