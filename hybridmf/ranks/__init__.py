"""One fit by several ranks: SU-ALS, MCUMSGD and their workers."""
