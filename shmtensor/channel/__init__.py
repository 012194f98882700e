"""Who is there, how to wake them, and what to clean up."""
