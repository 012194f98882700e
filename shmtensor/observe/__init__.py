"""What channels do over time, seen from outside: rates, the ends of processes, the messages themselves."""
