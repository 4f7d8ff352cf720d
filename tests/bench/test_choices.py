"""Choices beside a search for each tensor."""

from bench.choices import CHOICES, Row, emulated, judge, table


def test_a_search_is_no_slower_than_what_is_tried():
    row = judge(next(emulated()))
    assert 0 < row.search <= row.tried <= row.first <= row.native
    assert row.tried < 1.02 * row.search  # a slow link, where compression pays
    assert row.native > 5 * row.tried


def test_a_row_for_each_group_and_choice():
    rows = [Row("hosts", str(n), 1.0, 2.0, 1.0, 1.0 + n / 100, 1.5) for n in range(4)]
    head, _, *lines = table(rows).splitlines()
    assert "worst" in head
    assert len(lines) == len(CHOICES)
    assert lines[1].split("|")[-3:-1] == [" 1.030 ", " 1 "]
