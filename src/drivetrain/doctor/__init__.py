"""`drivetrain doctor`: examines a machine, and packs the findings for a report of a bug."""
