"""Configurations of other software as a run file. Nothing of theirs is imported and none of their files is run."""
