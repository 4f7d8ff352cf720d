"""Ranks that exchange tensors: connections, programs, states of codecs, failures.

A way in reads options, makes a channel, submits exchanges where the training gives it tensors, and
waits; tests/hipress/toy_way.py is one in full.
"""

from hipress.channel.channel import Channel
from hipress.channel.exchange import Exchange, Piece, rows

__all__ = ["Channel", "Exchange", "Piece", "rows"]
