"""Optimizers, their low-bit and low-rank states, and learning-rate schedules."""
