"""A warning for specs that decode a common gradient to NaN or infinity: the spec is run."""

from __future__ import annotations

import numpy as np

from compll.errors import CompllError, Diagnostic, Span
from compll.numerics.types import F32
from compll.runtime.codec import Codec

SIZE = 1000
#: gradients with names, and hints for specs that fail on them
TRIED = (
    ("an ordinary gradient", np.random.default_rng(0).standard_normal(SIZE).astype(np.float32),
     "log(x) and sqrt(x) are NaN below zero"),
    ("a gradient of zeros, as of unused words,", np.zeros(SIZE, np.float32),
     "0 / 0 is NaN: divide by max(x, 1e-30), or take where(x > 0, a / x, 0)"),
)  # fmt: skip


def warnings(codec: Codec) -> list[Diagnostic]:
    """At most one warning; none if the codec does not take these gradients."""
    place = codec.module.spans.get("decode", Span())
    for name, gradient, hint in TRIED:
        if codec.suits(SIZE) and not _finite(codec, gradient):
            message = f"warning: {name} decodes to NaN or infinity"
            return [Diagnostic(codec.module.path, place, message, hint)]
    return []


def _finite(codec: Codec, gradient: F32) -> bool:
    try:
        payload = codec.encode(gradient, state=codec.init_state(SIZE) or None)
        return bool(np.isfinite(codec.decode(payload, SIZE)).all())
    except CompllError:
        return True
