"""Measurements and the search for plans: `"auto"`."""
