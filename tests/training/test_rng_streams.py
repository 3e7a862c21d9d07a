"""Random streams: every one comes back, through a checkpoint file too."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from rtx.training.rng import restore_rng, rng_state, seed_everything


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), torch.rand(()).item()]


def test_restored_streams_repeat(tmp_path: Path) -> None:
    seed_everything(5)
    draws()  # odd numbers of Gaussians leave a second one waiting
    torch.save(rng_state(), tmp_path / "rng")
    first = draws()
    draws()
    restore_rng(torch.load(tmp_path / "rng", weights_only=True))
    assert draws() == first


def test_seeds_and_ranks_have_streams_of_their_own() -> None:
    seen = []
    for seed, rank in [(0, 0), (0, 1), (1, 0), (1, 1), (2**32 - 1, 7)]:
        seed_everything(seed, rank)
        seen.append(tuple(draws()))
    assert len(set(seen)) == len(seen)
