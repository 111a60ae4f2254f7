"""Answers prompts under any engine."""
