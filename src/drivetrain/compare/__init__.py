"""Compares the same run along any axes, side by side; failures are rows too."""
