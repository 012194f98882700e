"""Request and reply, on a work queue for the requests and a fan-out per client for the replies: docs/rpc.md."""
