"""Generates with a model under any engine: answers to prompts, log-probabilities, samples to train on."""
