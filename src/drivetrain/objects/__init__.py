"""Python objects that the caller of drivetrain.train() passed, here and on their way to the ranks."""
