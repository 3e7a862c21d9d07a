"""`rtx runs`, the names by which commands take a run, and the data that a run finds from another folder."""

from pathlib import Path

import pytest
from small_runs import Workshop

OLD, NEW = "20260101-000000-abcd1234", "20260102-000000-9876fedc"


@pytest.fixture(scope="module")
def runs(workshop: Workshop) -> list[Path]:
    """Two runs of one name, the older first, in the folder of all runs."""
    return [workshop.train(f"out/small/{name}", f"seed={seed}") for seed, name in enumerate((OLD, NEW), 1)]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another current folder, with no runs and no data."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_list_has_the_newest_first_and_what_differs(
    workshop: Workshop, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for folder in ((), (str(runs[0].parent),)):
        rows = [line.split() for line in workshop.command("runs", *folder).splitlines()]
        assert rows[0] == ["run", "what", "differs", "step", "bits", "state"]
        assert [row[0] for row in rows[1:]] == [f"small/{NEW}", f"small/{OLD}"]
        assert all(row[-3] == "12/12" and float(row[-2]) > 0 and row[-1] == "done" for row in rows[1:])
    assert "has no run" not in workshop.command("runs")
    assert "nowhere: no such folder" in workshop.command("runs", "nowhere", code=2)
    assert "holds no run" in workshop.command("runs", str(workshop.data), code=2)


def test_a_run_has_names_and_its_data_wherever_one_stands(
    workshop: Workshop, runs: list[Path], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, asked = workshop.environment, ["eval", "analyze patterns", "sample", "export", "resume", "report"]
    monkeypatch.setattr(workshop, "environment", lambda run: here(run) | {"RTX_DATA": str(elsewhere / "none")})
    for name, run in (("last", runs[1]), (NEW, runs[1]), ("98", runs[1]), ("small/20260101", runs[0]), (OLD, runs[0])):
        said = workshop.command("eval", name, "limit=1")
        assert f"{run}: best.ckpt" in said and "preparing" not in said
    for words in asked:
        assert str(runs[1]) in workshop.command(*words.split(), "last")
    assert not (elsewhere / "none").exists()
    only = workshop.folder / "only"
    only.mkdir()
    runs[0].rename(only / OLD)
    assert f"{only / OLD}: best.ckpt" in workshop.command("eval", str(only), "limit=1")
    (only / OLD).rename(runs[0])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("2026", f"2026: 2 runs; name one: {{0}}/small/{NEW}, {{0}}/small/{OLD}"),
        ("small", f"small: 2 runs; name one: {{0}}/small/{NEW}, {{0}}/small/{OLD}"),
        ("abce1234", "no run of this name (did you mean 'abcd1234'?); the newest: "),
        ("lats", f"(did you mean 'last'?); the newest: {{0}}/small/{NEW}, {{0}}/small/{OLD}"),
        ("x" * 3000, "no such folder, and no run of this name; the newest: "),
    ],
)
def test_a_name_of_several_runs_or_none(workshop: Workshop, runs: list[Path], name: str, said: str) -> None:
    assert said.format(workshop.folder / "out") in workshop.command("eval", name, code=2)


def test_without_runs(workshop: Workshop, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = workshop.environment
    monkeypatch.setattr(workshop, "environment", lambda run: here(run) | {"RTX_OUTPUTS": str(elsewhere)})
    assert "last: no such folder, and no run of this name; the newest: there is none" in workshop.command(
        "eval", "last", code=2
    )
    assert "holds no run; rtx train makes one" in workshop.command("runs", code=2)
