"""What is compressed, and how."""
