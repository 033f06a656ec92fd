"""Ratings on their way in: labels, text, readers, and stores on disk that are read slab by slab."""
