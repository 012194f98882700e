"""What takes the place of a class of the standard library: queues, a `multiprocessing` context, an executor."""
