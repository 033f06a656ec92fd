"""Exchange of arrays between ranks: threads, sockets, NCCL."""
