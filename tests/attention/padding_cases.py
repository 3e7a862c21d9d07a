"""Padding masks to try a pattern with."""

from __future__ import annotations

import torch
from oracle_cases import Case
from torch import Tensor


def padding(case: Case) -> Tensor:
    """Return a mask `[B, N]`, true at real positions: padding behind the end, in front, within, or everywhere."""
    generator = torch.Generator().manual_seed(case.seed)
    mask_BN = torch.rand(case.B, case.N, generator=generator) < (0.0, 0.3, 0.7, 1.0)[case.seed % 4]
    mask_BN[0] = torch.arange(case.N) < 2 * case.N // 3
    return mask_BN.flip(0) if case.seed % 2 else mask_BN
