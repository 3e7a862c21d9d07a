"""From hidden states to nats, without the logits of a whole batch in memory at once.

The softmax is over all tokens, or adaptive (Baevski and Auli 2019): the vocabulary is cut into
bands of decreasing frequency, and the vectors of rarer bands are narrower, in the embedding too.

Shapes: B sequences, N positions, R = B * N rows, E width of the vectors that the output layer
reads, V vocabulary, G tokens of a band, S width of the band's vectors, K rows whose tokens are in
one band.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.precision import widened
from rtx.attention.recompute import recomputed
from rtx.errors import UserError
from rtx.model.linear import Linear
from rtx.settings.derived import sizes_of
from rtx.settings.schema import ModelConfig

MAX_LOGITS = 1 << 24
"""Logits in memory at once on a CPU. More are computed in parts, and again in the backward pass."""
MAX_LOGITS_GPU = 1 << 28
"""The same on a GPU, which smaller parts would leave mostly idle."""


def most_logits(gpu: bool) -> int:
    """Return how many logits are in memory at once."""
    if gpu:
        return MAX_LOGITS_GPU
    return MAX_LOGITS


def fused_mean_nats(
    hidden_BNE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor,
    target_BN: Tensor,
) -> Tensor:
    """Return the mean of `token_nats` by Liger-Kernel.

    Liger-Kernel computes gradients in the forward pass, where the gradient of the result is not
    known. So the result is one number, the mean. The CPU waits for the GPU twice: the kernel counts
    its targets, and reads the gradient of its result.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
        LigerFusedLinearCrossEntropyFunction,
    )

    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        hidden_BNE.flatten(0, 1),
        weight_VE,
        target_BN.flatten(),
        bias_V,
    )
    return loss


def token_nats(hidden_BNE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_BN: Tensor) -> Tensor:
    """Return -log p(target) of every position, in nats, float32 or wider, `[B, N]`."""

    def nats(hidden_RE: Tensor, target_R: Tensor) -> Tensor:
        logits_RV = F.linear(hidden_RE, weight_VE, bias_V)
        return nats_of(widened(logits_RV), target_R)

    vocabulary = len(weight_VE)
    return in_parts(nats, hidden_BNE, target_BN, logits_of_a_row=vocabulary)


def nats_of(logits_RV: Tensor, target_R: Tensor) -> Tensor:
    """Return -log p(target) of each row by its logits, `[R]`."""
    return F.cross_entropy(logits_RV, target_R, reduction="none")


def in_parts(
    nats: Callable[[Tensor, Tensor], Tensor],
    hidden_BNE: Tensor,
    target_BN: Tensor,
    logits_of_a_row: int,
) -> Tensor:
    """Return `nats(hidden_RE, target_R)` of all rows, `[B, N]`, computed for some rows at a time.

    A part has at most `most_logits` logits in memory.

    Args:
        nats: returns the nats of some rows, `[R]`.
        logits_of_a_row: the number of logits that `nats` computes for a row.
    """
    hidden_RE = hidden_BNE.flatten(0, 1)
    target_R = target_BN.flatten()
    most = most_logits(hidden_BNE.is_cuda)
    rows = max(1, most // logits_of_a_row)
    if len(target_R) <= rows:
        return nats(hidden_RE, target_R).view(target_BN.shape)
    hidden_parts = hidden_RE.split(rows)
    target_parts = target_R.split(rows)
    nats_parts = []
    for hidden_KE, target_K in zip(hidden_parts, target_parts, strict=True):
        nats_K = recomputed(nats, hidden_KE, target_K)
        nats_parts.append(nats_K)
    return torch.cat(nats_parts).view(target_BN.shape)


def band_ends(model: ModelConfig, vocabulary: int) -> list[int]:
    """Return the token id at which each band of `model.cutoffs` ends.

    Raises:
        UserError: the last band would start beyond the vocabulary.
    """
    ends = sizes_of(model.cutoffs)
    if ends[-1] >= vocabulary:
        rule = f"must end below the {vocabulary:,} tokens of the data, as one more band follows"
        raise UserError(f"model.cutoffs={model.cutoffs} {rule}; or set model.embedding=null")
    return [*ends, vocabulary]


class Band(NamedTuple):
    """The vectors of the tokens from `start` to `stop` - 1."""

    start: int
    stop: int
    table_GS: Tensor
    project_in: Linear
    """The projection to the hidden width, `[E, S]`."""

    def contains(self, tokens: Tensor) -> Tensor:
        """Return whether each token is in the band."""
        is_from_start = tokens >= self.start
        is_before_stop = tokens < self.stop
        return is_from_start & is_before_stop

    def row_or_any(self, tokens: Tensor) -> Tensor:
        """Return the row of each token in the table; some row for a token of another band."""
        last = self.stop - self.start - 1
        return (tokens - self.start).clamp(0, last)


class Bands(nn.Module):
    """The vectors of tokens by band: a table of the band's width, and a matrix to the hidden width.

    Args:
        ends: token ids before which the bands end, ascending; the last is V.
        hidden: E.
        factor: the width of a band divided by that of the next; the first has width E.
    """

    def __init__(self, ends: Sequence[int], hidden: int, factor: int) -> None:
        super().__init__()
        self.ranges = list(itertools.pairwise([0, *ends]))
        tables = []
        matrices = []
        for band, (start, stop) in enumerate(self.ranges):
            width = hidden // factor**band
            table_GS = torch.empty(stop - start, width)
            tables.append(table_GS)
            matrices.append(Linear(width, hidden, bias=False))
        self.tables = nn.ParameterList(tables)
        self.project_in = nn.ModuleList(matrices)

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, band: int) -> Band:
        start, stop = self.ranges[band]
        return Band(
            start=start,
            stop=stop,
            table_GS=self.tables[band],
            project_in=self.project_in[band],  # type: ignore[arg-type]
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of tokens, `[..., E]`."""
        if tokens.is_cpu:
            return self.gathered(tokens)
        return self.masked(tokens)

    def masked(self, tokens: Tensor) -> Tensor:
        """Return the vectors; each band computes one for every token.

        That takes more products than `gathered`, but no shape depends on the tokens, and a CPU
        never waits for a GPU.
        """
        vectors = self.tables[0].new_zeros(())
        for index in range(len(self)):
            band = self[index]
            row = band.row_or_any(tokens)
            narrow = F.embedding(row, band.table_GS)
            wide = band.project_in(narrow)
            is_in_band = band.contains(tokens)
            vectors = torch.where(is_in_band[..., None], wide, vectors)
        return vectors.to(self.tables[0].dtype)

    def gathered(self, tokens: Tensor) -> Tensor:
        """Return the vectors; each band computes those of its own tokens alone."""
        hidden = self[0].project_in.out_features
        vectors = self.tables[0].new_zeros(*tokens.shape, hidden)
        for index in range(len(self)):
            band = self[index]
            at = band.contains(tokens).nonzero(as_tuple=True)
            row_K = tokens[at] - band.start
            narrow_KS = F.embedding(row_K, band.table_GS)
            vectors_KE = band.project_in(narrow_KS)
            vectors_KE = vectors_KE.to(vectors.dtype)
            vectors = vectors.index_put(at, vectors_KE)
        return vectors

    def initialise(self, as_output: bool) -> None:
        """Draw weights with the scales of `Transformer.initialise`.

        Args:
            as_output: products with rows of variance 1 have variance 1/4; False: vectors have
                variance 1.
        """
        for index in range(len(self)):
            band = self[index]
            E, S = band.project_in.weight.shape
            matrix_deviation = S**-0.5
            table_deviation = 1.0
            if as_output:
                matrix_deviation = E**-0.5
                table_deviation = 0.5 * S**-0.5
            nn.init.normal_(band.project_in.weight, std=matrix_deviation)
            nn.init.normal_(band.table_GS, std=table_deviation)


def make_bands(model: ModelConfig, vocabulary: int) -> Bands:
    """Return the bands of a model's configuration."""
    ends = band_ends(model, vocabulary)
    return Bands(ends, model.hidden, model.band_factor)


class AdaptiveSoftmax(nn.Module):
    """The exact likelihood of a token, over the whole vocabulary (Grave et al. 2017).

    The first softmax is over the tokens of the first band, and one entry for each other band. The
    likelihood of a token of another band is that of its band, times that of the token in a softmax
    over the band.
    """

    def __init__(self, bands: Bands, hidden: int) -> None:
        super().__init__()
        self.bands = bands
        self.other_bands = nn.Linear(hidden, len(bands) - 1)
        """The logits of the entries of all bands but the first."""
        zero_V = torch.zeros(self.vocabulary)
        self.bias_V = nn.Parameter(zero_V)

    @property
    def vocabulary(self) -> int:
        """V."""
        _, stop_of_last_band = self.bands.ranges[-1]
        return stop_of_last_band

    def logits(self, hidden_RE: Tensor, index: int) -> Tensor:
        """Return the logits of the softmax over a band, `[R, G]`, float32 or wider.

        Those of the first band end with the entries of the other bands.
        """
        band = self.bands[index]
        narrow_RS = hidden_RE @ band.project_in.weight
        bias_G = self.bias_V[band.start : band.stop]
        product_RG = narrow_RS @ band.table_GS.T
        logits_RG = product_RG + bias_G
        if index == 0:
            entries = self.other_bands(hidden_RE)
            logits_RG = torch.cat([logits_RG, entries], dim=-1)
        return widened(logits_RG)

    def token_nats(self, hidden_BNE: Tensor, target_BN: Tensor) -> Tensor:
        """Return -log p(target) of every position, in nats, float32 or wider, `[B, N]`.

        In training on a GPU every row computes all bands: otherwise the CPU would wait for the
        number of rows of each band, and shapes of a graph would depend on it.
        """
        if hidden_BNE.is_cpu or not torch.is_grad_enabled():
            # An estimate: a row computes the first band, and at most one of the others.
            logits = max(self.bands[0].stop, self.vocabulary // 4)
            return in_parts(self.nats, hidden_BNE, target_BN, logits)
        return in_parts(self.nats_of_all_bands, hidden_BNE, target_BN, self.vocabulary)

    def nats(self, hidden_RE: Tensor, target_R: Tensor) -> Tensor:
        """Return -log p(target) of rows, float32 or wider, `[R]`; a row computes only its band."""
        nats_R = self.first_nats(hidden_RE, target_R)
        others = range(1, len(self.bands))
        masks = [self.bands[index].contains(target_R) for index in others]
        # Read together: the CPU waits for a GPU once.
        sums = [is_in_band_R.sum() for is_in_band_R in masks]
        counts = torch.stack(sums).tolist()
        for index, is_in_band_R, count in zip(others, masks, counts, strict=True):
            row_K = is_in_band_R.nonzero_static(size=count)[:, 0]
            logits_KG = self.logits(hidden_RE[row_K], index)
            target_K = target_R[row_K] - self.bands[index].start
            nats_K = nats_of(logits_KG, target_K)
            nats_R = nats_R.index_add(0, row_K, nats_K)
        return nats_R

    def nats_of_all_bands(self, hidden_RE: Tensor, target_R: Tensor) -> Tensor:
        """Return what `nats` does; a row computes every band, so no shape depends on the tokens."""
        nats_R = self.first_nats(hidden_RE, target_R)
        for index in range(1, len(self.bands)):
            band = self.bands[index]
            logits_RG = self.logits(hidden_RE, index)
            # A row of another band gets the nats of some token of this band, which are not added.
            target_of_band_R = band.row_or_any(target_R)
            band_nats_R = nats_of(logits_RG, target_of_band_R)
            is_in_band_R = band.contains(target_R)
            nats_R = nats_R + torch.where(is_in_band_R, band_nats_R, 0.0)
        return nats_R

    def first_nats(self, hidden_RE: Tensor, target_R: Tensor) -> Tensor:
        """Return -log p by the first softmax, `[R]`: of the token, or else of its band."""
        entry_R = target_R
        for index in range(1, len(self.bands)):
            is_beyond_R = target_R >= self.bands[index].start
            entry_R = torch.where(is_beyond_R, self.entry(index), entry_R)
        logits_RG = self.logits(hidden_RE, 0)
        return nats_of(logits_RG, entry_R)

    def entry(self, index: int) -> int:
        """Return the entry of the first softmax for a band that is not the first."""
        return self.bands[0].stop + index - 1

    def log_shares(self, hidden_RE: Tensor) -> Tensor:
        """Return the logarithm of the likelihood of every token, `[..., V]`, for `[..., E]`."""
        entries_RG = self.logits(hidden_RE, 0).log_softmax(-1)
        tokens_of_first = self.bands[0].stop
        first_RG = entries_RG[..., :tokens_of_first]
        bands = [first_RG]
        for index in range(1, len(self.bands)):
            within_RG = self.logits(hidden_RE, index).log_softmax(-1)
            of_band_R = entries_RG[..., self.entry(index)]
            bands.append(of_band_R[..., None] + within_RG)
        return torch.cat(bands, dim=-1)
