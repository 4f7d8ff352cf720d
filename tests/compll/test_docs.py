"""docs/how/language.md names every operator and section, and its examples compile."""

import re
from pathlib import Path

import numpy as np
import pytest

import compll
from compll.frontend.operators import OPERATORS
from compll.frontend.source import SECTIONS
from tests.tiers import first_fast

TEXT = (Path(__file__).parents[2] / "docs" / "how" / "language.md").read_text()
#: of one step, where error feedback keeps more than half: sqrt(1 / (1 + ratio)) of a sketch; of the
#: largest 16th of normal numbers, a third of their squares is sent
LOST = {"countsketch": 0.92, "few_of_each": 0.85}
EXAMPLES = re.findall(r"```yaml\n(name: .*?)```", TEXT, re.DOTALL)


def test_every_section_and_operator_is_named():
    told = set(re.findall(r"[\w.]+", " ".join(re.findall(r"`[^`\n]+`", TEXT))))
    assert set(SECTIONS) <= told
    assert {name for name, row in OPERATORS.items() if not row.infix} - {"choose"} <= told
    assert "`a if c else b`" in TEXT  # choose


@pytest.mark.parametrize("example", first_fast(EXAMPLES), ids=lambda text: text.split("\n")[0])
def test_examples_compile_and_agree(example, tmp_path):
    path = tmp_path / "example.yaml"
    path.write_text(example)
    codecs = [compll.compile(path, target=target) for target in ("reference", "cpu")]
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    states = [codec.init_state(5000) for codec in codecs]
    first, second = (c.encode(x, state=s) for c, s in zip(codecs, states, strict=True))
    assert np.array_equal(first, second)
    lost = np.linalg.norm(x - codecs[0].decode(first, 5000)) / np.linalg.norm(x)
    assert lost < LOST.get(codecs[0].name, 0.5)
