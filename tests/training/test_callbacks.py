"""The callbacks of a run: when they look at numbers, their order, and what docs/training.md says of
them.
"""

import inspect
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from rtx.errors import RunFailed
from rtx.model.transformer import Transformer
from rtx.settings.compose import compose
from rtx.training.callbacks.not_finite import NotFinite
from rtx.training.callbacks.rows import MetricsRows
from rtx.training.callbacks.validations import Validations
from rtx.training.checkpoint import with_current_callbacks
from rtx.training.distributed import Ranks
from rtx.training.hardware import resolve_hardware
from rtx.training.module import TrainingModule
from rtx.training.session import GPU_LOOKS, Session

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
SMALL = "model.layers=1 model.hidden=16 model.heads=2 model.window=8 data.length=32"
SMALL += " routing.heads=1 routing.layers=1 routing.window=8 hardware=cpu"


def session(folder: Path, accelerator: str = "cpu", **status: Any) -> Session:
    """Return the session of a small run without data."""
    config = compose([*SMALL.split(), "trainer.log_every=100", "trainer.steps=1000"])
    hardware = resolve_hardware(config)
    hardware = hardware.__class__(**{**vars(hardware), "accelerator": accelerator})
    return Session(
        config=config,
        requested=config,
        hardware=hardware,
        folder=folder,
        store=mock.Mock(),
        cost=mock.Mock(),
        signals=mock.Mock(),
        ranks=Ranks(0, 1),
        **status,
    )


def test_a_gpu_is_looked_at_every_few_steps_and_where_something_is_due(tmp_path: Path) -> None:
    run = session(tmp_path, "gpu")
    looks = [step for step in range(1, 101) if run.looks_at(step)]
    assert looks == sorted({1, 100, *range(GPU_LOOKS, 101, GPU_LOOKS)})
    assert all(session(tmp_path).looks_at(step) for step in range(1, 20)), "a CPU has no wait"
    run.begin({"step": 40})
    assert (run.looks_at(41), run.looks_at(42), run.saved_step) == (True, False, 40)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    run = session(tmp_path)
    trainer: Any = SimpleNamespace(global_step=3)
    good = SimpleNamespace(sums=torch.tensor([2.0, 0.0, 2.0]), norm=torch.tensor(1.0))
    NotFinite(run).on_train_batch_end(trainer, good)
    assert run.bits == pytest.approx(1 / 0.6931471805599453)
    bad = SimpleNamespace(sums=good.sums, norm=torch.tensor(float("inf")))
    with pytest.raises(RunFailed, match="step 3: the norm of the gradient is inf at learning rate"):
        NotFinite(run).on_train_batch_end(trainer, bad)


def test_states_of_callbacks_of_earlier_versions_are_read(tmp_path: Path) -> None:
    best = {"bits": 1.5, "step": 4, "windows": 5}
    former = {"Watch": {"seconds": 2.0, "clock": {}, "best": best, "ranks": [{}]}}
    states = with_current_callbacks(former)
    assert states["RankStates"] == {"ranks": [{}]}
    assert states["Timing"] == {"seconds": 2.0, "clock": {}}
    validations = Validations(session(tmp_path))
    validations.load_state_dict(states[validations.state_key])
    assert validations.session.best == best and with_current_callbacks(states) is states


def test_the_page_shows_the_step_as_it_is_and_its_callback_works(tmp_path: Path) -> None:
    page = PAGE.read_text()
    assert inspect.getsource(TrainingModule.take_step) in page
    (code,) = re.findall(r"```python\n(\"\"\"Snapshots.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(code), names)
    run = session(tmp_path, status=mock.Mock())
    module = SimpleNamespace(model=Transformer(run.config, 256))
    for step in (99, 100):
        trainer: Any = SimpleNamespace(global_step=step)
        names["Snapshots"](run).on_train_batch_end(trainer, module)
    (saved,) = (tmp_path / "snapshots").iterdir()
    assert saved.name == "step100.pt" and torch.load(saved, weights_only=True)


def test_a_row_is_written_when_due_and_at_the_end(tmp_path: Path) -> None:
    run = session(tmp_path)
    rows = MetricsRows(run, mock.Mock())
    with mock.patch.object(MetricsRows, "training_row", return_value={"bits": 1.0}):
        for step, should_stop in ((99, False), (100, False), (150, True)):
            trainer: Any = mock.Mock(global_step=step, should_stop=should_stop, loggers=[logger])
            rows.on_train_batch_end(trainer, mock.Mock())
    assert [call.args[1] for call in logger.log_metrics.call_args_list] == [100, 150]


logger = mock.Mock()
