"""The C++ compiler that torch.compile needs for CPU code: what rtx/attention and rtx/training share."""

from __future__ import annotations

import os
import shutil


def has_compiler() -> bool:
    """Tell whether torch.compile finds what it needs to make CPU code."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++"))
