"""Train a PyTorch model under any precision and any parallel engine from one run file."""

__version__ = "0.1.0"
