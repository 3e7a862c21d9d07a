"""From overrides to a checked configuration, to plain values and back, and onto the configuration of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rtx.checks import resolve
from rtx.compose import compose, config_hash, load_run_config, merge, to_config, to_dict, to_yaml
from rtx.errors import UserError

HASHES = {
    "": "c15674fb8d83",
    "data=enwik8 model=rt24": "948064e8fff7",
    "experiment=cifar10 seed=3": "4041088e38d3",
    "experiment=recall routing=blocks routing.block=4": "c8a00dfd5625",
    "model=rt22 optimizer.lr=1e-2 data=pg19": "06c937bed225",
}


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


def test_no_experiment_undoes_one_that_stands_before_it(default: Any) -> None:
    assert compose(["experiment=smoke", "experiment=null"]) == default
    assert compose(["experiment=null", "experiment=smoke"]).name == "smoke"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["routing.heads=9"], "routing.heads=9 must be at most model.heads=4"),
        (["trainer.steps=${seeed}"], "trainer.steps: Interpolation key 'seeed' not found"),
        (["trainer.steps=${name}"], "trainer.steps: "),
        (["trainer.steps=${oc.env:NO_SUCH_VARIABLE}"], "Environment variable 'NO_SUCH_VARIABLE' not found"),
        (["name=${name}"], "name: Recursive interpolation detected"),
        (["data.length=${seed}"], "data.length=0: must be an integer, at least 2"),
        (["data=text"], "data=text needs data.path=<file, folder or glob>"),
    ],
)
def test_mistakes_that_show_when_all_is_composed(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plain_values_and_back(default: Any, tmp_path: Path) -> None:
    assert resolve(to_config(to_dict(default))) == default
    small = compose(["optimizer.lr=1e-5", "trainer.max_minutes=1e-3", "name=1e3", "logger.group='a: [b'"])
    for config in (default, small, compose(['name="null"', "hardware.compile=true"])):
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load_run_config(tmp_path) == config


@pytest.mark.parametrize("name", ["007", "-0", "1e3", "0x10", "true", "${oc.env:HOME}"])
def test_a_text_of_a_run_is_taken_as_it_is_written(default: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(default).replace("\nname: rtx\n", f"\nname: {name}\n"))
    assert load_run_config(tmp_path).name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not the configuration of a run"),
        ("eval: {split: test}\n", "config.yaml: unknown key 'eval.split'"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nseed: [*b, *b]\n", "a must be one value"),
        ("a: &a {x: 1}\nb: *a\n", "b must be one value"),
        ("seed: " + "[" * 5000, "seed must be one value"),
        ("- " * 100_000, "it must be one value"),
        ("seed: 1\nname: a\nseed: 2\n", "seed must be one value, or keys with one each, once"),
        ("data: {length: {a: 1}}", "data.length must be one value"),
        ("? {a: 1}\n: 2", "it must be one value"),
        ("seed: [1, 2]", "seed must be one value"),
        ("seed: 1\ndata: {", "config.yaml: not valid YAML: while parsing"),
        ("data:\n  lenght: 3\n", "unknown key 'data.lenght' (did you mean 'data.length'?)"),
        ("data:\n  length: three\n", "config.yaml: data.length=three: must be an integer"),
        ("\udcff\x00", "can't decode byte"),
    ],
)
def test_a_damaged_configuration_of_a_run(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        load_run_config(tmp_path)
    assert said in str(caught.value) and len(str(caught.value)) < 1000
    assert all(line.startswith(str(tmp_path)) for line in str(caught.value).splitlines())


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        load_run_config(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        load_run_config(tmp_path / "run")
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"has no config\.yaml"):  # and it is not waited for
        load_run_config(tmp_path)


def test_merge_takes_keys_and_groups_and_checks_them(default: Any) -> None:
    merged = merge(default, ["hardware.threads=2", "hardware=cpu", "data.length=512", "logger=jsonl", "seed=3"])
    assert (merged.hardware.name, merged.hardware.threads, merged.data.length) == ("cpu", 2, 512)
    assert (merged.logger.name, merged.seed) == ("jsonl", 3)
    assert merge(default, []) == default
    assert merge(default, ["name=${oc.env:HOME}"]).name == "${oc.env:HOME}"
    with pytest.raises(UserError, match=r"routing\.window=64 must be at most data\.length=32"):
        merge(default, ["data.length=32"])


def test_the_hash_tells_cells_apart_by_what_changes_results(default: Any) -> None:
    reference = config_hash(default)
    assert len(reference) == 12
    same = "name=other logger.group=g hardware.workers=2 model.name=mine data.verify=never"
    same += " trainer.checkpoint_every=7 trainer.micro_batch_size=2 model.recompute=true"
    assert config_hash(compose(same.split())) == reference
    others = ("seed=1", "routing.window=32", "trainer.steps=5", "hardware.threads=1", "optimizer.lr=0.1")
    assert len({reference, *(config_hash(compose([word])) for word in others)}) == 6
    assert compose(["seed=1"]) != compose([]) == default  # a later cell of the same groups knows nothing of an earlier


def test_the_hash_of_recorded_configurations_stands() -> None:
    """Cells that were trained before must be found again by the same words."""
    for words, recorded in HASHES.items():
        assert config_hash(compose(words.split())) == recorded, words


def test_the_hash_knows_the_folder_that_a_path_counts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = config_hash(compose(words := ["data=text", "data.path=book.txt"]))
    monkeypatch.chdir(tmp_path)
    assert before != config_hash(compose(words)) == config_hash(compose([words[0], f"data.path={tmp_path}/book.txt"]))
