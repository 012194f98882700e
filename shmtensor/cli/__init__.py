"""The `shmtensor` command."""
