"""The corpus and the batches: the same on every run, in every process."""

import numpy as np
import pytest

from hipress.tools.run import corpus, lstm
from hipress.tools.run.jobs import Workload


@pytest.fixture
def library(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "b.py").write_text("x = x + 1\n")
    (tmp_path / "a.py").write_text("def f(x): return x\n")
    (tmp_path / "test" / "c.py").write_text("never_read\n")
    return tmp_path


def test_words_numbers_marks_and_line_ends_are_tokens():
    assert corpus.tokenize("a_1 = f(x2,12)\n# é!") == [
        *("a_1", "=", "f", "(", "x2", ",", "12", ")", "\n", "#", "é", "!")
    ]


def test_frequent_words_have_low_numbers_and_rare_ones_none():
    numbers = corpus.number(["b", "a", "b", "c", "a", "b", "d"], vocabulary=4)
    assert numbers.tolist() == [1, 2, 1, 3, 2, 1, 0]


def test_files_are_read_in_sorted_order_without_tests(library):
    assert list(corpus._texts(library, 1000)) == ["def f(x): return x\n", "x = x + 1\n"]


def test_the_size_is_capped(library):
    assert "".join(corpus._texts(library, 7)) == "def f(x"


def test_too_little_text_is_an_error(library):
    with pytest.raises(ValueError, match="only 16 words"):
        corpus.load(library)


@pytest.mark.slow
def test_the_standard_library_gives_the_same_numbers_twice(tmp_path, monkeypatch):
    first, second = (corpus.load(characters=300_000) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first.max() < corpus.VOCABULARY
    assert len(first) > 50_000


def test_numbers_are_kept_between_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(corpus, "load", lambda: np.arange(5))
    path = corpus.prepare()
    monkeypatch.delattr(corpus, "load")
    assert corpus.prepare() == path
    assert list(path.parent.iterdir()) == [path]
    assert np.load(path).tolist() == [0, 1, 2, 3, 4]


def test_a_batch_depends_on_seed_rank_and_step_alone():
    numbers, workload = np.arange(5000), Workload(batch=3, length=4)
    first = lstm.batch(numbers, workload, rank=0, step=7)
    assert first.shape == (3, 5)
    assert first.equal(lstm.batch(numbers, workload, rank=0, step=7))
    assert not first.equal(lstm.batch(numbers, workload, rank=1, step=7))
    assert not first.equal(lstm.batch(numbers, workload, rank=0, step=8))


@pytest.mark.parametrize("workload", [Workload(), Workload(vocabulary=50, width=8)])
def test_the_model_has_as_many_parameters_as_it_says(workload):
    built = lstm.build(workload)
    assert sum(each.numel() for each in built.parameters()) == workload.parameters
    assert lstm.build(workload).output.weight.equal(built.output.weight)


def test_the_default_model_has_twelve_million_parameters():
    assert 12.3e6 < Workload().parameters < 12.5e6
