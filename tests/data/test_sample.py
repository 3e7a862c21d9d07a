from __future__ import annotations

import pytest
from corpora import MadePart, prose
from hypothesis import given
from hypothesis import strategies as st

from rtx.data.pieces import _runs
from rtx.data.sample import LARGEST, count_runs, even_sample

NUMBERS = b" ".join(b"%06d" % number for number in range(100_000))  # 700 kB: what is sampled says where it is from


@given(st.lists(st.binary(max_size=3000), max_size=5), st.integers(1000, 5000), st.integers(1, 700))
def test_a_sample_is_never_larger_than_asked_and_does_not_know_the_chunks(texts, size, chunk):
    blocks, total = even_sample([MadePart(tuple(texts), chunk)], size)
    assert total == sum(map(len, texts))
    assert sum(len(block.content) for block in blocks) <= size
    if total <= size:
        assert b"".join(block.content for block in blocks) == b"".join(texts)
    assert (blocks, total) == even_sample([MadePart((text,), 10_000) for text in texts], size)


@pytest.mark.parametrize("size", [1000, 20_000, 300_000])
def test_a_sample_is_nearly_as_large_as_asked_and_even(size):
    blocks, _ = even_sample([MadePart((NUMBERS,))], size)
    assert size - max(LARGEST // 64, 300) * 4 < sum(len(block.content) for block in blocks) <= size
    numbers = [int(word) for block in blocks for word in block.content.split(b" ")[1:-1]]
    assert numbers == sorted(numbers)
    for start in range(0, 100_000, 50_000):
        share = sum(start <= number < start + 50_000 for number in numbers) / len(numbers)
        assert 0.3 < share < 0.7


def test_what_a_block_cuts_is_not_counted():
    whole, _ = even_sample([MadePart((NUMBERS,))], 10**6)
    assert len(count_runs(whole, _runs)) > 99_000
    some, _ = even_sample([MadePart((NUMBERS,))], 50_000)
    assert all(len(run) in (6, 7) for run in count_runs(some, _runs))


def test_runs_are_those_of_the_text():
    text = prose(2000)
    blocks, _ = even_sample([MadePart((text,))], 10**6)
    expected: dict[bytes, int] = {}
    for run in _runs(text):
        expected[run] = expected.get(run, 0) + 1
    del expected[b"\n"]
    if len(blocks) == 1:
        assert count_runs(blocks, _runs) == expected
    else:
        found = count_runs(blocks, _runs)
        assert 0 <= sum(expected.values()) - sum(found.values()) <= 2 * len(blocks)
