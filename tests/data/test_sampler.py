"""Training items and batches: functions of seed, step and place alone, whoever slices them."""

import pickle
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from rtx.data.datamodule import TrainingItems, permuted, training_batches

TOKENS = np.arange(20_000, dtype=np.uint16)  # every token says where it stands


def starts(items: TrainingItems, epoch: int) -> list[int]:
    return [items.start(epoch * items.per_epoch + slot) for slot in range(items.per_epoch)]


def test_the_same_items_on_every_machine():
    items = TrainingItems(TOKENS, length=32, seed=2**32 - 1, batch_size=4)
    assert [items.start(index) for index in (0, 1, 2, 1000, 123_456_789)] == [13218, 11970, 1730, 14131, 19530]
    item = items[250 * 4]
    assert item.dtype == torch.int64 and item.tolist() == list(range(14131, 14131 + 32))
    images = TrainingItems(np.arange(240, dtype=np.uint8), 6, seed=1, batch_size=3, whole=True)
    assert [images.start(index) // 6 for index in (0, 1, 39, 40, 10**9)] == [34, 37, 39, 17, 14]


@pytest.mark.parametrize(("units", "length"), [(20_000, 32), (1000, 64), (64, 64), (100, 64), (127, 64), (128, 64)])
def test_an_epoch_is_a_permutation_of_windows_that_do_not_overlap(units, length):
    items = TrainingItems(TOKENS[:units], length, seed=0, batch_size=3)
    assert items.per_epoch >= max(1, units // length - 1)
    for epoch in range(5):
        found = sorted(starts(items, epoch))
        assert found[0] >= 0 and found[-1] + length <= units
        assert all(b - a == length for a, b in pairwise(found))
    if items.per_epoch > 5:
        assert starts(items, 0) != sorted(starts(items, 0)) and starts(items, 0) != starts(items, 1)


def test_window_starts_cover_the_text_evenly():
    units, length, epochs = 1000, 32, 600
    items = TrainingItems(TOKENS[:units], length, seed=0, batch_size=1)
    phases = Counter(items.start(epoch * items.per_epoch) % length for epoch in range(6400))
    assert len(phases) == length and all(140 < count < 260 for count in phases.values())  # 200 each
    seen = np.zeros(units)
    for first in (min(starts(items, epoch)) for epoch in range(epochs)):
        seen[first : first + items.per_epoch * length] += 1
    assert (seen[2 * length : -2 * length] == epochs).all()  # the inside is read once in every epoch
    assert seen.min() > 0  # and no byte is never read


def test_every_epoch_visits_every_image_exactly_once_and_whole():
    images, length = 37, 12
    pixels = np.repeat(np.arange(images, dtype=np.uint8), length)  # every sub-pixel says whose it is
    items = TrainingItems(pixels, length, seed=5, batch_size=4, whole=True)
    orders = []
    for epoch in range(4):
        sequences = [items[epoch * images + slot] for slot in range(images)]
        assert all((sequence == sequence[0]).all() for sequence in sequences), "no image is cut"
        orders.append([int(sequence[0]) for sequence in sequences])
        assert sorted(orders[-1]) == list(range(images))
    assert len({tuple(order) for order in orders}) == 4 and orders[0] != sorted(orders[0])


def test_the_permutation_favours_no_place():
    for size in (2, 3, 5):
        for index in range(size):
            places = Counter(permuted(index, size, str(key).encode()) for key in range(2000))
            assert all(0.8 * 2000 / size < places[place] < 1.2 * 2000 / size for place in range(size))


@pytest.mark.parametrize(("world", "micro_batch"), [(1, None), (1, 3), (2, None), (2, 2), (3, 4), (4, 1), (12, 1)])
def test_ranks_and_micro_batches_slice_the_same_global_batch(world, micro_batch):
    items = TrainingItems(TOKENS, 8, seed=0, batch_size=12)
    ranks = [list(training_batches(items, 5, 8, rank, world, micro_batch)) for rank in range(world)]
    size = micro_batch or 12 // world
    assert all(len(rank) == 3 * 12 // (world * size) and len(batch) == size for rank in ranks for batch in rank)
    dealt = torch.cat([batch for turn in zip(*ranks, strict=True) for batch in turn])  # micro-batch j of all ranks
    assert torch.equal(dealt.long(), torch.stack([items[index] for index in range(5 * 12, 8 * 12)]))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12's word on processes with threads
def test_any_number_of_workers_gives_the_same_batches_and_leaves_the_global_generator_alone():
    items = TrainingItems(TOKENS, length=16, seed=0, batch_size=4)
    before = torch.get_rng_state()
    plain, worked, resumed = (
        list(training_batches(items, first, 14, micro_batch=2, num_workers=workers))
        for first, workers in ((10, 0), (10, 2), (12, 0))
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert len(plain) == 8 and plain[3].dtype == torch.uint16
    for others in (worked, [*plain[:4], *resumed]):
        assert all(torch.equal(a, b) for a, b in zip(plain, others, strict=True))


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32"])
def test_another_process_opens_a_split_by_its_path(tmp_path: Path, kind: str):
    TOKENS.astype(kind).tofile(tmp_path / "train.bin")
    items = TrainingItems(np.memmap(tmp_path / "train.bin", kind, mode="r"), 16, seed=0, batch_size=4)
    sent = pickle.dumps(items)
    assert len(sent) < 1_000, "a worker that is spawned must not be sent the split"
    again = pickle.loads(sent)
    assert isinstance(again.tokens.base, np.memmap) or isinstance(again.tokens, np.memmap)
    batch = next(iter(training_batches(again, 0, 1)))
    assert batch.dtype == getattr(torch, kind) and torch.equal(batch.long()[1], items[1])
