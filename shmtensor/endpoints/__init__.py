"""What users hold: publishers, subscribers, producers, consumers and messages."""
