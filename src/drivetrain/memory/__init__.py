"""Ways to need less memory, or to reuse it."""
