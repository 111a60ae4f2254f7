"""Trains: the loop, the run around it, and what is settled before the first step."""
