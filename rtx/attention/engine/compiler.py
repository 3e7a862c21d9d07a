"""Compile the C++ kernels at their first use, and keep the result in the user's cache folder.

A compiled copy is code. It is loaded only if this user alone can have written it: neither the file,
nor its folder, nor a folder above may be writable by other users (`refuse_shared`). So nobody can
exchange the file between this check and its use.
"""

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = [
    FOLDER / "kernels.cpp",
    FOLDER / "vectors.h",
    FOLDER / "native.cpp",
    FOLDER / "selection.cpp",
    FOLDER / "probing.cpp",
]
"""The source that is compiled, then the files that it includes."""
TUNING = {
    "x86_64": ["-march=native", "-mprefer-vector-width=512"],
    "aarch64": ["-mcpu=native"],
    "arm64": ["-mcpu=native"],
}
FLAGS = [
    "-O3",
    "-std=c++17",
    "-ffp-contract=fast",
    "-w",
    "-shared",
    "-fPIC",
    "-fopenmp",
    *TUNING.get(platform.machine(), []),
]


COMPILE_SECONDS = 120.0
"""Seconds after which a compiler that has not ended is stopped."""
FUNCTIONS = ("rtx_attend", "rtx_select", "rtx_probe")
"""The functions that a compiled copy must have."""


def library() -> ctypes.CDLL | None:
    """Return the kernels; they are compiled if no cached copy can be loaded.

    If that fails, one line is printed on stderr, and the result is None.
    """
    kernels, reason = load_once()
    if kernels is None:
        print_once(f"no attention kernel, torch's operations are used: {reason}")
    return kernels


def problem() -> str:
    """Return why there are no kernels, "" if there are; it may compile them."""
    return load_once()[1]


@functools.cache
def print_once(line: str) -> None:
    print(line, file=sys.stderr)


@functools.cache
def load_once() -> tuple[ctypes.CDLL | None, str]:
    """Return the kernels and "", or None and the reason why there are none."""
    try:
        return load(), ""
    except (OSError, RuntimeError) as error:
        return None, printable(str(error))


def load() -> ctypes.CDLL:
    """Load the cached copy, or compile the kernels and load them.

    They are compiled for this process alone if there is no folder for a copy.

    Raises:
        OSError, RuntimeError: they cannot be compiled or loaded.
    """
    try:
        folder = cache_folder()
    except (OSError, RuntimeError) as error:
        print_once(printable(f"the compiled attention kernel is not kept: {error}"))
        return compiled()
    path = folder / copy_name()
    return cached(path) or compiled(path)


def cache_folder() -> Path:
    """Return the folder of compiled copies, which is made if need be.

    Raises:
        OSError: it cannot be made, or other users may write there.
        RuntimeError: the user has no home folder.
    """
    # A path that is not absolute is invalid by the XDG specification.
    named = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    folder = caches / "rtx" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (folder, folder.resolve()):
        refuse_shared(path, is_entry=True)
        for parent in path.parents:
            refuse_shared(parent, is_entry=False)
    return folder


def refuse_shared(path: Path, *, is_entry: bool) -> None:
    """Raise PermissionError if another user than root may change what a path leads to.

    Args:
        is_entry: the path is the file or folder to be used, which this user must own. Otherwise it
            is a folder above: root may own it, and a sticky one, such as /tmp, may be writable.
    """
    info = path.lstat()
    others_write = info.st_mode & stat.S_IWOTH
    # By convention a group with the number of a user has no other member.
    if info.st_gid != info.st_uid:
        others_write |= info.st_mode & stat.S_IWGRP
    is_link = stat.S_ISLNK(info.st_mode)
    owners = {os.getuid()}
    if is_entry:
        others_write |= is_link
    else:
        owners.add(0)
        # The mode of a link means nothing.
        if is_link or info.st_mode & stat.S_ISVTX:
            others_write = 0
    if others_write or info.st_uid not in owners:
        advice = "set XDG_CACHE_HOME to a folder where they may not"
        raise PermissionError(f"other users may write to {path}; {advice}")


def copy_name() -> str:
    """Return the name of the compiled copy.

    It has a hash of everything that the copy depends on: sources, flags, compiler and machine
    (several machines may share a home folder).
    """
    sources = [path.read_text() for path in SOURCES]
    made_of = f"{sources} {FLAGS} {platform.machine()} {platform.libc_ver()}"
    made_of += os.environ.get("CXX", "")
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().lower().splitlines()
        words = ("flags", "features", "model name", "cpu part")
        made_of += str(sorted({line for line in lines if line.startswith(words)}))
    digest = hashlib.sha256(made_of.encode(errors="surrogateescape")).hexdigest()
    return f"attention-{digest[:16]}.so"


def cached(path: Path) -> ctypes.CDLL | None:
    """Return the kernels from a compiled copy; None if there is none that can be used."""
    with contextlib.suppress(OSError):
        refuse_shared(path, is_entry=True)
        if stat.S_ISREG(path.lstat().st_mode):
            return opened(path)
    return None


def opened(path: Path) -> ctypes.CDLL:
    """Return the kernels in a file; OSError if it is no library or lacks one of them."""
    kernels = ctypes.CDLL(str(path))
    for name in FUNCTIONS:
        if not hasattr(kernels, name):
            raise OSError(errno.ENOEXEC, f"lacks {name}", str(path))
    return kernels


def compiled(path: Path | None = None) -> ctypes.CDLL:
    """Compile the kernels, copy them to a path in the cache if it can be written, and load them."""
    command = compiler_command()
    print("compiling the attention kernel (once, about 5 s)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="rtx-") as folder:
        made = Path(folder, "attention.so")
        run_compiler([*command, *FLAGS, str(SOURCES[0]), "-o", str(made)])
        if path is None:
            return opened(made)
        with contextlib.suppress(OSError):
            into_cache(made, path)
        try:
            # Not from the cache: dlopen would return a former copy that it has loaded from there.
            return opened(made)
        except OSError:
            # The folder for temporary files may forbid programs.
            return opened(path)


def compiler_command() -> list[str]:
    """Return the command of the C++ compiler: CXX, else a usual one that is installed."""
    for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = command.split()
        if words and shutil.which(words[0]):
            return words
    raise RuntimeError("no C++ compiler (CXX, c++, g++, clang++)")


def run_compiler(command: list[str]) -> None:
    """Run a compiler, at most `COMPILE_SECONDS`; RuntimeError with its messages if it fails.

    Its messages go to a file: a pipe would stay open as long as a process that it has started.
    """
    with tempfile.TemporaryFile() as messages:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            code = process.wait(COMPILE_SECONDS)
        except subprocess.TimeoutExpired as error:
            limit = f"has not ended after {COMPILE_SECONDS:g} s"
            raise RuntimeError(f"{command[0]} {limit}") from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code:
            messages.seek(0)
            said = messages.read(2000).decode(errors="replace")
            raise RuntimeError(f"{command[0]} ended with {code}: {said}")


def into_cache(made: Path, path: Path) -> None:
    """Copy a file to a path in the cache.

    Other processes find the whole file there or none, because the last step is a rename.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        copy = Path(shutil.copy(made, beside))
        copy.chmod(0o700)
        with copy.open("rb+") as file:
            os.fsync(file.fileno())
        copy.replace(path)


def printable(text: str) -> str:
    """Return text on one line of at most 300 characters, without control characters."""
    line = " ".join(text.split())[:300]
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
