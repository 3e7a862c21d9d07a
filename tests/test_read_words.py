"""What stands behind a command: run folders, options in short and in full, overrides, and what it does not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtx.errors import UserError
from rtx.options import EvalOptions, SampleOptions, SweepOptions, read_words


def refusal(command: str, *words: str) -> str:
    """Return what is said of words that are refused."""
    with pytest.raises(UserError) as caught:
        read_words(command, words)
    return str(caught.value)


def test_options_are_written_short_or_with_their_section() -> None:
    words = read_words("eval", ["run", "split=test", "eval.limit=5", "seed=3", "hardware=cpu", "data.path=a=b"])
    assert words.runs == [Path("run")]
    assert words.options == EvalOptions(split="test", limit=5)
    assert words.overrides == ["seed=3", "hardware=cpu", "data.path=a=b"]
    sample = read_words("sample", ["run", "prompt=Once, (upon) a=b", "seed=3", "top_k=null", "temperature=5e-1"])
    assert sample.options == SampleOptions(prompt="Once, (upon) a=b", seed=3, temperature=0.5)
    assert read_words("sample", ["run", "prompt='  null '"]).options.prompt == "  null "
    assert read_words("analyze context", ["run", "windows=2", "mode=streaming"]).options.windows == 2


def test_a_sweep_takes_its_options_and_leaves_the_rest_to_the_cells() -> None:
    words = read_words("train -m", ["seed=1,2", "sweep.parallel=2", "hydra/launcher=basic"])
    assert words.options == SweepOptions(parallel=2)
    assert words.overrides == ["seed=1,2", "hydra/launcher=basic"]


def test_an_audit_without_a_run_takes_a_whole_configuration() -> None:
    words = read_words("audit", ["model=rt24", "seed=3", "audit.seed=4", "windows=0", "model.layers=2"])
    assert (words.runs, words.options.seed, words.options.windows) == ([], 4, 0)
    assert words.overrides == ["model=rt24", "seed=3", "model.layers=2"]
    assert read_words("audit", ["run", "seed=4"]).options.seed == 4


def test_a_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a=b", "-o"):
        Path(name).mkdir()
        assert read_words("eval", [name, "limit=1"]).runs == [Path(name)]


@pytest.mark.parametrize(
    ("command", "word", "said"),
    [
        ("eval", "splt=test", "unknown key 'splt' (did you mean 'split'?)"),
        ("eval", "split=tst", "split=tst: must be one of valid, test, train (did you mean 'test'?)"),
        ("eval", "eval.limit=0", "eval.limit=0: must be an integer, at least 1, or null"),
        ("eval", "limit=1,2", "limit=1,2: must be an integer"),
        ("eval", "optimizer.lr=5", "optimizer.lr=5: rtx eval does not read optimizer.lr; it reads split"),
        ("eval", "sample.length=5", "rtx eval does not read sample.length; it is an option of rtx sample"),
        ("eval", "hardware.devices=2", "rtx eval does not read hardware.devices"),
        ("eval", "hardware=ddp", "hardware=ddp: rtx eval works on one device; hardware takes auto, cpu or gpu"),
        ("eval", "hardware.name=fsdp", "rtx eval works on one device"),
        ("eval", "hardware=slurm", "makes jobs of the cells of a sweep (rtx train -m), not of rtx eval"),
        ("eval", "model=rt24", "model=rt24: rtx eval does not read model; it reads split, mode"),
        ("eval", "force=true", "unknown key 'force'"),
        ("eval", "-x", "-x: unknown flag"),
        ("sample", "split=test", "unknown key 'split'"),
        ("sample", "data.path=x", "rtx sample does not read data.path"),
        ("resume", "name=x", "name=x: rtx resume does not read name"),
        ("resume", "eval.split=test", "rtx resume does not read eval.split; it is an option of rtx eval"),
        ("resume", "experiment=smoke", "rtx resume does not read experiment"),
        ("analyze patterns", "windows=3", "unknown key 'windows'"),
        ("report", "name=x", "rtx report does not read name"),
    ],
)
def test_a_command_refuses_what_it_does_not_read(command: str, word: str, said: str) -> None:
    assert said in refusal(command, "run", word)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("bench.turns=9", "bench.turns=9: rtx train does not read bench.turns; it is an option of rtx bench steps"),
        ("report.output=x", "it is an option of rtx report"),
        ("sweep.once=true", "it is an option of rtx sweep"),
        ("sweep.retry=true", "it is an option of rtx train -m"),
        ("eval.stride=9", "it is an option of rtx eval; for validations in training: trainer.val_stride"),
        ("routing.haeds=2", "unknown key 'routing.haeds' (did you mean 'routing.heads'?)"),
        ("stray", "'stray' is not of the form key=value"),
    ],
)
def test_training_refuses_the_options_of_other_commands(word: str, said: str) -> None:
    assert said in refusal("train", word)


def test_runs_are_counted_and_every_mistake_is_told_at_once() -> None:
    said = refusal("eval", "split=test")
    assert said.startswith("rtx eval needs the run's folder first, not 'split=test'; usage: rtx eval <run>")
    assert "takes 1 run, not also 'b'" in refusal("eval", "a", "b")
    assert len(refusal("eval", "run", "splt=test", "limit=0", "model=rt24").splitlines()) == 3
