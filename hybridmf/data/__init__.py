"""Input of ratings: labels, text, readers, and stores on disk that are read slab by slab."""
