"""Saved state: its canonical form, atomic directories, which checkpoints are kept."""
