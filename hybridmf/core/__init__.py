"""Validation, facts about the system, sparse helpers, the objective; the lowest layer."""
