"""Predicted times of a step."""
