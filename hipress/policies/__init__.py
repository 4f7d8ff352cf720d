"""Policies, which move between levels of a compressor, and their state."""
