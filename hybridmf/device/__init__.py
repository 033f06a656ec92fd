"""One GPU: what it is, its memory, and copies between it and the host."""
