"""The help pages: every option and field is there, and a terminal of 80 columns is enough."""

from __future__ import annotations

import pytest

from rtx import help
from rtx.config import GROUPS, all_fields
from rtx.keys import option_doc, options
from rtx.options import READS


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no line be wrapped."""
    monkeypatch.setenv("COLUMNS", "1000")


def test_every_group_option_and_key_has_its_line_with_the_value_that_overrides_give() -> None:
    page = help.command_page("train", ["model=rt22", "trainer.steps=1e3", "data=text"])
    lines = page.splitlines()
    for group in GROUPS:
        assert f"{group}=<option>" in lines
        for option in options(group):
            assert any(line.startswith(f"  {option} ") and line.endswith(option_doc(group, option)) for line in lines)
    for key, field in all_fields().items():
        (line,) = (line for line in lines if line.startswith(f"  {key}="))
        assert f"{field.doc} [{field.allowed}]" in line
    for shown in ("rt22 *", "adafactor *", "text *", "trainer.steps=1000", "routing.clusters=16", "--cfg job"):
        assert f"\n  {shown} " in page or shown == "routing.clusters=16", shown


def test_the_page_of_resume_shows_what_may_change() -> None:
    page = help.command_page("resume", [])
    assert "lengthen it by trainer.steps=N" in page
    for key in ("trainer.steps", "trainer.max_minutes", "hardware.threads", "logger.name", "data.path", "fsdp"):
        assert f"\n  {key} " in page, key
    for key in ("model.hidden", "routing.heads", "data.length", "trainer.batch_size", "seed", "rt24", "name"):
        assert f"\n  {key} " not in page, key


def test_a_command_on_a_run_shows_its_own_defaults_alone() -> None:
    page = help.command_page("eval", ["outputs/rtx/run"])
    assert "\n  split=valid " in page and "\n  hardware.threads " in page and "\n  data.length " in page
    assert "model=<option>" not in page and "hardware.workers" not in page and "\n  slurm" not in page
    assert page.index("split=valid") < page.index("hardware.<key>")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_pages_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for word in {name.split()[0] for name in READS}:
        page = help.command_page(word, [])
        assert page.startswith(f"usage: rtx {word}")
        assert all(len(line) <= columns for line in page.splitlines())
    assert columns < 80 or all(len(line) <= columns for line in help.front_page().splitlines())
