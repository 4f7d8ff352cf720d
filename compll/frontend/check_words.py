"""Text parameters: comparing one with a text chooses a branch before any data is known."""

from __future__ import annotations

from collections.abc import Mapping

from compll.errors import Problems, nearest
from compll.frontend.spec import Param, ParamValue, Spec
from compll.frontend.syntax import Call, Name, Syntax, Word

HINT = "like `mode == 'nearest'` of `mode: {type: str, default: nearest, choices: [...]}`"


def equal(
    tree: Call, spec: Spec, params: Mapping[str, ParamValue], problems: Problems
) -> bool | None:
    """True if a parameter equals a text; None, with the reason in `problems`, if they do not
    compare."""
    left, right = tree.args
    other, word = (right, left) if isinstance(left, Word) else (left, right)
    param = _param(other, spec)
    if param is None or not isinstance(word, Word):
        problems.add(tree.span, "a text is compared with a parameter of type str", HINT)
        return None
    if param.choices and word.value not in param.choices:
        choices = [str(c) for c in param.choices]
        problems.add(
            word.span, f"parameter {param.name!r} is never {word.value!r}",
            nearest(word.value, choices),
        )  # fmt: skip
        return None
    return (params[param.name] == word.value) == (tree.op == "eq")


def _param(tree: Syntax, spec: Spec) -> Param | None:
    named = (p for p in spec.params if isinstance(tree, Name) and p.name == tree.name)
    return next((p for p in named if p.type == "str"), None)
