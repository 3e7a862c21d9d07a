"""Long-context tasks: prompts have every answer, nothing else tells it, and all machines agree."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from rtx.data.catalog import made_store
from rtx.data.long_context import LongContextStore
from rtx.data.synthetic import TEST, TRAIN, VALID, chance_bits, chance_of
from rtx.errors import UserError
from rtx.settings.compose import compose_data
from rtx.settings.schema import DataConfig

NEEDLES = DataConfig(
    name="needles",
    length=65,
    pairs=6,
    keys=9,
    values=8,
    fillers=3,
    sequences=7,
    distance=10,
    queries=3,
)
SEVERAL = replace(NEEDLES, needle_values=2)
TRACKING = replace(NEEDLES, name="tracking", hops=2)
CHAIN = replace(TRACKING, pairs=8, hops=4, queries=2)
COUNTING = replace(NEEDLES, name="counting")
TASKS = (NEEDLES, SEVERAL, TRACKING, CHAIN, COUNTING)
SMALLEST = replace(NEEDLES, length=4, pairs=1, keys=1, distance=0, queries=1)
FINGERPRINTS = "976251f37fc0 4e86cc62c844 b5aba3d62008 435deca4b766 4ac798edb395"  # of TASKS
DRAWN = 1_500

each_task = pytest.mark.parametrize(
    "task", TASKS, ids=lambda task: f"{task.name}-{task.needle_values}-{task.hops}"
)


def store_of(task: DataConfig) -> LongContextStore:
    """Return the store of a task."""
    store = made_store(task)
    assert isinstance(store, LongContextStore)
    return store


def drawn(task: DataConfig, count: int = DRAWN) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return sequences `[count, N]`, and positions, distances and hops of answers `[count, A]`."""
    store = store_of(task)
    tokens = np.stack([store.sequence(0, index) for index in range(count)]).astype(np.int64)
    found = store.find_answers(torch.from_numpy(tokens))
    return tokens, [fact_BA.numpy() for fact_BA in found]


def origin(sequence: list[int], position: int, task: DataConfig) -> tuple[int, int]:
    """Return distance and hops of an answer by looking for pairs of its question from the start."""
    if task.name == "counting":
        return 0, 0
    question = max(place for place in range(position) if sequence[place] < task.keys)
    token = sequence[question]
    earlier = position - question - 1
    hops = 0
    place = question
    while token < task.keys:
        places = [place for place in range(question) if sequence[place] == token]
        # A variable is first in its own assignment, and then in the next one of its chain.
        place = places[earlier] + 1
        token = sequence[place]
        hops += 1
    return position - place, hops


@pytest.mark.parametrize(
    "task", [*TASKS, SMALLEST], ids=lambda task: f"{task.name}-{task.length}-{task.hops}"
)
def test_a_program_that_reads_the_prompt_answers_everything(task: DataConfig) -> None:
    store = store_of(task)
    tokens, (position_KA, distance_KA, hops_KA) = drawn(task, 200)
    assert tokens.max() < store.vocabulary
    per_question = task.needle_values if task.name == "needles" else 1
    assert position_KA.shape[1] == task.queries * per_question
    for sequence, position_A, distance_A, hops_A in zip(
        tokens.tolist(), position_KA, distance_KA, hops_KA, strict=True
    ):
        assert (np.diff(position_A) > 0).all()
        for position, distance, hops in zip(position_A, distance_A, hops_A, strict=True):
            assert store.solve(sequence[:position]) == sequence[position]
            assert (distance, hops) == origin(sequence, position, task)
            assert sequence[position - distance] == sequence[position]


@each_task
def test_the_last_tokens_before_the_questions_are_filler(task: DataConfig) -> None:
    store = store_of(task)
    tokens, (position_KA, distance_KA, _) = drawn(task, 300)
    first_filler = store.keys + task.values
    question = position_KA[:, 0].min() - 1
    gap = tokens[:, question - task.distance : question]
    assert (gap >= first_filler).all()
    if task.name != "counting":
        assert distance_KA.min() > task.distance


def test_needles_are_everywhere_and_every_key_and_value_is_as_likely() -> None:
    tokens, (position_KA, distance_KA, _) = drawn(NEEDLES)
    needle = (position_KA - distance_KA).ravel()
    cells = (NEEDLES.length - NEEDLES.distance - 6) // 2
    counts = (
        np.bincount(needle // 2, minlength=cells),
        np.bincount(tokens[:, position_KA[0, 0] - 1], minlength=NEEDLES.keys),
        np.bincount(tokens[:, position_KA[0, 1]] - NEEDLES.keys, minlength=NEEDLES.values),
    )
    for count in counts:
        assert chisquare(count).pvalue > 0.001


def test_questions_are_as_often_about_each_link_of_a_chain() -> None:
    _, (_, distance_KA, hops_KA) = drawn(CHAIN)
    assert chisquare(np.bincount(hops_KA.ravel())[1:]).pvalue > 0.001
    # The start of a chain is before its other links.
    assert distance_KA.mean() > 0.6 * (CHAIN.length - CHAIN.distance)


def test_counts_are_those_of_a_zeta_distribution() -> None:
    tokens, _ = drawn(COUNTING, 50)
    for sequence in tokens:
        counts = np.bincount(sequence[: -4 - COUNTING.distance], minlength=9)[1:9]
        expected = [51 * rank**-2 / sum(r**-2 for r in range(1, 10)) for rank in range(2, 10)]
        assert sorted(counts, reverse=True) == [int(count) for count in expected]


@each_task
def test_chance_is_what_neither_the_unit_before_nor_the_position_can_beat(
    task: DataConfig,
) -> None:
    store = store_of(task)
    tokens, (position_KA, _, _) = drawn(task)
    chance = chance_of(store.answer_values)
    half = DRAWN // 2
    rates = []
    for number, position in enumerate(position_KA[0]):
        answer_K = tokens[:, position]
        allowed = store.answer_values[number % len(store.answer_values)]
        for context_K in (tokens[:, position - 1], np.zeros_like(answer_K)):
            table = np.zeros((store.vocabulary, store.vocabulary))
            np.add.at(table, (context_K[:half], answer_K[:half]), 1)
            right = table.argmax(1)[context_K[half:]] == answer_K[half:]
            assert abs(right.mean() - 1 / allowed) < 0.06
            rates.append(right.mean())
    assert abs(np.mean(rates) - chance) < 0.02


def test_the_chance_of_counting_is_among_the_values_that_are_left() -> None:
    assert store_of(COUNTING).answer_values == (8, 7, 6)
    assert chance_of((8, 7, 6)) == pytest.approx((1 / 8 + 1 / 7 + 1 / 6) / 3)
    assert chance_bits((8, 2)) == 2
    assert store_of(NEEDLES).answer_values == (8,)


@each_task
def test_a_sequence_is_a_function_of_its_split_seed_and_number(task: DataConfig) -> None:
    store = store_of(task)
    again = store_of(task)
    assert (store.sequence(2**32 - 1, 10**12) == again.sequence(2**32 - 1, 10**12)).all()
    first = store.sequence(1, 2)
    others = ((1, 3, TRAIN), (2, 2, TRAIN), (1, 2, VALID), (1, 2, TEST))
    for seed, index, split in others:
        assert (first != store.sequence(seed, index, split)).any()
    for name, number in (("valid", VALID), ("test", TEST)):
        assert store.split(name).shape == (task.sequences * task.length,)
        rows = store.split(name).reshape(task.sequences, task.length)
        assert (rows[2] == store.sequence(0, 2, number)).all()
    with pytest.raises(UserError, match=f"data={task.name} has no train split"):
        store.split("train")


def test_the_data_sets_stay_as_they_are_and_settings_name_them() -> None:
    found = [store_of(task).fingerprint[:12] for task in TASKS]
    assert found == FINGERPRINTS.split()
    for task in TASKS:
        store = store_of(task)
        assert store.settings["name"] == task.name
        for name in store.settings:
            if name != "name":
                other = store_of(replace(task, **{name: 2 * getattr(task, name)}))
                assert other.settings != store.settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data=needles data.pairs=15 data.needle_values=2", "must be a multiple of data.needle"),
        ("data=needles data.queries=17", r"data\.queries=17 must be at most .* = 16"),
        ("data=needles data.keys=15", "needs data.keys of at least 16, not 15"),
        ("data=needles data.length=175", "data.length of at least 176, not 175"),
        ("data=tracking data.hops=5", "must be a multiple of data.hops=5"),
        ("data=tracking data.queries=13", r"data\.queries=13 must be at most .* = 12"),
        ("data=counting data.queries=17", "data.queries=17 must be at most data.values=16"),
        ("data=counting data.queries=12", "too short for their counts to differ"),
        ("data=counting data.pairs=3", "data.pairs=3 has no effect with data.name=counting"),
        ("data=mqar data.queries=3", "data.queries=3 has no effect with data.name=mqar"),
        ("data=tracking data.needle_values=2", "has no effect with data.name=tracking"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose_data(words.split())
