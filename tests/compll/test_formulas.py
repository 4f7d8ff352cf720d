"""Typed expressions in messages: readable, and equal in meaning to the spec's."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll.errors import Problems, Span
from compll.frontend.source import Text
from compll.frontend.spec import parse
from compll.ir.expr import FACTOR, Pool, Type, formula
from compll.ir.static import depends, evaluate
from compll.runtime.library import type_check
from tests.compll.wrong import problems

HEAD = "name: example\nparams: {rank: 2, width: 8}\nencode:\n  m: matrix(g, width)\n"
TAIL = 'payload: {q: "float32[ceil(n / width), rank]"}\ndecode: flat(q)\n'


@pytest.mark.parametrize(
    "q, message",
    [
        ("m", "'q' is declared float[ceil(n / 8), 2] but is float[ceil(n / 8), 8]"),
        ("m @ m", "float[ceil(n / 8), 8] @ float[ceil(n / 8), 8]: the columns of the first"),
        ("m + transpose(m)", "float[ceil(n / 8), 8] and float[8, ceil(n / 8)] do not go together"),
        ("orthonormal(m, transpose(m))", "of the same shape, float[ceil(n / 8), 8]"),
        ("m @ random_matrix(width, (n + 1) // 2)", "but is float[ceil(n / 8), (n + 1) // 2]"),
    ],
)
def test_sizes_of_matrices(q, message, tmp_path):
    (found,) = problems(f"{HEAD}  q: {q}\n{TAIL}", tmp_path)
    assert message in found.message


KNOWN = {name: getattr(math, name) for name in ("ceil", "floor", "sqrt", "log2", "log", "exp")}
KNOWN |= {"min": min, "max": max, "abs": abs, "round": round}


@pytest.mark.parametrize("name", compll.list_specs())
def test_formulas_of_n_evaluate_to_their_values(name):
    """Evaluated by Python, the formula of every such value in the specs is the value."""
    module, params = type_check(name, {})
    env = params | {"n": 1000}
    for expr in module.bindings.values():
        if expr.type.shape == "static" and not depends(expr) - set(env):
            text = str(expr)
            assert "((" not in text
            assert eval(text, KNOWN | env) == pytest.approx(evaluate(expr, env)), text


OPERATIONS = st.sampled_from(["add", "sub", "mul", "floordiv", "pow", "min", "lt", "choose", "neg"])

TREES = st.recursive(
    st.integers(0, 9) | st.just("n"),
    lambda inner: st.tuples(OPERATIONS, inner, inner, inner),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_parentheses_stand_where_they_are_needed(tree):
    pool = Pool()
    text = formula(node(pool, tree))
    again = parse(Text(text, Span()), Problems(""))
    assert again is not None
    assert str(read(pool, again)) == text
    assert read(pool, again) is node(pool, tree)
    assert f"2 * {formula(node(pool, tree), FACTOR)}" == formula(
        pool.make("mul", (pool.const(2), node(pool, tree)), STATIC)
    )


STATIC = Type("int", "static")
ARITY = {"neg": 1, "choose": 3}


def node(pool, tree):
    """A typed expression with these parts."""
    if isinstance(tree, tuple):
        op, *args = tree
        args = tuple(node(pool, a) for a in args[: ARITY.get(op, 2)])
        return pool.make(op, args, STATIC)
    return pool.make("param", (), STATIC, tree) if tree == "n" else pool.const(tree)


def read(pool, tree):
    """A typed expression from a syntax tree."""
    if hasattr(tree, "op"):
        return pool.make(tree.op, tuple(read(pool, a) for a in tree.args), STATIC)
    name = getattr(tree, "name", None)
    return pool.make("param", (), STATIC, name) if name else pool.const(tree.value)
