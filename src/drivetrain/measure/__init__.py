"""Measures what a run costs: time, memory, utilisation, FLOPs."""
