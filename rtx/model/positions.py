"""Positional encodings of a model.

Rotary positions, the relative positions of Shaw et al. and of Transformer-XL, and learned
positions, absolute or by the axes of an image.

Shapes: B sequences, H heads, N positions, D head size, E hidden width, M distances, F pairs of
columns.
"""

import math
from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.engine.softmax import RelativeTables
from rtx.model.linear import Linear

TABLE_DEVIATION = 0.02
"""Standard deviation of position tables at the start."""

ROTARY_BASE = 10_000.0
"""Pair f of D / 2 turns by base ** (-2 f / D) radians a position, by default with this base."""


def rotate(x_BHND: Tensor, first: int = 0, base: float = ROTARY_BASE) -> Tensor:
    """Return vectors rotated by their positions `first`, `first` + 1, ... (rotary, Su et al. 2021).

    Columns f and f + D / 2 are a pair, which turns by the position times a fixed frequency. A dot
    product of two rotated vectors depends on their distance alone. There is no largest position.
    """
    size = x_BHND.shape[-1]
    count = x_BHND.shape[-2]
    cos_ND, sin_ND = angles(size, first, count, x_BHND.dtype, x_BHND.device, base)
    partner_BHND = x_BHND.roll(size // 2, -1)
    product_BHND = x_BHND * cos_ND
    return torch.addcmul(product_BHND, partner_BHND, sin_ND)


Angles = tuple[Tensor, Tensor]
"""Cosines and signed sines, see `angles`."""
MAX_CACHED = 4
"""The largest number of cache entries; then a new entry replaces the oldest one."""
cached_angles: dict[Hashable, Angles] = {}
"""A cache of the last angles, which all layers share. torch.compile can read a dictionary."""


def angles(
    size: int,
    first: int,
    count: int,
    dtype: torch.dtype,
    device: torch.device,
    base: float = ROTARY_BASE,
) -> Angles:
    """Return cosines and signed sines of `count` positions from `first` on, `[count, size]`.

    The sines of the first half of the columns are negative.
    """
    key = (size, first, count, dtype, device, base)
    if key not in cached_angles:
        if len(cached_angles) >= MAX_CACHED:
            oldest = next(iter(cached_angles))
            cached_angles.pop(oldest)
        cached_angles[key] = make_angles(*key)
    return cached_angles[key]


def make_angles(
    size: int,
    first: int,
    count: int,
    dtype: torch.dtype,
    device: torch.device,
    base: float,
) -> Angles:
    """Compute the result of `angles`, in float64: at far positions rounding errors would grow."""
    with torch.inference_mode(False):
        wide = torch.float64
        stop = first + count
        position_N = torch.arange(first, stop, device=device, dtype=wide)
        column_F = torch.arange(0, size, 2, device=device, dtype=wide)
        frequency_F = base ** -(column_F / size)
        angle_NF = position_N[:, None] * frequency_F
        cos_NF = angle_NF.cos().to(dtype)
        sin_NF = angle_NF.sin().to(dtype)
        cos_ND = torch.cat([cos_NF, cos_NF], dim=-1)
        sin_ND = torch.cat([-sin_NF, sin_NF], dim=-1)
        return cos_ND, sin_ND


def drawn_table(rows: int, columns: int, deviation: float = TABLE_DEVIATION) -> nn.Parameter:
    """Return a table of normally distributed values."""
    normal = torch.randn(rows, columns)
    return nn.Parameter(normal * deviation)


class Shaw(nn.Module):
    """Relative keys and values (Shaw et al. 2018), shared by the heads of a group in a layer.

    Distances run from 0 to `max_distance`.
    """

    def __init__(self, max_distance: int, size: int) -> None:
        super().__init__()
        distances = max_distance + 1
        self.keys_MD = drawn_table(distances, size)
        self.values_MD = drawn_table(distances, size)

    def forward(self) -> RelativeTables:
        """Return the tables."""
        return RelativeTables(self.keys_MD, self.values_MD)


class SinusoidKeys(nn.Module):
    """Transformer-XL's positions (Dai et al. 2019, section 3.3).

    A logit is (q + u) k + (q + v) r, where r is a matrix times the sinusoids of the distance.
    u is `content_HD`, which `with_content` adds to the queries; v is `place_HD`.

    Args:
        clamp: distances beyond it count as `clamp`; None: every distance has its own sinusoids.
        dropout: on the sinusoids.
    """

    def __init__(self, hidden: int, heads: int, clamp: int | None, dropout: float) -> None:
        super().__init__()
        self.clamp = clamp
        self.dropout = dropout
        self.project = Linear(hidden, hidden, bias=False)
        size = hidden // heads
        self.content_HD = drawn_table(heads, size)
        self.place_HD = drawn_table(heads, size)

    def with_content(self, q_BHND: Tensor) -> Tensor:
        """Return queries with u added."""
        content_HD = self.content_HD.to(q_BHND.dtype)
        return q_BHND + content_HD[:, None]

    def forward(self, distances: int) -> RelativeTables:
        """Return keys and biases by distance, for queries to which u was added.

        Args:
            distances: the number of distances, from 0 on.
        """
        count = distances
        if self.clamp:
            count = min(distances, self.clamp + 1)
        sinusoid_ME = self.sinusoids(count)
        sinusoid_ME = F.dropout(sinusoid_ME, self.dropout, self.training)
        keys_ME = self.project(sinusoid_ME)
        keys_MHD = keys_ME.unflatten(-1, self.place_HD.shape)
        keys_HMD = keys_MHD.transpose(0, 1)
        # The queries have u: (q + v) r = (q + u) r + (v - u) r.
        difference_HD = self.place_HD - self.content_HD
        bias_HM1 = keys_HMD @ difference_HD[..., None]
        return RelativeTables(keys_HMD, None, bias_HM1[..., 0])

    def sinusoids(self, count: int) -> Tensor:
        """Return sines, then cosines of the first distances (Vaswani et al. 2017), `[M, E]`."""
        weight_EE = self.project.weight
        E = len(weight_EE)
        half = (E + 1) // 2
        cos_ME, sin_ME = angles(E, 0, count, weight_EE.dtype, weight_EE.device)
        # `angles` returns each sine and cosine twice, and the first half of the sines is negative.
        positive_sin = sin_ME[:, half:]
        first_cos = cos_ME[:, :half]
        sinusoid = torch.cat([positive_sin, first_cos], dim=-1)
        return sinusoid[:, :E]


class LearnedPositions(nn.Module):
    """Learned vectors added to the embeddings: a table for each axis, summed (Child et al. 2019).

    Args:
        sizes: number of positions on each axis, the slowest first (rows, columns and colours of an
            image in raster order). With one axis every position has a vector.
        hidden: width of the vectors.
    """

    def __init__(self, sizes: tuple[int, ...], hidden: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.length = math.prod(sizes)
        deviation = TABLE_DEVIATION / math.sqrt(len(sizes))
        tables = [drawn_table(size, hidden, deviation) for size in sizes]
        self.tables = nn.ParameterList(tables)

    def forward(self, first: int, count: int) -> Tensor:
        """Return the vectors of positions `first` to `first + count - 1`, `[count, E]`.

        Raises:
            ValueError: the last of them is beyond the tables.
        """
        last = first + count - 1
        if last >= self.length:
            covered = f"learned positions cover 0 to {self.length - 1} (data.length)"
            raise ValueError(f"position {last}: {covered}")
        device = self.tables[0].device
        position_N = torch.arange(first, first + count, device=device)
        return self.at(position_N)

    def at(self, position_N: Tensor) -> Tensor:
        """Return the vectors of some positions, `[..., E]`."""
        # Positions from one entry of an axis to the next; torch.compile has no unravel_index.
        stride = self.length
        vectors = []
        for size, table in zip(self.sizes, self.tables, strict=True):
            stride //= size
            index_N = position_N // stride % size
            vector_NE = F.embedding(index_N, table)
            vectors.append(vector_NE)
        return torch.stack(vectors).sum(0)
