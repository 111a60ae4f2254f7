"""The copy of a run in an object store: its index, the transfer of checkpoints, and the uploads in the background."""
