"""Links and other files that are no records, laid out by somebody else in the folder of a run.

No command follows one, waits for one, or reads a file without a bound.
"""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rtx import disk
from rtx.runs.folder import FILES_OF_A_RUN, FOLDERS_OF_A_RUN, OTHERS_OF_A_RUN
from rtx.training.loggers import make_wandb_folder
from tests.helpers.disturbances import asked
from tests.helpers.small_runs import Workshop, draw_nothing

FOLLOWS_NONE = "is a link, and rtx follows none below"
COMMANDS: dict[str, tuple[str, ...]] = {
    "resume": ("trainer.steps=13",),
    "eval": ("limit=1",),
    "sample": ("length=2",),
    "audit": ("sequences=1", "prefixes=1"),
    "analyze": ("patterns",),
    "export": (),
}
"""Commands that work in the folder of a run, and words that make them quick."""


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder of the user, outside the run, in which nothing may change."""
    folder = tmp_path / "victim"
    (folder / "inner").mkdir(parents=True)
    for name in ("file.json", "last.ckpt", ".last.ckpt.1.writing", "inner/file"):
        (folder / name).write_text("mine")
    before = content_of(folder)
    yield folder
    assert content_of(folder) == before


def content_of(folder: Path) -> dict[str, str]:
    """Return the names of all files and folders below a folder, and the content of the files."""
    content = {}
    for path in folder.rglob("*"):
        content[str(path.relative_to(folder))] = path.read_text() if path.is_file() else ""
    return content


def words_of(command: str, run: Path) -> list[str]:
    """Return the words of a command on a run."""
    first, *others = COMMANDS[command] or ("",)
    if command == "analyze":
        return [command, first, str(run), *others]
    return [word for word in (command, str(run), first, *others) if word]


def replace_by_link(path: Path, target: Path) -> None:
    """Put a link in place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", FOLDERS_OF_A_RUN)
def test_a_link_in_place_of_a_folder_of_a_run_is_refused(
    workshop: Workshop, copy: Path, victim: Path, name: str
) -> None:
    replace_by_link(copy / name, victim)
    line = f"rtx: {copy / name}: {FOLLOWS_NONE} {copy}; put what it leads to in its place, or move"
    status = (copy / "status.json").read_text()
    for command in COMMANDS:
        code, said = asked(workshop, *words_of(command, copy))
        assert code == 2 and line in said, command
    words = ("train", workshop.text, "data=text", "trainer.steps=13")
    code, said = asked(workshop, *words, run=copy)
    assert code == 2 and (copy / name).is_symlink()
    assert (copy / "status.json").read_text() == status


@pytest.mark.parametrize("name", [*FILES_OF_A_RUN, *OTHERS_OF_A_RUN])
def test_a_link_in_place_of_a_file_of_a_run_is_refused(
    workshop: Workshop, copy: Path, victim: Path, name: str
) -> None:
    replace_by_link(copy / name, victim / "file.json")
    for command in COMMANDS:
        code, said = asked(workshop, *words_of(command, copy))
        assert code == 2 and f"rtx: {copy / name}: {FOLLOWS_NONE} {copy}; " in said, command


@pytest.mark.parametrize("name", ["last.ckpt", "previous.ckpt", "best.ckpt"])
def test_a_link_in_place_of_a_checkpoint_is_not_read(
    workshop: Workshop, copy: Path, victim: Path, run: Path, name: str
) -> None:
    for kept in (copy / "checkpoints").iterdir():
        if kept.name != name:
            kept.unlink()
    replace_by_link(copy / "checkpoints" / name, run / "checkpoints" / "last.ckpt")
    code, said = asked(workshop, "eval", str(copy), "limit=1")
    assert code == 2 and f"{copy / 'checkpoints' / name}: {FOLLOWS_NONE}" in said


def test_records_behind_links_are_left_out_of_a_report_with_a_note(
    workshop: Workshop, copy: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_nothing(monkeypatch)
    asked(workshop, "eval", str(copy), "limit=1")
    (record,) = (copy / "eval").glob("*.json")
    shutil.copy(record, copy / "kept.json")
    for name in ("status.json", "metrics.jsonl", "analysis", f"eval/{record.name}"):
        replace_by_link(copy / name, copy / "kept.json")
    code, said = asked(workshop, "report", str(copy))
    assert code == 0
    for name in ("status.json", "metrics.jsonl", "analysis", f"eval/{record.name}"):
        assert f"note: {copy / name}: {FOLLOWS_NONE} {copy}" in said.replace("\n", " ")
    assert asked(workshop, "runs", str(copy.parent))[0] == 0


def test_a_report_or_an_export_is_not_written_through_a_link_in_a_run(
    workshop: Workshop, copy: Path, victim: Path
) -> None:
    for name, words in {
        "report": ("report", str(copy)),
        "export": ("export", str(copy)),
        "hf": ("export", str(copy), "format=hf"),
    }.items():
        (copy / name).symlink_to(victim)
        code, said = asked(workshop, *words)
        assert code == 2 and f"{copy / name}: {FOLLOWS_NONE} {copy}; " in said
        (copy / name).unlink()


def test_a_run_as_a_whole_and_an_output_that_the_user_names_may_be_links(
    workshop: Workshop, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_nothing(monkeypatch)
    run = tmp_path / "link to the run"
    run.symlink_to(copy)
    output = tmp_path / "link to an output"
    for command in ("report", "export"):
        (tmp_path / f"new {command}").mkdir()
        output.unlink(missing_ok=True)
        output.symlink_to(tmp_path / f"new {command}")
        assert asked(workshop, command, str(run), f"output={output}")[0] == 0
        assert (tmp_path / f"new {command}" / f"{command}.json").is_file()
    for command in ("resume", "eval", "sample"):
        assert asked(workshop, *words_of(command, run))[0] == 0
    assert [*(copy / "samples").iterdir()] and [*(copy / "eval").iterdir()]


def test_a_link_in_the_folder_of_a_logger_is_refused(
    workshop: Workshop, copy: Path, victim: Path
) -> None:
    (copy / "tensorboard").mkdir()
    (copy / "tensorboard" / "hparams.yaml").symlink_to(victim / "file.json")
    words = ("resume", str(copy), "trainer.steps=13", "logger.tensorboard=true")
    code, said = asked(workshop, *words)
    assert code == 2 and f"{copy}/tensorboard/hparams.yaml: {FOLLOWS_NONE}" in said


def test_nobody_waits_for_a_pipe_in_the_folder_of_a_logger(workshop: Workshop, copy: Path) -> None:
    (copy / "tensorboard").mkdir()
    os.mkfifo(copy / "tensorboard" / "hparams.yaml")
    words = ("resume", str(copy), "trainer.steps=13", "logger.tensorboard=true")
    code, said = asked(workshop, *words)
    assert code == 2 and "tensorboard/hparams.yaml: is neither a file nor a folder" in said


@pytest.mark.parametrize("name", ["artifacts", "artifacts/staging", "run-1", "settings"])
def test_a_link_that_wandb_would_follow_is_refused(tmp_path: Path, victim: Path, name: str) -> None:
    run = tmp_path / "run"
    path = run / "wandb" / name
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    with pytest.raises(disk.LinkRefused):
        make_wandb_folder(run)
    path.unlink()
    # W&B itself makes this one, and replaces it.
    (run / "wandb" / "latest-run").symlink_to("run-1")
    assert make_wandb_folder(run) == run / "wandb"


def test_a_sweep_behind_a_link_is_not_read(workshop: Workshop, copy: Path, victim: Path) -> None:
    sweeps = copy.parent / "sweeps.jsonl"
    sweeps.symlink_to(victim / "file.json")
    code, said = asked(workshop, "sweep", str(copy.parent))
    assert code == 2 and f"{sweeps}: {FOLLOWS_NONE} {copy.parent}; " in said


def make_sparse(path: Path) -> None:
    """Make a file of a tebibyte that takes no room."""
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def make_socket(path: Path) -> None:
    """Make a socket; the path of one must be short."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def make_device(path: Path) -> None:
    """Make a device that gives zeros without end."""
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("no devices may be made here")


MAKERS = (os.mkfifo, make_sparse, make_socket, make_device)
RECORDS = (*FILES_OF_A_RUN, "resumes.jsonl", "wandb.json", "eval/one.json", "analysis/one.json")


@pytest.mark.parametrize("make", MAKERS)
def test_nothing_in_place_of_a_record_stops_a_list_or_a_report(
    workshop: Workshop,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    draw_nothing(monkeypatch)
    for name in RECORDS:
        copy = Path(shutil.copytree(run, tmp_path / "runs" / name.replace("/", "-")))
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).unlink(missing_ok=True)
        make(copy / name)
    for command in ("runs", "report"):
        code, said = asked(workshop, command, str(tmp_path / "runs"))
        assert code == 0, said
    assert "status.json: cannot be read (" in said.replace("\n", " ")


@pytest.mark.parametrize("make", [make_sparse, make_socket, make_device])
@pytest.mark.parametrize("name", ["config.yaml", "status.json", "metrics.jsonl", "lock"])
def test_nothing_in_place_of_a_file_stops_a_run(
    workshop: Workshop,
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    make: Callable[[Path], None],
) -> None:
    monkeypatch.chdir(copy)
    (copy / name).unlink()
    make(copy / name)
    code, said = asked(workshop, "resume", str(copy), "trainer.steps=13")
    # A status that cannot be read counts as none; a file of any size locks.
    is_passed_over = name == "status.json" or (name == "lock" and make is make_sparse)
    assert code == (0 if is_passed_over else 2), said


def test_a_checkpoint_of_zeros_is_known_by_its_end(workshop: Workshop, copy: Path) -> None:
    for path in (copy / "checkpoints").iterdir():
        path.unlink()
        make_sparse(path)
    code, said = asked(workshop, "eval", str(copy), "limit=1")
    assert code == 1 and "is damaged (its checksum does not match)" in said


REPORT_FILES = ("report.tex", "report.html", "report.csv", "report.json", "report.md")


@pytest.fixture(scope="module")
def report_names(
    workshop: Workshop, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """The names in a folder of a report, which a second report writes over."""
    output = tmp_path_factory.mktemp("report")
    for _ in range(2):
        assert asked(workshop, "report", str(run), f"output={output}")[0] == 0
    names = sorted(path.name for path in output.iterdir())
    assert {*REPORT_FILES} <= {*names}
    return names


@pytest.mark.parametrize("name", [*REPORT_FILES, "curves.png"])
def test_a_report_writes_over_nothing_that_it_did_not_write(
    workshop: Workshop,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    report_names: list[str],
    name: str,
) -> None:
    if not name.endswith(".png"):
        draw_nothing(monkeypatch)
    output = tmp_path / "output"
    output.mkdir()
    pictures = [one for one in report_names if one.endswith(".png")]
    foreign = name if name in report_names else pictures[0]
    (output / foreign).write_text('{"mine": 1}')
    code, said = asked(workshop, "report", str(run), f"output={output}")
    assert code == 2
    assert f"output={output}: holds a {foreign} that rtx report did not write; name" in said
    assert content_of(output) == {foreign: '{"mine": 1}'}


def test_an_export_writes_over_nothing_that_it_did_not_write(
    workshop: Workshop, run: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    export = ("export", str(run), f"output={output}")
    (output / "export.json").write_text('{"program": "another"}')
    (output / "README.md").write_text("mine")
    code, said = asked(workshop, *export)
    assert code == 2 and f"output={output}: holds an export.json that rtx export did not" in said
    assert sorted(content_of(output).values()) == ["mine", '{"program": "another"}']
    (output / "export.json").unlink()
    (output / "README.md").unlink()
    assert asked(workshop, *export)[0] == 0 == asked(workshop, *export)[0]
    (output / "config.json").write_text("mine")
    code, said = asked(workshop, *export, "format=hf")
    assert code == 2 and f"output={output}: holds a config.json that rtx export did not" in said
    assert (output / "config.json").read_text() == "mine"
    assert disk.is_file_inside(output, "model.safetensors")
    assert asked(workshop, *export)[0] == 0
    assert (output / "config.json").read_text() == "mine"
