"""What a run costs: time, memory, utilisation, FLOPs."""
