"""Converts checkpoints between this project's format and other software's."""
