"""Sweeps: the cells that overrides lay out, and how they are run."""
