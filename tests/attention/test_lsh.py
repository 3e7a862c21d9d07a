"""Hashing: the worked examples of its module."""

import pytest
import torch

from rtx.attention.lsh import hashed, sorted_places, with_ascending_starts
from rtx.attention.reads import Holes

BUCKET_1N = torch.tensor([[0, 1, 0, 0, 1, 0]])


@pytest.mark.parametrize(
    ("variant", "window", "position", "read"),
    [
        ("causal", 3, 5, [2, 3]),
        ("causal", 3, 0, [0]),
        ("reformer", 4, 5, [0, 2, 3]),
        ("reformer", 4, 4, [1]),
    ],
)
def test_a_query_reads_earlier_members_of_its_bucket(
    variant: str, window: int, position: int, read: list[int]
) -> None:
    mask_1NN = hashed(BUCKET_1N, window, variant, streaming=False, causal=True)
    assert mask_1NN[0, position].nonzero()[:, 0].tolist() == read


def test_places_are_those_among_the_positions_so_far() -> None:
    assert sorted_places(torch.tensor([[1, 0, 1]]), 2).tolist() == [[0, 0, 2]]


def test_keys_that_lower_starts_add_are_hidden() -> None:
    none_XM = torch.zeros(0, 3, dtype=torch.int64)
    start_M, holes = with_ascending_starts(
        torch.tensor([0, 3, 2]), Holes(none_XM, none_XM, none_XM)
    )
    assert start_M.tolist() == [0, 2, 2]
    is_hidden_PM = (holes.value_iM >= holes.low_iP.T) & (holes.value_iM < holes.high_iP.T)
    assert is_hidden_PM.nonzero().tolist() == [[1, 2]]
