"""Lookup of specs, and compilation from a name or path to a Codec."""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import pkgutil
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np

from compll.errors import Diagnostic, Problems, Span, SpecError, UsageError, nearest
from compll.frontend import check, reader, source
from compll.frontend.spec import (
    PARAM_TYPES,
    Param,
    Shape,
    Spec,
    as_float,
    open_params,
    settled,
    shown,
)
from compll.runtime import lint, training
from compll.runtime.codec import Codec

_compiled: dict[tuple[str, str, str, object], Codec] = {}
#: names of specs elsewhere
ALIASES = {
    "3lc": "threelc", "tbq": "mxnet_2bit", "2bit": "mxnet_2bit", "int4": "int4_group",
    "int8": "int8_group", "1bit": "onebit_sgd", "1bitsgd": "onebit_sgd", "sidco": "sidco_e",
    "randk": "randomk", "sketchml": "sketch", "fp32": "none", "float32": "none",
    "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
}  # fmt: skip


def specs_dir() -> Path:
    """The folder of the specs that come with the package."""
    here = Path(__file__).resolve().parents[1]
    inside = here / "specs"
    return inside if inside.is_dir() else here.parent / "specs"


def list_specs() -> list[str]:
    """Names of the specs that come with the package."""
    return sorted(p.stem for p in specs_dir().glob("*.yaml"))


@cache
def backends() -> list[str]:
    """Names of the backends: packages in compll.backends, whose modules `backend` have `build`."""
    import compll.backends as package

    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg)


def is_path(text: str) -> bool:
    """True if a spec is given by its path, not its name."""
    return os.sep in text or text.endswith((".yaml", ".yml"))


def locate(name_or_path: str | os.PathLike[str]) -> Path:
    """The file of a spec, by its name or its path. Raises SpecError."""
    try:
        text = os.fsdecode(name_or_path)
    except TypeError:
        raise UsageError(f"a spec is given by its name or path, not as {name_or_path!r}") from None
    if is_path(text):
        return Path(text)
    path = specs_dir() / f"{text}.yaml"
    if not os.path.isfile(path):
        hint = meant(text) or nearest(text, list_specs()) or "`compll list` prints all"
        raise SpecError([Diagnostic("", Span(), f"there is no spec {text!r}", hint)])
    return path


def meant(name: str) -> str:
    """A hint for an unknown name: the file of that name, or the spec that others call so."""
    if os.path.isfile(f"{name}.yaml"):
        return f"did you mean the file, '{name}.yaml'?"
    alias = ALIASES.get(re.sub(r"[-_ ]", "", name.lower()))
    return f"did you mean {alias!r}?" if alias else ""


def load(name_or_path: str | os.PathLike[str], problems: Problems | None = None) -> Spec:
    """Read a spec file. Raises SpecError if it is not a mapping of sections.

    Other problems of form are added to `problems` if given, else raised together.
    """
    path = locate(name_or_path)
    problems_found = problems or Problems(_shown(path))
    result = _parse(_text(path, problems_found), problems_found)
    if problems is None:
        problems_found.raise_if_any()
    return result


def _text(path: Path, problems: Problems) -> str:
    """The text of a spec's file. Raises SpecError."""
    text = source.read(path, problems)
    if text is None:
        problems.raise_if_any()
        raise AssertionError("a file that is not read has problems")
    return text


def _parse(text: str, problems: Problems) -> Spec:
    """A spec as it is written; mistakes of form are added to `problems`. Raises SpecError if it is
    no mapping of sections."""
    root = source.parse(text, problems)
    if root is None:
        problems.raise_if_any()
        raise AssertionError("a text that is not read has problems")
    return reader.read(root, problems)


def _shown(path: Path) -> str:
    try:
        # not Path.resolve, which raises RuntimeError for a loop of links
        return str(Path(os.path.realpath(path)).relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


def type_check(name_or_path: str | os.PathLike[str], params: Mapping[str, object]) -> check.Checked:
    """The typed module of a spec, and all its parameters. Raises SpecError with all problems."""
    return _checked(name_or_path, params)[1]


def warnings(
    name_or_path: str | os.PathLike[str], params: Mapping[str, object]
) -> list[Diagnostic]:
    """Warnings about a spec that compiles. Raises SpecError if it does not."""
    spec, checked = _checked(name_or_path, params)
    diagnostics = lint.spec_warnings(spec, checked.module) + lint.cost_warnings(checked.module)
    codec = compile(name_or_path, "reference", **params)
    diagnostics += lint.trial_warnings(codec, (lint.finite,))
    places = {each.span for each in diagnostics}  # one warning for each claim
    diagnostics += [w for w in lint.trial_warnings(codec, lint.CLAIMS) if w.span not in places]
    diagnostics += lint.trial_warnings(codec, (training.trains,)) if not diagnostics else ()
    for name, value in _ends(spec.params, params) if not diagnostics else ():
        diagnostics += _at_end(name_or_path, {**params, name: value}, name)
    return sorted(diagnostics)


def _ends(params: Sequence[Param], named: Collection[str]) -> Iterator[tuple[str, object]]:
    """Parameters that are not named, with the ends of their ranges and each of their choices."""
    for p in params:
        ends = [end for end in (p.low, p.high) if end is not None and abs(as_float(end)) < math.inf]
        for value in (*ends, *p.choices) if p.name not in named else ():
            yield p.name, PARAM_TYPES[p.type](value)


def _at_end(
    name_or_path: str | os.PathLike[str], params: Mapping[str, object], name: str
) -> list[Diagnostic]:
    """Warnings about a spec with parameter `name` at an end of its range or with another choice."""
    try:
        diagnostics = lint.trial_warnings(
            compile(name_or_path, "reference", **params), (lint.finite,)
        )
    except SpecError as error:
        first = error.diagnostics[0]
        diagnostics = [replace(first, message=f"warning: this does not compile: {first.message}")]
    return [replace(d, message=f"{d.message}, with {name}={params[name]!r}") for d in diagnostics]


def _checked(
    name_or_path: str | os.PathLike[str], params: Mapping[str, object]
) -> tuple[Spec, check.Checked]:
    """A spec as it is written, and typed."""
    problems = Problems(_shown(locate(name_or_path)))
    read_spec = load(name_or_path, problems)
    return read_spec, check.check(read_spec, params, problems)


def plain(value: object) -> object:
    """A NumPy scalar as Python's; other values unchanged."""
    if isinstance(value, np.floating):
        return float(value)  # item() leaves a longdouble as it is
    return value.item() if isinstance(value, np.generic) else value


def compile(name_or_path: str | os.PathLike[str], target: str = "cpu", **params: object) -> Codec:
    """Compile a spec, by name or path, for a backend ("cpu", "reference", "cuda").

    Parameters are numbers, truth values and texts, of Python or NumPy. Raises SpecError if the spec
    or a parameter is wrong, UsageError for an unknown backend. The process caches codecs, and
    kernels are also cached on disk. A codec for "cuda" belongs to the device that is current when
    it is made.
    """
    if target not in backends():
        raise UsageError(f"no backend {target!r}: {nearest(str(target), backends())}")
    path, params = locate(name_or_path), {name: plain(value) for name, value in params.items()}
    problems = Problems(_shown(path))
    text = _text(path, problems)
    key = (
        hashlib.sha256(text.encode()).hexdigest() + str(path),
        target,
        # hex: Python refuses to print integers of thousands of digits, which are reported later
        repr(sorted((k, hex(v) if type(v) is int else _spelt(v)) for k, v in params.items())),
        _bound(target),
    )
    if codec_made := _compiled.get(key):
        return codec_made
    written = _parse(text, problems)
    module, values = check.check(written, params, problems)
    codec = Codec(module, values, target, text, _backend(target).build(module, values))
    shipped = path.parent == specs_dir()
    codec.origin = again, (path.stem if shipped else str(path.absolute()), target, params)
    if open_ := open_params(written.params, params):
        codec.shaped = _shaped(path, target, params, open_)
    # no lock, which a fork would copy as held: of two threads' codecs the first is kept
    return _compiled.setdefault(key, codec)


def _spelt(value: object) -> str:
    """A parameter as a part of a key; what is no parameter's value is refused before it is kept."""
    return repr(value) if isinstance(value, float | bool | str) else shown(value)


def _backend(target: str) -> ModuleType:
    return importlib.import_module(f"compll.backends.{target}.backend")


def _bound(target: str) -> object:
    """The part of a codec's key that the backend adds, such as a device."""
    bound: Callable[[], object] | None = getattr(_backend(target), "bound", None)
    return None if bound is None else bound()


def again(name_or_path: str, target: str, params: Mapping[str, object], digest: str) -> Codec:
    """The codec that a pickle describes. Raises UsageError if its spec has changed."""
    codec = compile(name_or_path, target, **params)
    if codec.digest != digest:
        raise UsageError(f"the spec {name_or_path} has changed since its codec was pickled")
    return codec


def _shaped(
    path: Path, target: str, params: Mapping[str, object], open_: tuple[Param, ...]
) -> Callable[[Shape], Codec]:
    """A function from shapes to codecs; a shape that decides nothing gives the codec of the
    defaults."""

    def make(shape: Shape) -> Codec:
        return compile(path, target, **params, **settled(open_, shape))

    return make
