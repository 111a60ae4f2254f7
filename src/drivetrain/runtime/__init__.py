"""Machine and files beneath a run: its folder, locks, hardware, environment, signals."""
