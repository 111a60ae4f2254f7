"""Runs on one machine with a GPU what it can show of drivetrain, in parts of less than eight minutes: `make gpu`."""
