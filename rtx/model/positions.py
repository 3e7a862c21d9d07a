"""Position terms: rotary angles, relative keys of Shaw and of Transformer-XL, learned absolute and axial positions."""

import math
from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.engine.softmax import RelativeTables
from rtx.model.linear import Linear

TABLE_DEVIATION = 0.02
"""Standard deviation of position tables at the start."""


def rotate(x_BHND: Tensor, first: int = 0) -> Tensor:
    """Return the vectors turned by their positions, the first of which is `first` (rotary, Su et al. 2021).

    Unit f and unit f + D / 2 are a pair, which turns by the position times a fixed frequency. A dot product of two
    rotated vectors depends on their distance alone. It is defined for every position.
    """
    size = x_BHND.shape[-1]
    cos_ND, sin_ND = angles(size, 10_000.0, first, x_BHND.shape[-2], x_BHND.dtype, x_BHND.device)
    return torch.addcmul(x_BHND * cos_ND, x_BHND.roll(size // 2, -1), sin_ND)


Angles = tuple[Tensor, Tensor]
MAX_HELD = 4
held_angles: dict[Hashable, Angles] = {}
"""The angles that were used last, as all layers turn by the same: in a dictionary, which torch.compile can read."""


def angles(
    size: int, base: float, first: int, count: int, dtype: torch.dtype, device: torch.device
) -> Angles:
    """Return cosines, and sines with a minus for the first of each pair, `[count, size]`, from position `first` on."""
    key = size, base, first, count, dtype, device
    if key not in held_angles:
        if len(held_angles) >= MAX_HELD:
            held_angles.pop(next(iter(held_angles)))
        held_angles[key] = make_angles(size, base, range(first, first + count), dtype, device)
    return held_angles[key]


def make_angles(
    size: int, base: float, positions: range, dtype: torch.dtype, device: torch.device
) -> Angles:
    """Return what `angles` does, computed in float64: rounded frequencies would turn far positions wrongly."""
    with torch.inference_mode(False):
        position_N = torch.arange(
            positions.start, positions.stop, device=device, dtype=torch.float64
        )
        exponent_F = torch.arange(0, size, 2, device=device, dtype=torch.float64) / size
        angle_NF = position_N[:, None] * base**-exponent_F
        cos_NF, sin_NF = angle_NF.cos().to(dtype), angle_NF.sin().to(dtype)
        return torch.cat([cos_NF, cos_NF], dim=-1), torch.cat([-sin_NF, sin_NF], dim=-1)


class Shaw(nn.Module):
    """Relative keys and values for distances 0 to `max_distance`, shared by the heads of one kind in one layer."""

    def __init__(self, max_distance: int, size: int) -> None:
        super().__init__()
        self.keys_MD = nn.Parameter(torch.randn(max_distance + 1, size) * TABLE_DEVIATION)
        self.values_MD = nn.Parameter(torch.randn(max_distance + 1, size) * TABLE_DEVIATION)

    def forward(self) -> RelativeTables:
        """Return the tables."""
        return RelativeTables(self.keys_MD, self.values_MD)


class SinusoidKeys(nn.Module):
    """Transformer-XL's positions (Dai et al. 2019, section 3.3): a logit is (q + u) k + (q + v) r of the distance.

    r is a matrix times the sinusoids of the distance, of which `clamp` is the largest that is told apart; `dropout` is
    on the sinusoids. u is `content_HD`, which `with_content` adds to the queries; v is `place_HD`.
    """

    def __init__(self, hidden: int, heads: int, clamp: int | None, dropout: float) -> None:
        super().__init__()
        self.clamp, self.dropout = clamp, dropout
        self.project = Linear(hidden, hidden, bias=False)
        self.content_HD = nn.Parameter(torch.randn(heads, hidden // heads) * TABLE_DEVIATION)
        self.place_HD = nn.Parameter(torch.randn(heads, hidden // heads) * TABLE_DEVIATION)

    def with_content(self, q_BHND: Tensor) -> Tensor:
        """Return queries with u."""
        return q_BHND + self.content_HD[:, None].to(q_BHND.dtype)

    def forward(self, distances: int) -> RelativeTables:
        """Return keys and bias, for queries with u, of so many distances from 0 on."""
        weight_EE = self.project.weight
        count = min(distances, (self.clamp or distances) + 1)
        E, half = len(weight_EE), -(-len(weight_EE) // 2)
        cos_ME, sin_ME = angles(E, 10_000.0, 0, count, weight_EE.dtype, weight_EE.device)
        # Sines, then cosines (Vaswani et al. 2017); `angles` has each twice, the sines with a minus first.
        sinusoid_ME = torch.cat([sin_ME[:, half:], cos_ME[:, :half]], dim=-1)[:, :E]
        keys_ME = self.project(F.dropout(sinusoid_ME, self.dropout, self.training))
        keys_HMD = keys_ME.unflatten(-1, self.place_HD.shape).transpose(0, 1)
        bias_HM = (keys_HMD @ (self.place_HD - self.content_HD)[..., None])[..., 0]
        return RelativeTables(keys_HMD, None, bias_HM)


class LearnedPositions(nn.Module):
    """Learned vectors added to the embeddings: one table for each axis of an image, summed (Child et al. 2019).

    Args:
        sizes: positions of each axis, slowest first (rows, columns and colours of an image in raster order); one axis
            is a vector for each position.
        hidden: width of the vectors.
    """

    def __init__(self, sizes: tuple[int, ...], hidden: int) -> None:
        super().__init__()
        self.sizes, self.length = sizes, math.prod(sizes)
        deviation = TABLE_DEVIATION / math.sqrt(len(sizes))
        self.tables = nn.ParameterList(
            nn.Parameter(torch.randn(size, hidden) * deviation) for size in sizes
        )

    def forward(self, first: int, count: int) -> Tensor:
        """Return the vectors of positions `first` to `first + count - 1`; ValueError: one beyond the last."""
        if first + count > self.length:
            raise ValueError(
                f"position {first + count - 1}: learned positions cover 0 to {self.length - 1} (data.length)"
            )
        device = self.tables[0].device
        position_N = torch.arange(first, first + count, device=device)
        vectors = []
        stride = (
            self.length
        )  # positions from one place on an axis to the next; torch.compile has no unravel_index
        for size, table in zip(self.sizes, self.tables, strict=True):
            stride //= size
            vectors.append(F.embedding(position_N // stride % size, table))
        return torch.stack(vectors).sum(0)
