"""The only code that touches shared memory, mappings, locks and barriers."""
