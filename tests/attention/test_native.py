"""The compiled kernel gives what torch's engine gives, forward and backward, on any number of threads."""

import re
import subprocess
import sys

import pytest
import torch
from cases import KINDS, Case, drawn, gradients, run

from rtx.attention import flex, native
from rtx.training.hardware import has_compiler

NATIVE = [kind for kind in KINDS if kind != "span"]
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")


@needs_compiler
@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_agrees_with_torchs_engine(kind: str, seed: int) -> None:
    case = Case(N=70, W=9, D=6, seed=seed, attend_self=bool(seed % 2), rotary=seed == 2)
    (pattern, here), found = drawn(kind, case, torch.float32), []
    for backend in ("torch", "native"):
        pattern.backend = backend
        out = run(pattern, here)
        found.append([out, *gradients(pattern, here, out).values()])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@needs_compiler
def test_threads_change_no_bit() -> None:
    case = Case(N=300, W=40, D=16)
    pattern, here = drawn("random", case, torch.float32, backend="native")
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            out = run(pattern, here)
            found.append([out, *gradients(pattern, here, out).values()])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_compiler
def test_what_the_kernel_cannot_do_is_refused_by_name() -> None:
    for case, dtype in ((Case(distances=3), torch.float32), (Case(), torch.float64)):
        with pytest.raises(ValueError, match=re.escape("backend='native' cannot run this")):
            run(*drawn("local", case, dtype, backend="native"))
    pattern, here = drawn("local", Case(), torch.float32, backend="native")
    with pytest.raises(RuntimeError, match="first derivatives alone"):
        torch.autograd.grad(run(pattern, here).sum(), here["q"], create_graph=True)


def test_without_a_compiler_there_is_no_kernel_and_one_line(tmp_path) -> None:
    program = "from rtx.attention import native; print(native.available(), native.library())"
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "False None\n", done.stderr
    assert len(done.stderr.splitlines()) == 1 and "compiler" in done.stderr


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kind", ["full", "local", "fixed", "random", "causal-shared", "topk-separate", "strided"])
@torch.no_grad()
def test_flex_gives_the_same_forward_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "BLOCK", 16)
    case = Case(N=40, W=7, D=16)
    pattern, here = drawn(kind, case, torch.float32)
    expected = run(pattern, here)
    pattern.backend = "flex"
    torch.testing.assert_close(run(pattern, here), expected, rtol=1e-4, atol=1e-5)


def test_without_a_kernel_auto_takes_torchs_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    case = Case(B=1, N=1100, W=4)
    assert torch.equal(*(run(*drawn("local", case, torch.float32, backend=name)) for name in ("auto", "torch")))
