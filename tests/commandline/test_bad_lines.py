"""Generated bad command lines: no traceback, no other exit code than the promised ones, and what is
accepted runs with exactly the values that were named: the words are read here without Hydra and
without rtx's parser, and what this reader does not understand it refuses (an error), so that
nothing is waved through.

The lines are the same in every run of the tests. RTX_BAD_LINES=1000 draws as many of them, others
every time.
"""

import contextlib
import importlib
import io
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import rtx.commands.data
import rtx.sweeps.launcher
from rtx.cli import main as cli
from rtx.errors import written
from rtx.settings.compose import compose
from rtx.settings.fields import Field
from rtx.settings.run_config import to_yaml
from rtx.settings.schema import GROUPS, Config, all_fields, flat, to_dict
from rtx.settings.schema import settings as known_values
from rtx.sweeps.outcomes import Outcome
from tests.helpers.bad_lines import GOOD, RUN, bad_lines

LINES = int(os.environ.get("RTX_BAD_LINES", "0"))
DRAWN: dict[str, Any] = {
    "max_examples": LINES or 100,
    "derandomize": not LINES,
    "deadline": None,
    "database": None,
}
DRAWN["suppress_health_check"] = list(HealthCheck)
LONGEST = 2_000
"""Characters of a line of an error message at the most."""
GOOD_FILE = to_yaml(compose(["data=recall"]))
TRUTH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
NUMBER = re.compile(
    r"[+-]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)(e[+-]?\d[\d_]*)?", re.IGNORECASE | re.ASCII
)
QUOTED = r"""'[^']*'|"[^"]*\""""
REFERENCE = re.compile(r"\$\{((?:oc\.env:)?[\w.]+)\}")
SELF_MADE = ("data.length", "routing.clusters", "model.hash_buckets")
"""Keys that are worked out from others where nobody names them."""


class Stage:
    """Runs lines in this process up to where a command would begin its work, and notes the
    configurations for that.
    """

    reached: list[Config]

    def module(self, name: str) -> Any:
        """Stand in for a command's module."""
        word = name.rpartition(".")[2]
        if word in ("data", "report", "sweep"):
            return importlib.import_module(name)
        return SimpleNamespace(main=lambda request: self.reach(request.configs))

    def reach(self, configs: Sequence[Config]) -> int:
        self.reached = list(configs)
        return 0

    async def launch(self, launcher: rtx.sweeps.launcher.Launcher) -> list[Outcome]:
        self.reach([cell.config for cell in launcher.cells])
        return [Outcome(0, "done") for _ in launcher.cells]

    def ask(self, words: Sequence[str]) -> list[Config]:
        """Run a line, check exit code and message, and return what it would have worked with."""
        self.reached = []
        out = io.StringIO()
        said = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            code = cli.main(words)
        error = said.getvalue()
        assert (
            code in {0, 1, 2, 130, 143}
            and "Traceback" not in error
            and "HYDRA_FULL_ERROR" not in error
        )
        assert all(
            line.startswith("rtx: ") and len(line) <= LONGEST for line in error.splitlines()
        ), error
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
        patch.setattr(
            "rtx.cli.refusals.refuse", lambda *given: None
        )  # here words are judged, not what the run has
        patch.setattr("rtx.runs.resumption.plan_resumption", lambda folder, config: "killed")
        patch.setattr(
            rtx.sweeps.launcher.Launcher, "launch", lambda launcher: stage.launch(launcher)
        )
        actions = dict.fromkeys(
            rtx.commands.data.ACTIONS, lambda data: stage.reach([Config(data=data)])
        )
        patch.setattr(rtx.commands.data, "ACTIONS", actions)
        yield stage


def cell(words: Sequence[str]) -> dict[str, str]:
    """Return key and text of what a line of one cell sets, the last of each.

    The seed that is a command's own is left out.
    """
    texts = {}
    for word in words[1:]:
        key, equals, text = word.partition("=")
        if word.startswith("~") and not word.startswith("~/"):
            texts[word[1:]] = "null"
        elif equals and not word.startswith("-"):
            texts[key.lstrip("+").strip()] = text
    own = words[0] in ("sample", "analyze", "audit")
    return {key: text for key, text in texts.items() if not (own and key == "seed")}


FUNCTIONS = {
    "range(1,4)": ["1", "2", "3"],
    "range(4)": ["0", "1", "2", "3"],
    "range(start=1,stop=3)": ["1", "2"],
    "choice(1,2)": ["1", "2"],
    "shuffle(1,2)": ["1", "2"],
}
"""Those of the drawn values that are functions of Hydra's, and what they stand for."""


def listed_values(key: str, text: str) -> list[str]:
    """Return the values of a key in a sweep."""
    word = text.strip()
    if word in FUNCTIONS:
        return FUNCTIONS[word]
    if word == "glob(*)" and key in known_values():
        return list(known_values()[key].values)
    if re.fullmatch(QUOTED, word) or re.fullmatch(r"[\[({].*[\])}]", word):
        return [text]
    return text.split(",")


def cells(words: Sequence[str]) -> list[dict[str, str]]:
    """Return what each cell of a sweep sets: lists make several cells."""
    texts = cell(["", *words])
    values = [listed_values(key, text) for key, text in texts.items()]
    return [dict(zip(texts, each, strict=True)) for each in itertools.product(*values)]


def disagree(values: Mapping[str, Any], said: Mapping[str, str]) -> list[str]:
    """Return the keys of a configuration that are not what a cell's words say."""
    fields = all_fields()
    read = {key: followed(values, fields[key], text) for key, text in said.items() if key in fields}
    wrong = [
        key
        for key, value in read.items()
        if values[key] not in meanings(key, value) and not (value is None and key in SELF_MADE)
    ]
    names = {
        group: f"{group}.name" for group in GROUPS if group in said and f"{group}.name" in values
    }
    return wrong + [
        group
        for group, own in names.items()
        if own not in said and said[group].strip().strip("'\"") != values[own]
    ]


def meanings(key: str, value: Any) -> list[Any]:
    """Return the values that a command may have in place of one that was written."""
    if key == "data.path" and value is not None:
        return [value, os.path.abspath(os.path.expanduser(value))]
    return [value]


def followed(values: Mapping[str, Any], field: Field, text: str) -> Any:
    """Return the value of a text, whatever it refers to."""
    word = text.strip()
    if "${" not in word:
        return value_of(field, text)
    bare = word[1:-1] if re.fullmatch(QUOTED, word) else word
    bare = re.sub(r"\$\{oc\.decode:'(\w+)'\}", r"\1", bare)
    found: dict[str, Any] = {}
    for name in REFERENCE.findall(bare):
        found[name] = referred(values, field, name)
    if bare[2:-1] in found and found[bare[2:-1]] is None:
        return None
    filled = REFERENCE.sub(lambda each: written(found[each[1]]), bare)
    assert "${" not in filled, text
    return filled if field.kind is str and not field.values else value_of(field, filled)


def referred(values: Mapping[str, Any], field: Field, name: str) -> Any:
    """Return the value that a reference in a field names."""
    if name.startswith("oc.env:"):
        return os.environ[name.removeprefix("oc.env:")]
    leaf = name.lstrip(".")
    if leaf == name:
        return values[name]
    # Each dot in front is a step up from the key itself: one means beside it.
    above = field.key.split(".")[: len(leaf) - len(name)]
    return values[".".join([*above, leaf])]


def value_of(field: Field, text: str) -> Any:
    """Return the value that a text is of a field."""
    word = text.strip()
    if word.lower() == "null" and field.optional:
        return None
    quotes = re.fullmatch(QUOTED, word)
    bare = word[1:-1] if quotes else word
    if bare in field.words:
        return bare
    if field.kind is str:
        return bare if quotes or field.values else text
    if field.kind is bool:
        return TRUTH[bare.strip().lower()]
    assert NUMBER.fullmatch(bare.strip()), (field.key, text)
    number = float(bare.replace("_", ""))
    assert field.kind is float or number.is_integer()
    return number if field.kind is float else int(number)


def judge(words: Sequence[str], configs: Sequence[Config]) -> None:
    """Check that what would run is what was named: a configuration for each cell, every key with
    its value.
    """
    if not configs:
        return
    several = {"-m", "--multirun"} & {*words}
    listed = cells(words[1:]) if several else [cell(words)]
    assert len(configs) <= len(listed)
    for config in configs:
        assert any(not disagree(flat(to_dict(config)), said) for said in listed), (words, config)


@pytest.mark.parametrize("words", GOOD, ids=" ".join)
def test_the_lines_mean_something_before_they_go_wrong(stage: Stage, words: list[str]) -> None:
    judge(words, configs := stage.ask(words))
    assert configs or {"--help", "--cfg", "list", "report", "sweep"} & {*words}


@given(words=bad_lines())
@settings(**DRAWN)
def test_a_bad_line_is_refused_in_words_or_means_what_it_says(
    stage: Stage, words: list[str]
) -> None:
    judge(words, stage.ask(words))
