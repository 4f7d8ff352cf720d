"""Compiled codecs: what users call, their arguments, arrays and caches."""
