"""Generated bad command lines and configuration files: no traceback, no other exit code than the promised ones, and
what is accepted runs with exactly the values that were named.

The lines are the same in every run of the tests. RTX_BAD_LINES=1000 draws as many of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import named
import pytest
from bad_lines import GOOD, RUN, bad_files, bad_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rtx.commands.bench
import rtx.commands.data
import rtx.compose
import rtx.sweep.launcher
from rtx import cli
from rtx.compose import compose, flat, to_dict, to_yaml
from rtx.config import Config
from rtx.options import read_words
from rtx.sweep.cells import Outcome

LINES = int(os.environ.get("RTX_BAD_LINES", "120"))
SAME_EVERY_TIME = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
CODES = {0, 1, 2, 130, 143}
LONGEST = 2_000
"""Characters of a line of an error message at the most."""

tally: Counter[str] = Counter()


@dataclasses.dataclass
class Answer:
    """How rtx answered a line, and the configurations that it would have gone to work with."""

    code: int
    error: str
    configs: list[Config]


class Stage:
    """Runs lines in this process up to where a command would begin its work."""

    def __init__(self) -> None:
        self.reached: list[Config] = []
        self.last: list[Config] = []

    def module(self, name: str) -> Any:
        """Stand in for a command's module: note the configuration instead of working with it."""
        word = name.rpartition(".")[2]
        if word in ("data", "report", "sweep"):
            return importlib.import_module(name)
        return SimpleNamespace(main=self.bench if word == "bench" else self.main)

    def main(self, arguments: list[str]) -> int:
        """Of a command whose words have been composed and checked before it was imported."""
        self.reached = self.last[-1:]
        return 0

    def bench(self, arguments: list[str]) -> int:
        """Of `rtx bench`."""
        words = read_words("bench steps", arguments[1:])
        self.reached = [row.config for row in rtx.commands.bench.lay_out_rows(words.overrides)]
        return 0

    def launch(self, launcher: rtx.sweep.launcher.Launcher) -> list[Outcome]:
        """Of a sweep: its cells."""
        self.reached = [cell.config for cell in launcher.cells]
        return [Outcome(cell.number, 0, "done") for cell in launcher.cells]

    def data(self, data: Any) -> None:
        """Of `rtx data`."""
        self.reached = [Config(data=data)]

    def resolve(self, config: Config) -> Config:
        """Check a configuration, and note it."""
        self.last.append(checked := RESOLVE(config))
        return checked

    def ask(self, words: Sequence[str]) -> Answer:
        """Run a line."""
        self.reached, self.last = [], []
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = cli.main(words)
        if code == 0 and any(word.startswith("--cfg") for word in words):
            self.reached = self.last[-1:]
        return Answer(code, error.getvalue(), self.reached)


RESOLVE = rtx.compose.resolve


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A folder with a book and a run, and commands that stop before they do anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("lines"))
        for name in ("RTX_DATA", "RTX_OUTPUTS", "RTX_NOT_SET"):
            patch.delenv(name, raising=False)
        Path("book.txt").write_text("It was a dark and stormy night. " * 99)
        Path(RUN).mkdir(parents=True)
        Path(RUN, "config.yaml").write_text(to_yaml(compose(["data=recall"])))
        stage = Stage()
        patch.setattr(cli, "importlib", SimpleNamespace(import_module=stage.module))
        patch.setattr(rtx.compose, "resolve", stage.resolve)
        patch.setattr(rtx.sweep.launcher.Launcher, "launch", lambda launcher: stage.launch(launcher))
        patch.setattr(rtx.commands.data, "ACTIONS", dict.fromkeys(rtx.commands.data.ACTIONS, stage.data))
        yield stage
    print(dict(tally))


def values(config: Config) -> dict[str, Any]:
    """Return a configuration by dotted keys."""
    return flat(to_dict(config))


def judge_answer(answer: Answer) -> None:
    """Check exit code and message."""
    tally[f"exit {answer.code}"] += 1
    assert answer.code in CODES
    assert "Traceback" not in answer.error
    lines = answer.error.splitlines()
    assert all(line.startswith("rtx: ") and len(line) <= LONGEST for line in lines), answer.error
    assert bool(lines) == (answer.code in (1, 2)) or not answer.configs
    assert "HYDRA_FULL_ERROR" not in answer.error
    if answer.code:
        assert not answer.configs


def judge_values(words: Sequence[str], configs: Sequence[Config]) -> None:
    """Check that what would run is what was named: a configuration for each cell, every key with its value."""
    several = words[0] == "bench" or {"-m", "--multirun"} & set(words)
    listed = named.cells(words[1:]) if several else [only(words)]
    assert len(configs) <= len(listed)
    for config in configs:
        assert any(not named.disagree(values(config), cell) for cell in listed), (words, config)
        tally["composed as named"] += 1


def only(words: Sequence[str]) -> dict[str, str]:
    """Return what a line of one cell sets; keys of eval and the like may have been written short, and are no field."""
    split = [word.partition("=")[::2] for word in words[1:] if "=" in word and not word.startswith("-")]
    own = {"seed"} if words[0] in ("sample", "analyze") or (words[0] == "audit" and "=" not in words[1]) else set()
    found = {key.lstrip("+").strip(): text for key, text in split}
    return {key: text for key, text in found.items() if key not in own}


@pytest.mark.parametrize("words", GOOD, ids=" ".join)
def test_the_lines_mean_something_before_they_go_wrong(stage: Stage, words: tuple[str, ...]) -> None:
    answer = stage.ask(words)
    judge_answer(answer)
    assert answer.code == 0, answer.error
    judge_values(words, answer.configs)


def test_another_value_than_the_named_one_would_be_noticed() -> None:
    words = ["train", "data=recall", "trainer.steps=5", "seed=1"]
    config = compose(words[1:])
    judge_values(words, [config])
    for wrong in ([dataclasses.replace(config, seed=2)], [compose(["trainer.steps=5", "seed=1"])], [config, config]):
        with pytest.raises(AssertionError):
            judge_values(words, wrong)


@given(words=bad_lines())
@settings(max_examples=LINES, **SAME_EVERY_TIME)  # type: ignore[arg-type]
def test_a_bad_line_is_refused_in_words_or_means_what_it_says(stage: Stage, words: list[str]) -> None:
    answer = stage.ask(words)
    judge_answer(answer)
    judge_values(words, answer.configs)


@given(content=st.deferred(lambda: bad_files(GOOD_FILE)))
@settings(max_examples=LINES, **SAME_EVERY_TIME)  # type: ignore[arg-type]
def test_a_bad_file_is_refused_in_words_or_means_what_it_says(stage: Stage, content: bytes) -> None:
    folder = Path("outputs/rtx/other")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_bytes(content)
    answer = stage.ask(["eval", str(folder)])
    judge_answer(answer)
    if answer.configs:
        found, written = values(answer.configs[0]), named.from_yaml(content.decode())
        assert {key: found[key] for key in written if key not in named.SELF_MADE or written[key]} == {
            key: value for key, value in written.items() if key not in named.SELF_MADE or value
        }
        tally["read as written"] += 1


GOOD_FILE = to_yaml(compose(["data=recall"]))
