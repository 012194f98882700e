"""`shmtensor demo`: real frames to several readers, every byte checked, compared with the standard queues."""
