"""The tools of the tests of commands: waiting for a run fails in time, it never hangs."""

from __future__ import annotations

import pytest
import small_runs
from small_runs import Workshop


def test_waiting_for_what_a_run_that_is_gone_has_not_shown(workshop: Workshop) -> None:
    process = workshop.start("gone", "trainer.steps=0")
    with pytest.raises(AssertionError, match=r"ended without what was waited for: rtx: trainer\.steps=0"):
        process.kill_when(lambda run: False)
    assert process.wait() == 2


def test_waiting_for_what_a_run_does_not_show(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    process = workshop.start("endless", "trainer.steps=1000000")
    monkeypatch.setattr(small_runs, "PATIENCE", 0.2)
    with pytest.raises(pytest.fail.Exception, match="has not shown"):
        process.until(lambda run: False)
    monkeypatch.undo()
    assert process.wait() == -9
