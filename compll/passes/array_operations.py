"""Operators that mix elements, by name: the functions that make their values and steps."""

from __future__ import annotations

from compll.numerics import matrices
from compll.passes import array_calls, array_fields, array_matrices, selections
from compll.passes.arrays import Operation

#: calls of a routine of the operator's own name
ROUTINES = ("orthonormal", "chosen", *matrices.OPERATORS)
OPERATIONS: dict[str, Operation] = {
    "field": array_fields.field,
    "combined": array_fields.combined,
    "matrix": array_matrices.matrix,
    "flat": array_matrices.flat,
    "transpose": array_matrices.transpose,
    "take_columns": array_matrices.take_columns,
    "random_matrix": array_matrices.random_matrix,
    "ones": array_matrices.ones,
    "indices": selections.indices,
    "count_kept": selections.counted,
    "gather": selections.gather,
    "in": selections.inside,
    "scatter": selections.scatter,
    "matmul": array_calls.matmul,
    "sum_by": array_calls.sum_by,
    **dict.fromkeys(ROUTINES, array_calls.routine),
}
