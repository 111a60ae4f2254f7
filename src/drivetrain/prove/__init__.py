"""Tests the promises on a user's own run: a few steps on its engine against one process."""
