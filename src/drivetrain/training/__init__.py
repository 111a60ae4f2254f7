"""Trains: the loop, the run around it, and the settings decided before the first step."""
