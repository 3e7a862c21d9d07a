"""Patterns without a left-to-right mask: encoders and cross-attention, by the oracle."""

from dataclasses import replace
from functools import partial
from math import inf
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from rtx import attention
from rtx.attention import Centroids, Full, Indexer, Local, Pattern, TopK, oracle
from rtx.attention.engine import blocks as torch_blocks
from tests.attention.test_patterns import needs_compiler
from tests.helpers.cases import CASES, EDGES, MIXED, Case, gradients, make, run, tensors

few = settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
KINDS = (
    "full",
    "local",
    "strided",
    "fixed",
    "fixed_block",
    "fixed_summary",
    "span",
    "random",
    "random-keys",
    "topk-shared",
    "topk-separate",
    "topk-projected",
    "causal-shared",
    "causal-separate",
    "nearest-separate",
    "exact",
    "blocks",
    "compressed",
    "blocks_random",
    "probed",
    "probed-best",
    "indexer",
    "indexer-dense",
    "lsh",
    "reformer",
)
ALWAYS_CAUSAL = ("recurrent", "pairs")


def encoder(kind: str, case: Case, **options: Any) -> Pattern:
    """Return a pattern of a kind without a left-to-right mask."""
    return make(kind, case, causal=False, **options)


def encoder_case(case: Case) -> Case:
    return replace(case, distances=0)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_the_oracles(kind: str) -> None:
    for case in (*MIXED, *EDGES):
        check_encoder(kind, case)


@pytest.mark.parametrize("kind", KINDS)
@given(case=CASES)
@few
def test_any_options_give_what_the_oracle_gives(kind: str, case: Case) -> None:
    check_encoder(kind, case)


def check_encoder(kind: str, case: Case) -> None:
    """Compare outputs and gradients of a pattern of a kind with the oracle."""
    pattern = encoder(kind, case)
    here = tensors(pattern, encoder_case(case))
    with mock.patch.object(torch_blocks, "MIN_BLOCKS", 1):
        ours = run(pattern, here)
    theirs = run(partial(oracle.attend_by_rule, pattern), here)
    close(ours, theirs)
    close(gradients(pattern, here, ours), gradients(pattern, here, theirs))


def read(pattern: Pattern, N: int) -> Tensor:
    """Return which keys the only head reads, `[N, N]`, by the gradient of its outputs."""
    q, k = torch.randn(2, 1, 1, N, 4, dtype=torch.float64)
    unit_NN = torch.eye(N, dtype=torch.float64)
    out, _ = pattern(q, k, unit_NN[None, None])
    return out[0, 0] > 0


def test_local_heads_read_a_window_around_a_position() -> None:
    mask_NN = read(Local(window=4, causal=False).double(), 6)
    expected = [{0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {1, 2, 3, 4}, {2, 3, 4, 5}, {3, 4, 5}]
    assert [set(row.nonzero().flatten().tolist()) for row in mask_NN] == expected


def test_every_member_of_a_cluster_reads_all_its_keys() -> None:
    torch.manual_seed(0)
    N = 40
    W = 6
    centroids = Centroids(1, 3, 4, window=W, length=N, decay=0.9, keys="separate")
    pattern = TopK(centroids, causal=False).double().eval()
    q, k = torch.randn(2, 1, 1, N, 4, dtype=torch.float64)
    mask_CNN = pattern.rule(pattern.inputs(q, k, None), 0, False)
    assert mask_CNN.sum(-1).unique().tolist() == [0, W]
    assert mask_CNN.any(-1).sum(-1).tolist() == [W] * 3
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    assert (mask_CNN.any(0) & later).any()


@pytest.mark.parametrize("kind", ["full", "local", "strided", "random", "topk-separate", "exact"])
def test_plans_count_the_pairs_of_both_sides(kind: str) -> None:
    case = Case(B=1, H=1, N=30, C=3, W=8)
    pattern = encoder(kind, case)
    here = tensors(pattern, case)
    mask_CNN = pattern.rule(pattern.inputs(here["q"], here["k"], None), 0, False)
    assert pattern.pairs_of_head(30) == mask_CNN.sum()


@pytest.mark.parametrize("kind", ["full", "topk-separate", "exact", "indexer", "indexer-dense"])
@pytest.mark.parametrize(("queries", "keys"), [(9, 23), (23, 9), (1, 12), (12, 1), (0, 5), (5, 0)])
def test_cross_attention_has_another_number_of_keys(kind: str, queries: int, keys: int) -> None:
    case = Case(N=max(queries, keys), W=4, seed=2)
    pattern = encoder(kind, case)
    here = tensors(pattern, case)
    here["q"] = here["q"][:, :, :queries].detach().requires_grad_()
    for name in "kv":
        here[name] = here[name][:, :, :keys].detach().requires_grad_()
    ours = run(pattern, here)
    assert ours.shape == (case.B, case.H, queries, case.D)
    theirs = run(partial(oracle.attend_by_rule, pattern), here)
    close(ours, theirs)
    if ours.requires_grad and ours.numel():
        close(gradients(pattern, here, ours), gradients(pattern, here, theirs))


def test_cross_attention_of_routing_heads_trains_and_moves_its_centroids() -> None:
    torch.manual_seed(0)
    centroids = Centroids(2, 3, 4, window=5, length=20, decay=0.9, keys="separate")
    pattern = TopK(centroids, causal=False).train()
    q = torch.randn(2, 2, 20, 4, requires_grad=True)
    k, v = torch.randn(2, 2, 2, 31, 4)
    before = centroids.centroid_HCD.clone()
    out, loss = pattern(q, k, v)
    (out.sum() + loss).backward()
    assert q.grad is not None and bool(q.grad.any())
    attention.after_step(pattern)
    assert not torch.equal(before, centroids.centroid_HCD)


@needs_compiler
@pytest.mark.parametrize("kind", ["fixed", "lsh", "exact", "blocks", "probed", "probed-best"])
@torch.no_grad()
def test_compiled_kernels_read_both_sides(kind: str) -> None:
    case = Case(N=40, D=16, W=9)
    pattern = encoder(kind, case, backend="native").float()
    ours = run(pattern, tensors(pattern, case, torch.float32))
    pattern.backend = "torch"
    theirs = run(pattern.double(), tensors(pattern, case))
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("keys", [9, 13])
def test_indexers_learn_from_all_keys_that_their_queries_read(warmup: int, keys: int) -> None:
    torch.manual_seed(0)
    pattern = Indexer(2, 4, window=5, width=3, warmup=warmup, causal=False).double().train()
    q = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, keys, 4, dtype=torch.float64)
    _, loss = pattern(q, k, v)
    qk = pattern.inputs(q, k, None)
    divergences = []
    for head in range(2):
        read_NN = pattern.rule(qk, head, False)[0]
        query_NE, key_NE = pattern.vectors_by_rule(qk, head)
        weight_NN = (q[0, head] @ k[0, head].T / 2).masked_fill(~read_NN, -inf).softmax(-1)
        log_score_NN = (query_NE @ key_NE.T).masked_fill(~read_NN, -inf).log_softmax(-1)
        terms_NN = weight_NN * (weight_NN.log() - log_score_NN)
        divergences.append(terms_NN[read_NN].sum())
    close(loss, torch.stack(divergences).sum() / 18)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_documents_are_left_out(kind: str) -> None:
    case = Case(seed=7)
    pattern = encoder(kind, case)
    here = tensors(pattern, case)
    documents = attention.Documents(torch.tensor([[0] * 6 + [6] * 11] * 2))
    real_BN = torch.ones(2, 17, dtype=torch.bool)
    real_BN[:, 4:6] = False
    out = run(pattern, here, documents=documents, real_BN=real_BN)
    for part in (slice(0, 4), slice(6, 17)):
        alone = {
            name: x[:, :, part] if name in "qkv" and x is not None else x
            for name, x in here.items()
        }
        close(out[:, :, part], run(pattern, alone))


@pytest.mark.parametrize("kind", ALWAYS_CAUSAL)
def test_patterns_that_are_always_causal_say_so(kind: str) -> None:
    with pytest.raises(ValueError, match=r"causal=False: \w+ reads earlier positions alone: take"):
        encoder(kind, Case())


def test_bad_calls_are_refused_in_one_line() -> None:
    q, k, v = torch.randn(3, 1, 1, 6, 4)
    full = Full(causal=False)
    tables = attention.RelativeTables(torch.randn(3, 4), None)
    for function, said in (
        (full.stream, r"stream\(\): needs causal=True"),
        (partial(full, q, k, v, streaming=True), "streaming=True: needs causal=True"),
        (partial(full, q, k, v, relative=tables), "relative: needs causal=True"),
        (partial(full, q, k, v, memory=1), "memory: needs causal=True"),
        (
            partial(Full(causal=False, attend_self=False), q, k[:, :, :3], v[:, :, :3]),
            "attend_self=False: must be True for keys of another sequence",
        ),
        (
            partial(Local(window=2, causal=False), q, k[:, :, :3], v[:, :, :3]),
            "k_BHND has 3 keys for 6 queries: Local chooses by the positions of queries",
        ),
        (
            partial(full, q, k[:, :, :3], v[:, :, :3], real_BN=torch.ones(1, 6).bool()),
            "cross-attention takes neither rotate nor real_BN nor documents",
        ),
        (partial(full, q, k[:, :, :3], v), r"v_BHND has the shape \(1, 1, 6, 4\): must be"),
        (partial(Full(), q, k[:, :, :3], v[:, :, :3]), r"k_BHND has the shape \(1, 1, 3, 4\)"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            function()
        assert "\n" not in str(caught.value)
