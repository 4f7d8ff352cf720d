"""Ranks that exchange tensors: connections, programs, states of codecs, failures."""
