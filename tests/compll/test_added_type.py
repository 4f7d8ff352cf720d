"""A payload type of varying length takes what CONTRIBUTING.md's table says, and no more."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import compll

#: for each file that the table names: a text in it, and what is put before that text
ADDED = {
    "ir/storage.py": {
        "class Golomb(": "class Skips(Gaps):\n    pass\n\n\n",
        '        Gaps("gaps"),': '        Skips("skips"),\n',
    },
    "routines/streams.py": {
        '    "golomb": Coder(': '    "skips": Coder(store_gaps, load_gaps),\n',
    },
    "backends/cuda/streams.py": {
        '"gaps": store_positions': '"skips": store_positions, ',
        '"gaps": read_positions': '"skips": read_positions, ',
    },
    "backends/cuda/include/codes.cuh": {"struct golomb_code": "typedef gaps_code skips_code;\n"},
}
SPEC = """
name: skipping
about: Elements above a threshold, with positions of a new type.
encode:
  kept: filter(abs(g) >= 1.5)
  place: indices(kept)
  value: g[kept]
payload: {place: "skips[kept]", value: "float32[kept]"}
decode: scatter(place, value)
"""
USED = """
import sys
import numpy as np
import compll
from compll.backends.cuda import source

x = np.random.default_rng(3).standard_normal(5000).astype(np.float32)
payloads = []
for target in ("reference", "cpu"):
    codec = compll.compile(sys.argv[1], target)
    payload = codec.encode(x)
    assert np.array_equal(codec.decode(payload, len(x)), np.where(abs(x) >= 1.5, x, 0)), target
    payloads.append(payload.tobytes())
assert payloads[0] == payloads[1]
assert "skips_code" in source.source(codec.module).text
"""


def test_a_type_of_varying_length_is_added_in_four_files(tmp_path):
    package = Path(compll.__file__).parent
    shutil.copytree(package, tmp_path / "compll", ignore=shutil.ignore_patterns("__pycache__"))
    for name, edits in ADDED.items():
        path = tmp_path / "compll" / name
        text = path.read_text()
        for before, new in edits.items():
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, new + before)
        path.write_text(text)
    spec = tmp_path / "skipping.yaml"
    spec.write_text(SPEC)
    ran = subprocess.run(
        [sys.executable, "-c", USED, str(spec)], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_the_table_names_these_files():
    text = (Path(compll.__file__).parents[1] / "CONTRIBUTING.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| a payload type |")]
    assert all("/".join(Path(name).parts[-2:]) in row for name in ADDED)
