"""The example in the docstring of `rtx/attention/engine/lists.py`."""

import re

import torch

from rtx.attention.engine import lists
from rtx.attention.reads import MemberLists, members_read


def documented(name: str) -> list[int]:
    """Return the first numbers behind a name in the docstring's tables."""
    assert lists.__doc__ is not None
    line = re.search(rf"^ +{name} +((?:\d+ +)*\d+)", lists.__doc__, re.MULTILINE)
    assert line is not None
    return [int(number) for number in line[1].split()]


def test_the_example_of_the_docstring() -> None:
    packed = MemberLists(torch.tensor([0, 2, 5, 2, 3]), torch.tensor([3, 2]))
    made = lists.kernel_lists(members_read(packed, packed, length=6, window=2), rows=6)
    for name in ("start_P", "stop_P", "low_M", "high_M"):
        assert getattr(made, name).tolist() == documented(name)
    assert made.query_members.first_R1.tolist() == documented("first_R1")
    assert made.query_members.member_M.tolist() == documented("member_M")
    assert made.count_2.tolist() == [5, 5]
