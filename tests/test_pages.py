"""Commands of README.md and of the pages: rtx takes them, and files, targets and extras exist."""

import re
import tomllib
from pathlib import Path

import pytest

from rtx.cli import main as cli
from rtx.cli.commands import COMMANDS as COMMANDS_OF_RTX
from rtx.cli.commands import WORDS, find_command
from rtx.cli.help import command_page, completion
from rtx.cli.refusals import refuse
from rtx.cli.request import read_request, with_configuration
from rtx.errors import UserError
from rtx.settings.compose import compose
from rtx.settings.overrides import check_overrides
from rtx.settings.run_config import to_yaml
from rtx.sweeps.cells import lay_out
from tests.helpers.pages import PAGES, ROOT, PageCommand, commands_of

COMMANDS = [command for page in PAGES for command in commands_of(page)]
OF_RTX = [command for command in COMMANDS if command.words[0] == "rtx"]
BLOCKS_BY_WORDS: dict[tuple[str, ...], PageCommand] = {}
for block in OF_RTX:
    if block.is_block:
        BLOCKS_BY_WORDS.setdefault(tuple(block.words), block)
BLOCKS = list(BLOCKS_BY_WORDS.values())
"""A command that several pages show is read once, with the first of them."""
MENTIONS = [command for command in OF_RTX if not command.is_block]
GENERAL = ("--help", "--version")
KINDS_OF_RUNS = {
    "routes": ["data=stdlib"],
    "full": ["experiment=far_text", "heads=full", "seed=0"],
    "recurrent": ["model=transformer_xl", "data=stdlib"],
    "words": ["model=rt10", "data=wikitext103"],
}
"""Configurations of the runs that stand in for `last`, `<run>` and folders of outputs/."""
RUN = re.compile(r"outputs/\S+( [a-z0-9+ ]*>)?|<run[^>]*>|\blast\b")
ELSEWHERE = {
    "extensions=": "tests/commands/test_extensions.py",
    "--config-dir": "tests/commands/test_extensions.py",
    "hydra/sweeper=optuna": "tests/sweep/test_optimizing.py",
    "hydra.launcher": "tests/slurm/test_slurm.py",
    "model.start=": "tests/hf/test_start.py",
    "rtx bench": "a command of version 0.1, with which a result was recorded",
}
"""Words of commands that need files or packages, and the tests that run them."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, and with a run of each kind, which has no weights."""
    folder = tmp_path_factory.mktemp("pages")
    for name, words in KINDS_OF_RUNS.items():
        (folder / name).mkdir()
        (folder / name / "config.yaml").write_text(to_yaml(compose(words)))
    for name in ("book.txt", "other.txt", "text"):
        (folder / name).write_text("a line\n" * 9)
    (folder / "docs").symlink_to(ROOT / "docs")
    return folder


@pytest.mark.parametrize("command", BLOCKS, ids=str)
def test_rtx_takes_every_command_that_a_page_shows(
    command: PageCommand, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(word in command.text for word in ELSEWHERE):
        return
    monkeypatch.chdir(runs)
    monkeypatch.setenv("RTX_OUTPUTS", str(runs))
    problems = []
    for run in KINDS_OF_RUNS:
        text = re.sub(r"<[^>]*>", "text", RUN.sub(run, command.text))
        try:
            read(PageCommand(command.page, text, is_block=True).words[1:])
            return
        except UserError as error:
            problems.append(str(error))
    raise AssertionError(problems)


def read(words: list[str]) -> None:
    """Read the words after `rtx` as it does, up to its work; `UserError` where they are refused."""
    flags, rest = cli.split_flags(words[0], words[1:])
    if "--help" in flags:
        assert command_page(words[0], rest)
        return
    if words[0] == "completion":
        assert completion(rest)
        return
    command, rest = find_command(words[0], rest, sweep="-m" in flags)
    request = read_request(command, rest)
    if command.prefix == "sweep.":
        # The cells of other seeds are the same, and many.
        others = [override for override in request.overrides if override.key != "seed"]
        assert lay_out([*others, *check_overrides(["seed=0"])])
    elif command.loads_torch:
        for config in with_configuration(request).configs:
            refuse(command.name, config, request.options)


def test_commands_and_keys_that_sentences_mention_exist() -> None:
    problems = []
    for command in MENTIONS:
        if command.page != "docs/changelog.md" and command.words[1] not in (*WORDS, *GENERAL):
            problems.append(f"{command}: {command.words[1]}")
        keys = [word.partition("=")[0] for word in command.words[2:] if "=" in word]
        problems += [f"{command}: {key}" for key in keys if not is_known(command, key)]
    assert problems == []


def is_known(command: PageCommand, key: str) -> bool:
    """Whether a command that a page mentions reads a key."""
    names = " ".join(command.words[1:])
    entries = [entry for entry in COMMANDS_OF_RTX if names.startswith(entry.name)]
    return any(key in entry.known() for entry in entries)


def test_targets_files_and_extras_of_other_commands_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    problems = []
    for command in COMMANDS:
        program = command.words[0]
        words = [word for word in command.words[1:] if "=" not in word]
        if program == "make" and not set(words) <= set(targets):
            problems.append(str(command))
        extras = re.findall(r"\[([a-z]+)\]", command.text) if program == "pip" else []
        if not set(extras) <= set(project["optional-dependencies"]):
            problems.append(str(command))
        if program in ("python", "pytest"):
            problems += [str(command) for path in paths_in(words) if not path.exists()]
    assert problems == []


def paths_in(words: list[str]) -> list[Path]:
    """Return the files of this project that the words of a command name."""
    paths = []
    if words[:2] == ["-m", "tests"]:
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    for word in words:
        path = word.partition("::")[0]
        if path.startswith(("tests/", "benchmarks/", "docs/")):
            paths.append(ROOT / path)
    return paths
