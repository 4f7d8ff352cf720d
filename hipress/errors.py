"""Every exception that hipress raises on purpose.

    HipressError
    ├── ConfigError (ValueError)      an option, name or model that cannot be used; says what can
    │   └── ConfigMismatch            the ranks were configured differently; names both sides
    ├── AgreementTimeout (TimeoutError)   ranks that did not come or answer, or a silent store
    ├── RankLost (RuntimeError)       another rank ended, failed, or broke its connection
    ├── StateError (ValueError)       a state that does not fit this model, or one during a step
    ├── SyncError (RuntimeError)      synchronizing gradients failed, now or in an earlier step
    └── DivergenceError (RuntimeError)    verify=True found ranks that differ

Errors of casync and compll become one of these, with the first as `__cause__`. After a failed step
the module cannot take another one: that is a SyncError with the failure as `__cause__`, or a
RuntimeError of DDP's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from casync.errors import CasyncError, PeerTimeout, TransportError


class HipressError(Exception):
    """Base of hipress's errors."""


class ConfigError(HipressError, ValueError):
    """An option, a name or a model that cannot be used."""


class ConfigMismatch(ConfigError):
    """Ranks of one job were configured differently, or one of them failed to start."""


class AgreementTimeout(HipressError, TimeoutError):
    """Some ranks did not come or answer, or the job's store did not, within the time-out."""


class RankLost(HipressError, RuntimeError):
    """Another rank ended, failed or broke its connection, so this one cannot go on."""


class StateError(HipressError, ValueError):
    """A state dictionary that does not fit, or that a step which did not end does not allow."""


class SyncError(HipressError, RuntimeError):
    """Gradients could not be synchronized; training cannot go on from here."""


class DivergenceError(HipressError, RuntimeError):
    """Ranks hold different gradients after a synchronization, or different parameters."""


def of_casync(error: CasyncError, text: str) -> HipressError:
    """An error of casync as one of hipress, with this text and the first as its cause."""
    kind: type[HipressError] = SyncError
    if isinstance(error, TransportError):
        kind = AgreementTimeout if isinstance(error, PeerTimeout) else RankLost
    converted = kind(text)
    converted.__cause__ = error.with_traceback(None)  # frames would keep the model alive
    return converted


def unknown(
    kind: str, name: str, known: Iterable[str], meant: str = "", every: str = ""
) -> ConfigError:
    """A ConfigError for an unknown name, with the intended one (`meant`), a close one, or all, as
    `every` tells where there are many."""
    names = sorted(known)
    close = closest(str(name), names)
    hint = meant or (f"did you mean {close!r}?" if close else every)
    return ConfigError(
        f"unknown {kind} {name!r}. {hint or 'Known: ' + (', '.join(names) or '(none)') + '.'}"
    )


def closest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` was probably meant to be, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def shown(value: object) -> str:
    """A value for people, short, as compll shows it."""
    from compll.frontend import spec  # not above: it would double the time that an import takes

    return spec.shown(value)
