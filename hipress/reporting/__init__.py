"""What hipress tells of a model: its plan, and what that cost so far."""
