"""Uses a trained model: evaluates it, predicts with it."""
