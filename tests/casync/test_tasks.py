"""Tasks print and parse back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casync.errors import GraphSyntaxError
from casync.graph.tasks import SIDES, Decode, Encode, Merge, Recv, Reduce, Send, parse_task

number = st.integers(0, 10**6)
tasks = st.one_of(
    st.builds(Encode, number, number, number, st.sampled_from(SIDES), st.booleans(), st.booleans()),
    *(st.builds(kind, number, number, number) for kind in (Decode, Merge, Reduce)),
    *(st.builds(kind, number, number, number, number, number) for kind in (Send, Recv)),
)


@given(tasks)
def test_round_trip(task):
    assert parse_task(task.text()) == task


def test_text_is_the_documented_one():
    assert Send(0, 3, 7, 1, 0).text() == "send rank=0 part=3 payload=7 peer=1 channel=0"


@pytest.mark.parametrize(
    "text, hint",
    [
        ("fly rank=0 part=0 payload=0", "unknown task"),
        ("decode rank=0 part=0", "expected `decode rank=.. part=.. payload=..`"),
        ("decode part=0 rank=0 payload=0", "expected `decode"),
        ("decode rank=0 part=0 payload=0 peer=1", "expected `decode"),
        ("decode rank=0 part=0 payload=x", "bad value of 'payload'"),
        ("decode rank=0 part=0 payload", "expected `decode"),
        ("encode rank=0 part=0 payload=0 side=left average=0 writeback=0", "bad value of 'side'"),
        ("encode rank=0 part=0 payload=0 side=worker average=2 writeback=0", "'average'"),
    ],
)
def test_bad_text_is_refused(text, hint):
    with pytest.raises(GraphSyntaxError, match=hint):
        parse_task(text)
