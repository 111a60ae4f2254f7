"""What a model makes under any engine: answers to prompts, log-probabilities, samples to train on."""
