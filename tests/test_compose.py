"""From overrides to a checked configuration, to plain values and back, and onto the configuration of a run."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from rtx.commandline.fields import all_fields
from rtx.compose import (
    compose,
    compose_unresolved,
    config_hash,
    from_dict,
    get,
    load_run_config,
    merge,
    to_dict,
    to_yaml,
)
from rtx.errors import UserError


@pytest.fixture(scope="module")
def default() -> Any:
    """What `rtx train` runs."""
    return compose([])


def test_the_newcomers_configuration(default: Any) -> None:
    assert (default.data.name, default.model.name, default.routing.selection) == ("stdlib", "tiny", "causal")
    assert (default.routing.decay, default.routing.logit_scale) == (0.99, "sqrt_d")
    assert default.optimizer.name == "adamw"
    assert default.trainer.steps == default.optimizer.steps
    assert default.routing.clusters == -(-default.data.length // default.routing.window)


def test_a_command_line_wins_over_presets_and_a_later_group_over_an_earlier() -> None:
    assert compose(["model=tiny", "optimizer=adafactor"]).optimizer.name == "adafactor"
    assert compose(["optimizer=adam", "model=rt22"]).optimizer.name == "adam"
    assert compose(["model=rt22"]).optimizer.name == "adafactor"
    paper = compose(["model=rt24", "data=enwik8", "routing.window=128", "data.length=4096"])
    assert (paper.data.length, paper.routing.window, paper.routing.heads) == (4096, 128, 4)
    smoke = compose(["experiment=smoke", "trainer.batch_size=2"])
    assert (smoke.name, smoke.trainer.steps, smoke.trainer.batch_size) == ("smoke", 20, 2)
    assert compose(["optimizer.steps=7"]).trainer.steps == 7
    assert compose(["routing=topk", "model=rt24"]).routing.logit_scale == "none"


def test_images_fix_the_length_whatever_a_model_writes_and_the_command_line_wins() -> None:
    assert compose(["data=cifar10"]).data.length == 3072  # model=tiny writes 256
    assert compose(["data=cifar10", "model=rt24"]).data.length == 3072
    assert compose(["data=cifar10", "data.size=16"]).data.length == 768
    assert compose(["data=imagenet64"]).data.length == 12288
    assert compose(["data=images", "data.path=cats"]).data.length == 3072
    with pytest.raises(UserError, match=r"data\.length=256 must be 3072 = 32 x 32 x 3"):
        compose(["data=cifar10", "data.length=256"])


def test_choices_are_those_hydra_made() -> None:
    _, choices = compose_unresolved(["model=rt22"])
    assert choices["optimizer"] == "adafactor"
    assert choices["experiment"] is None


def test_no_experiment_undoes_one_that_stands_before_it() -> None:
    for words in (["experiment=null"], ["experiment=smoke", "experiment=null"]):
        config, choices = compose_unresolved(words)
        assert config == compose_unresolved([])[0] and choices["experiment"] is None
    for words in (["experiment=null", "experiment=smoke"], ["experiment=smoke", "experiment=recall"] * 2):
        assert compose(words).name == words[-1].removeprefix("experiment=")


def test_values_reach_the_configuration_as_they_were_written(tmp_path: Path) -> None:
    config = compose(["sample.prompt=Il était (une) fois, [..]", "name=007", "seed=1e3"])
    assert (config.sample.prompt, config.name, config.seed) == ("Il était (une) fois, [..]", "007", 1000)
    path = str(tmp_path / "livre à lire=1.txt")
    assert compose(["data=text", f"data.path='{path}'"]).data.path == path


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["routing.heads=9"], "routing.heads=9 must be at most model.heads=4"),
        (["trainer.steps=${seeed}"], "trainer.steps: Interpolation key 'seeed' not found"),
        (["trainer.steps=${name}"], "trainer.steps: "),
        (["trainer.steps=${oc.env:NO_SUCH_VARIABLE}"], "Environment variable 'NO_SUCH_VARIABLE' not found"),
        (["name=${name}"], "name: Recursive interpolation detected"),
        (["data.length=${seed}"], "data.length=0: must be at least 2"),
        (["data=text"], "data=text needs data.path=<file, folder or glob>"),
    ],
)
def test_mistakes_that_show_when_all_is_composed(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_composing_leaves_the_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compose(["seed=1"])
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before


def test_plain_values_and_back(default: Any, tmp_path: Path) -> None:
    assert from_dict(to_dict(default)) == default
    (tmp_path / "config.yaml").write_text(to_yaml(default))
    assert load_run_config(tmp_path) == default
    small = compose(["optimizer.lr=1e-5", "trainer.max_minutes=1e-3", "name=1e3", "sample.prompt=a: [b\n'c"])
    (tmp_path / "config.yaml").write_text(to_yaml(small))
    assert load_run_config(tmp_path) == small


@pytest.mark.parametrize("name", ["007", "-0", "1e3", "0x10", "1_0", "true"])
def test_a_text_of_a_run_is_taken_as_it_is_written(default: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(default).replace("\nname: rtx\n", f"\nname: {name}\n"))
    assert load_run_config(tmp_path).name == name


def test_a_key_that_an_older_run_lacks_keeps_the_schemas_default(default: Any) -> None:
    values = to_dict(default)
    del values["routing"]["key_shift"]
    assert from_dict(values) == default


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not the configuration of a run"),
        ("sweep: {retry: -1}", "sweep.retry=-1: must be "),
        ("- a\n", "is not the configuration of a run"),
        ("seed: 1\ndata: [", "config.yaml: not valid YAML, line 2: "),
        ("seed: \x00", "config.yaml: not valid YAML: "),
        ("data:\n  lenght: 3\n", "Key 'lenght' not in 'DataConfig'"),
        ("data:\n  length: three\n", "could not be converted to Integer"),
        ("data:\n  length: 1\n", "config.yaml: data.length=1: must be at least 2"),
        ("\udcff\x00", "cannot be read"),
    ],
)
def test_a_damaged_configuration_of_a_run(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        load_run_config(tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        load_run_config(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        load_run_config(tmp_path / "run")


def test_merge_takes_short_forms_keys_and_two_groups(default: Any) -> None:
    merged = merge(default, ["split=test", "mode=streaming", "limit=5", "hardware.threads=2", "hardware=cpu"], "eval")
    assert (merged.eval.split, merged.eval.mode, merged.eval.limit) == ("test", "streaming", 5)
    assert (merged.hardware.name, merged.hardware.threads) == ("cpu", 2)
    assert merge(merged, ["limit=null"], "eval").eval.limit is None
    sample = merge(default, ["length=20", "seed=3", "temperature=0.5", "prompt=a, b", "checkpoint=last"], "sample")
    assert (sample.sample.length, sample.sample.seed, sample.seed) == (20, 3, 0)
    assert (sample.sample.prompt, sample.sample.checkpoint, sample.eval.checkpoint) == ("a, b", "last", "best")
    assert merge(default, ["seed=3"]).seed == 3
    assert merge(default, []) == default
    assert merge(default, ["logger=jsonl"]).logger.name == "jsonl"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("splt=test", "unknown key 'splt' (did you mean 'split'?)"),
        ("split=tst", "eval.split=tst: must be one of valid, test, train (did you mean 'test'?)"),
        ("model=rt24", "model=rt24: a run keeps its model; hardware= can be chosen anew"),
        ("data.length=32", "routing.window=64 must be at most data.length=32"),
        ("limit=0", "eval.limit=0: must be an integer, at least 1, or null"),
        ("limit=1,2", "eval.limit=1,2: several values need -m"),
    ],
)
def test_merge_refuses(default: Any, override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        merge(default, [override], "eval")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("command", "override", "said"),
    [
        ("eval", "length=5", "unknown key 'length' (did you mean 'data.length'?); rtx eval reads eval.*, data.*"),
        ("eval", "optimizer.lr=5", "optimizer.lr=5: rtx eval does not read optimizer.lr; it reads eval.*, data.*"),
        ("eval", "model.layers=5", "rtx eval does not read model.layers"),
        ("eval", "sample.length=5", "rtx eval does not read sample.length"),
        ("eval", "hardware.devices=2", "rtx eval does not read hardware.devices"),
        ("eval", "hardware=ddp", "hardware=ddp: rtx eval works on one device; hardware takes auto, cpu or gpu"),
        ("eval", "hardware.name=ddp", "rtx eval works on one device"),
        ("eval", "hardware=fsdp", "hardware=fsdp: rtx eval works on one device; hardware takes auto, cpu or gpu"),
        ("eval", "logger=jsonl", "logger=jsonl: a run keeps its logger; hardware= can be chosen anew"),
        ("eval", "force=true", "unknown key 'force'; rtx eval reads"),
        ("sample", "split=test", "unknown key 'split'; rtx sample reads sample.*"),
        ("sample", "data.path=x", "rtx sample does not read data.path"),
        ("resume", "name=x", "name=x: rtx resume does not read name; it reads trainer.*"),
        ("resume", "eval.split=test", "rtx resume does not read eval.split"),
        ("resume", "split=test", "unknown key 'split'"),
        ("resume", "experiment=smoke", "a run keeps its experiment; hardware= and logger= can be chosen anew"),
    ],
)
def test_a_command_refuses_what_it_does_not_read(default: Any, command: str, override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        merge(default, [override], command)
    assert said in str(caught.value)


def test_a_command_takes_what_it_reads(default: Any) -> None:
    merged = merge(default, ["data.length=512", "seed=3", "data.name=text", "data.path=book.txt"], "eval")
    assert (merged.data.length, merged.seed, merged.data.name, merged.data.path) == (512, 3, "text", "book.txt")
    assert merge(default, ["hardware.precision=fp64"], "sample").hardware.precision == "fp64"
    merged = merge(default, ["optimizer.lr=1", "trainer.steps=9", "logger.group=g", "model.dropout=0.1"], "resume")
    assert (merged.optimizer.lr, merged.trainer.steps, merged.logger.group) == (1.0, 9, "g")


def test_the_hash_tells_cells_apart_by_what_changes_results(default: Any) -> None:
    reference = config_hash(default)
    assert len(reference) == 12
    same = [
        "name=other",
        "logger=jsonl",
        "logger.group=g",
        "hardware.workers=2",
        "trainer.checkpoint_minutes=5",
        "model.name=mine",
        "pictures.bins=3",
    ]
    assert config_hash(compose(same)) == reference
    seen = {reference}
    for override in ("seed=1", "routing.window=32", "trainer.steps=5", "hardware.threads=1", "optimizer.lr=0.1"):
        seen.add(config_hash(compose([override])))
    assert len(seen) == 6


def test_the_hash_knows_the_folder_that_a_path_counts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        seen.add(config_hash(compose(["data=text", "data.path=book.txt"])))
    assert len(seen) == 2
    assert config_hash(compose(["data=text", f"data.path={tmp_path}/other/book.txt"])) in seen


def test_get_reaches_every_key(default: Any) -> None:
    assert {key: get(default, key) for key in all_fields()}["optimizer.beta2"] == default.optimizer.beta2
