"""Decode kernels of payloads with `spread`: values in order, where a condition holds."""

from __future__ import annotations

from compll.backends.cpu_decode import Decoder
from compll.ir import Expr, Module, walk


class Spreading(Decoder):
    """Decoder with spreads: within a tile their values are first laid out in a buffer each.

    `check` counts beforehand for how many elements the conditions hold, so that no value is read
    that the payload does not have.
    """

    def __init__(self, module: Module, add: bool) -> None:
        super().__init__(module, add)
        self.spreads = spreads(module)

    def before_tiles(self) -> None:
        """A buffer, and how many values were taken so far, for each spread."""
        if self.spreads:
            self.unpack_kept()
        for k, e in enumerate(self.spreads):
            self.buffers[id(e)] = f"y_{k}"
            self.add(f"y_{k} = np.empty({self.tile}, np.float32)")
            self.add(f"taken_{k} = 0")

    def each_tile(self, decode: Expr) -> None:
        if not self.spreads:
            return super().each_tile(decode)
        self.unpack_all_codes()
        self.lay_out()
        return self.output(decode, "m", "i")

    def unpack_all_codes(self) -> None:
        with self.block(f"if m == {self.tile}:"):
            self.add("pass")
            for f in self.packed:
                self.unpack(f)
        with self.block("else:"):
            self.add("pass")
            self.unpack_short()

    def lay_out(self) -> None:
        """The tile's values, element after element."""
        for k, e in enumerate(self.spreads):
            condition, values = e.args
            with self.block("for i in range(m):"):
                with self.block(f"if {self.text(condition, 'i')}:"):
                    self.add(f"y_{k}[i] = {self.text(values, f'taken_{k}')}")
                    self.add(f"taken_{k} += 1")
                with self.block("else:"):
                    self.add(f"y_{k}[i] = ZERO")

    # before anything is written

    def check_piece(self) -> None:
        super().check_piece()
        if not self.spreads:
            return
        conditions = [e.args[0] for e in self.spreads]
        self.code_buffers()
        for k, _ in enumerate(conditions):
            self.add(f"found_{k} = 0")
        with self.over_tiles(*conditions):
            self.unpack_all_codes()
            for k, c in enumerate(conditions):
                with self.block("for i in range(m):"):
                    self.add(f"found_{k} += i64({self.text(c, 'i')})")
        for k, e in enumerate(self.spreads):
            with self.block(f"if found_{k} != k_{e.value}:"):
                self.add("return 1 + p")
        self.forget_all()


def spreads(module: Module) -> list[Expr]:
    """The spreads of decode, each once."""
    return [e for e in walk(module.decode) if e.op == "spread"]
