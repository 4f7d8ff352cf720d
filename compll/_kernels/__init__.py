"""Generated CPU kernels: an importable package whose modules live in the user's cache folder.

Numba caches machine code only for functions of an importable module; one that is imported from a
loose file compiles once and then crashes the second process that loads it.
"""

from __future__ import annotations

from compll.runtime.cache import folder

__path__ = [str(folder("cpu"))]
