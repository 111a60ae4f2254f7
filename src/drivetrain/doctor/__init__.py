"""What `drivetrain doctor` finds on a machine, and packs for those who help from afar."""
