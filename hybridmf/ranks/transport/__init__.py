"""Exchange of arrays between ranks: threads, MPI, NCCL."""
