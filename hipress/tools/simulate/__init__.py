"""Predictions of a step on a cluster that is described in a file."""
