from __future__ import annotations

import random

import pytest

from rtx.data.windows import Window, windows


def test_every_unit_is_scored_exactly_once_with_the_most_context_the_stride_gives():
    draw = random.Random(0)
    for _ in range(300):
        length = draw.randint(1, 40)
        stride = draw.choice([None, length, draw.randint(1, length)])
        units = draw.choice([1, length, length + 1, draw.randint(1, 5 * length), length * draw.randint(1, 5)])
        found = windows(units, length, stride)
        scored = [unit for window in found for unit in range(window.first, window.stop)]
        assert scored == list(range(units)), (units, length, stride)
        for k, window in enumerate(found):
            assert 0 <= window.start <= window.first < window.stop <= units
            assert window.stop - window.start == min(length, units)
            if 0 < k < len(found) - 1:
                assert window.start == k * (stride or length)
                assert window.first - window.start == length - (stride or length)
        assert found[-1].stop == units


def test_examples():
    assert list(windows(10, 4)) == [Window(0, 4, 0), Window(4, 8, 4), Window(6, 10, 8)]
    assert list(windows(8, 4)) == [Window(0, 4, 0), Window(4, 8, 4)]
    assert list(windows(6, 4, stride=1)) == [Window(0, 4, 0), Window(1, 5, 4), Window(2, 6, 5)]
    assert list(windows(3, 4)) == [Window(0, 3, 0)]


def test_they_are_a_sequence_that_costs_nothing():
    many = windows(5_000_000, 8192, stride=1)
    assert len(many) == 5_000_000 - 8192 + 1
    assert many[-1] == Window(5_000_000 - 8192, 5_000_000, 5_000_000 - 1)
    assert many[2:4] == [many[2], many[3]]
    with pytest.raises(IndexError):
        many[len(many)]


def test_windows_of_images_are_one_image_each():
    length, images = 32 * 32 * 3, 7
    found = windows(length * images, length)
    assert list(found) == [Window(k * length, (k + 1) * length, k * length) for k in range(images)]
