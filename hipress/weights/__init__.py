"""Lossless differences of weights, from a trainer to workers, by a folder or a group."""
