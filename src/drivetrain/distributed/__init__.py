"""This process among those of the run: what they do together, the shards they hold, their random numbers."""
