"""The functions that Python users call: train, load, predict, evaluate, compare, engine (docs/reference/python.md)."""
