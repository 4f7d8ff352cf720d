"""The operator table: name, arguments, typing rule, meaning and properties, one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compll.frontend import rules as arrays
from compll.frontend import rules as elements
from compll.frontend import rules as reductions
from compll.frontend import rules as selections
from compll.frontend.rule_context import Context
from compll.ir.expr import Expr

Rule = Callable[..., Expr]


@dataclass(frozen=True)
class Operator:
    """An operator of the language. It takes `low` to `high` arguments.

    rule: a function of the context, the operator's name and its typed arguments; None if the
    checker treats the operator's arguments by itself.
    """

    name: str
    low: int
    high: int
    rule: Rule | None
    about: str
    infix: str = ""
    #: true if an argument may be a selection
    selections: bool = False
    #: arguments of which the value shows a NaN or infinity: "first" or "any"
    strict: str = ""
    #: true if an element of the result, which is no matrix, depends on other elements
    mixes: bool = False
    #: true if the value is negative where the argument is, or where it is not
    signed: bool = False

    @property
    def arity(self) -> str:
        """The number of arguments, in words."""
        if self.low != self.high:
            return f"{self.low} to {self.high} arguments"
        return f"{self.low} argument" + "s" * (self.low != 1)


_ROWS = (
    # elementwise: numbers in, number out
    Operator("add", 2, 2, elements.arithmetic, "a + b", "+", strict="any"),
    Operator("sub", 2, 2, elements.arithmetic, "a - b", "-", strict="any"),
    Operator("mul", 2, 2, elements.arithmetic, "a * b", "*", strict="any"),
    Operator("div", 2, 2, elements.real, "a / b, by IEEE rules (0/0 is NaN)", "/"),
    Operator("pow", 2, 2, elements.power, "a to the power b", "**"),
    Operator("floordiv", 2, 2, elements.arithmetic, "floor(a / b)", "//"),
    Operator("mod", 2, 2, elements.mod, "a - b * floor(a / b)", "%"),
    Operator("bitand", 2, 2, elements.integer, "bits of both integers", "&"),
    Operator("bitor", 2, 2, elements.integer, "bits of either integer", "|"),
    Operator("bitxor", 2, 2, elements.integer, "bits of one of the integers", "^"),
    Operator("shl", 2, 2, elements.integer, "a shifted left by b bits; 0 if b is negative, or not less than the bits of a (32 per element)", "<<"),
    Operator("shr", 2, 2, elements.integer, "a shifted right by b bits; 0, or -1 if a < 0, if b is negative, or not less than the bits of a", ">>"),
    Operator("neg", 1, 1, elements.arithmetic, "-a", "-", strict="first", signed=True),
    Operator("abs", 1, 1, elements.arithmetic, "magnitude", strict="first"),
    Operator("sign", 1, 1, elements.sign, "-1 below zero, else +1 (also for zero)", signed=True),
    Operator("floor", 1, 1, elements.rounding, "largest integer not above", signed=True),
    Operator("ceil", 1, 1, elements.rounding, "smallest integer not below", signed=True),
    Operator("round", 1, 1, elements.rounding, "nearest integer, ties to even", signed=True),
    Operator("int", 1, 1, elements.truncated, "as an integer: truncated, at most what an int32 holds; 0 for infinity and NaN"),
    Operator("sqrt", 1, 1, elements.real, "square root"),
    Operator("exp", 1, 1, elements.real, "e to the power a"),
    Operator("log", 1, 1, elements.real, "natural logarithm"),
    Operator("log2", 1, 1, elements.real, "logarithm to base 2"),
    Operator("exponent", 1, 1, elements.of_bits, "floor(log2(abs(x))), from its bits: an integer; -127 below 2**-126, 128 for infinity and NaN"),
    Operator("exp2", 1, 1, elements.exp2, "2 to the power of an integer, exactly; 0 below 2**-126, infinity from 2**128 on"),
    Operator("float_bits", 1, 1, elements.of_bits, "the 32 bits of x as a float32, as an integer; negative if the sign bit is set"),
    Operator("from_float_bits", 1, 1, elements.from_float_bits, "the float32 that has the bits of an integer"),
    Operator("clip", 3, 3, elements.clip, "clip(x, low, high): x kept between low and high"),
    Operator("float16", 1, 1, elements.cast, "rounded to float16, nearest even", strict="first", signed=True),
    Operator("bfloat16", 1, 1, elements.cast, "rounded to bfloat16, nearest even", strict="first", signed=True),
    Operator("bfloat16_up", 1, 1, elements.cast, "rounded to bfloat16 away from zero", strict="first", signed=True),
    Operator("float8_e4m3", 1, 1, elements.cast,
             "rounded to 8 bits (OCP's E4M3), nearest even, 448 at most; NaN of what is not finite", strict="first", signed=True),
    Operator("random", 2, 2, elements.random, "random(a, b): uniform in [a, b), drawn by (seed, step, tensor, element)"),
    Operator("shared", 2, 2, elements.shared,
             "shared(a, b): uniform in [a, b), drawn by (step, tensor, element), the same on all ranks and in decode"),
    # quantiles of distributions
    Operator("probit", 1, 1, elements.probit, "probit(p): the value that a standard normal variable stays below with probability p; p is known before any data"),
    Operator("pareto_above", 3, 3, elements.pareto_above,
             "pareto_above(mean, std, p): the value that a generalized Pareto variable of this mean and standard deviation "
             "exceeds with probability p"),
    # conditions
    Operator("lt", 2, 2, elements.compare, "a < b", "<"),
    Operator("le", 2, 2, elements.compare, "a <= b", "<="),
    Operator("gt", 2, 2, elements.compare, "a > b", ">"),
    Operator("ge", 2, 2, elements.compare, "a >= b", ">="),
    Operator("eq", 2, 2, elements.compare, "a == b", "=="),
    Operator("ne", 2, 2, elements.compare, "a != b", "!="),
    Operator("and", 2, 2, elements.logic, "both", "and", selections=True),
    Operator("or", 2, 2, elements.logic, "either", "or", selections=True),
    Operator("not", 1, 1, elements.logic, "negation", "not", selections=True),
    Operator("isfinite", 1, 1, elements.test, "neither infinite nor NaN"),
    Operator("isnan", 1, 1, elements.isnan, "is NaN"),
    Operator("isinf", 1, 1, elements.isinf, "is infinite"),
    Operator("where", 3, 3, elements.where, "where(c, a, b): a where c holds, else b", selections=True),
    Operator("choose", 3, 3, elements.choose, "`a if c else b` on scalars; only the branch taken is computed"),
    # whole-tensor (or, in a grouped spec, whole-group) values
    Operator("sum", 1, 2, reductions.reduction, "sum of all elements; sum(x, c): of those where c holds"),
    Operator("mean", 1, 2, reductions.reduction, "mean of all elements; mean(x, c): of those where c holds"),
    Operator("std", 1, 2, reductions.reduction, "standard deviation (of the population); std(x, c): of those where c holds"),
    Operator("norm2", 1, 2, reductions.reduction, "Euclidean norm; norm2(x, c): of the elements where c holds"),
    Operator("min", 1, 2, reductions.extreme, "min(x): smallest element; min(a, b): the smaller, elementwise"),
    Operator("max", 1, 2, reductions.extreme, "max(x): largest element; max(a, b): the larger, elementwise"),
    Operator("count", 1, 1, reductions.count, "number of elements for which a condition holds, or of a selection", selections=True),
    Operator("whole", 1, 1, None,
             "whole(max(abs(g))): one number of the tensor, where other reductions are of groups"),
    Operator("iterate", 5, 5, None,
             "iterate(x, first, next, times, most): begins with `first` and takes `next`, in which x is the value before, `times` times (at most `most`, known from the parameters)"),
    # selection
    Operator("sample", 2, 2, selections.sample, "sample(x, m): m elements, one from each of m equal stretches"),
    Operator("kth_largest", 2, 2, selections.kth_largest, "kth_largest(x, k): the k-th largest of x or of a sample"),
    Operator("adjust", 7, 7, selections.search,
             "adjust(x, t, low, high, down, up, tries): t * down while fewer than low elements of x are "
             ">= t, t * up while more than high are, at most `tries` times"),
    Operator("bisect", 6, 6, selections.search,
             "bisect(x, low, high, fewest, most, tries): a threshold between low and high, an interval that is halved until from fewest to most elements of x are >= it, at most `tries` times"),
    # tables
    Operator("literal", 1, 256, reductions.literal, "[a, b, ...]: a table of numbers that follow from the parameters", "[a, b, ...]"),
    Operator("quantiles", 2, 2, reductions.quantiles,
             "quantiles(x, q): table of the q - 1 elements that divide the sorted x into q equal parts"),
    Operator("bucket", 2, 2, reductions.bucket,
             "bucket(x, edges): how many of a table's ascending edges are not above x; edges may be written down: bucket(x, [-1, 0, 1])"),
    Operator("sum_by", 3, 3, reductions.sum_by,
             "sum_by(i, x, size): row of `size` sums, of the x whose i is 0, 1, ...; an i below 0 counts as the first, one beyond the end as the last"),
    Operator("lookup", 2, 2, reductions.lookup,
             "lookup(table, i): value i of a table or a row; the first below 0, the last beyond the end; lookup([0, 0.5, 1], i)"),
    # matrices
    Operator("matrix", 2, 2, arrays.matrix,
             "matrix(x, columns): the elements of x row by row, zeros at the end, in ceil(n / columns) rows"),
    Operator("flat", 1, 1, arrays.flat, "flat(m): the elements of a matrix row by row, the first n of them", strict="first"),
    Operator("matmul", 2, 2, arrays.matmul, "product of two matrices", "@", strict="any"),
    Operator("transpose", 1, 1, arrays.transpose, "rows and columns exchanged", strict="first"),
    Operator("orthonormal", 1, 2, arrays.orthonormal,
             "orthonormal(m, spare): columns of length one, at right angles, that span those of m; a column that "
             "depends on those before it is replaced by the same column of `spare`, if given, else by zeros"),
    Operator("random_matrix", 2, 2, arrays.filled,
             "random_matrix(rows, columns): uniform in [-1, 1), drawn by (step, tensor), the same on all ranks, in decode, and in all calls of this size"),
    Operator("ones", 2, 2, arrays.filled, "ones(rows, columns): a matrix of ones"),
    Operator("chosen", 2, 2, arrays.chosen,
             "chosen(p, k): at most k positions in a row of chances, which sum to at most k; each is drawn with its chance"),
    Operator("take_columns", 2, 2, arrays.take_columns, "take_columns(m, at): the columns of m at positions that chosen() gives for all rows, or top_columns() for each; zeros at -1"),
    Operator("top_columns", 2, 2, arrays.top_columns, "top_columns(m, k): positions of the k largest elements of each row, ascending (NaN counts as largest; ties: first come); -1 at the end where a row has fewer"),
    Operator("place_columns", 3, 3, arrays.place_columns, "place_columns(at, m, columns): a matrix of `columns` columns, with the elements of m at positions `at` of its rows and zeros elsewhere; positions outside are left out"),
    Operator("combined", 1, 1, None, "combined(p): the value that the p of all ranks, a field of `rounds:`, combine to", mixes=True),
    Operator("hadamard", 2, 2, arrays.hadamard,
             "hadamard(x, block): orthonormal Walsh-Hadamard transform of each run of `block` elements, a power of two "
             "(the rest in runs of ever smaller powers of two); its own inverse", strict="first", mixes=True),
    # selections
    Operator("top", 2, 2, selections.selection, "top(x, k): selection of the k largest (NaN counts as largest; ties: first come), also among drawn elements", selections=True),
    Operator("filter", 1, 2, selections.selection, "filter(c, limit): selection of the elements where c holds, at most `limit`, also among drawn elements", selections=True),
    Operator("drawn", 1, 1, selections.drawn,
             "drawn(k): selection of k elements at random, one of each of k equal stretches, the same on all ranks and in decode"),
    Operator("indices", 1, 1, selections.indices, "positions of a selection's elements, ascending", selections=True),
    Operator("gather", 2, 2, selections.gather, "x[selection]: the selected elements of x", "[]", selections=True),
    Operator("scatter", 2, 2, selections.scatter, "scatter(indices, values): values at those positions, zero elsewhere; of elements among drawn ones, what those have"),
    Operator("spread", 2, 2, selections.spread,
             "spread(c, values): the values, in order, at the elements where c holds, zero elsewhere; c is the condition of their `filter`"),
)  # fmt: skip

OPERATORS: dict[str, Operator] = {row.name: row for row in _ROWS}
CONSTANTS: dict[str, float] = {"inf": float("inf"), "nan": float("nan"), "pi": 3.141592653589793}
#: operators on arrays, besides those on matrices
MIXING = tuple(row.name for row in _ROWS if row.mixes)
#: operators that make a selection
SELECTING = ("top", "filter", "drawn")
RESERVED = ("g", "n", "step", *CONSTANTS)
#: names of operators elsewhere
SYNONYMS = {
    "average": "mean", "avg": "mean", "norm": "norm2", "l2": "norm2", "var": "std", "stddev": "std",
    "maximum": "max", "minimum": "min", "amax": "max", "amin": "min", "clamp": "clip",
    "rand": "random", "uniform": "random", "magnitude": "abs",
    "topk": "top", "argsort": "top", "sort": "kth_largest", "quantile": "quantiles",
    "choice": "chosen", "multinomial": "chosen",
    "reshape": "matrix", "view": "matrix", "flatten": "flat", "dot": "matmul", "qr": "orthonormal",
    "searchsorted": "bucket", "bincount": "sum_by", "scatter_add": "sum_by", "index_add": "sum_by", "digitize": "bucket", "take": "lookup",
    "percentile": "kth_largest", "median": "kth_largest", "kthvalue": "kth_largest",
    "nonzero": "filter", "mask": "filter", "select": "where", "trunc": "floor", "len": "count",
    "ppf": "probit", "ndtri": "probit", "repeat": "iterate", "loop": "iterate",
    "bitcast": "float_bits", "frexp": "exponent", "ilogb": "exponent", "ldexp": "exp2",
    "half": "float16", "float8": "float8_e4m3", "fp8": "float8_e4m3", "sgn": "sign", "ln": "log", "power": "pow", "scatter_": "scatter", "masked_scatter": "spread", "expand": "spread",
}  # fmt: skip
#: hints for functions of other languages
MEANT = {
    "bernoulli": "random(0, 1) < p", "randint": "floor(random(0, 2)) is 0 or 1",
    "norm1": "sum(abs(x))", "l1": "sum(abs(x))",
    "numel": "n is the number of elements", "size": "n is the number of elements",
    "zeros": "a number stands for any number of elements", "ones": "a number stands for any number of elements",
    "float": "numbers are float32 where it matters",
    "float32": "numbers are float32 where it matters", "relu": "max(x, 0)",
    "any": "count(c) > 0", "all": "count(not c) == 0", "tanh": "made of exp(x)", "sigmoid": "1 / (1 + exp(-x))",
    "log10": "log(x) / log(10)", "log1p": "log(1 + x)", "expm1": "exp(x) - 1",
    "stochastic_round": "floor(x + random(0, 1))", "argmax": "top(x, 1) selects the largest",
    "normal": "draws are uniform: random(a, b)", "randn": "draws are uniform: random(a, b)",
    "svd": "orthonormal(gram @ v) in an iterate() finds singular vectors: see atomo.yaml",
    "cast": "the payload's types convert; int(x) truncates", "cumsum": "there are no running sums",
}  # fmt: skip
#: operators that a call can name; the others have a symbol or keyword
CALLABLE = tuple(n for n, row in OPERATORS.items() if not row.infix and n != "choose")


def apply(c: Context, op: str, args: tuple[Expr, ...]) -> Expr:
    """The typed expression `op(args)`. Raises RuleError."""
    row = OPERATORS[op]
    if not row.selections:
        c.no_selection(op, args)
    assert row.rule is not None, op
    return row.rule(c, op, *args)
