"""Specs with mistakes, and what is told of them."""

import pytest

import compll


def problems(text, folder, **params):
    """Diagnostics of a wrong spec."""
    path = folder / "spec.yaml"
    path.write_text(text)
    with pytest.raises(compll.SpecError) as caught:
        compll.compile(path, "reference", **params)
    return caught.value.diagnostics


def tells(good, old, new, line, message, folder):
    """Assert that a sound spec compiles, and that with `new` for `old` it is refused at a line."""
    assert good.count(old) == 1
    path = folder / "spec.yaml"
    path.write_text(good)
    compll.compile(path, "reference")
    found = problems(good.replace(old, new), folder)
    assert any(message in f"{d.message} {d.hint}" and d.span.line == line for d in found), [
        *map(str, found)
    ]


def refuses(text, message, folder):
    """Assert that a message is told of a spec: a regular expression of all of the text."""
    path = folder / "spec.yaml"
    path.write_text(text)
    with pytest.raises(compll.SpecError, match=message):
        compll.compile(path, "reference")
