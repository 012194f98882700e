"""Request and reply: a work queue for the requests, and a fan-out per client for the replies."""
