"""The help pages: every option and field is there, and a terminal of 80 columns is enough."""

from __future__ import annotations

import pytest

from rtx.cli import COMMANDS
from rtx.commandline import help
from rtx.config import GROUPS, all_fields
from rtx.keys import option_doc, options


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no line be wrapped."""
    monkeypatch.setenv("COLUMNS", "1000")


def test_every_group_option_and_key_has_its_line() -> None:
    lines = help.command_page("train", []).splitlines()
    for group in GROUPS:
        assert f"{group}=<option>" in lines
        for option in options(group):
            assert any(line.startswith(f"  {option} ") and line.endswith(option_doc(group, option)) for line in lines)
    for key, field in all_fields().items():
        (line,) = (line for line in lines if line.startswith(f"  {key}="))
        assert f"{field.doc} [{field.allowed}]" in line


def test_the_page_of_resume_says_how_a_run_is_lengthened() -> None:
    page = help.command_page("resume", [])
    assert "trainer.steps=N or trainer.max_minutes=M lengthens a run that is done" in page
    for key in ("trainer.steps", "trainer.max_minutes", "hardware.threads", "logger.name", "data.path", "fsdp"):
        assert f"\n  {key} " in page, key
    for key in ("model.hidden", "routing.heads", "data.length", "trainer.batch_size", "seed", "rt24"):
        assert f"\n  {key} " not in page, key


def test_values_and_stars_follow_the_overrides() -> None:
    page = help.command_page("train", ["model=rt22", "trainer.steps=1e3"])
    assert "\n  rt22 * " in page
    assert "\n  adafactor * " in page
    assert "\n  trainer.steps=1000 " in page
    assert "\n  routing.clusters=16 " in page
    assert "\n  experiment" not in page


def test_an_incomplete_configuration_has_its_help() -> None:
    assert "\n  text * " in help.command_page("train", ["data=text"])


def test_a_command_on_a_run_shows_its_own_defaults_alone() -> None:
    page = help.command_page("eval", ["outputs/rtx/run"])
    assert "\n  split=valid " in page
    assert "\n  hardware.threads " in page
    assert "model=<option>" not in page
    assert "hardware.workers" not in page
    assert "\n  ddp" not in page and "\n  fsdp" not in page
    assert "\n  data.length " in page
    assert page.index("rtx eval: ") < page.index("hardware.<key>")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_pages_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for word in COMMANDS:
        page = help.command_page(word, [])
        assert page.startswith(f"usage: rtx {word} ")
        assert all(len(line) <= columns for line in page.splitlines())
    if columns >= 80:
        assert all(len(line) <= columns for line in help.front_page(COMMANDS).splitlines())


def test_a_pipe_has_a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("os.get_terminal_size", lambda _: (_ for _ in ()).throw(OSError))
    assert help.terminal_width() == 100
