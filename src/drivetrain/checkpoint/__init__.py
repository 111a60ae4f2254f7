"""Saved state: canonical form, atomic directories, what is kept."""
