"""`python -m drivetrain` is `drivetrain`."""

from drivetrain.cli import main

main()
