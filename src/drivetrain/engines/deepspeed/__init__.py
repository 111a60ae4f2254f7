"""DeepSpeed's ZeRO as an engine."""
