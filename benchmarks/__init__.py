"""Benchmarks of shmtensor against its rivals: `python -m benchmarks.run`, see README.md."""
