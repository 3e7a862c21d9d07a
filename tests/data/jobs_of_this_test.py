"""A job that needs no more than what writes a part."""

from __future__ import annotations

import sys

import rtx.data.parts  # noqa: F401


def modules(advance):
    return sorted(sys.modules)
