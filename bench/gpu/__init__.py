"""What one machine with a GPU shows of drivetrain, in parts of less than eight minutes: `make gpu`."""
