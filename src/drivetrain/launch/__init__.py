"""Starts a verb's work in the processes of a run, restarts them when one dies, and joins other launchers."""
