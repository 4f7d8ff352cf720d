"""Compressors in simple plain torch, the baseline of `python -m bench.codecs`.

They are written for clarity and ordinary speed (in place if that is natural), with the default
parameters of the spec of the same name.
"""

from __future__ import annotations

from bench.torch_common import Method
from bench.torch_formats import FORMATS
from bench.torch_low_rank import LOW_RANK
from bench.torch_quantizers import QUANTIZERS
from bench.torch_shared import shared
from bench.torch_sidco import SIDCO
from bench.torch_signs import signs
from bench.torch_sparse_codes import SPARSE_CODES
from bench.torch_sparsifiers import SPARSIFIERS
from compll import list_specs

_ALL = QUANTIZERS | FORMATS | signs() | SPARSIFIERS | SIDCO | SPARSE_CODES | LOW_RANK | shared()
METHODS: dict[str, Method] = {name: _ALL[name] for name in list_specs() if name in _ALL}
