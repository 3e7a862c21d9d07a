"""Reports on folders of made-up runs."""

from pathlib import Path

import pytest

from rtx.report import contents
from rtx.report.contents import Report, build
from rtx.report.run_records import collect


def built(*folders: Path) -> Report:
    """Return the report of all records below some folders."""
    return build(collect(folders), "a report")


def without_plots(*folders: Path) -> Report:
    """Return the same report without its plots, which take most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plots_of", "pretrained_plots"):
            patch.setattr(contents, name, lambda *of_what: [])
        patch.setattr(contents, "bits_and_time", lambda *of_what: None)
        return built(*folders)
