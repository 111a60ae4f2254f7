"""Models: loading and building them, and what is changed in them before training."""
