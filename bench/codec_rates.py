"""Make hipress/tools/simulate/cpu_codecs.json from the measurements of bench.codecs.

python -m bench.codec_rates
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from bench.commands import RESULTS
from hipress.tools import simulate

PATH = Path(simulate.__file__).parent / "cpu_codecs.json"


def rates(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Nanoseconds per gradient byte, by codec: encode with feedback, decode and add, and both."""
    by_codec = {}
    for row in rows:
        each = {name: 1.0 / rate["rate"] for name, rate in row["rates"].items()}
        encode = each.get("encode_feedback", each.get("encode", 0.0))
        decode = each["decode_add"]
        by_codec[row["codec"]] = [encode, decode, each.get("merge", decode + encode)]
    return by_codec


def main() -> None:
    """Write the file."""
    recorded = json.loads((RESULTS / "codecs.json").read_text("utf-8"))
    about = {key: recorded["about"][key] for key in ("date", "cpu", "elements")}
    about["unit"] = "seconds a byte of gradient on a core: encode, decode and add, both in one"
    by_codec = rates(recorded["rows"])
    rows = {name: [round(1e-9 * ns, 15) for ns in each] for name, each in by_codec.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in rows.items())
    text = f'{{\n "about": {json.dumps(about)},\n "codecs": {{\n{lines}\n }}\n}}\n'
    PATH.write_text(text, "utf-8")


if __name__ == "__main__":
    typer.run(main)
