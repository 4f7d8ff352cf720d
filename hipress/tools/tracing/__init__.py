"""`hipress trace`: a real step and its prediction on one timeline."""
