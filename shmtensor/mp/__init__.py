"""Drop-in replacements of `multiprocessing`'s queues and contexts."""
