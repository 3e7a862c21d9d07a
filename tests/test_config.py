"""What fits with what, and keys that nothing would read."""

from __future__ import annotations

import re

import pytest

from rtx.cells import lay_out
from rtx.checks import resolve
from rtx.compose import compose, merge, with_values
from rtx.config import Config, all_fields
from rtx.errors import UserError
from rtx.options import check_overrides


def changed(words: str) -> Config:
    """Return the schema's own defaults with the values of some words."""
    values = {}
    for word in words.split():
        key, _, text = word.partition("=")
        values[key] = all_fields()[key].read_word(text)
    return with_values(Config(), values)


@pytest.mark.parametrize(
    ("words", "frozen"),
    [
        ("", (4, None)),  # 1024 / 256
        ("routing.clusters=9", (9, None)),
        ("model.base=lsh+local", (4, 8)),  # 2 * 1024 / 256
        ("model.base=lsh model.hash_buckets=30", (4, 30)),
    ],
)
def test_clusters_and_hash_buckets_are_frozen(words: str, frozen: tuple[int, int | None]) -> None:
    resolved = resolve(changed(words))
    assert (resolved.routing.clusters, resolved.model.hash_buckets) == frozen
    assert resolve(resolved) == resolved and Config().routing.clusters is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("routing.heads=9", "routing.heads=9 must be at most model.heads=8"),
        ("routing.selection=exact", "routing.selection=exact needs routing.keys=separate or tied, not shared;"),
        ("routing.selection=random routing.keys=projected", "routing.keys=projected needs routing.selection=causal"),
        ("routing.key_shift=1", "routing.key_shift and routing.key_conv are for routing.keys=separate"),
        (
            "routing.keys=tied routing.key_loss=1",
            "routing.key_loss is for routing.keys=separate or projected, not for tied",
        ),
        ("routing.selection=blocks routing.keys=separate routing.block=300", "must be at most routing.window=256"),
        ("model.window=2000", "model.window=2000 must be at most data.length=1024"),
        ("model.base=fixed model.summary=129", "model.summary=129 must be at most model.stride=128"),
        ("model.base=local+local+lsh", "needs in every layer a multiple of 3 heads that do not route"),
        *(
            (f"model.positions=axial model.axes={axes}", f"model.axes={axes} must have the product data.length=1024")
            for axes in ("32x33", "32*32", "-32x-32", "1024x", "")
        ),
        ("model.hash_buckets=7", "model.hash_buckets=7 must be even: a rotation and its opposite give two buckets"),
        ("model.hidden=250 model.positions=none", "model.hidden=250 must be a multiple of model.heads=8"),
        ("model.hidden=264", "model.positions=rotary needs an even head size, not hidden/heads = 33"),
        ("hardware.name=cpu hardware.precision=tf32", "hardware.precision=tf32 needs a GPU; a CPU takes"),
        ("hardware.devices=2", "hardware.devices and nodes above 1 need hardware=ddp or fsdp, not hardware=auto"),
        ("hardware.name=fsdp hardware.compile=true", "hardware.compile=true is not for hardware=fsdp"),
        ("hardware.name=fsdp optimizer.name=adafactor", "optimizer=adafactor is not for hardware=fsdp"),
        ("hardware.attention=flex hardware.name=cpu", "hardware.attention=flex is for a GPU"),
        ("hardware.attention=native hardware.name=gpu", "hardware.attention=native is for hardware.precision=fp32 on"),
        ("hardware.attention=native model.positions=shaw", "need hardware.attention=auto or torch"),
        ("trainer.batch_size=10 trainer.micro_batch_size=4", "trainer.batch_size=10 must be a multiple of"),
        ("optimizer.warmup=0", "optimizer.schedule=rsqrt needs optimizer.warmup of at least 1"),
        ("data.name=text", "data=text needs data.path=<file, folder or glob>"),
        ("data.name=cifar10", "data.length=1024 must be 3072 = 32 x 32 x 3: an image is one sequence"),
        ("data.name=images data.path=a", "data.length=1024 must be height x width x 3"),
        ("data.name=cifar10 data.length=3072 trainer.val_stride=1024", "has no place in data=cifar10, whose sequences"),
        ("data.name=recall data.pairs=17", "data.pairs=17 must be at most data.keys=16"),
        ("data.name=recall data.pairs=16 data.length=63 routing.heads=0 model.window=8", "questions take 64 units"),
        ("data.name=mqar data.pairs=300 data.keys=400", "data.pairs=300 and their questions take 1200 units, not"),
        ("data.name=copy data.pairs=100 data.distance=1000", "besides data.distance=1000, not data.length=1024"),
        ("data.name=induction data.pairs=17", "data.pairs=17 must be at most data.keys=16"),
        ("name=a/b", "name='a/b' must be a folder's name"),
        (f"name={'x' * 201}", "must be a folder's name, of at most 200 bytes"),
    ],
)
def test_what_does_not_fit(words: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        resolve(changed(words))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "routing.heads=0 routing.window=2000",  # nothing routes, so its window does not matter
        "model.base=strided+fixed model.window=2000 model.summary=128",
        "model.positions=axial model.axes=32x16x2",
        "hardware.name=auto hardware.precision=tf32",  # known to be wrong only once the device is
        "data.name=cifar10 data.length=3072 trainer.val_stride=3072",
        "data.name=images data.path=cats data.length=2100",
    ],
)
def test_what_fits(words: str) -> None:
    config = changed(words)
    assert with_values(resolve(config), {"routing.clusters": None}) == config


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("data.path=book.txt", "data.path=book.txt has no effect with data.name=stdlib; it is for text, enwik8,"),
        ("data.size=16", "data.size=16 has no effect with data.name=stdlib; it is for cifar10, imagenet64, images"),
        ("data=cifar10 data.tokenizer=words", "data.tokenizer=words has no effect with data.name=cifar10"),
        ("data.vocabulary=500", "data.vocabulary=500 has no effect with data.tokenizer=bytes; it is for sentencepiece"),
        (
            "routing=blocks_random routing.compressed=true",
            "routing.compressed=true has no effect with routing.selection=blocks_random; it is for blocks",
        ),
        ("routing.block=8", "routing.block=8 has no effect with routing.selection=causal; it is for blocks"),
        ("routing=exact routing.decay=0.5", "routing.decay=0.5 has no effect with routing.selection=exact"),
        ("model.stride=8", "model.stride=8 has no effect with model.base=local; it is for strided, fixed"),
        ("optimizer=adafactor optimizer.beta1=0.5", "optimizer.beta1=0.5 has no effect with optimizer.name=adafactor"),
        ("logger=jsonl logger.project=x", "logger.project=x has no effect with logger.name=jsonl; it is for auto"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(words: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        compose(words.split())
    with pytest.raises(UserError, match=re.escape(said)):
        merge(compose(words.split()[:-1]), words.split()[-1:])


def test_a_key_that_something_reads_is_not() -> None:
    for words in ("model.axes=null", "data=enwik8 data.fetch=archive", "model.base=local+fixed model.stride=8"):
        compose(words.split())
    merge(resolve(changed("data.newlines=drop")), ["seed=1"])  # what a file says in vain hurts nobody
    elsewhere = compose(["experiment=recall", "data=text", "data.path=book.txt"])
    assert (elsewhere.data.name, elsewhere.data.keys, elsewhere.routing.window) == ("text", 8, 16)


def test_a_sweep_refuses_a_key_that_no_cell_reads() -> None:
    both = ["routing=blocks,causal", "routing.block=8,16", "model.heads=4"]
    assert len(lay_out(check_overrides(both, sweep=True))) == 4
    with pytest.raises(UserError, match=r"routing\.block=8 has no effect with routing\.selection=topk"):
        lay_out(check_overrides(["routing=topk,causal", "routing.block=8,16"], sweep=True))
