"""Generated bad command lines: no traceback, no other exit code than the promised ones, and
what is accepted runs with exactly the values that were named.

The lines are the same in every run of the tests. RTX_BAD_LINES=1000 draws as many of them, others every time.
"""

import contextlib
import importlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import named
import pytest
from bad_lines import GOOD, RUN, bad_lines
from hypothesis import HealthCheck, given, settings

import rtx.commands.data
import rtx.compose
import rtx.launcher
from rtx import cli
from rtx.cells import Outcome
from rtx.compose import compose, flat, to_dict, to_yaml
from rtx.config import Config

LINES = int(os.environ.get("RTX_BAD_LINES", "0"))
DRAWN: dict[str, Any] = {"max_examples": LINES or 100, "derandomize": not LINES, "deadline": None, "database": None}
DRAWN["suppress_health_check"] = list(HealthCheck)
LONGEST = 2_000
"""Characters of a line of an error message at the most."""
GOOD_FILE = to_yaml(compose(["data=recall"]))
RESOLVE = rtx.compose.resolve


class Stage:
    """Runs lines in this process up to where a command would begin its work, and notes the configurations for that."""

    reached: list[Config]
    last: Config

    def module(self, name: str) -> Any:
        """Stand in for a command's module."""
        word = name.rpartition(".")[2]
        if word in ("data", "report", "sweep"):
            return importlib.import_module(name)
        return SimpleNamespace(main=lambda _: self.reach([self.last]))

    def reach(self, configs: Sequence[Config]) -> int:
        self.reached = list(configs)
        return 0

    async def launch(self, launcher: rtx.launcher.Launcher) -> list[Outcome]:
        self.reach([cell.config for cell in launcher.cells])
        return [Outcome(0, "done") for _ in launcher.cells]

    def resolve(self, config: Config, *keys: Any) -> Config:
        """Check a configuration, and note it."""
        self.last = RESOLVE(config, *keys)
        return self.last

    def ask(self, words: Sequence[str]) -> list[Config]:
        """Run a line, check exit code and message, and return what it would have gone to work with."""
        self.reached = []
        out, said = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            code = cli.main(words)
        error = said.getvalue()
        assert code in {0, 1, 2, 130, 143} and "Traceback" not in error and "HYDRA_FULL_ERROR" not in error
        assert all(line.startswith("rtx: ") and len(line) <= LONGEST for line in error.splitlines()), error
        assert bool(error) == (code in (1, 2)) or not self.reached
        assert not (code and self.reached)
        return self.reached


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A folder with a book and a run, and commands that stop before they do anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("lines"))
        for name in ("RTX_DATA", "RTX_OUTPUTS", "NO_RTX"):
            patch.delenv(name, raising=False)
        Path("book.txt").write_text("It was a dark and stormy night. " * 99)
        Path(RUN).mkdir(parents=True)
        Path(RUN, "config.yaml").write_text(GOOD_FILE)
        stage = Stage()
        patch.setattr(cli, "importlib", SimpleNamespace(import_module=stage.module))
        patch.setattr(rtx.compose, "resolve", stage.resolve)
        patch.setattr(rtx.launcher.Launcher, "launch", lambda launcher: stage.launch(launcher))
        actions = dict.fromkeys(rtx.commands.data.ACTIONS, lambda data: stage.reach([Config(data=data)]))
        patch.setattr(rtx.commands.data, "ACTIONS", actions)
        yield stage


def judge(words: Sequence[str], configs: Sequence[Config]) -> None:
    """Check that what would run is what was named: a configuration for each cell, every key with its value."""
    if not configs:
        return
    several = {"-m", "--multirun"} & {*words}
    listed = named.cells(words[1:]) if several else [named.cell(words)]
    assert len(configs) <= len(listed)
    for config in configs:
        assert any(not named.disagree(flat(to_dict(config)), cell) for cell in listed), (words, config)


@pytest.mark.parametrize("words", GOOD, ids=" ".join)
def test_the_lines_mean_something_before_they_go_wrong(stage: Stage, words: list[str]) -> None:
    judge(words, configs := stage.ask(words))
    assert configs or {"--help", "--cfg", "list", "report", "sweep"} & {*words}


@given(words=bad_lines())
@settings(**DRAWN)
def test_a_bad_line_is_refused_in_words_or_means_what_it_says(stage: Stage, words: list[str]) -> None:
    judge(words, stage.ask(words))
