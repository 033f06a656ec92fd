"""Beyond one device and beyond memory: communicators, ranks, stores, checkpoints."""
