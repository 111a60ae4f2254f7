"""The functions that Python users call: train, load, predict, evaluate, compare, engine (docs/reference/python.md)."""

from drivetrain.runtime.library_messages import hush

hush()  # before a function's module imports what prints by itself
