"""Rewards for answers: verifiers that ship, functions of the user's own, and the processes that they run in."""
