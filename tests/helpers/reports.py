"""Reports on folders of made-up runs."""

from pathlib import Path

import pytest

from rtx.report.contents import Report, build
from rtx.report.run_records import collect
from tests.helpers.small_runs import draw_nothing


def built(*folders: Path) -> Report:
    """Return the report of all records below some folders."""
    return build(collect(folders), "a report")


def without_plots(*folders: Path) -> Report:
    """Return the same report without its plots, which take most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        return built(*folders)
