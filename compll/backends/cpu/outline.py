"""Walks that a kernel makes several times become one function: the rounds of `iterate`.

Unrolled, every round is compiled anew: seven stages of sidco_gp took 20 s. Rounds differ in the
names of what they read and find alone, which become arguments and results. So does what is
computed from what a walk found, another function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

WALK = "for t in range(tiles):"
#: assignments after a walk that are worth a function
LEAST = 6
#: what stands in an assignment that may become part of one; calls of functions of numbers, too
PURE = (
    ast.Assign, ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.IfExp,
    ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip
OF_NUMBERS = re.compile(
    r"f64|[bd]_\w+|called_\w+|gamma_above|np\.(sqrt|floor|ceil|rint|isfinite|isnan)"
)


@dataclass(frozen=True)
class Region:
    """Lines first..last of a kernel, its walk's text without indentation, and the local names."""

    first: int
    last: int
    text: str
    names: tuple[str, ...]


def outline(text: str, prefix: str) -> tuple[list[str], str]:
    """The functions that repeated walks of a kernel became, and the kernel."""
    lines = text.splitlines()
    spans = list(_walks(lines))
    rough = [re.sub(r"\d+", "#", "\n".join(lines[a:b])).replace(" ", "") for a, b in spans]
    if len(set(rough)) == len(rough):
        return [], text
    known = _stored(ast.parse(text))
    regions = [_region(lines, first, last, known) for first, last in spans]
    functions = []
    for number, group in enumerate(_groups(regions)):
        name = f"{prefix}_walk{number}"
        functions.append(_function(name, group[0], *_interface(group[0])))
        for region in group:
            _replace(lines, region, _call(name, group[0], region, *_interface(group[0])))
        chains = _alike([_chain(lines, region.first) for region in group], lines, known)
        if len(chains) > 1:
            functions.append(_chained(f"{prefix}_after{number}", chains, lines))
    return functions, "\n".join(filter(None, lines)) + "\n"


def _groups(regions: list[Region]) -> list[list[Region]]:
    """Those that are alike but for names, where there are several."""
    groups: dict[str, list[Region]] = {}
    for region in regions:
        groups.setdefault(_canonical(region), []).append(region)
    return [group for group in groups.values() if len(group) > 1]


def _chain(lines: list[str], walk: int) -> tuple[int, int]:
    """The assignments of numbers that follow the block in which a walk was called."""
    first = walk + 1
    depth = _depth(lines[walk])
    while first < len(lines) and (not lines[first] or _depth(lines[first]) == depth):
        first += 1  # what else stands in the walk's block
    last = first
    while last < len(lines) and _pure(lines[last]):
        last += 1
    return first, last


def _pure(line: str) -> bool:
    """Whether a line assigns a name what is computed of numbers."""
    if not re.match(r"\s*[A-Za-z_]\w* = ", line):
        return False
    (statement,) = ast.parse(line.strip()).body
    nodes = list(ast.walk(statement))
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    named = {id(n) for call in calls for n in ast.walk(call.func)}
    return all(OF_NUMBERS.fullmatch(ast.unparse(call.func)) for call in calls) and all(
        isinstance(n, PURE) or n in calls or id(n) in named for n in nodes
    )


def _alike(spans: list[tuple[int, int]], lines: list[str], known: set[str]) -> list[Region]:
    """The longest beginnings of chains that are alike but for names; none where they are short."""
    for count in range(min(last - first for first, last in spans), LEAST - 1, -1):
        chains = [_region(lines, first, first + count, known) for first, _ in spans]
        if len(set(map(_canonical, chains))) == 1:
            return chains
    return []


def _chained(name: str, chains: list[Region], lines: list[str]) -> str:
    """Put calls where chains stand; the function that is called."""
    pattern = chains[0]
    wanted = set()
    for chain in chains:
        around = "\n".join(lines[: chain.first] + lines[chain.last :])
        used = set(re.findall(r"[A-Za-z_]\w*", around))
        wanted |= {i for i, n in enumerate(chain.names) if n in used}
    inputs, _ = _interface(pattern)
    assigned = _stored(ast.parse(pattern.text))
    outputs = [n for i, n in enumerate(pattern.names) if i in wanted and n in assigned]
    text = _function(name, pattern, inputs, outputs)
    for chain in chains:
        _replace(lines, chain, _call(name, pattern, chain, inputs, outputs))
    return text


def _walks(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Every walk's first line and the line after its last."""
    for first, line in enumerate(lines):
        if line.strip() == WALK:
            depth = _depth(line)
            last = first + 1
            while last < len(lines) and _depth(lines[last]) > depth:
                last += 1
            yield first, last


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _region(lines: list[str], first: int, last: int, known: set[str]) -> Region:
    depth = _depth(lines[first])
    text = "\n".join(line[depth:] for line in lines[first:last])
    names = dict.fromkeys(n for n in re.findall(r"[A-Za-z_]\w*", text) if n in known)
    return Region(first, last, text, tuple(names))


def _canonical(region: Region) -> str:
    """The text with its local names numbered."""
    number = {name: f"${i}" for i, name in enumerate(region.names)}
    return re.sub(r"[A-Za-z_]\w*", lambda m: number.get(m.group(), m.group()), region.text)


def _stored(tree: ast.AST) -> set[str]:
    """Local names of a function: arguments, and what is assigned."""
    found = {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    return found | {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def _events(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names in the order in which they are read or (True) assigned."""
    if isinstance(node, ast.Name):
        yield node.id, isinstance(node.ctx, ast.Store)
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Assign):
        children = [node.value, *node.targets]
    elif isinstance(node, ast.AugAssign):
        if isinstance(node.target, ast.Name):
            yield node.target.id, False
        children = [node.value, node.target]
    elif isinstance(node, ast.For):
        children = [node.iter, node.target, *node.body]
    for child in children:
        yield from _events(child)


def _interface(region: Region) -> tuple[list[str], list[str]]:
    """What a walk reads from outside, and of that what it assigns anew."""
    first: dict[str, bool] = {}
    assigned = set()
    for name, stored in _events(ast.parse(region.text)):
        first.setdefault(name, stored)
        if stored:
            assigned.add(name)
    inputs = [n for n in region.names if not first.get(n, True)]
    return inputs, [n for n in inputs if n in assigned]


def _function(name: str, region: Region, inputs: list[str], outputs: list[str]) -> str:
    body = [f"    {line}" for line in region.text.splitlines()]
    if outputs:
        body.append(f"    return {', '.join(outputs)}")
    return "\n".join([f"def {name}({', '.join(inputs)}):", *body, ""])


def _call(name: str, pattern: Region, region: Region, inputs: list[str], outputs: list[str]) -> str:
    here = dict(zip(pattern.names, region.names, strict=True))
    call = f"{name}({', '.join(here[n] for n in inputs)})"
    return f"{', '.join(here[n] for n in outputs)} = {call}" if outputs else call


def _replace(lines: list[str], region: Region, call: str) -> None:
    """Put a call where a walk stands; numbers of lines stay, so the rest become empty."""
    lines[region.first] = " " * _depth(lines[region.first]) + call
    for i in range(region.first + 1, region.last):
        lines[i] = ""
