"""This process among the ranks of the run: their collectives, the shards they hold, their random numbers."""
