"""CUDA, where there is one: the runtime, copies that are on their way, and pinned mappings. docs/internals/cuda.md."""
