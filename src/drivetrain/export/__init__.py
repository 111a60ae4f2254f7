"""Exports a run's model into the formats of other software, and verifies each export by that software itself."""
