"""`shmtensor demo`: real frames to several readers, every byte checked, beside the queues that everybody has."""
