"""Lossless differences of weights, from a trainer to inference workers, through a folder or over a group."""
