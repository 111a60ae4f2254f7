"""Has a model make something under any engine: answers to prompts, log-probabilities, samples to train on."""
