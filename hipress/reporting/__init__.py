"""Reports of a model: its plan, and its costs so far."""
