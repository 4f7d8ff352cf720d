"""Where payloads lie on this rank, and what of them travels."""
