"""One GPU: its properties, its memory, and copies between it and the host."""
