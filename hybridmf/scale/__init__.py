"""Beyond one run on one machine: checkpoints."""
