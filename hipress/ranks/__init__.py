"""Coordination of a job's ranks: they find each other, compare settings, and report failures."""
