"""Training sequences and batches depend on seed, step and index alone, whoever reads them."""

import pickle
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from rtx.data.batches import token_ids, training_batches
from rtx.data.sampler import FirstBatches, ShuffledWindows

TOKENS = np.arange(20_000, dtype=np.uint16)  # every token says where it stands


def starts(sampler: ShuffledWindows, epoch: int) -> list[int]:
    return [sampler.start(epoch * sampler.per_epoch + slot) for slot in range(sampler.per_epoch)]


def test_the_same_sampler_on_every_machine():
    sampler = ShuffledWindows(TOKENS, length=32, seed=2**32 - 1, batch_size=4)
    assert [sampler.start(index) for index in (0, 1, 2, 1000, 123_456_789)] == [
        13218,
        11970,
        1730,
        14131,
        19530,
    ]
    item = token_ids(sampler, 250 * 4)
    assert item.dtype == torch.int64 and item.tolist() == list(range(14131, 14131 + 32))
    images = ShuffledWindows(np.arange(240, dtype=np.uint8), 6, seed=1, batch_size=3, aligned=True)
    assert [images.start(index) // 6 for index in (0, 1, 39, 40, 10**9)] == [34, 37, 39, 17, 14]


def test_first_batches_come_again_and_again():
    sampler = ShuffledWindows(TOKENS, length=32, seed=0, batch_size=4)
    first = FirstBatches(sampler, batches=2)
    assert (first.seed, first.batch_size) == (0, 4)
    for index in range(24):
        assert np.array_equal(first.sequence(index), sampler.sequence(index % 8))
    batches = [batch.tolist() for batch in training_batches(first, 0, 4)]
    assert batches[:2] == batches[2:] and batches[0] != batches[1]


@pytest.mark.parametrize(
    ("units", "length", "aligned"),
    [(20_000, 32, False), (64, 64, False), (127, 64, False), (128, 64, False), (444, 12, True)],
)
def test_an_epoch_is_a_permutation_of_windows_that_do_not_overlap(units, length, aligned):
    sampler = ShuffledWindows(TOKENS[:units], length, seed=0, batch_size=3, aligned=aligned)
    assert sampler.per_epoch >= max(1, units // length - (not aligned))
    for epoch in range(5):
        found = sorted(starts(sampler, epoch))
        assert found[0] >= 0 and found[-1] + length <= units
        assert all(b - a == length for a, b in pairwise(found))
    if sampler.per_epoch > 5:
        assert starts(sampler, 0) != sorted(starts(sampler, 0)) and starts(sampler, 0) != starts(
            sampler, 1
        )


def test_window_starts_cover_the_text_evenly():
    units = 1000
    length = 32
    epochs = 600
    sampler = ShuffledWindows(TOKENS[:units], length, seed=0, batch_size=1)
    first = [sampler.start(epoch * sampler.per_epoch) for epoch in range(6400)]
    phases = Counter(at % length for at in first)
    places = Counter(at // length for at in first if at < 30 * length)
    assert (len(phases), len(places)) == (length, 30)
    assert all(140 < count < 260 for count in (*phases.values(), *places.values()))  # some 200 each
    seen = np.zeros(units)
    for first in (min(starts(sampler, epoch)) for epoch in range(epochs)):
        seen[first : first + sampler.per_epoch * length] += 1
    assert (
        seen[2 * length : -2 * length] == epochs
    ).all()  # the inside is read once in every epoch
    assert seen.min() > 0  # and no byte is never read


@pytest.mark.parametrize(
    ("world", "micro_batch"), [(1, None), (1, 3), (2, None), (2, 2), (3, 4), (4, 1), (12, 1)]
)
def test_ranks_and_micro_batches_slice_the_same_global_batch(world, micro_batch):
    sampler = ShuffledWindows(TOKENS, 8, seed=0, batch_size=12)
    before = torch.get_rng_state()
    ranks = [
        list(training_batches(sampler, 5, 8, rank, world, micro_batch)) for rank in range(world)
    ]
    size = micro_batch or 12 // world
    assert all(
        len(rank) == 3 * 12 // (world * size) and len(batch) == size
        for rank in ranks
        for batch in rank
    )
    dealt = torch.cat(
        [batch for turn in zip(*ranks, strict=True) for batch in turn]
    )  # micro-batch j of all ranks
    assert torch.equal(
        dealt.long(), torch.stack([token_ids(sampler, index) for index in range(5 * 12, 8 * 12)])
    )
    assert torch.equal(torch.get_rng_state(), before), "the global stream is left to dropout"


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32"])
def test_another_process_opens_a_split_by_its_path(tmp_path: Path, kind: str):
    TOKENS.astype(kind).tofile(tmp_path / "train.bin")
    sampler = ShuffledWindows(
        np.memmap(tmp_path / "train.bin", kind, mode="r"), 16, seed=0, batch_size=4
    )
    sent = pickle.dumps(sampler)
    assert len(sent) < 1_000, "a worker that is spawned must not be sent the split"
    batch = next(iter(training_batches(pickle.loads(sent), 0, 1)))
    assert batch.dtype == getattr(torch, kind) and torch.equal(
        batch.long()[1], token_ids(sampler, 1)
    )
