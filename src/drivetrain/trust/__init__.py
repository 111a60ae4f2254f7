"""Files from strangers: which parts of them could run code, and which permission allows it
(docs/reference/security.md)."""
