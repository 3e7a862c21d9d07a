"""Adaptive input and softmax: an exact likelihood, by the definition, and streams."""

from typing import Any

import pytest
import torch
from test_decoding import streams_as_it_scores
from tiny_models import check_alike, tiny_config, tokens
from torch import Tensor

from rtx.model.likelihood import AdaptiveSoftmax
from rtx.model.transformer import Transformer

BANDS: dict[str, Any] = {"embedding": "adaptive", "cutoffs": "3x7", "band_factor": 2}


def drawn(**own: Any) -> Transformer:
    """A model of 11 words in bands of 3, 4 and 4, all of whose weights do something."""
    torch.manual_seed(0)
    model = Transformer(tiny_config(**BANDS, **own), 11).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def by_loops(softmax: AdaptiveSoftmax, hidden_E: Tensor) -> Tensor:
    """The likelihood of every word, word by word: of its band, and of the word among those of its band."""
    logits: list[list[Tensor]] = []
    for table_GS, widen in zip(softmax.bands.tables, softmax.bands.widen, strict=True):
        before = sum(map(len, logits))
        vectors = [widen.weight @ word_S for word_S in table_GS]  # type: ignore[operator, union-attr]
        logits.append([hidden_E @ vector_E + softmax.bias_V[before + n] for n, vector_E in enumerate(vectors)])
    pairs = zip(softmax.clusters.weight, softmax.clusters.bias, strict=True)
    head = torch.stack([*logits[0], *(hidden_E @ row_E + bias for row_E, bias in pairs)]).exp()
    shares = [head[word] / head.sum() for word in range(len(logits[0]))]
    for number, band in enumerate(logits[1:]):
        within = torch.stack(band).exp()
        shares += [head[len(logits[0]) + number] / head.sum() * share / within.sum() for share in within]
    return torch.stack(shares)


@pytest.mark.parametrize("tied", [True, False])
def test_the_likelihood_is_that_of_the_definition_and_adds_up(tied: bool) -> None:
    model = drawn(tie_embeddings=tied, norm="post")
    softmax, tokens_BN = model.softmax, tokens(batch=3, length=24)
    assert softmax is not None and (softmax.bands is model.embedding.bands) == tied
    hidden_BNE, _ = model(tokens_BN)
    share_RV = torch.stack([by_loops(softmax, hidden_E) for hidden_E in hidden_BNE.flatten(0, 1)])
    torch.testing.assert_close(share_RV.sum(-1), torch.ones(72, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.logits(hidden_BNE.flatten(0, 1)).exp(), share_RV, rtol=1e-9, atol=1e-9)
    expected_BN = -share_RV.gather(1, tokens_BN.flatten()[:, None]).log().view(3, 24)
    nats_BN, _ = model.loss(tokens_BN)
    check_alike(nats_BN, expected_BN, (p for p in model.parameters() if p.requires_grad))


def test_words_are_read_by_their_bands_and_streams_score_alike() -> None:
    model = drawn(tie_embeddings=True)
    bands = model.embedding.bands
    assert bands is not None
    vectors_VE = bands(torch.arange(11))
    assert [table.shape for table in bands.tables] == [(3, 16), (4, 8), (4, 4)]
    expected_E = bands.widen[1].weight @ bands.tables[1][2]  # type: ignore[operator]
    torch.testing.assert_close(vectors_VE[5], expected_E, rtol=1e-12, atol=1e-12)
    streams_as_it_scores(model, tokens())
