"""The typed stream of events, and those who listen."""
