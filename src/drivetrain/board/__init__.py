"""The no-code board: a web server over run files, a queue of processes and the folders of runs.

It trains by starting `drivetrain train` and reads what runs leave on the disk; it has no state that is not a file.
"""
