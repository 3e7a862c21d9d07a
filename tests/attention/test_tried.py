"""The selections of docs/results/tried.py compute what their docstrings say."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rtx
from rtx.attention import Centroids, after_step, oracle

FILE = Path(__file__).resolve().parents[2] / "docs" / "results" / "tried.py"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, which registers its patterns nowhere."""

    def register(name: str, make: Any, *, selection: bool) -> None:
        assert selection and callable(make), name

    monkeypatch.setattr(rtx, "register_pattern", register)
    spec = importlib.util.spec_from_file_location("tried", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vectors(N: int, D: int) -> list[torch.Tensor]:
    """Return queries, keys and values of two sequences of two heads."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 2, 2, N, D, generator=generator, dtype=torch.float64)
    return list(qkv)


def test_near_keys_and_probed_keys_share_a_softmax(tried: ModuleType) -> None:
    pattern = tried.ProbedAndNear(
        2, 4, near=3, clusters=5, decay=0.9, window=4, candidates=6, qk_norm=True
    ).double()
    pattern.eval()
    q, k, v = vectors(24, 4)
    out, _ = pattern(q, k, v)
    torch.testing.assert_close(out, oracle.attend_by_rule(pattern, q, k, v))
    stream = pattern.stream()
    outs = [stream.prefill(q[:, :, :9], k[:, :, :9], v[:, :, :9])]
    for n in range(9, 24):
        now = slice(n, n + 1)
        outs.append(stream.decode(q[:, :, now], k[:, :, now], v[:, :, now]))
    torch.testing.assert_close(torch.cat(outs, dim=2), out)


def test_a_step_moves_centroids_so_that_clusters_recall_more(tried: ModuleType) -> None:
    torch.manual_seed(0)
    centroids = Centroids(2, 8, 4, window=8, length=64, decay=1.0, keys="separate")
    pattern = tried.ClustersByRecall(centroids, queries=512, rate=0.02, momentum=0.0)
    q, k, v = (x.float() for x in vectors(64, 4))
    qk = pattern.inputs(q, k, None)
    before, _ = pattern.divergence(qk)
    for _ in range(20):
        pattern(q, k, v)
        after_step(pattern)
    after, _ = pattern.divergence(qk)
    assert after < before - 0.01
    norm_HC = centroids.centroid_HCD.norm(dim=-1)
    torch.testing.assert_close(norm_HC, torch.full_like(norm_HC, 2.0))
