"""What stands behind a command: run folders, options, overrides; what is taken, and what is refused in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtx.compose import compose
from rtx.config import all_fields
from rtx.errors import UserError
from rtx.options import READS, EvalOptions, SampleOptions, SweepOptions, check_overrides, read_words


def refusal(command: str, *words: str) -> str:
    """Return what is said of words that are refused."""
    with pytest.raises(UserError) as caught:
        check_overrides(read_words(command, words).overrides, sweep=command == "train -m")
    assert all(len(line) < 500 for line in str(caught.value).splitlines())
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("trainer.steps=1e3", 1000),
        ("trainer.steps = 5 ", 5),
        ("++trainer.steps=${optimizer.warmup}", 50),
        ("routing.attend_self=no", False),
        ("trainer.max_minutes=NULL", None),
        ("optimizer.lr=1e-5", 1e-5),
        ("name=007", "007"),
        ('name="null"', "null"),
        ("name='a,b'", "a,b"),
        ("logger.group=(x) [y", "(x) [y"),
        ("logger.group=${name}/x", "rtx/x"),
    ],
)
def test_a_value_is_taken_as_it_is_written(word: str, value: object) -> None:
    section, _, name = word.partition("=")[0].strip("+ ").rpartition(".")
    config = compose([word])
    assert getattr(getattr(config, section) if section else config, name) == value


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("routing.windw=3", "unknown key 'routing.windw' (did you mean 'routing.window'?)"),
        ("+lrr=3", "unknown key 'lrr' (did you mean 'optimizer.lr'?)"),
        ("modle=rt24", "unknown key 'modle' (did you mean 'model'?)"),
        ("TRAINER.STEPS=3", "(did you mean 'trainer.steps'?)"),
        ("routing.hiden=3", "(did you mean 'model.hidden'?)"),
        ("data=enwik9", "data=enwik9: must be one of cifar10, copy, enwik8, hub, "),
        ("data=enwik9", "text, wikitext103 (did you mean 'enwik8'?)"),
        ("data=../routing/causal", "data=../routing/causal: must be one of cifar10"),
        ("trainer={steps: 3}", "unknown key 'trainer'"),
        ("trainer.steps=abc", "trainer.steps=abc: must be an integer, at least 1 (Optimizer steps to train;"),
        ("trainer.steps=٤", "trainer.steps=٤: must be an integer"),
        ("trainer.steps=1e300", "trainer.steps=1e300: must be an integer"),
        ("optimizer.lr=nan", "optimizer.lr=nan: must be a number, greater than 0"),
        ("routing.decay=1.5", "routing.decay=1.5: must be a number, at least 0, at most 1 ("),
        ("hardware.compile=maybe", "hardware.compile=maybe: must be true or false"),
        ("trainer.micro_batch_size=0", "must be auto or an integer, at least 1"),
        ("routing.selection=causl", "blocks, blocks_random, indexer (did you mean 'causal'?)"),
        ("model.base=local+none", "adaptive_span, strided, fixed, fixed_block, fixed_summary, joined"),
        ("name=a,b", "takes one value; several make a sweep (rtx train -m); quote it where it is one: 'name=\"...\"'"),
        ("hydra.run.dir=x", "hydra.run.dir: keys of Hydra's own are not read; RTX_OUTPUTS=<folder>"),
        ("trainer.max_epochs=3", "unknown key 'trainer.max_epochs' (did you mean 'trainer.steps'?)"),
        ("foo=3", "unknown key 'foo'; --help lists them"),
        ("trainer.stps", "'trainer.stps' is not of the form key=value"),
        ("~routing.heads", "'~routing.heads' is not of the form key=value"),
        ("", "'' is not of the form key=value"),
        ("a\nb=3", "unknown key 'a b'"),
        ("sweep.retry=true", "sweep.retry is an option of rtx train -m"),
        ("eval.split=test", "rtx train does not read eval.split; split is an option of rtx eval"),
    ],
)
def test_what_training_refuses(word: str, said: str) -> None:
    assert said in refusal("train", word)


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("routing.heads=2, 4", ("2", " 4")),
        ("data.path=a.txt,'b,c.txt'", ("a.txt", "'b,c.txt'")),
        ("model=rt10, 'rt12'", ("rt10", "rt12")),
        ("hydra.launcher.setup=[a,b]", ("[a,b]",)),
    ],
)
def test_what_a_sweep_lists(word: str, values: tuple[str, ...]) -> None:
    (override,) = check_overrides([word], sweep=True)
    assert override.values == values


def test_a_sweep_refuses_a_value_among_others() -> None:
    assert "routing.heads=x: must be an integer" in refusal("train -m", "routing.heads=2,x")
    assert "model=rtx: must be one of" in refusal("train -m", "model=rt24,rtx")


def make_runs(folder: Path, *names: str) -> None:
    """Make the current folder one with runs."""
    for name in names:
        (folder / name).mkdir()
        (folder / name / "config.yaml").touch()


def test_options_are_read_beside_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_runs(tmp_path, "run")
    words = read_words("eval", ["run", "split=test", "limit=5", "seed=3", "hardware=cpu", "data.path=a=b"])
    assert (words.runs, words.options) == ([Path("run")], EvalOptions(split="test", limit=5))
    assert words.overrides == ["seed=3", "hardware=cpu", "data.path=a=b"] and words.given == {"split", "limit"}
    sample = read_words("sample", ["run", "prompt=Once, (upon) a=b", "seed=3", "top_k=null", "temperature=5e-1"])
    assert sample.options == SampleOptions(prompt="Once, (upon) a=b", seed=3, temperature=0.5)
    assert read_words("sample", ["run", "prompt='  null '"]).options.prompt == "  null "
    swept = read_words("train -m", ["seed=1,2", "sweep.parallel=2"])
    assert (swept.options, swept.overrides) == (SweepOptions(parallel=2), ["seed=1,2"])


def test_a_folder_may_have_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    make_runs(tmp_path, "lr=0.1")
    assert read_words("eval", [f"{tmp_path}/lr=0.1", "limit=1"]).runs == [tmp_path / "lr=0.1"]


@pytest.mark.parametrize(
    ("command", "word", "said"),
    [
        ("eval", "splt=test", "unknown key 'splt' (did you mean 'split'?)"),
        ("eval", "optimizer.lr=5", "rtx eval does not read optimizer.lr; it reads checkpoint, split"),
        ("eval", "sample.length=5", "rtx eval does not read sample.length; length is an option of rtx sample"),
        ("eval", "eval.split=test", "rtx eval does not read eval.split; split is an option of rtx eval"),
        ("eval", "hardware=ddp", "hardware=ddp: not for rtx eval"),
        ("resume", "hardware=slurm", "hardware=slurm: not for rtx resume"),
        ("sample", "data.path=x", "rtx sample does not read data.path"),
        ("resume", "model=rt24", "rtx resume does not read model; it reads hardware, logger, "),
    ],
)
def test_a_command_refuses_what_it_does_not_read(command: str, word: str, said: str) -> None:
    assert said in refusal(command, "run", word)


def test_runs_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_runs(tmp_path, "a", "b")
    assert "rtx eval needs the run's folder first; usage: rtx eval <run>" in refusal("eval", "split=test")
    assert "takes 1 run, not also 'b'" in refusal("eval", "a", "b")
    assert "usage: rtx audit <run> ..." in refusal("audit", "windows=9")
    assert read_words("audit", ["a", "b", "seed=4"]).runs == [Path("a"), Path("b")]
    assert read_words("report", []).runs == []


def test_every_key_has_a_docstring_of_one_sentence_or_more() -> None:
    docs = {key: field.doc for key, field in all_fields().items()}
    docs |= {f"{name} {key}": own.doc for name, command in READS.items() for key, own in command.own.items()}
    assert [key for key, doc in docs.items() if not doc.endswith(".")] == []
