"""What leaves the kernels of arrays: payload fields, decoded values, states."""

from __future__ import annotations

from compll.backends.cuda.domains import ELEMENTS, PIECE, Memory, domain_of
from compll.backends.cuda.elements import Place
from compll.backends.cuda.reads import Bytes
from compll.backends.cuda.spectra import Spectra
from compll.backends.cuda.steps import DTYPES
from compll.backends.cuda.text import code
from compll.ir.expr import Expr, Type, walk
from compll.ir.layout import TILE
from compll.ir.module import WHOLE, Field

PACK = 8  # tiles of codes that a block packs


class Outputs(Spectra):
    """Steps that store. alone: whether this rank combines with itself: what is combined is read
    back from its own payload. target: where fields are stored."""

    alone = False
    target: Bytes
    #: the payloads whose status byte tells that the decoded values are NaN; none where ""
    told = ""

    def __init__(self, *args: object, **more: object) -> None:
        self.stored: set[str] = set()
        self.own_values: Memory | None = None
        super().__init__(*args, **more)
        self.extremes = {name for name, how in self.module.rounds if how == "max"}

    def combine(self, name: str) -> None:
        if self.alone:
            self.flush()
            self.store(name)

    # payload fields

    def store(self, name: str) -> None:
        """A payload field, once."""
        f = self.field(name)
        if name in self.stored or f.expr is None:
            return
        self.stored.add(name)
        self.check_storage(f)
        self.need(f.expr)
        if f.expr.type.shape in ("static", "scalar"):
            with self.kernel("store", PIECE, 1, 32):
                value = self.declare("double", self.number(f.expr))
                self.body.add(f"if (threadIdx.x == 0) {self.put(f, 'double', value, '0')};")
        elif f.storage == "uint" and f.bits < 8:
            self.store_packed(f, f.expr)
        else:
            domain = domain_of(f.expr.type)
            with self.over("store", domain) as i:
                value = self.value(f.expr, self.place(domain, i))
                self.body.add(f"{self.put(f, f.expr.type.dtype, value, i)};")

    def put(self, f: Field, dtype: str, value: str, item: str) -> str:
        """The text that stores an item of a field."""
        if f.name in self.extremes:
            # The all-reduce of a maximum may lose a NaN: see [Note: combined].
            value = f"(isfinite({value}) ? {value} : __int_as_float(0x7f800000))"
        begin = self.bytes_of(f, self.target, "u8*")
        if f.storage == "uint":
            return f"{begin}[{item}] = (u8){self.code(f, value)}"
        to = f"{begin} + {f.item_bits // 8} * ({item})"
        kind = "i64" if f.storage in WHOLE else "float"
        return f"store_{f.storage}({to}, ({kind})({value}))"

    def code(self, f: Field, value: str) -> str:
        assert f.expr is not None
        most = f.most or (1 << f.bits) - 1
        return f"({code(most.bit_length(), f.expr, value)})"

    def store_packed(self, f: Field, e: Expr) -> None:
        """Codes of less than a byte, by way of scratch memory."""
        domain = domain_of(e.type)
        codes = self.memory(self.name("codes"), "uint8", domain)
        with self.over("codes", domain) as i:
            value = self.code(f, self.value(e, self.place(domain, i)))
            self.body.add(f"{self.held(codes)}[{i}] = (u8){value};")
        with self.kernel("pack", domain, PACK * TILE):
            count, to = self.count(domain), self.bytes_of(f, self.target, "u8*")
            self.head.add(f"const i64 tiles = ({count} + {TILE - 1}) / {TILE};")
            with self.body.block(f"for (i64 t = own * {PACK}; t < own * {PACK} + {PACK}; ++t)"):
                self.body.add("if (t >= tiles) break;")
                self.body.add(f"const i64 left = {count} - t * {TILE};")
                self.body.add(
                    f"pack_short<{f.bits}>({self.held(codes)} + t * {TILE}, "
                    f"{to} + t * {TILE * f.bits // 8}, left < {TILE} ? (int)left : {TILE}, "
                    "threadIdx.x, blockDim.x);"
                )

    def store_status(self) -> None:
        """The last byte: whether an element of the input is not finite."""
        end = "out + at[p] + {} - 1"
        with self.kernel("clear", PIECE, 1, 32):
            byte = end.format(self.size("total"))
            self.body.add(f"if (threadIdx.x == 0) *({byte}) = 0;")
        source = self.module.pool.make("input", (), Type("float", "n"), "g")
        with self.over("status", ELEMENTS) as i:
            value = self.value(source, Place("n", i))
            self.body.add(f"if (!finite({value})) *({end.format(self.size('total'))}) = 1;")

    # decoded values

    def look(self) -> None:
        """Whether the payload is as long as it must be."""
        wrong = self.memory("wrong", "uint32", PIECE)
        with self.kernel("look", PIECE, 1, 32):
            self.body.add("if (threadIdx.x) return;")
            self.body.add(f"const bool bad = used[p] != {self.size('total')};")
            self.body.add(f"{self.held(wrong)}[0] = bad;")
            self.body.add("if (bad) atomicOr(errors, 1u);")
        self.leaves_wrong = True

    def write(self, add: bool) -> None:
        """The decoded values into y, or added to it."""
        decode = self.module.decode
        if decode.op == "scatter":
            self.write_scattered(decode, add)
            return
        self.need(decode)
        with self.over("write", ELEMENTS) as i:
            value = self.decoded(Place("n", i))
            ys = self.hoist("ys", "XT* const ys = y + table[5 * p];")
            self.body.add(f"store1({ys}, {i}, {f'load1({ys}, {i}) + ' if add else ''}{value});")

    def decoded(self, place: Place) -> str:
        """An element of what decode gives."""
        value = self.value(self.module.decode, place)
        return self.declare("float", f"{self.bad()} ? NAN_F : {value}") if self.told else value

    def bad(self) -> str:
        """Whether the status byte tells that the input was not finite."""
        end = f"{self.told}[at[p] + {self.size('total')} - 1]"
        return self.hoist("bad", f"const bool bad = {end} != 0;")

    def write_scattered(self, decode: Expr, add: bool) -> None:
        """Selected elements alone where they are added; see write()."""
        self.check_scatter(decode)
        self.need(*decode.args)
        domain = domain_of(decode.args[1].type)
        if self.told or not add:
            with self.over("clear", ELEMENTS) as i:
                ys = self.hoist("ys", "XT* const ys = y + table[5 * p];")
                fill = f"{self.bad()} ? NAN_F : 0.0f" if self.told else "0.0f"
                when = f"if ({self.bad()}) " if add else ""
                self.body.add(f"{when}store1({ys}, {i}, {fill});")
        with self.over("write", domain) as j:
            if self.told:
                self.hoist("unwanted", f"if ({self.bad()}) return;")
            at = self.position(str(decode.args[0].value), j)
            value = self.value(decode.args[1], self.place(domain, j))
            ys = self.hoist("ys", "XT* const ys = y + table[5 * p];")
            self.body.add(f"store1({ys}, {at}, {f'load1({ys}, {at}) + ' if add else ''}{value});")

    # states

    def materialize(self, e: Expr) -> None:
        """Have the values of an expression over elements or a matrix in scratch memory."""
        self.need(e)
        if self.known(e):
            return
        domain = domain_of(e.type)
        made = self.memory(self.name("b"), DTYPES[e.type.dtype], domain)
        with self.over("array", domain) as i:
            value = self.value(e, self.place(domain, i))
            self.body.add(f"{self.held(made)}[{i}] = {value};")
        self.made_arrays[id(e)] = made

    def prepare_updates(self) -> None:
        """The states' new values, before any state changes."""
        for e in self.module.updates.values():
            if e.type.shape == "matrix" or (e.type.shape == "n" and moves(e)):
                self.materialize(e)
            else:
                self.need(e)

    def keep_own(self) -> None:
        """Decode this rank's own payload into scratch memory; fields are read elsewhere then."""
        self.materialize(self.module.decode)
        self.own_values = self.array(self.module.decode)
        self.forget_fields()

    def settle(self, *, fed: bool, when: str = "") -> None:
        """Decoded values into x, and new values of the states, where they are at hand.

        None takes up a NaN or infinity.
        """
        updates = self.module.updates if fed else {}
        exprs = {name: e for name, e in updates.items() if e.type.shape == "n"}
        with self.over("settle", ELEMENTS) as i:
            here = Place("n", i)
            values = {name: self.value(e, here) for name, e in exprs.items()}
            decoded = self.decoded(here)
            if fed and self.module.feedback:
                values["residual"] = self.left(here, decoded)
            xs = self.hoist("xs", "XT* const xs = x + table[5 * p];")
            self.body.add(f"{when}store1({xs}, {i}, {decoded});")
            for name, value in values.items():
                self.body.add(self.kept_states.keep(name, self.state(name), i, value))
        for name, e in updates.items():
            self.settle_other(name, e)

    def left(self, place: Place, decoded: str) -> str:
        """The residual of an element."""
        source = self.module.pool.make("input", (), Type("float", "n"), "g")
        g = self.value(source, place)
        own = decoded if self.own_values is None else f"{self.held(self.own_values)}[{place.a}]"
        return self.declare("float", f"{g} - {own}")

    def settle_other(self, name: str, e: Expr) -> None:
        """A state that is a matrix, or a number of a tensor."""
        if e.type.shape == "matrix":
            domain = domain_of(e.type)
            with self.over("settle", domain) as i:
                value = self.value(e, self.place(domain, i))
                room = f"{self.count(domain)} <= n"
                self.body.add(f"if ({room} && finite({value})) {self.state(name)}[{i}] = {value};")
        elif e.type.shape != "n":
            with self.kernel("settle", PIECE, 1, 32):
                value = self.declare("float", f"(float){self.number(e)}")
                to = f"a_{name}[table[5 * p + 2]]"
                self.body.add(f"if (threadIdx.x == 0 && finite({value})) {to} = {value};")


def moves(e: Expr) -> bool:
    """Whether an element depends on inputs or states at other places."""
    return any(a.op in ("flat", "lookup") for a in walk(e))
