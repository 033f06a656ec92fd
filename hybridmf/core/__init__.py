"""Validation, facts about the system, sparse helpers, the objective and its float64 reference; the lowest layer."""
