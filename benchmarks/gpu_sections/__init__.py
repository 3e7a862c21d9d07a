"""The sections of `benchmarks/gpu.py`: what is checked, timed and trained on a GPU, row by row."""
