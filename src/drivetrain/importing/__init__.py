"""Translates configurations of other software into a run file, without importing that software or running its files."""
