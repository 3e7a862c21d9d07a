"""The Triton kernels of clusters against torch and the oracle, by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, Lists, cases, inputs, membership, run

from rtx.attention import reference
from rtx.attention.clusters import attend_members
from rtx.attention.lists import pack
from rtx.attention.triton_clusters import attend_members_triton, triton_refusal
from rtx.attention.weights import Distances

pytest.importorskip("triton", reason="triton is not installed (pip install 'rtx[triton]', Linux only)")

HERE = Path(__file__).parent


def fast(case: Lists, given: list[Tensor]) -> dict[str, Tensor]:
    """Return what the kernels make of a case."""
    return run(attend_members_triton, case, [x.to(DEVICE) for x in given], pack(membership(case).to(DEVICE)))


def by_torch(case: Lists, given: list[Tensor]) -> dict[str, Tensor]:
    """Return what torch makes of it in float64."""
    return run(attend_members, case, [x.double() for x in given], pack(membership(case)))


def by_oracle(case: Lists, given: list[Tensor]) -> dict[str, Tensor]:
    """Return what the oracle says in float64."""
    member_BHCN = membership(case)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, attend_self: bool) -> Tensor:
        heads = []
        for b in range(case.B):
            for h in range(case.H):

                def sets(i: int, member_CN: Tensor = member_BHCN[b, h]) -> list[list[int]]:
                    return reference.cluster_sets(i, member_CN, window, attend_self)

                heads.append(reference.read(q[b, h], k[b, h], v[b, h], sets, scale, None))
        # Without members nothing is read: the sum keeps the graph.
        return torch.stack(heads).view(v.shape) + 0 * (q.sum() + k.sum() + v.sum())

    return run(attend, case, [x.double() for x in given])


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare output and gradients."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name].double(), x, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


# Torch's attention on a CPU makes NaN of a scale that is not positive; the oracle below does not.
@pytest.mark.parametrize("case", [case for case in cases() if case.dense != 0 and case.B and case.scale > 0], ids=str)
def test_against_torch(case: Lists) -> None:
    given = inputs(case)
    assert_close(fast(case, given), by_torch(case, given), 2e-5)


@pytest.mark.parametrize("case", [case for case in cases() if case.B and case.N <= 30], ids=str)
def test_against_the_oracle(case: Lists) -> None:
    given = inputs(case)
    assert_close(fast(case, given), by_oracle(case, given), 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own_keys", [False, True])
def test_in_half_precision(own_keys: bool, dtype: torch.dtype) -> None:
    case = Lists(N=150, C=2, D=16, E=16, W=100, dense=0.9, own_keys=own_keys, scale=0.25)
    given = inputs(case, dtype)
    found = fast(case, given)
    assert all(x.dtype == dtype for x in found.values())
    assert_close(found, by_torch(case, given), 4e-2 if dtype == torch.bfloat16 else 5e-3)


def test_no_sequences() -> None:
    case = Lists(B=0, N=4)
    assert fast(case, inputs(case))["output"].shape == (0, 1, 4, 4)


@pytest.mark.parametrize("own_keys", [False, True])
def test_same_bits_at_every_run(own_keys: bool) -> None:
    case = Lists(B=2, H=2, C=4, N=50, W=9, D=16, E=16, dense=0.6, own_keys=own_keys)
    given = inputs(case)
    first, second = fast(case, given), fast(case, given)
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_inputs_need_not_lie_in_one_piece() -> None:
    case = Lists(B=2, H=3, N=20, dense=0.5)
    given = inputs(case)
    scattered = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given[:3]]
    members = pack(membership(case).to(DEVICE))
    outs = []
    for q, k, v in (given[:3], [*scattered[:2], scattered[2].repeat_interleave(2, -1)[..., ::2]]):
        q, k, v = (x.to(DEVICE) for x in (q, k, v))
        outs.append(attend_members_triton(q, k, v, members, **case.options))
    assert torch.equal(*outs)


def test_only_what_needs_a_gradient_gets_one() -> None:
    case = Lists(dense=0.5, own_keys=True)
    q, k, v, grad = (x.to(DEVICE) for x in inputs(case))
    k.requires_grad_()
    attend_members_triton(q, k, v, pack(membership(case).to(DEVICE)), **case.options).backward(grad)
    assert q.grad is None and v.grad is None
    torch.testing.assert_close(k.grad, fast(case, inputs(case))["k"].to(DEVICE))


def test_the_future_changes_nothing() -> None:
    case = Lists(B=1, H=2, C=3, N=60, W=11, D=16, E=16, dense=0.6)
    given, changed = inputs(case), inputs(case)
    for x in changed[:3]:
        x[:, :, 30:] += 1.0
    assert torch.equal(fast(case, given)["output"][:, :, :30], fast(case, changed)["output"][:, :, :30])


def test_refusals() -> None:
    x = torch.randn(1, 1, 4, 8, device=DEVICE)
    tables = Distances(torch.randn(2, 8, device=DEVICE), torch.randn(2, 8, device=DEVICE))
    wide = torch.randn(1, 1, 4, 129, device=DEVICE)
    assert triton_refusal(x, x, x) is None
    assert "dropout=0.1" in str(triton_refusal(x, x, x, dropout=0.1))
    assert "relative" in str(triton_refusal(x, x, x, relative=tables))
    assert "float64" in str(triton_refusal(x.double(), x.double(), x.double()))
    assert "v_BHND is of torch.bfloat16" in str(triton_refusal(x, x, x.bfloat16()))
    assert "head size 129" in str(triton_refusal(wide, wide, wide))
    meta = x.to("meta")
    assert "meta" in str(triton_refusal(meta, meta, meta))
    members = pack(torch.ones(1, 1, 1, 4, dtype=torch.bool, device=DEVICE))
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        attend_members_triton(x, x, x, members, window=2, scale=1.0, dropout=0.1)


def compiled(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_without_the_interpreter_a_cpu_is_refused(tmp_path: Path) -> None:
    script = (
        "import torch; from rtx.attention.triton_clusters import triton_refusal as refusal;"
        "x = torch.ones(1, 1, 1, 4); print(refusal(x, x, x))"
    )
    assert "TRITON_INTERPRET=1" in compiled(tmp_path, "-c", script).stdout


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """No GPU is needed for this: the compiler comes with triton. Shared memory of most GPUs: 99 KiB a program."""
    done = compiled(tmp_path, str(HERE / "triton_compile.py"))
    assert done.returncode == 0, done.stderr
    shared = {line.split(": ")[0]: int(line.split(": ")[1]) for line in done.stdout.splitlines()}
    assert len(shared) >= 8 and max(shared.values()) <= 99 * 1024, shared
