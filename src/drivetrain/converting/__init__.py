"""Checkpoints of others ↔ this project's: each format a file, and what cannot be carried over is told item by item."""
