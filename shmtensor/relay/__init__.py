"""Relays: they extend a channel of this host to another one. See docs/internals/relay.md."""
