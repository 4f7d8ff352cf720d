"""Decode kernels of payloads with `spread`: values in order, where a condition holds."""

from __future__ import annotations

from compll.backends.cpu.decode import Decoder
from compll.backends.cpu.text import SLACK, STEP
from compll.ir.expr import Expr, walk
from compll.ir.module import Module


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
        if not self.spreads:
            return
        self.unpack_kept()
        self.add(f"hit = np.empty({self.tile}, np.uint8)")
        self.add(f"taken = np.empty({self.tile + SLACK}, np.float32)")
        for k, e in enumerate(self.spreads):
            self.buffers[id(e)] = f"y_{k}"
            self.add(f"y_{k} = np.empty({self.tile}, np.float32)")
            self.add(f"taken_{k} = 0")

    def each_tile(self, decode: Expr) -> None:
        if not self.spreads:
            return super().each_tile(decode)
        self.unpack_all_codes()
        self.lay_out()
        with self.block(f"if m == {self.tile}:"):
            with self.full_tile_written():
                self.output(decode, str(self.tile), "i", "o_")
        with self.block("else:"):
            self.output(decode, "m", "i")
        return None

    def unpack_all_codes(self) -> None:
        with self.block(f"if m == {self.tile}:"):
            for f in self.packed:
                self.unpack(f)
        with self.block("else:"):
            self.unpack_short()

    def lay_out(self) -> None:
        """The tile's values, element after element; see [Note: squeezing]."""
        for k, e in enumerate(self.spreads):
            condition, values = e.args
            with self.block("for i in range(m):"):
                self.add(f"hit[i] = b_code({self.text(condition, 'i')})")
            with self.block(f"for i in range(m, {self.tile}):"):
                self.add("hit[i] = u8(0)")
            if self.tile < STEP:
                self.one_by_one(k, values)
            else:
                self.spread(k, values)

    def spread(self, k: int, values: Expr) -> None:
        self.add("count = hits(hit)")
        with self.block("for j in range(count):"):
            self.add(f"taken[j] = {self.text(values, f'(taken_{k} + j)')}")
        self.add(f"spread(hit, taken, y_{k})")
        self.add(f"taken_{k} += count")

    def one_by_one(self, k: int, values: Expr) -> None:
        """The same for tiles that are shorter than a step."""
        with self.block("for i in range(m):"):
            with self.block("if hit[i] != 0:"):
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
                self.add("z = i32(0)")
                with self.block("for i in range(m):"):
                    self.add(f"z = i_add(z, i_of_b({self.text(c, 'i')}))")
                self.add(f"found_{k} += i64(z)")
        for k, e in enumerate(self.spreads):
            with self.block(f"if found_{k} != k_{e.value}:"):
                self.add("return 1 + p")
        self.forget_all()


def spreads(module: Module) -> list[Expr]:
    """The spreads of decode, each once."""
    return [e for e in walk(module.decode) if e.op == "spread"]
