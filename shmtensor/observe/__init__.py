"""Channels observed over time, by a process that is not a member: rates, ends of processes, messages, traces."""
