"""Parts and tasks, as data, and the builder with which strategies make them."""
