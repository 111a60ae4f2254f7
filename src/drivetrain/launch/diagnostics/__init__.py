"""Finds which rank a run waits for: process states, stacks, and ranks that lost a peer."""
