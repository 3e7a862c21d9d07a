"""Recall tasks: the prefix has every answer, recall alone finds it, and all machines agree."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from rtx.data.recall import RecallStore
from rtx.data.synthetic import TEST, TRAIN, VALID
from rtx.errors import UserError
from rtx.settings.schema import DataConfig, all_fields

MQAR = DataConfig(
    name="mqar", length=64, pairs=4, keys=9, values=8, fillers=3, sequences=7, distance=10
)
COPY = replace(MQAR, name="copy", keys=1, pairs=6)
INDUCTION = replace(MQAR, name="induction")
RECALL = replace(MQAR, name="recall", distance=0)
TASKS = (MQAR, replace(MQAR, gaps="power"), COPY, INDUCTION, RECALL)
SIZES = (
    replace(RECALL, length=4, pairs=1, keys=1, values=2, fillers=1),
    replace(RECALL, length=2_048, pairs=64, keys=300, values=200, fillers=1),
)
FINGERPRINTS = "a4368443829d d56acb33392f 952031069090 cbdc3923a861 2da0e42a6f4d"  # of TASKS
DRAWN = 2_000


def drawn(task: DataConfig, count: int = DRAWN) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sequences `[count, N]`, positions of answers and distances to pairs `[count, A]`."""
    store = RecallStore(task)
    tokens = np.stack([store.sequence(0, index) for index in range(count)]).astype(np.int64)
    found = store.answers(torch.from_numpy(tokens))
    return tokens, found.position_BA.numpy(), found.distance_BA.numpy()


def solved(sequence: list[int], task: DataConfig) -> list[tuple[int, int, int]]:
    """Answer by reading from left to right: position, value and distance of every answer."""
    told: dict[int, int] = {}
    found = []
    # Where the string after the current question is first.
    run = None
    for place, unit in enumerate(sequence):
        if unit < task.keys:
            run = told.get(unit)
            told.setdefault(unit, place + 1)
        elif unit >= task.keys + task.values:
            run = None
        elif run is not None:
            found.append((place, sequence[run], place - run))
            run += 1
    return found


@pytest.mark.parametrize(
    "task", [*TASKS, *SIZES], ids=lambda task: f"{task.name}-{task.gaps}-{task.length}"
)
def test_a_reader_of_the_prefix_finds_every_answer_and_no_other(task: DataConfig) -> None:
    counts = set()
    P = task.pairs
    for sequence, at_A, back_A in zip(*drawn(task, 300 if task in TASKS else 5), strict=True):
        answers = solved(sequence.tolist(), task)
        assert [(place, back) for place, _, back in answers] == [
            pair for pair in zip(at_A.tolist(), back_A.tolist(), strict=True) if pair[0] >= 0
        ]
        assert all(
            sequence[place] == value and back >= max(2, task.distance)
            for place, value, back in answers
        )
        assert sequence.max() < RecallStore(task).vocabulary
        if task.name == "recall":
            assert at_A.tolist() == list(range(task.length - 2 * P + 1, task.length, 2))
            assert len({*sequence[: 2 * P : 2].tolist()}) == P
        counts.add(len(answers))
    assert counts == ({P} if task.name == "recall" else {P, P // 2, P // 4})


@pytest.mark.parametrize("task", [MQAR, COPY], ids=lambda task: task.name)
def test_questions_are_asked_at_every_place_alike(task: DataConfig) -> None:
    _, at, _ = drawn(task)
    first = task.distance + (2 * task.pairs if task.name == "mqar" else task.pairs + 1)
    if task.name == "mqar":
        counts = np.bincount(at[at >= 0], minlength=task.length)[first + 1 :: 2]
        assert (at[at >= 0] - first).min() == 1 and counts.sum() == (at >= 0).sum()
    else:  # of the longest string, which has the fewest places
        longest = at[at[:, -1] >= 0, 0] - 1 - first
        counts = np.bincount(longest, minlength=task.length - first - task.pairs)
    assert chisquare(counts).pvalue > 0.001


def test_the_power_law_asks_soon_and_pairs_of_induction_stand_anywhere() -> None:
    soon, late = (
        np.median(drawn(replace(MQAR, distance=0, gaps=gaps))[2]) for gaps in ("power", "uniform")
    )
    assert soon < 0.6 * late
    _, at, back = drawn(INDUCTION)
    told = np.bincount((at - back)[at >= 0] // 2, minlength=32) / (at >= 0).sum()
    assert (told[: 32 - 5] > 0).all() and not told[32 - 5 :].any()
    assert told[:5].mean() > 2 * told[-10:-5].mean(), (
        "early pairs have more places for their question"
    )
    small = RecallStore(replace(INDUCTION, length=8 * 4 + 10))  # as many pairs as fit for certain
    assert {int((small.sequence(0, index) < 9).sum()) for index in range(50)} == {8, 4, 2}


def test_every_key_value_and_order_of_recall_is_as_likely() -> None:
    tokens, _, _ = drawn(RECALL)
    asked = (tokens[:, -8::2] == tokens[:, :1]).nonzero()[1]  # where the first key is asked
    for found, kinds in ((tokens[:, 0], 9), (tokens[:, 5] - 9, 8), (asked, 4)):
        assert chisquare(np.bincount(found, minlength=kinds)).pvalue > 0.001 and len(found) == DRAWN


@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.name}-{task.gaps}")
def test_neither_the_unit_before_nor_the_position_tells_an_answer(task: DataConfig) -> None:
    tokens, at, _ = drawn(task)
    split = DRAWN // 2
    rows, columns = np.nonzero(at >= 0)
    place = at[rows, columns]
    answer = tokens[rows, at[rows, columns]]
    for context in (tokens[rows, place - 1], place):
        table = np.zeros(
            (max(task.length, RecallStore(task).vocabulary), RecallStore(task).vocabulary)
        )
        np.add.at(table, (context[rows < split], answer[rows < split]), 1)
        right = (table.argmax(1)[context] == answer)[rows >= split].mean()
        assert abs(right - 1 / task.values) < 0.03


def test_a_sequence_is_the_same_on_every_machine_for_its_split_seed_and_number() -> None:
    assert [RecallStore(task).fingerprint[:12] for task in TASKS] == FINGERPRINTS.split()
    task = replace(RECALL, length=24, pairs=3, keys=10, values=10, fillers=10)
    told = [0, 19, 6, 16, 3, 13]
    asked = [0, 19, 3, 13, 6, 16]
    filler = [26, 26, 23, 27, 25, 28, 28, 21, 21, 28, 22, 22]
    assert RecallStore(task).sequence(2**32 - 1, 10**12, TRAIN).tolist() == [*told, *filler, *asked]
    store = RecallStore(RECALL)
    for other in (
        store.sequence(1, 3),
        store.sequence(2, 2),
        store.sequence(1, 2, VALID),
        store.sequence(1, 2, TEST),
    ):
        assert (store.sequence(1, 2) != other).any()


def test_held_out_splits_are_fixed_counted_and_named_by_the_fingerprint() -> None:
    store = RecallStore(RECALL)
    for name, number in (("valid", VALID), ("test", TEST)):
        assert store.split(name).shape == (7 * 64,)
        assert (store.split(name)[2 * 64 : 3 * 64] == store.sequence(0, 2, number)).all()
    with pytest.raises(UserError, match="data=recall has no train split"):
        store.split("train")
    fields = ("length", "pairs", "keys", "values", "fillers", "sequences")
    others = [replace(RECALL, **{field: getattr(RECALL, field) + 1}) for field in fields]
    assert len({RecallStore(task).fingerprint for task in [RECALL, RECALL, *others]}) == 7
    highest = sum(all_fields()[f"data.{name}"].high for name in ("keys", "values", "fillers"))
    assert highest < 2**16, "units are kept as uint16"


def test_masked_hides_one_of_the_two_values_of_each_key_on_either_side():
    task = replace(MQAR, name="masked")
    tokens, at, distance = drawn(task, 300)
    same, second, _ = drawn(INDUCTION, 300)
    assert np.array_equal(tokens, same)
    is_answer = at >= 0
    assert np.array_equal(is_answer, second >= 0)
    # The other value of the key is visible, and is the same.
    is_first = (at != second)[is_answer]
    rows = np.nonzero(is_answer)[0]
    hidden = at[is_answer]
    other = hidden + np.where(is_first, 1, -1) * distance[is_answer]
    assert np.array_equal(tokens[rows, hidden], tokens[rows, other])
    assert np.array_equal(tokens[rows, hidden - 1], tokens[rows, other - 1])
    assert 0.4 < is_first.mean() < 0.6
    assert (distance[is_answer] >= task.distance).all()
    shown = {(row, place) for row, place in zip(rows.tolist(), other.tolist(), strict=True)}
    assert shown.isdisjoint(zip(rows.tolist(), hidden.tolist(), strict=True))
