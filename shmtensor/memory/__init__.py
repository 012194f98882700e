"""The only Python code that maps shared memory, stores shared words, and uses locks, semaphores and barriers."""
