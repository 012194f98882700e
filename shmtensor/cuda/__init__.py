"""CUDA: the runtime, copies in progress, pinned mappings, shared device memory. docs/internals/cuda.md."""
