"""Sweeps: the cells of a command, each in a process or a job of its own, and how they stand."""
