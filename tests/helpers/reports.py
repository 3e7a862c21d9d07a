"""Reports on folders of made-up runs."""

from pathlib import Path

import pytest

from rtx.report.contents import Report, build
from rtx.report.drawing import Plot
from rtx.report.run_records import collect
from tests.helpers.small_runs import draw_nothing


def built(*folders: Path) -> Report:
    """Return the report of all records below some folders."""
    return build(collect(folders), "a report")


def without_plots(*folders: Path) -> Report:
    """Return what `built` returns, without plots, which take most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        return built(*folders)


def with_captions(*folders: Path) -> Report:
    """Return what `built` returns, with plots that have names and captions, but no picture."""

    def unpainted(name: str, caption: str, figure: object) -> Plot:
        return Plot(name, caption, svg="", png=b"")

    with pytest.MonkeyPatch.context() as patch:
        for module in ("plots", "pretrained_plots", "time_plot"):
            patch.setattr(f"rtx.report.{module}.plot_of", unpainted)
        return built(*folders)
