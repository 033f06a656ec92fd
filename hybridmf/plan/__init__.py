"""Every size and choice of a fit, decided by pure functions before any work."""
