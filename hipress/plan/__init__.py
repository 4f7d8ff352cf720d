"""Planning: the codec, strategy and partitions of each parameter."""
