"""Texts and conversations for language models, from rows to token ids."""
