"""The machine and the files beneath a run: its folder, locks, hardware, environment, signals."""
