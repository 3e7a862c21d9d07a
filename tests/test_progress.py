"""The bar of long commands: a bar on a terminal, a plain line now and then elsewhere, nothing for quick work."""

from __future__ import annotations

import io
import sys

import pytest

from rtx import progress


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_lines_where_there_is_no_terminal(
    patience: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", patience)
    with progress.progress_bar("windows") as show:
        for done in (1, 2, 3):
            show(done, 3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if patience else 3)
    assert all(len(line) < 80 and f"{done}/3" in line and "windows" in line for done, line in enumerate(lines, 1))


def test_a_bar_on_a_terminal_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt), progress.progress_bar("layers") as show:
        show(1, 2)
        raise KeyboardInterrupt
    assert "layers" in terminal.getvalue() and terminal.getvalue().endswith("\r")
