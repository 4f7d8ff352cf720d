"""Every exception that hipress raises on purpose.

    HipressError
    ├── ConfigError (ValueError)      an option, name or model that cannot be used; says what can
    │   └── ConfigMismatch            the ranks were configured differently; names both sides
    ├── AgreementTimeout (TimeoutError)   ranks that never arrived, or the job's silent store
    ├── RankLost (RuntimeError)       another rank's process ended, or was interrupted
    ├── StateError (ValueError)       a state that does not fit this model, or one during a step
    ├── SyncError (RuntimeError)      synchronizing gradients failed, now or in an earlier step
    └── DivergenceError (RuntimeError)    verify=True found ranks that differ

The step in which casync fails raises its error as it is, a casync.errors.CasyncError. The module
cannot take another step then: that is a SyncError with the first error as `__cause__`, or a
RuntimeError of DDP's own. Errors of compll become ConfigError, with them as `__cause__`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HipressError(Exception):
    """Base of hipress's errors."""


class ConfigError(HipressError, ValueError):
    """An option, a name or a model that cannot be used."""


class ConfigMismatch(ConfigError):
    """Ranks of one job were configured differently, or one of them failed to start."""


class AgreementTimeout(HipressError, TimeoutError):
    """Some ranks did not arrive, or the job's store did not answer, within the time-out."""


class RankLost(HipressError, RuntimeError):
    """Another rank ended, or was interrupted, so this one cannot go on."""


class StateError(HipressError, ValueError):
    """A state dictionary that does not fit, or that a step which did not end does not allow."""


class SyncError(HipressError, RuntimeError):
    """Gradients could not be synchronized; training cannot go on from here."""


class DivergenceError(HipressError, RuntimeError):
    """Ranks hold different gradients after a synchronization, or different parameters."""


def unknown(kind: str, name: str, known: Iterable[str], meant: str = "") -> ConfigError:
    """A ConfigError for an unknown name, with the intended one, the nearest one, or all."""
    names = sorted(known)
    close = closest(name, names, 0.5)
    hint = meant or (f"did you mean {close!r}?" if close else "")
    return ConfigError(
        f"unknown {kind} {name!r}. {hint or 'Known: ' + (', '.join(names) or '(none)') + '.'}"
    )


def closest(name: str, known: Iterable[str], least: float = 0.6) -> str | None:
    """The one of `known` closest to `name`, at least so similar (0 to 1); None if there is none."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=least)
    return found[0] if found else None
