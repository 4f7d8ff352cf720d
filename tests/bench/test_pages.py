"""Blocks of README.md and docs/ are current, and what they say by hand and by text agrees."""

import importlib.util
import re
import shutil
from itertools import product

import pytest
import typer
from typer.testing import CliRunner

import compll
from bench import help_table, pages
from bench.help_table import CASES, Answer


@pytest.mark.slow  # `make docs` checks the same
def test_files_are_current():
    for path, text in pages.current().items():
        assert path.read_text("utf-8") == text, f"{path}: run python -m bench.pages"


def test_every_spec_is_listed():
    text = (pages.ROOT / "docs" / "measurements" / "compressors.md").read_text("utf-8")
    assert [name for name in compll.list_specs() if f"| `{name}` |" not in text] == []


@pytest.mark.slow
def test_check_finds_what_is_out_of_date(tmp_path, monkeypatch):
    """In the tables of compressors; `make docs` checks all."""
    page = "bench/results/compressors.md"
    monkeypatch.setattr(pages, "BLOCKS", {page: pages.BLOCKS[page]})
    for name in (page, pages.EVIDENCE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pages.ROOT / name, tmp_path / name)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    path = tmp_path / page
    text = path.read_text("utf-8")
    path.write_text(text.replace("`ceil(n / 8) + 4`", "`ceil(n / 8) + 5`"), "utf-8")
    app = typer.Typer()
    app.command()(pages.main)
    result = CliRunner().invoke(app, ["--check"])
    assert result.exit_code == 1
    assert f"{page} is not" in result.output
    assert CliRunner().invoke(app, []).exit_code == 0
    assert path.read_text("utf-8") == text


def test_a_text_without_marks_is_refused():
    with pytest.raises(ValueError, match="no <!-- SPECS -->"):
        pages.fill("nothing", {"SPECS": "x"})


def test_predicted_steps_are_between_the_bounds_by_hand():
    """A step takes as long as the link or the computation at least, and both at most, besides the
    work of compressors."""
    for case in CASES:
        found = help_table.answer(case)
        if not isinstance(found, Answer):
            continue
        for text, step in (("bf16", found.common), (case.method, found.ours)):
            _, link, alone = help_table.by_hand(case, text)
            assert 0.98 * max(link, alone) <= step <= 1.15 * (link + alone), (case, text)


def test_answers_do_not_contradict_the_order_of_links_and_models():
    """On a faster link nothing gets slower, and where one node is faster, it is on slower links."""
    for slow, fast in product(CASES, CASES):
        if (slow.file, slow.model, slow.way) != (fast.file, fast.model, fast.way):
            continue
        found, other = help_table.answer(slow), help_table.answer(fast)
        if slow.rate < fast.rate and isinstance(found, Answer) and isinstance(other, Answer):
            assert found.common > other.common
            assert found.ours >= other.ours
            assert found.one_node == other.one_node


@pytest.mark.parametrize(
    ("common", "ours", "one_node", "told"),
    [(2.0, 1.0, 4.0, "**yes**: 2 to 1 (p)"), (1.0, 1.0, 4.0, "no: 1 to 1 (p)"),
     (1.03, 1.0, 4.0, "no: 1.03 to 1 (p)"),
     (9.0, 3.0, 2.0, "no, one node alone is faster: 9 to 3 (p)")],
)  # fmt: skip
def test_yes_takes_a_gain_despite_the_host_and_more_than_one_node(common, ours, one_node, told):
    assert Answer(common, ours, one_node).text(host=0.02) == told


def test_readme_and_the_page_say_what_the_files_of_clusters_describe():
    for file, _ in help_table.ROWS:
        assert (
            f"examples/clusters/{file}.yaml"
            in (pages.ROOT / "docs" / "start" / "help.md").read_text()
        )
    named = re.findall(
        r"examples/clusters/\w+\.yaml", (pages.ROOT / "docs/start/help.md").read_text()
    )
    assert all((pages.ROOT / each).is_file() for each in named)


PAGES = [*pages.ROOT.glob("*.md"), *pages.ROOT.glob("docs/**/*.md"), pages.RESULTS / "README.md"]
TEXTS = {page.relative_to(pages.ROOT).as_posix(): page.read_text("utf-8") for page in PAGES}


def test_no_claim_cites_a_program_that_is_gone():
    """Five claims cited programs that only the history had."""
    gone = [
        f"{page}: {module}"
        for page, text in TEXTS.items()
        if page != "CHANGELOG.md"
        for module in re.findall(r"python -m (bench[\w.]*\w)", text)
        if importlib.util.find_spec(module) is None
    ]
    assert gone == []
    assert [page for page, text in TEXTS.items() if "git show" in text] == []


@pytest.mark.parametrize(
    ("figures", "where"),
    [
        (r"2123.*1184|1184.*2123|2081", {"docs/measurements/shards.md"}),  # HSDP, on four pages
        (r"1\.1 to 3\b", set()),  # had no source
        (r"\b(363|394) (ms|/ ?5[68])", set()),  # one command, two figures
        (r"reaches float32.s loss", set()),  # was within 1.5% of it
        (r"at most 1\.0%", set()),  # beside +2.4% of one workload
        (r"No GPU has been\s+probed", set()),  # where another page tabulates "auto" on one
        (r"took 258 ms|hook took 318", set()),  # beside 259, 317 and 291
    ],
)
def test_a_figure_is_quoted_in_one_place(figures, where):
    """The first contradictions that a reader found."""
    found = {p for p, text in TEXTS.items() if re.search(figures, text)}
    assert found <= where
