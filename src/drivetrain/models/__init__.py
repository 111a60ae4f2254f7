"""Models: loads and builds them, and changes them before training."""
