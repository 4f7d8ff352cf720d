"""CompLL: gradient compressors written as short YAML specs, compiled to fused kernels.

codec = compll.compile("onebit_group")
payload = codec.encode(x, state=codec.init_state(len(x)))
y = codec.decode(payload, len(x))
"""

from __future__ import annotations

__version__ = "0.2.0"

from compll.errors import CompllError, Diagnostic, PayloadError, Span, SpecError, UsageError
from compll.ir.layout import FORMAT as PAYLOAD_FORMAT
from compll.runtime.codec import Codec
from compll.runtime.library import compile, list_specs

__all__ = [
    "PAYLOAD_FORMAT",
    "Codec",
    "CompllError",
    "Diagnostic",
    "PayloadError",
    "Span",
    "SpecError",
    "UsageError",
    "__version__",
    "compile",
    "list_specs",
]
