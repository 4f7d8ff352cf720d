"""Predicted times of a step: formulas, and a simulation of the graph."""
