"""Bytes to arrays and tensors, and back."""
