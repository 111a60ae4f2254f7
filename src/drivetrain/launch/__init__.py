"""Starts a verb's work, in as many processes as the run asks for."""
