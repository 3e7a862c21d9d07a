"""From hidden states to nats, without holding the logits of a whole batch at once: by one softmax over all units, or
adaptive (Baevski and Auli 2019): words in bands of falling frequency, the rarer the narrower, also as they are read.

Shapes: B sequences, N positions, R = B * N rows, E hidden width, V units, G words of a band, S its width, K rows whose
words are in one band.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.engine.softmax import recomputed
from rtx.errors import UserError
from rtx.model.linear import Linear
from rtx.settings.derived import sizes_of
from rtx.settings.schema import ModelConfig

MAX_LOGITS, MAX_LOGITS_GPU = 1 << 24, 1 << 28
"""Logits held at once on a CPU and on a GPU, where small parts would leave most of the chip idle; beyond it they are
computed in parts, and again in the backward pass."""


def most_logits(gpu: bool) -> int:
    """Return how many logits are held at once."""
    return MAX_LOGITS_GPU if gpu else MAX_LOGITS


def fused_mean_nats(
    hidden_BNE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_BN: Tensor
) -> Tensor:
    """Return the mean of `token_nats` by Liger-Kernel, which works out the gradient in the forward pass.

    Only the mean: a gradient of single positions would need the logits a second time. The CPU waits for the GPU
    twice, as the kernel counts its targets and looks at the gradient that it is given.
    """
    from liger_kernel.ops import fused_linear_cross_entropy as liger  # type: ignore[import-not-found]

    rows = hidden_BNE.flatten(0, 1), weight_VE, target_BN.flatten(), bias_V
    return liger.LigerFusedLinearCrossEntropyFunction.apply(*rows)[0]


def token_nats(hidden_BNE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_BN: Tensor) -> Tensor:
    """Return -log p(target) of every position, in nats, float32 or wider, `[B, N]`."""

    def of_rows(hidden_RE: Tensor, target_R: Tensor) -> Tensor:
        logits_RV = F.linear(hidden_RE, weight_VE, bias_V)
        wide = torch.promote_types(logits_RV.dtype, torch.float32)
        return F.cross_entropy(logits_RV.to(wide), target_R, reduction="none")

    return in_parts(of_rows, hidden_BNE, target_BN, len(weight_VE))


def in_parts(
    of_rows: Callable[..., Tensor], hidden_BNE: Tensor, target_BN: Tensor, logits: int
) -> Tensor:
    """Return what `of_rows(hidden_RE, target_R)` does, which holds so many logits for a row, `[B, N]`."""
    hidden_RE, target_R = hidden_BNE.flatten(0, 1), target_BN.flatten()
    part = max(1, most_logits(hidden_BNE.is_cuda) // logits)
    if len(target_R) <= part:
        return of_rows(hidden_RE, target_R).view(target_BN.shape)
    parts = zip(hidden_RE.split(part), target_R.split(part), strict=True)
    return torch.cat([recomputed(of_rows, *given) for given in parts]).view(target_BN.shape)


def band_ends(model: ModelConfig, vocabulary: int) -> list[int]:
    """Return where each band of `model.cutoffs` ends; `UserError` where the last begins beyond the vocabulary."""
    ends = sizes_of(model.cutoffs)
    if ends[-1] >= vocabulary:
        below = f"must end below the {vocabulary:,} units of the data"
        raise UserError(
            f"model.cutoffs={model.cutoffs} {below}, which go on behind it; or model.embedding=null"
        )
    return [*ends, vocabulary]


class Bands(nn.Module):
    """The vectors of words by band: a table of the band's own width, and a matrix between it and the hidden width.

    Args:
        ends: ids before which the bands end, ascending; the last is V.
        hidden: E.
        factor: by which each band is narrower than the one before; the first has width E.
    """

    def __init__(self, ends: Sequence[int], hidden: int, factor: int) -> None:
        super().__init__()
        self.ranges = list(itertools.pairwise([0, *ends]))
        widths = [hidden // factor**band for band in range(len(ends))]
        sizes = [stop - start for start, stop in self.ranges]
        self.tables = nn.ParameterList(
            torch.empty(G, S) for G, S in zip(sizes, widths, strict=True)
        )
        self.widen = nn.ModuleList(Linear(S, hidden, bias=False) for S in widths)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors of words, `[..., E]`."""
        return self.gathered(ids) if ids.is_cpu else self.masked(ids)

    def masked(self, ids: Tensor) -> Tensor:
        """Return the vectors, each of the bands asked for all words: more products, but the CPU never waits."""
        vectors = self.tables[0].new_zeros(())
        for (start, stop), table_GS, widen in zip(
            self.ranges, self.tables, self.widen, strict=True
        ):
            within = (ids >= start) & (ids < stop)
            place = (ids - start).clamp(0, stop - start - 1)
            vectors = torch.where(within[..., None], widen(F.embedding(place, table_GS)), vectors)
        return vectors.to(self.tables[0].dtype)

    def gathered(self, ids: Tensor) -> Tensor:
        """Return the vectors, each of the bands asked for its own words."""
        vectors = self.tables[0].new_zeros(*ids.shape, self.widen[0].out_features)  # type: ignore[arg-type]
        for (start, stop), table_GS, widen in zip(
            self.ranges, self.tables, self.widen, strict=True
        ):
            at = ((ids >= start) & (ids < stop)).nonzero(as_tuple=True)
            vectors = vectors.index_put(
                at, widen(F.embedding(ids[at] - start, table_GS)).to(vectors.dtype)
            )
        return vectors

    def initialise(self, as_output: bool) -> None:
        """As `Transformer.initialise`: vectors of variance 1 to read, or products of variance 1/4 with rows of 1."""
        for table_GS, widen in zip(self.tables, self.widen, strict=True):
            E, S = widen.weight.shape  # type: ignore[misc]
            nn.init.normal_(widen.weight, std=E**-0.5 if as_output else S**-0.5)  # type: ignore[arg-type, operator]
            nn.init.normal_(table_GS, std=0.5 * S**-0.5 if as_output else 1.0)  # type: ignore[operator]


class AdaptiveSoftmax(nn.Module):
    """The likelihood of a word, exact: over the whole vocabulary it adds up to 1 (Grave et al. 2017).

    One softmax, the head, is over the words of the first band and, as one entry each, the further bands. A word of a
    further band has the likelihood of its band times that of the word within the band, by a softmax of the band's own.
    """

    def __init__(self, bands: Bands, hidden: int) -> None:
        super().__init__()
        self.bands = bands
        self.clusters = nn.Linear(hidden, len(bands.ranges) - 1)
        self.bias_V = nn.Parameter(torch.zeros(bands.ranges[-1][1]))

    def logits(self, hidden_RE: Tensor, band: int) -> Tensor:
        """Return the logits of a band's words, float32 or wider; for the first band, those of the head."""
        start, stop = self.bands.ranges[band]
        narrow_RS = hidden_RE @ self.bands.widen[band].weight  # type: ignore[operator]
        logits_RG = narrow_RS @ self.bands.tables[band].T + self.bias_V[start:stop]
        if band == 0:
            logits_RG = torch.cat([logits_RG, self.clusters(hidden_RE)], dim=-1)
        return logits_RG.to(torch.promote_types(logits_RG.dtype, torch.float32))

    def token_nats(self, hidden_BNE: Tensor, target_BN: Tensor) -> Tensor:
        """Return -log p(target) of every position, in nats, float32 or wider, `[B, N]`.

        In training on a GPU all rows look at all bands: the CPU would have to wait for the number of rows of each band,
        and no shape of a graph may depend on it.
        """
        first = self.bands.ranges[0][1]
        words = self.bands.ranges[-1][1]
        if hidden_BNE.is_cpu or not torch.is_grad_enabled():
            # An estimate: every row looks at the first band, and at one of the others at the most.
            logits = max(first, words // 4)
            return in_parts(self.nats, hidden_BNE, target_BN, logits)
        return in_parts(self.nats_of_all_bands, hidden_BNE, target_BN, words)

    def nats(self, hidden_RE: Tensor, target_R: Tensor) -> Tensor:
        """Return -log p(target) of some rows, float32 or wider, `[R]`; each row looks at its own band alone."""
        nats_R = self.head_nats(hidden_RE, target_R)
        further = self.bands.ranges[1:]
        is_in_R_by_band = [(target_R >= start) & (target_R < stop) for start, stop in further]
        # Read together: the CPU waits for a GPU once.
        counts = torch.stack([is_in_R.sum() for is_in_R in is_in_R_by_band]).tolist()
        for band, (start, _) in enumerate(further, 1):
            row_K = is_in_R_by_band[band - 1].nonzero_static(size=counts[band - 1])[:, 0]
            logits_KG = self.logits(hidden_RE[row_K], band)
            nats_K = F.cross_entropy(logits_KG, target_R[row_K] - start, reduction="none")
            nats_R = nats_R.index_add(0, row_K, nats_K)
        return nats_R

    def nats_of_all_bands(self, hidden_RE: Tensor, target_R: Tensor) -> Tensor:
        """Return what `nats` does; each row looks at every band, so that no shape depends on the words."""
        nats_R = self.head_nats(hidden_RE, target_R)
        for band, (start, stop) in enumerate(self.bands.ranges[1:], 1):
            is_in_R = (target_R >= start) & (target_R < stop)
            # A row of another band looks at some word of this one, which is not added.
            place_R = (target_R - start).clamp(0, stop - start - 1)
            of_band_R = F.cross_entropy(self.logits(hidden_RE, band), place_R, reduction="none")
            nats_R = nats_R + torch.where(is_in_R, of_band_R, 0.0)
        return nats_R

    def head_nats(self, hidden_RE: Tensor, target_R: Tensor) -> Tensor:
        """Return -log p of each row by the head, `[R]`: of its word in the first band, else of its band."""
        first = self.bands.ranges[0][1]
        place_R = target_R
        for band, (start, _) in enumerate(self.bands.ranges[1:]):
            place_R = torch.where(target_R >= start, first + band, place_R)
        return F.cross_entropy(self.logits(hidden_RE, 0), place_R, reduction="none")

    def log_shares(self, hidden_RE: Tensor) -> Tensor:
        """Return the logarithm of the likelihood of every word, `[..., V]`, for vectors `[..., E]`."""
        first = self.bands.ranges[0][1]
        head_RG = self.logits(hidden_RE, 0).log_softmax(-1)
        tails = [
            head_RG[..., first + band, None] + self.logits(hidden_RE, band + 1).log_softmax(-1)
            for band in range(self.clusters.out_features)
        ]
        return torch.cat([head_RG[..., :first], *tails], dim=-1)
