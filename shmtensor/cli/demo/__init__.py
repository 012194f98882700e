"""`shmtensor demo`: inference workers and a checked fan-out over real images, next to the usual queues."""
