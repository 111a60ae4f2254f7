"""Data sets that are read while they are trained on: shards, their shuffled order, and samples drawn from them."""
