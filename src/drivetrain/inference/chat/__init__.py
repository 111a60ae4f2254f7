"""Talks with models at a terminal, or through a pipe."""
