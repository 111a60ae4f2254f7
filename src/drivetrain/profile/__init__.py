"""Records where the time of a run's steps goes: by part, operator and module, and what ranks wait for each other."""
