"""Bytes in, values out: the dtype table, the record, and the description of a value. No I/O, no clock."""
