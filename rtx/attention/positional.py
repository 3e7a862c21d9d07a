"""The patterns that choose by position: who reads whom in full, local, recurrent, strided, fixed, span, random heads.

Each states its lists for the engine (`spreads`) and its rule for the oracle and pictures (`sees`), in one place.

Shapes: H heads, C clusters, N positions, W attention window, M distances.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.arguments import check_number, check_positive, check_seed, check_within
from rtx.attention.cache import Cache, ClusterCache, PositionCache
from rtx.attention.engine.softmax import LogitTerms, RelativeTables
from rtx.attention.once import made_once
from rtx.attention.oracle import last_members
from rtx.attention.pattern import ClusterPattern, ContiguousPattern, PositionLists, PositionPattern
from rtx.attention.reads import MemberLists, QueriesKeys, RangeReads, Reads, members_read


class Full(ContiguousPattern):
    """Every position reads every j <= i. Cost N^2, memory linear in N.

    By torch's kernels not quite: terms by distance and dropout on a CPU hold keys and values N / 1024 times, and
    without `attend_self` there is a mask of N^2 for all heads.
    """

    reads_all_kept = True

    def since(self, i: Tensor) -> Tensor:
        return torch.full_like(i, -(1 << 40))  # positions of a memory are below 0


class Local(ContiguousPattern):
    """Position i reads i - W < j <= i: exactly `window` keys with its own."""

    reads_all_kept = True

    def __init__(self, *, window: int, **options: Any) -> None:
        super().__init__(**options)
        check_positive(window=window)
        self.window = self.keeps = window

    def since(self, i: Tensor) -> Tensor:
        return i + 1 - self.window


class Recurrent(ContiguousPattern):
    """Position i reads its own segment of `length` positions up to itself, and `memory` positions before the segment.

    Transformer-XL (Dai et al. 2019, section 3.2). With `same_length` it reads `memory` keys, its own included, as the
    released code evaluates.
    """

    configured = ("same_length",)

    def __init__(self, *, length: int, memory: int, same_length: bool = False, **options: Any) -> None:
        super().__init__(**options)
        check_positive(length=length)
        check_positive(int(same_length), memory=memory)
        self.length, self.memory, self.same_length = length, memory, same_length
        self.keeps = memory if same_length else length + memory

    def since(self, i: Tensor) -> Tensor:
        return (i + 1 if self.same_length else i // self.length * self.length) - self.memory


class Strided(PositionPattern):
    """Position i reads i, i - stride, i - 2 stride, ...: for data with a period, such as rows of an image.

    Child et al. 2019. Cost N^2 / stride.
    """

    def __init__(self, *, stride: int, **options: Any) -> None:
        super().__init__(**options)
        check_positive(stride=stride)
        self.stride = stride

    def spreads(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        remainder_N = position_N % self.stride
        return [PositionLists(remainder_N, remainder_N, torch.zeros_like(position_N), position_N + 1)]

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % self.stride == 0


class Fixed(PositionPattern):
    """Position i reads its own block up to itself, and the summary columns of every earlier block.

    Child et al. 2019, for data without a period, such as text. Summary columns are `summary` positions of a `block`;
    head h takes the sub-block s = h mod (block // summary) counted from the block's end. One softmax spans both sets.
    Cost N (block + N summary / block).
    """

    def __init__(self, *, block: int, summary: int, **options: Any) -> None:
        super().__init__(**options)
        check_positive(block=block)
        check_within("summary", summary, block, "block")
        self.block, self.summary = block, summary

    def spreads(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        """The own block's list, and the list of all summary columns of the head."""
        own_N, none_N = position_N // self.block, torch.zeros_like(position_N)
        head_H1 = torch.arange(heads, device=position_N.device)[:, None]
        column_HN = torch.where(self.is_summary(head_H1, position_N), 0, -1)
        return [
            PositionLists(own_N, own_N, none_N, position_N + 1),
            PositionLists(none_N, column_HN, none_N, own_N * self.block),
        ]

    def is_summary(self, head: int | Tensor, j: Tensor) -> Tensor:
        """Tell whether j is a summary column of its block."""
        end = self.block - self.summary * (head % (self.block // self.summary))
        column = j % self.block
        return (column >= end - self.summary) & (column < end)

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        return (i // self.block == j // self.block) | self.is_summary(head, j)


class FixedBlock(Recurrent):
    """Position i reads its own block up to itself: the first of the fixed pattern's parts on heads of its own."""

    decided = ("length", "memory", "same_length")

    def __init__(self, *, block: int, **options: Any) -> None:
        check_positive(block=block)
        super().__init__(length=block, memory=0, **options)

    def spreads(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        own_N, none_N = position_N // self.length, torch.zeros_like(position_N)  # a list each: whole triangles
        return [PositionLists(own_N, own_N, none_N, position_N + 1)]


class FixedSummary(Fixed):
    """Position i reads the summary columns of all blocks up to itself: the fixed pattern's other part, see `Fixed`."""

    def spreads(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        return [super().spreads(position_N, heads)[1]._replace(until_N=position_N + 1)]

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        return self.is_summary(head, j)


class AdaptiveSpan(ContiguousPattern):
    """Local heads that each learn how far back they read (Sukhbaatar et al. 2019).

    A key at distance x counts with the weight m_z(x) = clamp((R + z - x) / R, 0, 1) beside its softmax term.

    Fully up to the span z, fading out over the ramp of R positions behind it, never at `window` or farther. The
    parameter is the span's share of the window, which learning rates suit whatever the window; it starts at 0 (a head
    then reads the ramp), as in the released code. A span is held in [0, window]. Cost and memory grow with N times what
    the longest span reaches.

    Args:
        heads: H.
        window: keys that no span goes beyond, the own position included.
        ramp: R, positions over which the weight falls from 1 to 0.
        cost: weight, in the loss, of the heads' mean span in positions (the paper's lambda); the layers add up.
    """

    reads_all_kept = True
    decided = ("attend_self",)
    configured = ("ramp", "cost")

    def __init__(self, heads: int, *, window: int, ramp: int = 32, cost: float = 0.0, **options: Any) -> None:
        super().__init__(attend_self=True, **options)  # a key within reach may weigh nothing, the own one never
        check_positive(0, heads=heads)
        check_positive(window=window, ramp=ramp)
        check_number("cost", cost, "finite and at least 0", lambda x: 0 <= x < math.inf)
        self.heads, self.window, self.ramp, self.cost = heads, window, ramp, cost
        self.share_H = nn.Parameter(torch.zeros(heads))

    def spans(self) -> Tensor:
        """Return the spans in positions, `[H]`, at least in float32."""
        return self.share_H.to(torch.promote_types(self.share_H.dtype, torch.float32)).clamp(0, 1) * self.window

    @torch.no_grad()
    def after_step(self) -> None:
        """Hold the spans in [0, window], as the released code does: outside, a span would have no gradient."""
        self.share_H.clamp_(0, 1)

    @torch.no_grad()
    def reach(self) -> int:
        """Return how many keys, its own included, the head with the longest span reads: behind them weights are 0.

        On a GPU, which a CPU would have to wait for, the window, which no span exceeds.
        """
        if not self.share_H.is_cpu:
            return self.window
        reach = self.ramp + float(F.pad(self.spans(), (0, 1)).max())
        return math.ceil(reach) if reach < self.window else self.window

    def since(self, i: Tensor) -> Tensor:
        return i + 1 - self.reach()

    def form(self) -> tuple[int]:
        return (self.reach(),)

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        """What the head's own weight does not make nothing."""
        return (i - j < self.window) & (i - j < self.ramp + self.spans()[head])

    def terms(self, size: int, relative: RelativeTables | None) -> LogitTerms:
        """Return the terms with log m_z(distance) for each head, -inf where the weight is 0."""
        distance_M = torch.arange(self.reach() + 1, device=self.share_H.device)
        weight_HM = ((self.ramp + self.spans()[:, None] - distance_M) / self.ramp).clamp(0, 1)
        seen_HM = (weight_HM > 0) & (distance_M < self.window)
        # The logarithm of 1 where nothing is seen: that of 0 would turn its gradient into NaN.
        bias_HM = weight_HM.masked_fill(~seen_HM, 1).log().masked_fill(~seen_HM, -math.inf)
        return super().terms(size, relative)._replace(bias_HM=bias_HM)

    def loss(self, qk: QueriesKeys, parts: list[Reads]) -> Tensor:
        """Return the weighted mean span, zero outside training."""
        return self.cost * self.spans().sum() / max(1, len(self.share_H)) if self.training else super().loss(qk, parts)

    def start(self, relative: RelativeTables | None = None) -> Cache:
        """See `Pattern.start`; the spans stay as they are now."""
        return PositionCache(self, relative, self.reach())


class Random(ClusterPattern):
    """The control of Table 1: clusters whose members are drawn, whatever the sequence holds.

    The paper says no more than that Kidx is chosen at random. One draw, which is kept, is ours.

    Each cluster has `window` random members among `length` positions, a function of (seed, head, `clusters`, `window`,
    `length`) alone. Later positions go on with the same members over and over. Other options: see `ClusterPattern`.
    """

    configured = ("has_keys",)

    def __init__(
        self, heads: int, clusters: int, *, length: int, seed: int, has_keys: bool = False, **options: Any
    ) -> None:
        super().__init__(has_keys=has_keys, **options)
        check_positive(0, heads=heads)
        check_positive(clusters=clusters, length=length)
        check_seed(seed)
        self.heads, self.clusters, self.length, self.seed = heads, clusters, length, seed
        position_HCW = random_positions(heads, clusters, length, self.window, seed)
        self.register_buffer("position_HCW", position_HCW, persistent=False)
        self.position_HCW: Tensor

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        B, H, N, _ = qk.q_BHND.shape
        form = type(self), self.clusters, self.length, self.seed, self.window, self.attend_self, B, H, N
        return [*made_once(form, qk.q_BHND.device, partial(self.make_reads, B, H, N))]

    def make_reads(self, B: int, H: int, N: int, device: torch.device) -> list[RangeReads]:
        """Return who reads whom in B sequences of N positions."""
        lists = self.members(B, H, N, device)
        return [members_read(lists, lists, N, self.window, self.attend_self)]

    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        B, H, N, _ = qk.q_BHND.shape
        return [self.members(B, H, N, qk.q_BHND.device)]

    def members(self, B: int, H: int, N: int, device: torch.device) -> MemberLists:
        """Return the members of every cluster."""
        turn_T1 = torch.arange(-(-N // self.length), device=device)[:, None]
        drawn_HCW = random_positions(H, self.clusters, self.length, self.window, self.seed).to(device)
        position_HCT = (turn_T1 * self.length + drawn_HCW[:, :, None]).flatten(2)
        inside_BHCT = (position_HCT < N).expand(B, *position_HCT.shape)
        first_BH = torch.arange(B * H, device=device).view(B, H) * N
        row_BHCT = first_BH[..., None, None] + position_HCT
        return MemberLists(row_BHCT[inside_BHCT], inside_BHCT.sum(-1).flatten())

    def member_HCN(self, length: int) -> Tensor:
        """Return the memberships of positions 0 to `length` - 1."""
        member_HCN = self.position_HCW.new_zeros(*self.position_HCW.shape[:2], self.length, dtype=torch.bool)
        member_HCN.scatter_(2, self.position_HCW, True)
        return member_HCN.repeat(1, 1, -(-length // self.length))[..., :length]

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        member_CN = self.member_HCN(qk.q_BHND.shape[2])[head]
        return last_members(member_CN, member_CN, self.window)

    def join(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> tuple[Tensor, Tensor, None]:
        joins_HC = (self.position_HCW == position % self.length).any(-1)
        joins_BHC = joins_HC.expand(len(qk.q_BHND), *joins_HC.shape)
        return joins_BHC, joins_BHC, None


def random_positions(heads: int, clusters: int, length: int, window: int, seed: int) -> Tensor:
    """Return `window` random positions for each cluster, ascending, `[H, C, W]`: a function of the arguments alone.

    A window over `length` is `length`.
    """
    generator = torch.Generator().manual_seed(seed)
    window = min(window, length)
    # One draw a cluster, however many there are.
    draws = [torch.rand(length, generator=generator, device="cpu") for _ in range(heads * clusters)]
    chosen = [draw_N.topk(window).indices.sort().values for draw_N in draws]
    return torch.stack(chosen).view(heads, clusters, window) if chosen else torch.zeros(heads, clusters, window).long()
