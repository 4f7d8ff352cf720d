"""Arrays in scratch memory, and what makes them."""

from __future__ import annotations

from compll.backends.cuda.domains import ELEMENTS, PIECE, Domain, Memory, domain_of
from compll.backends.cuda.elements import ALONE
from compll.backends.cuda.totals import Totals
from compll.ir.expr import Expr, Type, walk
from compll.ir.program import Unsupported

#: dtypes of arrays in scratch memory
DTYPES = {"float": "float32", "int": "int32", "bool": "uint8"}


class Steps(Totals):
    """Makes drawn selections, and arrays with elements at their positions."""

    def __init__(self, *args: object, **more: object) -> None:
        self.made_arrays: dict[int, Memory] = {}
        super().__init__(*args, **more)

    def known(self, e: Expr) -> bool:
        return id(e) in self.made_arrays

    def array(self, e: Expr) -> Memory:
        return self.made_arrays[id(e)]

    def make(self, e: Expr) -> None:
        how = getattr(self, f"make_{e.op}", None)
        if how is None:
            raise Unsupported(f"`{e.op}`", "", e)
        how(e)

    def new_array(self, e: Expr) -> Memory:
        """Scratch memory for the elements of an expression."""
        made = self.memory(self.name("b"), DTYPES[e.type.dtype], domain_of(e.type))
        self.made_arrays[id(e)] = made
        return made

    def forget_fields(self) -> None:
        """Have all that is made of payload fields made anew: they are read elsewhere from now on."""
        for e in walk(self.module.decode):
            if any(a.op == "field" for a in walk(e)):
                for known in (self.parts, self.slots, self.made_arrays):
                    known.pop(id(e), None)

    # drawn selections

    def select(self, name: str) -> None:
        """Leave what positions follow from."""
        memory = f"drawn_{name}"
        if memory in self.scratch:
            return
        one = next(s for s in self.module.selections if s.name == name)
        if one.kind != "drawn":
            raise Unsupported(f"{one.kind}() in {ALONE}", name, hint="drawn(k) draws elements")
        made = self.memory(memory, "uint64", PIECE, factor=3)
        with self.kernel("draw", PIECE, 1, 32):
            keys = self.stream(-3, self.offset())
            count = self.count(Domain("kept", name))
            self.body.add(
                f"if (threadIdx.x == 0 && {count}) "
                f"draw_positions({self.held(made)}, {keys}, (u64)n, (u64){count});"
            )

    def clear(self, made: Memory) -> None:
        """Zeros for all elements."""
        with self.over("zeros", ELEMENTS) as i:
            self.body.add(f"{self.held(made)}[{i}] = 0;")

    def make_sum_by(self, e: Expr) -> None:
        """See [Note: sums by index]: in any order, as whole numbers add up to the same."""
        pool, domain = self.module.pool, domain_of(e.type)
        size_of = pool.make("abs", e.args[1:], e.args[1].type)
        largest = pool.make("reduce_max", (size_of,), Type("float", "scalar"))
        self.need(largest)
        made, sums = self.new_array(e), self.memory(self.name("sums"), "int64", domain)
        with self.over("zeros", domain) as j:
            self.body.add(f"{self.held(sums)}[{j}] = 0;")
        items = domain_of(e.args[0].type)
        with self.over("sums", items) as i:
            at, value = (self.value(a, self.place(items, i)) for a in e.args)
            to = f"{self.held(sums)} + inside({at}, {self.count(domain)})"
            whole = f"sum_item({value}, {self.sum_shift(largest, items)})"
            self.body.add(f"atomicAdd((u64*)({to}), (u64){whole});")
        with self.over("rounded", domain) as j:
            whole = f"{self.held(sums)}[{j}]"
            self.body.add(
                f"{self.held(made)}[{j}] = sum_value({whole}, {self.sum_shift(largest, items)});"
            )

    def sum_shift(self, largest: Expr, items: Domain) -> str:
        top, count = self.hoisted_number(largest), self.count(items)
        text = f"const int {top}_shift = sum_shift((float){top}, {count});"
        return self.hoist(f"{top}_shift", text)

    def make_scatter(self, e: Expr) -> None:
        self.check_scatter(e)
        made = self.new_array(e)
        self.clear(made)
        with self.over("scatter", domain_of(e.args[1].type)) as j:
            place = self.place(domain_of(e.args[1].type), j)
            at = self.position(str(e.args[0].value), j)
            self.body.add(f"{self.held(made)}[{at}] = {self.value(e.args[1], place)};")

    def check_scatter(self, e: Expr) -> None:
        """Raise Unsupported for positions other than those of a drawn selection."""
        if e.args[0].op != "indices":
            raise Unsupported(f"scatter at other positions than a selection's in {ALONE}", "", e)

    def make_in(self, e: Expr) -> None:
        made = self.new_array(e)
        self.clear(made)
        domain = Domain("kept", str(e.value))
        with self.over("mark", domain) as j:
            self.body.add(f"{self.held(made)}[{self.position(str(e.value), j)}] = 1;")
