"""A process group of torch.distributed that compresses the all-reduces of a mesh dimension."""
