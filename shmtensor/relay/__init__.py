"""A channel of this host on another one: docs/internals/relay.md."""
