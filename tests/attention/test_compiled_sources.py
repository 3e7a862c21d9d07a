"""The C++ kernels for CPUs: their sources, how they are compiled, and which copies are loaded."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rtx.attention.engine import compiler
from rtx.errors import UserError
from rtx.training.hardware import refuse_without_kernel
from tests.helpers.disturbances import deadline

SOURCE = "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in compiler.FUNCTIONS)
"""A source with the functions of the kernels, which compiles in less than a second."""
LACKING = 'extern "C" int rtx_attend() { return 0; }\n'


def command_or_skip() -> list[str]:
    """Return the command of the C++ compiler; without one the test is skipped."""
    try:
        return compiler.compiler_command()
    except RuntimeError as error:
        pytest.skip(str(error))


def test_the_sources_compile_without_warnings() -> None:
    flags = [flag for flag in compiler.FLAGS if flag not in ("-w", "-shared")]
    checks = ["-O1", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    words = [*command_or_skip(), *flags, *checks, str(compiler.SOURCES[0])]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of compiled copies, with small sources and an empty memory of earlier calls.

    The kernels of these sources compute nothing: later tests must load the real ones again.
    """
    source = tmp_path / "small.cpp"
    source.write_text(SOURCE)
    monkeypatch.setattr(compiler, "SOURCES", [source])
    monkeypatch.setattr(compiler, "FLAGS", ["-shared", "-fPIC"])
    yield new_cache(tmp_path / "cache", monkeypatch)
    forget()


@pytest.fixture(autouse=True)
def kernels_of_other_tests() -> Iterator[None]:
    """Let tests of other files load the kernels anew, from the cache of before."""
    yield
    forget()


def new_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the kernels be loaded again, from another folder, and return that."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    forget()
    return folder / "rtx" / "kernels"


def forget() -> None:
    """Let the kernels be loaded again."""
    compiler.load_once.cache_clear()
    compiler.print_once.cache_clear()


def write_foreign(path: Path) -> None:
    """Put a library in place of the copy that lacks a function."""
    source = path.parent / "foreign.cpp"
    source.write_text(LACKING)
    path.unlink(missing_ok=True)
    words = [*command_or_skip(), *compiler.FLAGS, str(source), "-o", str(path)]
    subprocess.run(words, check=True)
    path.chmod(0o700)


def move_behind_link(path: Path) -> None:
    """Put a link to the copy in its place."""
    other = path.with_name("elsewhere.so")
    path.rename(other)
    path.symlink_to(other)


def write_text(path: Path) -> None:
    """Put a file that is no library in place of the copy, which this process may have loaded."""
    path.unlink()
    path.write_bytes(b"no library")


def make_pipe(path: Path) -> None:
    """Put a pipe in place of the copy."""
    path.unlink()
    os.mkfifo(path)


DISTURBED: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "written by others": lambda path: path.chmod(0o777),
    "link": move_behind_link,
    "pipe": make_pipe,
    "not a library": write_text,
    "another library": write_foreign,
}


def test_a_copy_that_others_may_write_or_that_is_none_is_made_anew(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    command_or_skip()
    assert compiler.library() is not None
    assert "compiling" in capfd.readouterr().err
    (made,) = cache.glob("*.so")
    assert cache.stat().st_mode & 0o777 == 0o700
    for name, disturb in DISTURBED.items():
        # Each case has another folder: a process loads a library once from each path.
        folder = new_cache(tmp_path / name, monkeypatch)
        shutil.copytree(cache, folder)
        path = folder / made.name
        disturb(path)
        kernels = compiler.library()
        assert all(hasattr(kernels, function) for function in compiler.FUNCTIONS), name
        said = capfd.readouterr().err
        assert ("compiling" in said) == (name != "nothing"), (name, said)
        assert path.is_file() and not path.is_symlink(), name
        assert path.stat().st_mode & 0o777 == 0o700, name


def test_a_folder_where_others_may_write_keeps_no_copy(
    cache: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command_or_skip()
    cache.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    for shared in (cache, cache.parent, cache.parent.parent):
        shared.chmod(0o777)
        forget()
        assert compiler.library() is not None
        said = capfd.readouterr().err
        reason = f"is not kept: other users may write to {shared}; set XDG_CACHE_HOME"
        assert reason in said, said
        shared.chmod(0o755)
    cache.rmdir()
    cache.symlink_to(elsewhere)
    forget()
    assert compiler.library() is not None
    assert f"other users may write to {cache}" in capfd.readouterr().err
    assert not list(elsewhere.iterdir())


def test_without_a_home_folder_no_copy_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command_or_skip()

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert compiler.library() is not None
    said = capfd.readouterr().err
    assert "is not kept: Could not determine home directory." in said
    assert not cache.exists()


def test_a_compiler_that_fails_hangs_or_is_missing_is_told_in_a_line(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.5)
    script = tmp_path / "cxx"
    monkeypatch.setenv("CXX", str(script))
    escape = "\N{REPLACEMENT CHARACTER}[31m"
    bodies = {
        f"ended with 1: {escape}no openmp": "printf '\\033[31mno openmp' >&2; exit 1",
        "has not ended after 0.5 s": "sleep 60 & sleep 60",
        "Exec format error": "",
    }
    for reason, body in bodies.items():
        script.write_text(f"#!/bin/sh\n{body}\n" if body else "\x7fno program\n")
        script.chmod(0o755)
        forget()
        began = time.monotonic()
        with pytest.raises(UserError, match=r"hardware\.attention=native: ") as refused:
            refuse_without_kernel()
        assert reason in str(refused.value)
        assert time.monotonic() - began < 20
        assert compiler.library() is None
        assert compiler.library() is None
        _, line = capfd.readouterr().err.splitlines()
        assert line.startswith("no attention kernel, torch's operations are used: ")
        assert reason in line
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    forget()
    assert compiler.problem() == "no C++ compiler (CXX, c++, g++, clang++)"


def test_a_signal_ends_a_compiler_that_hangs(tmp_path: Path) -> None:
    script = tmp_path / "cxx"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'process'}\nexec sleep 600\n")
    script.chmod(0o755)
    began = time.monotonic()
    # The handler of a signal raises, as that of a command does.
    with pytest.raises(AssertionError, match="not done after"), deadline(2.0):
        compiler.run_compiler([str(script)])
    assert time.monotonic() - began < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)
