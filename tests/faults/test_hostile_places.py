"""Folders that somebody else has laid out: links, programs, names that look like flags, files of other projects."""

import os
import shutil
from pathlib import Path

import pytest
from disturbances import asked
from small_runs import SIZES, Workshop, after

from rtx.launcher import start
from rtx.training.run_folder import run_state, shown


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    return workshop.train("a=b")


def test_a_cell_runs_no_code_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rtx", "torch", "json"):
        Path(f"{name}.py").write_text("open('attacked', 'w')")
    process = start(["nonsense"], tmp_path, {})
    assert process.wait() == 2
    assert (tmp_path / "output.log").read_text() == "rtx: 'nonsense' is not of the form key=value\n"
    assert not Path("attacked").exists()


def test_no_link_in_the_folder_of_a_sweep_is_followed(workshop: Workshop, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("mine")
    (tmp_path / "output.log").symlink_to(foreign)
    with pytest.raises(OSError, match="symbolic links"):
        start(["nonsense"], tmp_path, {})
    (workshop.folder / "out" / "linked").mkdir(parents=True)
    (workshop.folder / "out" / "linked" / "sweeps.jsonl").symlink_to(foreign)
    code, said = asked(workshop, "train", "-m", workshop.text, *SIZES, "seed=1,2", "name=linked")
    assert code == 2 and "cannot write to" in said and foreign.read_text() == "mine"


@pytest.mark.parametrize("name", ["lock", "resumes.jsonl", "metrics.jsonl"])
def test_no_link_in_the_folder_of_a_run_is_followed(workshop: Workshop, copy: Path, tmp_path: Path, name: str) -> None:
    (foreign := tmp_path / "foreign").write_bytes(b"a line of somebody else, without its end")
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(foreign)
    code, said = asked(workshop, "resume", str(copy), "trainer.steps=13")
    assert code in (1, 2) and "symbolic links" in said
    assert foreign.read_bytes() == b"a line of somebody else, without its end"


def test_paths_are_printed_as_they_can_be_typed(workshop: Workshop, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop.folder)
    assert [shown(Path(name)) for name in ("-o/-r", "a b", "a=b")] == ["./-o/-r", "'a b'", "a=b"]
    assert asked(workshop, "resume", "a=b")[0] == 0 == asked(workshop, "report", "a=b")[0]
    os.symlink("a=b", "-r")
    code, said = asked(workshop, "resume", "-r")
    assert code == 2 and said == "rtx: -r: is taken for a flag; write ./-r for the folder\n"
    assert asked(workshop, "resume", "./-r")[0] == 0


def test_checkpoints_that_are_taken_away_under_a_run_end_it_in_a_line(workshop: Workshop) -> None:
    process = workshop.start("bare", "trainer.steps=2000")
    process.until(after(4))
    shutil.rmtree(process.run / "checkpoints")
    assert process.wait() == 1
    line = process.log.read_text().splitlines()[-1]
    assert line.startswith(f"rtx: cannot write {process.run}/checkpoints/") and "No such file or directory" in line
    assert "Traceback" not in process.log.read_text() and run_state(process.run) == "failed"
    code, said = asked(workshop, "resume", str(process.run), "trainer.steps=5")
    assert code == 0 and "from the beginning: it has no checkpoint" in said


@pytest.mark.parametrize("content", ["", "services: [a, b]\n", "name: mine\nversion: 3\n"])
def test_the_configuration_of_another_project_is_not_written_over(
    workshop: Workshop, tmp_path: Path, content: str
) -> None:
    (tmp_path / "config.yaml").write_text(content)
    code, said = asked(workshop, "train", workshop.text, *SIZES, run=tmp_path)
    assert code == 2 and f"{tmp_path}/config.yaml: " in said
    assert (tmp_path / "config.yaml").read_text() == content and len(list(tmp_path.iterdir())) == 1
