"""Checkpoints: states as files, and back."""
