"""Two processes move their centroids as one process with the joined batch does, to the same bits."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_kmeans import make, queries, watch_both

from rtx.attention.kmeans import Centroids, update_centroids

STEPS = 20


def take_step(centroids: Centroids, step: int, share: slice) -> None:
    """One optimizer step with a share of the batch: queries and keys, sequences of different length."""
    mask_BN = torch.arange(20) < torch.tensor([[20], [13], [1]])
    watch_both(centroids, queries(step, batch=3)[share], queries(100 + step, batch=3)[share], mask_BN[share])
    update_centroids(centroids)


def rank_main(rank: int, folder: str) -> None:
    """One of two processes: its share of each batch, then its centroids into a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    centroids = make(keys="separate")
    for step in range(STEPS):
        take_step(centroids, step, slice(rank, None, 2))
    torch.save(centroids.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_agree_with_one_process(tmp_path: Path) -> None:
    mp.spawn(rank_main, args=(str(tmp_path),), nprocs=2)  # type: ignore[attr-defined]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    joined = make(keys="separate")
    for step in range(STEPS):
        take_step(joined, step, slice(None))
    for name, x in joined.state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], x, rtol=2e-7, atol=2e-7)
