"""Texts of tasks, as errors and traces show them."""

from casync.building.tasks import Reduce, Send
from tests.casync.fakes import EVERY, SIZES, graph_of


def test_text_is_the_documented_one():
    sent = "send rank=0 part=3 payload=7 codec=topk peer=1 channel=0 slot=2"
    assert Send(0, 3, 7, "topk", 1, 0, 2).text() == sent
    summed = "reduce rank=1 part=0 payload=4 codec=raw slot=0 ranks=0-2,5 to=5"
    assert Reduce(1, 0, 4, "raw", 0, (0, 1, 2, 5), (5,)).text() == summed


def test_texts_tell_the_tasks_of_a_graph_apart():
    for strategy, codec in EVERY:
        graph = graph_of(SIZES, strategy, codec, 5)
        assert len({task.text() for task in graph.tasks}) == len(graph.tasks), strategy
