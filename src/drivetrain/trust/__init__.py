"""Files from strangers: what in them could run code, and what allows it (docs/reference/security.md)."""
