"""`ProcessPoolExecutor`: the standard library's executor, with tensors and arrays in shared memory."""
