from __future__ import annotations

import lzma
import math
import sys
import zlib

import numpy as np
import pytest

from rtx.data.text import library_files
from rtx.evaluation import baselines as module
from rtx.evaluation.baselines import baselines, byte_model_bits, xz_bits


def slow_bits(train: bytes, held_out: bytes, order: int) -> float:
    """The definition, one byte after another."""
    bits = 0.0
    for i in range(len(held_out)):
        if i < order:
            bits += 8
            continue
        context, byte = held_out[i - order : i], held_out[i]
        follow = [train[j] for j in range(order, len(train)) if train[j - order : j] == context]
        bits -= math.log2((follow.count(byte) + 0.01) / (len(follow) + 256 * 0.01))
    return bits / len(held_out)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("chunk", [7, 1 << 22])
def test_byte_models_are_what_a_plain_loop_counts(order, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    rng = np.random.default_rng(order)
    train, held_out = (rng.choice(np.array([0, 10, 97, 255], dtype=np.uint8), size) for size in (90, 40))
    fast = byte_model_bits(train, held_out, order)
    assert fast == pytest.approx(slow_bits(train.tobytes(), held_out.tobytes(), order), rel=1e-12)


def test_a_split_shorter_than_the_context_costs_eight_bits_a_byte():
    train = np.arange(50, dtype=np.uint8)
    assert byte_model_bits(train, train[:1], 2) == 8.0


def test_compressors_see_the_split_alone_and_xz_is_preset_9():
    text = np.frombuffer(b"".join(b"line %d of a text\n" % (i * i) for i in range(4000)), dtype=np.uint8)
    found = baselines(text[:100], text)
    assert list(found) == ["zlib", "xz", "order-1", "order-2"]
    assert found["zlib"] == 8 * len(zlib.compress(text.tobytes(), 9)) / len(text)
    assert found["xz"] == 8 * len(lzma.compress(text.tobytes(), preset=9)) / len(text)
    assert xz_bits(text[:1]) == 8 * len(lzma.compress(text[:1].tobytes(), preset=9))


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="these figures are those of CPython 3.11.7's library")
def test_the_published_figures_on_the_last_twentieth_of_the_library():
    library = np.frombuffer(b"".join(path.read_bytes() for path in library_files()), dtype=np.uint8)
    assert len(library) == 12_602_225
    train, held_out = np.split(library, [len(library) * 95 // 100])
    found = {name: round(bits, 2) for name, bits in baselines(train, held_out).items()}
    assert found == {"zlib": 1.93, "xz": 1.63, "order-1": 3.59, "order-2": 2.75}
    assert round(byte_model_bits(train, held_out, 0), 2) == 4.62
