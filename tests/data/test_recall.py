"""Associative recall: sequences that ask what they told, the same on every machine, and nothing else to learn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rtx.config import DataConfig, all_fields
from rtx.data.catalog import check_source, open_data, prepare_data, verify_data
from rtx.data.recall import TEST, TRAIN, VALID, RecallStore
from rtx.errors import UserError

TASK = DataConfig(name="recall", length=40, pairs=5, keys=9, values=4, fillers=3, sequences=7)


def parts(sequence: np.ndarray, task: DataConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut a sequence into pairs `[P, 2]`, filler and questions `[P, 2]`."""
    P = task.pairs
    return sequence[: 2 * P].reshape(P, 2), sequence[2 * P : -2 * P], sequence[-2 * P :].reshape(P, 2)


@pytest.mark.parametrize(
    "task",
    [
        TASK,
        DataConfig(name="recall", length=4, pairs=1, keys=1, values=2, fillers=1),
        DataConfig(name="recall", length=2_048, pairs=64, keys=300, values=200, fillers=1),
    ],
)
def test_the_keys_are_asked_again_and_the_answers_are_what_was_told(task: DataConfig) -> None:
    store = RecallStore(task)
    for index in range(5):
        sequence = store.sequence(seed=3, index=index)
        told, filler, asked = parts(sequence, task)
        assert len(sequence) == task.length and len(set(told[:, 0])) == task.pairs
        assert dict(told.tolist()) == dict(asked.tolist())
        assert told[:, 0].max() < task.keys <= told[:, 1].min() and told[:, 1].max() < task.keys + task.values
        assert all(task.keys + task.values <= unit < store.vocabulary for unit in filler)
        at_BA, back_BA = store.answers(torch.from_numpy(sequence.astype(np.int64))[None])
        assert (sequence[at_BA[0]] == asked[:, 1]).all() and (sequence[at_BA[0] - 1] == asked[:, 0]).all()
        assert (sequence[at_BA[0] - back_BA[0]] == asked[:, 1]).all()


def test_a_sequence_is_the_same_on_every_machine_for_its_split_seed_and_number() -> None:
    task = DataConfig(name="recall", length=24, pairs=3, keys=10, values=10, fillers=10)
    told, filler, asked = parts(RecallStore(task).sequence(2**32 - 1, 10**12, TRAIN), task)
    assert told.tolist() == [[0, 19], [6, 16], [3, 13]]
    assert filler.tolist() == [26, 26, 23, 27, 25, 28, 28, 21, 21, 28, 22, 22]
    assert asked.tolist() == [[0, 19], [3, 13], [6, 16]]
    store = RecallStore(TASK)
    for other in (store.sequence(1, 3), store.sequence(2, 2), store.sequence(1, 2, VALID), store.sequence(1, 2, TEST)):
        assert (store.sequence(1, 2) != other).any()


def test_every_key_value_and_order_is_as_likely() -> None:
    store = RecallStore(TASK)
    told, _, asked = zip(*(parts(store.sequence(0, index), TASK) for index in range(3_000)), strict=True)
    keys = np.bincount(np.stack(told)[:, 0, 0], minlength=TASK.keys) / 3_000
    values = np.bincount(np.stack(told)[:, 2, 1] - TASK.keys, minlength=TASK.values) / 3_000
    place = np.mean([np.flatnonzero(a[:, 0] == t[0, 0])[0] for t, a in zip(told, asked, strict=True)])
    assert abs(keys - 1 / TASK.keys).max() < 0.03 and abs(values - 1 / TASK.values).max() < 0.04
    assert abs(place - (TASK.pairs - 1) / 2) < 0.15


def test_held_out_splits_are_fixed_counted_and_named_by_the_fingerprint() -> None:
    store = RecallStore(TASK)
    for name, number in (("valid", VALID), ("test", TEST)):
        assert store.split(name).shape == (7 * 40,)
        assert (store.split(name)[80:120] == store.sequence(0, 2, number)).all()
    with pytest.raises(UserError, match="data=recall has no train split"):
        store.split("train")
    fields = ("length", "pairs", "keys", "values", "fillers", "sequences")
    others = [dataclasses.replace(TASK, **{field: getattr(TASK, field) + 1}) for field in fields]
    assert len({RecallStore(task).fingerprint for task in [TASK, TASK, *others]}) == 7
    assert RecallStore(TASK).describe()["fingerprint"] == store.fingerprint


def test_nothing_is_written_or_read_and_units_fit(tmp_path, said) -> None:
    root = tmp_path / "stores"
    check_source(TASK, root)
    for action in (open_data, prepare_data):
        assert action(TASK, root, said.append).fingerprint == RecallStore(TASK).fingerprint
    with pytest.raises(UserError, match="made on the fly, nothing on disk"):
        verify_data(TASK, root, said.append)
    assert not root.exists()
    highest = sum(all_fields()[f"data.{name}"].high for name in ("keys", "values", "fillers"))
    assert highest < 2**16
