"""What a trained model is used for."""
