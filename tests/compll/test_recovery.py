"""All mistakes that do not depend on one another are reported at once, and nothing else is."""

import itertools

import compll
from tests.compll.wrong import problems

#: a correct spec, and mistakes in it: the wrong text, and a part of the message
RIGHT = """name: example
params:
  ratio: {type: float, default: 0.1, min: 0, max: 1}
  most: 2
group: 256
state:
  m: float32[n]
encode:
  v: g + m
  scale: max(abs(v))
  kept: filter(abs(v) > 0.5 * scale, ceil(n * ratio))
  index: indices(kept)
  value: (v / scale)[kept]
  q: floor(value * 7.5 + 8)
payload:
  scale: float32
  index: gaps[kept]
  q: uint4[kept]
decode:
  a: q - 8
  out: scatter(index, a)
update:
  m: where(kept, 0, v)
when: n > 100 * most
merge: decode
"""
MISTAKES = [
    ("default: 0.1", "default: 2", "the default is not allowed"),
    ("float32[n]\nencode", "float16\nencode", "state 'm' is float32, float32[n]"),
    ("filter(abs(v)", "filter(abs(v, 2)", "abs takes 1 argument, not 2"),
    ("0.5 * scale", "0.5 * scal", "unknown name 'scal'"),
    ("(v / scale)[kept]", "v[kept] / scale", "a value per group does not go together"),
    ("floor(value", "flor(value", "unknown operator 'flor'"),
    ("scale: float32", "scale: float33", "unknown type 'float33'"),
    ("gaps[kept]", "gaps[kep]", "'index' has an unknown length 'kep'"),
    ("a: q - 8", "a: q - kept - 8", "decode uses 'kept', which the payload lacks"),
    ("scatter(index, a)", "scatter(index, a) + 1", "scatter must be the last step"),
    ("where(kept, 0, v)", "sqrt(v, 2)", "sqrt takes 1 argument, not 2"),
    ("n > 100", "n + 100", "`when:` is a condition"),
    ("merge: decode", "merge: sums", "'merge' is one of"),
    ("name: example", "name: 1x", "'1x' is not a name"),
]


def with_(mistakes):
    text = RIGHT
    for right, wrong, _ in mistakes:
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    return text


def told(text, folder):
    return [d.message for d in problems(text, folder)]


def test_the_example_is_right(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(RIGHT)
    assert compll.compile(path, "reference").name == "example"


def rounds(mistakes, folder):
    """The mistakes that are told, then those that are told once these are mended, and so on."""
    left, found = list(mistakes), []
    while left:
        messages = told(with_(left), folder)
        found.append([m for m in left if any(m[2] in each for each in messages)])
        assert len(messages) == len(found[-1]) > 0, (left, messages)
        left = [m for m in left if m not in found[-1]]
    return found


def test_independent_mistakes_of_a_file_are_told_at_once(tmp_path):
    first, *later = rounds(MISTAKES, tmp_path)
    assert len(first) == 12
    assert [[m[1] for m in some] for some in later] == [
        ["v[kept] / scale"],  # depends on `scale * scal`, and on these:
        ["scatter(index, a) + 1"],
    ]


def test_pairs_of_mistakes_hide_nothing_else(tmp_path):
    assert all(len(rounds([one], tmp_path)) == 1 for one in MISTAKES)
    pairs = list(itertools.combinations(MISTAKES, 2))
    hidden = [pair for pair in pairs if len(rounds(pair, tmp_path)) > 1]
    assert len(pairs) == 91
    assert len(hidden) < 15


ITERATED = """name: iterated
encode:
  t: iterate(x, mean(abs(h)), mean(abs(g), abs(k) > x), 3, 2.5 + p)
payload: {t: float32}
decode: t
"""


def test_all_arguments_of_iterate_are_read(tmp_path):
    assert [m for m in told(ITERATED, tmp_path) if "unknown name" in m] == [
        "unknown name 'h'", "unknown name 'k'", "unknown name 'p'"
    ]  # fmt: skip


NESTED = """name: nested
encode:
  pool: drawn(floor(n * shar))
  x: g[pool]
  kept: top(abs(x), 1)
  index: indices(kept)
  value: x[kept]
payload: {index: "gaps[kept]", value: "float32[kept]", all: "float32[pool]"}
decode: scatter(indices(pool), scatter(index, value))
"""


def test_a_wrong_selection_is_a_selection(tmp_path):
    assert told(NESTED, tmp_path) == [
        "unknown name 'shar'", "'all' is in the payload but encode does not define it"
    ]  # fmt: skip
