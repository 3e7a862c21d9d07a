"""Compile the C++ kernels at their first use, and keep the result in the user's cache folder."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
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


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernels; they are compiled if no cached copy can be loaded.

    If that fails, a line is printed on stderr, and the result is None.
    """
    try:
        path = place()
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                return ctypes.CDLL(str(path))
        return compiled(path)
    except Exception as error:
        words = str(getattr(error, "stderr", None) or error).split()
        print("no attention kernel, torch's serve:", " ".join(words)[:200], file=sys.stderr)
        return None


def place() -> Path:
    """Return the path of the compiled copy in the user's cache.

    Its name has a hash of everything that the copy depends on: sources, flags, compiler and machine
    (several machines may share a home folder).
    """
    sources = [path.read_text() for path in SOURCES]
    made_of = f"{sources} {FLAGS} {platform.machine()} {platform.libc_ver()}"
    made_of += os.environ.get("CXX", "")
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().lower().splitlines()
        words = ("flags", "features", "model name", "cpu part")
        made_of += str(sorted({line for line in lines if line.startswith(words)}))
    digest = hashlib.sha256(made_of.encode()).hexdigest()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "rtx" / f"attention-{digest[:16]}.so"


def compiled(path: Path) -> ctypes.CDLL:
    """Compile the kernels, copy them to a path in the cache if it can be written, and load them."""
    command = compiler_command()
    print("compiling the attention kernel (once, about 5 s)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="rtx-") as folder:
        made = Path(folder, path.name)
        command += [*FLAGS, str(SOURCES[0]), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        with contextlib.suppress(OSError):
            made = into_cache(made, path)
        return ctypes.CDLL(str(made))


def compiler_command() -> list[str]:
    """Return the command of the C++ compiler: CXX, else a usual one that is installed."""
    for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = command.split()
        if words and shutil.which(words[0]):
            return words
    raise RuntimeError("no C++ compiler (CXX, c++, g++, clang++)")


def into_cache(made: Path, path: Path) -> Path:
    """Copy a file to a path in the cache and return that.

    Other processes find the whole file there or none, because the last step is a rename.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)  # fails where it is somebody else's
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        copy = Path(shutil.copy(made, beside))
        with copy.open("rb+") as file:
            os.fsync(file.fileno())
        return copy.replace(path)
