"""The reference backend: NumPy, one operator at a time."""
