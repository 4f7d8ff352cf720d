"""LLVM's builder, with helpers for common IR, and functions that a module's kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from llvmlite import ir

# ---- types --------------------------------------------------------------------------------------
# LLVM's types and constants.

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, F32, F64, PTR, VOID = (
    ir.HalfType(), ir.FloatType(), ir.DoubleType(), ir.PointerType(), ir.VoidType(),
)  # fmt: skip
#: bytes of an element
SIZES = {I8: 1, I16: 2, I32: 4, F32: 4, I64: 8, F64: 8}
KINDS = {"f32": F32, "i32": I32, "bool": I1, "f64": F64, "i64": I64, "table": PTR}


def lanes(kind: ir.Type, like: ir.Value) -> ir.Type:
    """The type with elements of `kind` and as many lanes as the value `like`."""
    return ir.VectorType(kind, like.type.count) if isinstance(like.type, ir.VectorType) else kind


def const(kind: ir.Type, like: ir.Value, number: float) -> ir.Value:
    """The number in every lane."""
    made = lanes(kind, like)
    return ir.Constant(made, [number] * made.count if made is not kind else number)


def element(x: ir.Value) -> ir.Type:
    """The type of one lane."""
    return x.type.element if isinstance(x.type, ir.VectorType) else x.type


def number(kind: ir.Type, value: float) -> ir.Value:
    """A constant."""
    return ir.Constant(kind, value)


def c(value: int) -> ir.Value:
    """An int64 constant."""
    return number(I64, value)


# ---- builder ------------------------------------------------------------------------------------


def at(b: Builder, pointer: ir.Value, offset: ir.Value) -> ir.Value:
    """The address `offset` bytes behind another."""
    return b.gep(pointer, [offset], source_etype=I8)


class Builder(ir.IRBuilder):  # type: ignore[misc]
    """LLVM's builder, with helpers for common IR."""

    def intrinsic(self, name: str, *args: ir.Value) -> ir.Value:
        """A call of an intrinsic that is overloaded by its first argument's type."""
        kind = args[0].type
        letters = {HALF: "f16", F32: "f32", F64: "f64", I32: "i32", I64: "i64"}
        inner = letters[element(args[0])]
        suffix = f"v{kind.count}{inner}" if isinstance(kind, ir.VectorType) else inner
        full = f"llvm.{name}.{suffix}"
        result = element(args[0]) if name.startswith("vector.reduce") else kind
        return self.call(self.declared(full, result, [a.type for a in args]), args)

    def declared(self, name: str, result: ir.Type, kinds: list[ir.Type]) -> ir.Value:
        """A function of LLVM, declared on first use."""
        function = self.module.globals.get(name)
        return function or ir.Function(self.module, ir.FunctionType(result, kinds), name)

    def expect(self, x: ir.Value, value: int) -> ir.Value:
        """A truth that mostly has this value."""
        expect = self.declared("llvm.expect.i1", I1, [I1, I1])
        return self.call(expect, [x, number(I1, value)])

    def clear(self, pointer: ir.Value, size: ir.Value) -> None:
        """Set bytes to 0."""
        memset = self.declared("llvm.memset.p0.i64", VOID, [PTR, I8, I64, I1])
        self.call(memset, [pointer, number(I8, 0), size, number(I1, 0)])

    def copy(self, pointer: ir.Value, source: ir.Value, size: ir.Value) -> None:
        """Copy bytes from `source`."""
        memcpy = self.declared("llvm.memcpy.p0.p0.i64", VOID, [PTR, PTR, I64, I1])
        self.call(memcpy, [pointer, source, size, number(I1, 0)])

    def get(self, array: ir.Value, kind: ir.Type, index: ir.Value, lanes: int = 0) -> ir.Value:
        """Elements of an array from `index` on; lanes 0: a single one, not a vector."""
        place = at(self, array, self.mul(index, c(SIZES[kind])))
        return self.load(place, typ=ir.VectorType(kind, lanes) if lanes else kind, align=1)

    def put(self, value: ir.Value, array: ir.Value, index: ir.Value) -> None:
        """Store a vector or a single element in an array."""
        self.store(value, at(self, array, self.mul(index, c(SIZES[element(value)]))), align=1)

    def stack(self, kind: ir.Type, count: int = 1) -> ir.Value:
        """Stack memory for `count` values of a kind."""
        with self.goto_entry_block():
            memory = self.alloca(ir.ArrayType(kind, count))
        memory.align, memory.type = 64, PTR
        return memory

    def splat(self, x: ir.Value, count: int) -> ir.Value:
        """A number in each of `count` lanes."""
        kind = ir.VectorType(x.type, count)
        empty = ir.Constant(kind, ir.Undefined)
        first = self.insert_element(empty, x, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, count), [0] * count)
        return self.shuffle_vector(first, empty, zeros)

    def running(self, x: ir.Value) -> ir.Value:
        """Running sums of the lanes."""
        zeros, lanes = ir.Constant(x.type, [0] * x.type.count), x.type.count
        for by in (1 << k for k in range(lanes.bit_length() - 1)):
            moved = [lanes + lane if lane < by else lane - by for lane in range(lanes)]
            places = ir.Constant(ir.VectorType(I32, lanes), moved)
            x = self.add(x, self.shuffle_vector(x, zeros, places))
        return x


@contextmanager
def loop(
    b: Builder, count: ir.Value, step: int | ir.Value = 1, start: ir.Value = None
) -> Iterator[ir.Value]:
    """A loop whose body the `with` builds, for 0, step, ... below count."""
    before = b.block
    body, after = b.append_basic_block("loop"), b.append_basic_block("after")
    first = number(I64, 0) if start is None else start
    b.cbranch(b.icmp_signed("<", first, count), body, after)
    b.position_at_end(body)
    index = b.phi(I64)
    index.add_incoming(first, before)
    yield index
    following = b.add(index, c(step) if isinstance(step, int) else step)
    index.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, count), body, after)
    b.position_at_end(after)


def in_steps(
    b: Builder, count: ir.Value, *steps: int
) -> Iterator[tuple[int, AbstractContextManager[ir.Value]]]:
    """Loops over 0..count, each with its step: a loop takes as many as its step allows, the next one
    those that are left."""
    done: ir.Value = c(0)
    for step in steps:
        stop = b.add(done, b.and_(b.sub(count, done), c(-step)))
        yield step, loop(b, stop, step, done)
        done = stop


class Variable:
    """A variable on the stack of a function."""

    def __init__(self, b: Builder, value: ir.Value) -> None:
        self.b, self.kind, self.place = b, value.type, b.stack(value.type)
        self.set(value)

    def get(self) -> ir.Value:
        """The present value."""
        return self.b.load(self.place, typ=self.kind)

    def set(self, value: ir.Value) -> None:
        """Assign a value."""
        self.b.store(value, self.place)


@contextmanager
def repeat_while(b: Builder, condition: Callable[[], ir.Value]) -> Iterator[None]:
    """A loop whose body the `with` builds, and that runs while the condition holds."""
    test, body, after = (b.append_basic_block(name) for name in ("while", "body", "done"))
    b.branch(test)
    b.position_at_end(test)
    b.cbranch(condition(), body, after)
    b.position_at_end(body)
    yield
    b.branch(test)
    b.position_at_end(after)


class Routine:
    """A function that a module's kernels share, built on first use.

    body(builder, *arguments) gives its result. inline: LLVM may inline it, for functions that loops
    call. Copies of other functions would only take time to compile.
    """

    def __init__(
        self, name: str, result: ir.Type, kinds: list[ir.Type], body: Callable[..., ir.Value], *, inline: bool = False
    ) -> None:  # fmt: skip
        self.name, self.body, self.inline = name, body, inline
        self.type = ir.FunctionType(result, kinds)

    def of(self, module: ir.Module) -> ir.Function:
        """The module's function."""
        if self.name not in module.globals:
            function = ir.Function(module, self.type, self.name)
            function.linkage = "internal"
            if not self.inline:
                function.attributes.add("noinline")
            b = Builder(function.append_basic_block("entry"))
            result = self.body(b, *function.args)
            b.ret_void() if self.type.return_type == VOID else b.ret(result)
        return module.globals[self.name]

    def __call__(self, b: Builder, *args: ir.Value) -> ir.Value:
        """A call of it."""
        return b.call(self.of(b.module), args)


def routine(
    result: ir.Type, *kinds: ir.Type, inline: bool = False
) -> Callable[[Callable[..., ir.Value]], Routine]:
    """A Routine whose body is the decorated function."""

    def decorated(body: Callable[..., ir.Value]) -> Routine:
        name = f"{body.__module__.rpartition('.')[2]}_{body.__name__.lstrip('_')}"
        return Routine(name, result, list(kinds), body, inline=inline)

    return decorated
