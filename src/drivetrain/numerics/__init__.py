"""The arithmetic of a run: precisions as torch dtypes and switches, and 16 bits on processors without them."""
