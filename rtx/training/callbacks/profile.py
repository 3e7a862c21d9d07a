"""`trainer.profile=N`: what CPU and GPU do in N steps, as a trace for https://ui.perfetto.dev."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from rtx.disk import read_named, write_inside
from rtx.errors import plural
from rtx.runs.folder import shown

TRACE = "trace.json.gz"
SKIPPED = 3
"""Steps before the profiler begins, in which kernels are chosen and memory is laid out."""
WARM_UP = 2
"""Steps that are traced and dropped, because the start of the profiler is slow."""


class Profile(Callback):
    """Records `steps` optimizer steps, or fewer if the run ends, and prints the trace's path."""

    def __init__(self, folder: Path, steps: int, say: Callable[[str], object]) -> None:
        self.folder = folder
        self.steps = steps
        self.say = say
        self.profiler: profile | None = None

    def on_train_start(self, *_: Any) -> None:
        requested = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
        turns = schedule(skip_first=SKIPPED, wait=0, warmup=WARM_UP, active=self.steps, repeat=1)
        activities = requested & supported_activities()
        self.profiler = profile(activities=activities, schedule=turns, on_trace_ready=self.write)
        self.profiler.start()

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.profiler:
            self.profiler.step()

    def on_train_end(self, *_: Any) -> None:
        self.stop()

    def on_exception(self, *_: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """End a recording that still goes on; if none has begun, print a line."""
        if self.profiler:
            self.profiler.stop()
        # Still set: `write` has not been called.
        if self.profiler:
            self.profiler = None
            first = SKIPPED + WARM_UP + 1
            ended = f"the run ended before step {first} of this process"
            self.say(f"trainer.profile={self.steps}: {ended}")

    def write(self, profiler: profile) -> None:
        """Write the trace, compressed; an error is printed, and the run goes on."""
        recorded = profiler.step_num - SKIPPED - WARM_UP
        # The run ended just before the first recorded step.
        if recorded < 1:
            return
        self.profiler = None
        try:
            # by path: a new folder of this process
            with tempfile.TemporaryDirectory() as folder:
                made = Path(folder) / TRACE
                profiler.export_chrome_trace(str(made))
                write_inside(self.folder, TRACE, read_named(made))
        except OSError as error:
            self.say(f"trainer.profile={self.steps}: no trace is written: {error}")
        else:
            steps = plural(recorded, "step")
            trace = shown(self.folder / TRACE)
            self.say(f"the trace of {steps} is {trace}: https://ui.perfetto.dev opens it")
