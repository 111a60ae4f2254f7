"""The report of one run as a single HTML file: curves, settings, result, machine, and the cause of a failure."""
