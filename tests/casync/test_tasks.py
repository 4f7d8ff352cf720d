"""Tasks print and parse back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casync.building.tasks import SIDES, Decode, Encode, Merge, Recv, Reduce, Send
from tests.casync.graph_text import GraphSyntaxError, parse_task

number = st.integers(0, 10**6)
base = (number, number, number, st.text(min_size=1))  # any name of a codec
ranks = st.lists(st.integers(0, 40), unique=True, min_size=1).map(lambda r: tuple(sorted(r)))
tasks = st.one_of(
    st.builds(Encode, *base, st.sampled_from(SIDES), st.booleans(), st.booleans()),
    *(st.builds(kind, *base) for kind in (Decode, Merge)),
    *(st.builds(kind, *base, number, number, number) for kind in (Send, Recv)),
    st.builds(Reduce, *base, number, ranks, ranks),
)


@given(tasks)
def test_round_trip(task):
    assert parse_task(task.text()) == task


def test_text_is_the_documented_one():
    sent = "send rank=0 part=3 payload=7 codec=topk peer=1 channel=0 slot=2"
    assert Send(0, 3, 7, "topk", 1, 0, 2).text() == sent
    summed = "reduce rank=1 part=0 payload=4 codec=raw slot=0 ranks=0-2,5 to=5"
    assert Reduce(1, 0, 4, "raw", 0, (0, 1, 2, 5), (5,)).text() == summed


ENCODE = "encode rank=0 part=0 payload=0 codec=a"


@pytest.mark.parametrize(
    "text, hint",
    [
        ("fly rank=0 part=0 payload=0", "unknown task"),
        ("decode rank=0 part=0", "expected `decode rank=.. part=.. payload=.. codec=..`"),
        ("decode part=0 rank=0 payload=0 codec=a", "expected `decode"),
        ("decode rank=0 part=0 payload=0 codec=a peer=1", "expected `decode"),
        ("decode rank=0 part=0 payload=x codec=a", "bad value of 'payload'"),
        ("decode rank=0 part=0 payload", "expected `decode"),
        (f"{ENCODE} side=left average=0 writeback=0", "bad value of 'side'"),
        (f"{ENCODE} side=worker average=2 writeback=0", "'average'"),
        ("reduce rank=0 part=0 payload=0 codec=a slot=0 ranks=0- to=0", "'ranks'"),
    ],
)
def test_bad_text_is_refused(text, hint):
    with pytest.raises(GraphSyntaxError, match=hint):
        parse_task(text)
