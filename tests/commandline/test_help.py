"""Help pages and completion in bash: every option and field is there, and a terminal of 80 columns
is enough.
"""

import shutil
import subprocess
import sys

import pytest

from rtx.cli import help
from rtx.cli import main as cli
from rtx.cli.commands import BY_NAME
from rtx.settings.presets import options
from rtx.settings.schema import GROUPS, all_fields


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")


def test_every_group_option_and_key_has_its_line_with_the_value_that_overrides_give() -> None:
    page = help.command_page("train", ["model=rt22", "trainer.steps=1e3", "data=text"])
    lines = page.splitlines()
    for group in GROUPS:
        assert f"{group}=<option>" in lines
        for option in options(group):
            assert any(line.startswith(f"  {option} ") and not line.endswith(" ") for line in lines)
    for key, field in all_fields().items():
        (line,) = (line for line in lines if line.startswith(f"  {key}="))
        assert f"{field.doc} [{field.allowed}]" in line
    for shown in ("rt22 *", "adafactor *", "text *", "trainer.steps=1000", "--cfg job"):
        assert f"\n  {shown} " in page, shown


def test_a_group_or_a_key_is_printed_alone() -> None:
    page = help.command_page("train", [])
    groups = ", ".join(GROUPS)
    assert (
        f"\n  --help routing                  print this group alone; also {groups}, or one "
        "key\n\ndata=<op" in page
    )
    alone = help.command_page("train", ["routing", "routing=topk"])
    assert (
        alone.startswith("routing=<option>\n  blocks ")
        and "\n\nrouting.<key>\n  routing.selection=topk " in alone
    )
    whole = help.command_page("train", ["routing=topk"])
    options_of_routing, keys_of_routing = alone.split("\n\n")
    assert f"\n\n{options_of_routing}\n\n" in whole
    assert f"\n\n{keys_of_routing}\n\n" in whole
    assert options_of_routing.count("\n") == len(options("routing"))
    trainer = help.command_page("plan", ["trainer"])
    assert trainer.startswith("trainer=<option>\n  debug ")
    assert "\n\ntrainer.<key>\n  trainer.steps=1000 " in trainer
    assert help.command_page("plan", ["seed", "seed=3"]).startswith("  seed=3 ")


def test_a_command_on_a_run_shows_its_own_options_and_what_may_change() -> None:
    page = help.command_page("resume", [])
    assert "extend it to trainer.steps=N" in page
    for key in (
        "trainer.steps",
        "trainer.max_minutes",
        "hardware.threads",
        "logger.mode",
        "data.path",
        "fsdp",
    ):
        assert f"\n  {key} " in page, key
    for key in (
        "model.hidden",
        "routing.heads",
        "data.length",
        "trainer.batch_size",
        "seed",
        "rt24",
    ):
        assert f"\n  {key} " not in page, key
    page = help.command_page("eval", ["outputs/rtx/run"])
    assert (
        "\n  split=valid " in page
        and "\n  hardware.threads " in page
        and "\n  data.length " in page
    )
    assert "model=<option>" not in page and "hardware.workers" not in page
    assert page.index("split=valid") < page.index("hardware.<key>")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_pages_fit_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert (cli.main(["--help"]), cli.main([])) == (0, 2)
    front, error = capsys.readouterr()
    assert front == 2 * f"{help.front_page()}\n" and error == ""
    assert columns < 80 or all(len(line) <= columns for line in front.splitlines())
    for name in BY_NAME:
        assert f"\n  {name} " in front and cli.main([word := name.split()[0], "--help"]) == 0
        page, error = capsys.readouterr()
        assert (
            page.startswith(f"usage: rtx {word}") and f"usage: rtx {name}" in page and error == ""
        )
        assert all(len(line) <= columns for line in page.splitlines())


ASKED = {
    "bash": (
        'COMP_LINE="rtx train data=en"; COMP_POINT=${#COMP_LINE}; _rtx; '
        'printf "<%s>" "${COMPREPLY[@]}"'
    ),
    "zsh": (
        'compset() { :; }; compadd() { printf "<%s>" "$@"; }; '
        "words=(rtx train x); CURRENT=3 PREFIX=data=en; _rtx"
    ),
}
SAID = {"bash": "<enwik8 >", "zsh": "<-S><><--><--><enwik8>"}


@pytest.mark.parametrize("shell", ASKED)
def test_a_shell_completes_by_its_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    script = (
        f"compdef() {{ :; }}\nrtx() "
        f'{{ "{sys.executable}" -m rtx "$@"; }}\n{help.SCRIPTS[shell]}\n{ASKED[shell]}'
    )
    answer = subprocess.run([shell, "-c", script], capture_output=True, text=True, timeout=600)
    assert (answer.stdout, answer.stderr) == (SAID[shell], "")


def test_what_may_stand_at_the_end_of_a_line() -> None:
    for line, some in (
        ("rtx tr", ["train "]),
        ("rtx train rou", ["routing=", "routing.selection="]),
        ("rtx train -m seed=1 model.recompute=", ["auto ", "true ", "false "]),
        ("rtx train -m routing=topk,ca", ["topk,causal "]),
        ("rtx train --multirun sweep.p", ["sweep.parallel="]),
        ("rtx train --cfg job data=enwik8 data.le", ["data.length="]),
        ("rtx audit outputs/rtx/run pos", ["positions="]),
        ("rtx resume outputs/rtx/run trainer.st", ["trainer.steps="]),
        ("rtx eval outputs/rtx/run split=t", ["test ", "train "]),
        ("rtx analyze pat", ["patterns "]),
        ("rtx analyze patterns outputs/rtx/run la", ["layer="]),
    ):
        found = help.candidates(line)
        assert found[: len(some)] == some if len(some) > 1 else some[0] in found, line
    assert help.candidates("rtx analyze patterns outputs/rtx/run nope=") == []
