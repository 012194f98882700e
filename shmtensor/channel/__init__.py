"""The members of a channel, how to wake them, and how to clean up after them."""
