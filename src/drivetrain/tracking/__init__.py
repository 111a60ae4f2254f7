"""The typed stream of events, and the trackers that receive it."""
