"""Predicts memory, time and cost of a run on this machine or another, and the choice among ways to run it."""
