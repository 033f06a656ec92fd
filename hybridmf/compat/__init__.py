"""Classes with the names and the meaning of other libraries', for a port that changes an import line."""
