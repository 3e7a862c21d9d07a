"""Scoring a split: every unit once, and what the score means."""
