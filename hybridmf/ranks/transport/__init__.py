"""How ranks exchange arrays: threads, sockets, NCCL."""
