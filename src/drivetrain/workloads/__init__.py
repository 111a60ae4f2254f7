"""What is trained: model, data, loss and metrics behind one contract."""
