"""Starts what a verb does, in as many processes as the run asks for."""
