"""Identities of messages: a number in front of each, checked on arrival.

[Note: identity] Tags and order alone let a rank take what another rank sent for another tensor, if
both have the same length. So a message begins with eight bytes: the epoch of its executor, the
number of its job, a digest of the name of the job's bucket, and its payload. A rank that receives
another identity raises an error that names both. A payload forwarded unchanged keeps its identity.
Native reduces and messages without tags have none: no host reads them. There callers keep one order
on all ranks, as for any collective, or compare names first, as Exchange.compare_names does.
"""

from __future__ import annotations

import zlib

from casync.errors import PayloadError

__all__ = ["IDENTITY", "NOTHING", "Identity", "digest_of"]

IDENTITY = 8  # bytes
NOTHING = -1  # in place of an identity: no message has arrived
_PAYLOAD, _NAME, _JOB, _EPOCH = 24, 16, 16, 7  # bits, from the lowest on; int64 stays positive


class Identity:
    """The identity of a job's messages."""

    def __init__(self, epoch: int, job: int, name: str, names: dict[int, str]) -> None:
        """epoch: number of the executor among those of its ranks. job: number in the order of
        submits. name: of the bucket; "": none. names: of the executor's buckets, by digest, to
        which this one is added."""
        self.job, self._names, digest = job, names, digest_of(name)
        if name:
            names[digest] = name
        number = epoch % (1 << _EPOCH)
        number = number << _JOB | job % (1 << _JOB)
        self._base = (number << _NAME | digest) << _PAYLOAD

    def of(self, payload: int) -> int:
        """The number in front of a payload."""
        return self._base | payload % (1 << _PAYLOAD)

    def check(self, payload: int, identity: int) -> None:
        """Raise PayloadError, which names both, unless `identity` is that of a payload."""
        if identity == NOTHING:
            raise PayloadError("the message is empty")
        if identity != (wanted := self.of(payload)):
            raise PayloadError(
                f"the message is of {self._text(identity)}, not of {self._text(wanted)}: ranks "
                "must exchange the same tensors in the same order"
            )

    def _text(self, number: int) -> str:
        """Text such as "job 3, bucket 'weights', payload 0"."""
        payload, number = number % (1 << _PAYLOAD), number >> _PAYLOAD
        name, number = number % (1 << _NAME), number >> _NAME
        job, epoch = number % (1 << _JOB), number >> _JOB
        known = repr(self._names[name]) if name in self._names else f"#{name:x}, unknown here"
        bucket = f", bucket {known}" if name else ""
        return f"job {job}{bucket}, payload {payload}" + (f", epoch {epoch}" if epoch else "")


def digest_of(name: str) -> int:
    """A number of 16 bits; 0 for no name."""
    return zlib.crc32(name.encode()) % ((1 << _NAME) - 1) + 1 if name else 0
