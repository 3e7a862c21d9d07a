"""Measurements of rtx: each file is a script, `python benchmarks/NAME.py`."""
