"""Search for the fastest configuration of each GPU kernel."""
