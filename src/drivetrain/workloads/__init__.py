"""Workloads: model, data, loss and metrics behind one contract."""
