"""Decode, add and encode in one CUDA kernel: what a ring hop and a parameter server do.

`merge_tile` adds a payload's tile to the gradients that a thread holds in registers.
"""

from __future__ import annotations

from compll.backends.cuda.decode import Decoder
from compll.backends.cuda.grids import Shape
from compll.backends.cuda.select import Selecting
from compll.ir.module import Module
from compll.ir.program import Program

EXTRA = (
    "const u8* __restrict__ data", "const i64* at_in", "const i64* used_in", "const double* st_in",
    "int statics_in",
)  # fmt: skip


class Merging(Decoder):
    """Emits the function `merge_tile`."""

    ready = "false"  # nobody has looked at where the payload stands

    def emit(self) -> None:
        decode, s = self.module.decode, self.shape
        args = (
            "const u8* data, const i64* at, const double* st, int statics, int p, i64 n, i64 t, "
            "int m, int u, int c, float* g"
        )
        with self.block(f"template <bool READY> D void {self.prefix}({args})"):
            self.add("if (m == 0) return;")
            self.add(f"const i64 tiles = (n + {self.tile - 1}) / {self.tile}, o = t * {self.tile};")
            self.layout()
            self.scalars()
            self.prepare(decode)
            bad = "data[end - 1] != 0" if self.module.status else "false"
            self.add(f"const bool bad = {bad};")
            self.prepare_groups(decode)
            self.packed_tiles()
            self.add("#pragma unroll")
            with self.block(f"for (int row = 0; row < {s.held}; ++row)"):
                self.add(f"const int k = c * {s.held} + row, l = k * {s.row} + 4 * u;")
                for f in self.elements():
                    self.load(f)
                self.add("#pragma unroll")
                with self.block("for (int e = 0; e < 4; ++e)"):
                    self.add("const int i = l + e;")
                    self.add(
                        f"if (READY || i < m) g[4 * row + e] += bad ? NAN_F : {self.text(decode)};"
                    )


class Hopping(Selecting):
    """Emits encode kernels that take a payload in."""

    def __init__(self, program: Program, feed: bool, prefix: str, threads: int = 256) -> None:
        self.merging = f"{prefix}_merge_tile"
        super().__init__(program, feed, prefix, threads)

    def taken(self, chunk: str) -> None:
        """Add the payload's part to the gradients just loaded."""
        self.add(
            f"{self.merging}<READY>(data, at_in, st_in, statics_in, p, n, t, m, u, {chunk}, g_);"
        )

    def extra_params(self) -> tuple[str, ...]:
        return EXTRA


def merge_function(module: Module, prefix: str, shape: Shape) -> Merging:
    """The function that an encode with this prefix calls."""
    return Merging(module, add=False, threads=shape.threads, prefix=f"{prefix}_merge_tile")
