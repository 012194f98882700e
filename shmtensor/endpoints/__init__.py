"""The public endpoints of channels: publishers, subscribers, producers, consumers and their messages."""
