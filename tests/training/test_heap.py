"""Memory that comes and goes on a CPU: kept, in huge pages, and only as much of it as is used."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import resource, sys
from pathlib import Path
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_AS, (2**34, resource.getrlimit(resource.RLIMIT_AS)[1]))
from rtx.training.heap import keep_freed_memory
import torch

def told(name):
    return 1024 * int(Path("/proc/self/smaps_rollup").read_text().split(name + ":")[1].split()[0])

def addresses():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0])

before = told("Rss"), addresses()
keep_freed_memory()
keep_freed_memory()
print(told("Rss") - before[0], addresses() - before[1])
for turn in range(9):
    parts = [torch.ones(2**22) for _ in range(4)]
    if turn == 6:  # by then the places have settled
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del parts
print(told("AnonHugePages"), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


def has_mallopt() -> bool:
    """Tell whether the C library is glibc."""
    return hasattr(ctypes.CDLL(None), "mallopt")


@pytest.mark.skipif(not has_mallopt(), reason="the C library is not glibc: its heap stays as it is")
@pytest.mark.parametrize("how", ["free", "limited", "refused"])
def test_freed_memory_is_kept_in_huge_pages(how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"THP_MEM_ALLOC_ENABLE": "0"} if how == "refused" else {})
    answer = subprocess.run([sys.executable, "-c", PROGRAM, how], env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    resident, addresses, huge, faults = map(int, answer.stdout.split())
    assert resident < 2**24, "addresses alone are taken"
    assert faults < 64, "the same tensors find the memory that they left"
    if how != "free":
        assert addresses < 2**24
        return
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert addresses < installed, "taken once"
    asked = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if addresses > 2**24 and asked.exists() and "[never]" not in asked.read_text():
        assert huge >= 2**25
