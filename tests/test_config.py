"""The schema: ranges, and what fits with what."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from rtx.checks import resolve
from rtx.compose import to_config
from rtx.config import Config
from rtx.errors import UserError


def changed(**values: Any) -> Config:
    """Return the schema's own defaults with some values changed; `a__b` stands for the key a.b."""
    config = Config()
    for key, value in values.items():
        *sections, name = key.split("__")
        node: Any = config
        for section in sections:
            node = getattr(node, section)
        assert hasattr(node, name)
        setattr(node, name, value)
    return config


def test_the_defaults_fit_together_and_clusters_are_frozen() -> None:
    assert resolve(Config()).routing.clusters == 4  # 1024 / 256
    assert resolve(changed(routing__window=300)).routing.clusters == 4  # rounded up
    assert resolve(changed(routing__clusters=9)).routing.clusters == 9


def test_hash_buckets_are_frozen_where_they_are_read() -> None:
    assert resolve(Config()).model.hash_buckets is None
    assert resolve(changed(model__base="lsh+local")).model.hash_buckets == 8  # 2 * 1024 / 256
    assert resolve(changed(model__base="lsh", model__window=1000)).model.hash_buckets == 2
    assert resolve(changed(model__base="lsh", model__hash_buckets=30)).model.hash_buckets == 30


def test_resolve_leaves_its_argument_alone() -> None:
    config = Config()
    resolved = resolve(config)
    assert config.routing.clusters is None
    assert resolve(resolved) == resolved


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("data.length", 1, "an integer, at least 2, at most 1073741824"),
        ("data.name", "enwik9", "one of stdlib, text, enwik8, wikitext103, pg19, cifar10, imagenet64, images, recall"),
        ("routing.clusters", 0, "an integer, at least 1, or null"),
        ("routing.decay", 1.5, "a number, at least 0, at most 1"),
        ("optimizer.lr", 0.0, "a number, greater than 0"),
        ("optimizer.lr", math.nan, "a number, greater than 0"),
        ("optimizer.lr", math.inf, "a number, greater than 0"),
        ("seed", 2**32, "an integer, at least 0, at most 4294967295"),
        ("hardware.compile", 2, "true or false"),
        ("model.base", "local+none", "one or more of local, full, lsh, adaptive_span, strided, fixed, joined by +"),
    ],
)
def test_ranges(key: str, value: Any, allowed: str) -> None:
    section, _, name = key.rpartition(".")
    with pytest.raises(UserError, match=re.escape(f"{key}={value}: must be {allowed}")):
        to_config({section: {name: value}} if section else {name: value})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"routing__heads": 9}, "routing.heads=9 must be at most model.heads=8"),
        ({"routing__window": 2000}, "routing.window=2000 must be at most data.length=1024"),
        ({"model__window": 2000}, "model.window=2000 must be at most data.length=1024"),
        ({"model__base": "strided", "model__stride": 2000}, "model.stride=2000 must be at most data.length=1024"),
        (
            {"model__base": "fixed", "model__summary": 129},
            "model.summary=129 must be at most model.stride=128, the block of base=fixed",
        ),
        *(
            (
                {"model__positions": "axial", "model__axes": axes},
                f"product data.length=1024, such as 32x32x3 for 3072, not model.axes={axes}",
            )
            for axes in (None, "32x33", "32*32", "-32x-32", "1024x", "")
        ),
        ({"model__hash_buckets": 7}, "model.hash_buckets=7 must be even: a rotation and its opposite give two buckets"),
        ({"model__hidden": 250, "model__positions": "none"}, "model.hidden=250 must be a multiple of model.heads=8"),
        ({"model__hidden": 264}, "model.positions=rotary needs an even head size, not hidden/heads = 33"),
        ({"hardware__name": "cpu", "hardware__precision": "tf32"}, "hardware.precision=tf32 needs a GPU; a CPU takes"),
        ({"hardware__devices": 2}, "hardware.devices=2 needs hardware=ddp or fsdp, not hardware=auto"),
        ({"hardware__name": "fsdp", "hardware__compile": True}, "hardware.compile=true is not for hardware=fsdp"),
        ({"trainer__batch_size": 10, "trainer__micro_batch_size": 4}, "trainer.batch_size=10 must be a multiple of"),
        ({"optimizer__warmup": 0}, "optimizer.schedule=rsqrt needs optimizer.warmup of at least 1"),
        ({"trainer__val_stride": 2000}, "trainer.val_stride=2000 must be at most data.length=1024"),
        ({"data__name": "text"}, "data=text needs data.path=<file, folder or glob>"),
        ({"data__path": "book.txt"}, "data.path=book.txt is not read by data=stdlib; use data=text data.path=book.txt"),
        ({"data__newlines": "drop"}, "data.newlines=drop is for data=enwik8 alone, not for data=stdlib"),
        ({"data__size": 16}, "data.size=16 is for images (cifar10, imagenet64, images), not for data=stdlib"),
        ({"data__name": "images", "data__length": 3072}, "data=images needs data.path=<folder with images>"),
        ({"data__name": "cifar10"}, "data.length=1024 must be 3072 = 32 x 32 x 3: an image is one sequence"),
        ({"data__name": "images", "data__path": "a"}, "data.length=1024 must be height x width x 3"),
        (
            {"data__name": "cifar10", "data__length": 3072, "trainer__val_stride": 1024},
            "trainer.val_stride=1024 has no place in data=cifar10, whose images are scored whole",
        ),
        (
            {"data__name": "cifar10", "data__length": 3072, "data__tokenizer": "words"},
            "data.tokenizer=words is for text; data=cifar10 takes data.tokenizer=bytes",
        ),
        ({"name": "a/b"}, "name='a/b' must be a folder's name"),
        ({"name": "x" * 201}, "must be a folder's name, of at most 200 bytes"),
    ],
)
def test_what_does_not_fit(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(changed(**values))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"routing__heads": 0, "routing__window": 2000},  # nothing routes, so its window does not matter
        {"model__base": "full", "model__window": 2000},
        {"model__base": "strided+fixed", "model__window": 2000, "model__summary": 128},
        {"model__positions": "axial", "model__axes": "32x16x2"},
        {"hardware__name": "ddp", "hardware__devices": 2, "hardware__nodes": 2},
        {"hardware__name": "auto", "hardware__precision": "tf32"},  # known to be wrong only once the device is
        {"optimizer__warmup": 0, "optimizer__schedule": "constant"},
        {"data__name": "text", "data__path": "book.txt"},
        {"data__name": "enwik8", "data__newlines": "drop"},
        {"data__name": "cifar10", "data__length": 3072, "trainer__val_stride": 3072},
        {"data__name": "images", "data__path": "cats", "data__length": 2100},
    ],
)
def test_what_fits(values: dict[str, Any]) -> None:
    resolved = resolve(changed(**values))
    assert dataclasses.replace(resolved, routing=Config().routing) == dataclasses.replace(
        changed(**values), routing=Config().routing
    )


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        resolve(changed(routing__heads=9, routing__layers=5, name="/"))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"data__fetch": "archive"}, "data.fetch=archive is for wikitext103 and cifar10, not for data=stdlib"),
        ({"data__held_out": 3}, "data.held_out=3 is for cifar10 and imagenet64, not for data=stdlib"),
        ({"data__vocabulary": 500}, "data.vocabulary=500 is for data.tokenizer=sentencepiece, not for bytes"),
        ({"data__tokenizer_sample": 5_000}, "data.tokenizer_sample=5000 is for data.tokenizer=sentencepiece, not for"),
        ({"data__pairs": 4}, "data.pairs=4 is for data=recall alone, not for data=stdlib"),
        ({"data__sequences": 9}, "data.sequences=9 is for data=recall alone, not for data=stdlib"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve(changed(**values))


def test_settings_that_are_usual_somewhere_are_left_alone() -> None:
    resolve(changed(data__name="pg19", data__vocabulary=98_000))
    resolve(changed(data__name="enwik8", data__fetch="archive"))
    resolve(changed(data__tokenizer="sentencepiece", data__vocabulary=500, data__tokenizer_sample=5_000))
