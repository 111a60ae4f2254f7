"""Training data: reads files and data sets of any size, orders the samples, cuts batches, loads them."""
