"""A process's door, through which others learn that and why it ends."""

from __future__ import annotations

import os
import socket
import time

import pytest

from hipress.ranks import door as doors
from hipress.ranks import liveness as presences
from hipress.ranks.door import STRANGERS, Door
from hipress.ranks.liveness import Liveness, Watched
from tests.hipress.launch import CONTEXT
from tests.patience import HANG


def _visited(pipe):
    """A process with a door that sends its notes on, and ends when it gets None."""
    door = Door("127.0.0.1", {})
    pipe.send((door.port, door.token))
    while (note := pipe.recv()) is not None:
        door.tell(*note)
        pipe.send("told")
    os._exit(1)


@pytest.fixture
def visited():
    """A process's presence, and the pipe to it."""
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_visited, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        port, token = here.recv()
        yield Liveness("127.0.0.1", port, socket.gethostname(), token), here
    finally:
        process.kill()
        process.join()


@pytest.fixture
def watcher():
    """Connections of this process to others, by presence, with all that has arrived."""
    made = {}

    def look(presence):
        if presence not in made:
            made[presence] = Watched(0, presence, presence.host)
        made[presence].look()
        return made[presence]

    yield look
    for each in made.values():
        each.close()


def until(true):
    end = time.monotonic() + HANG
    while not true():
        assert time.monotonic() < end
        os.sched_yield()


def tell(pipe, *note):
    pipe.send(note)
    assert pipe.recv() == "told"


def test_a_last_message_is_read_after_its_process_ended(visited, watcher):
    presence, pipe = visited
    tell(pipe, "first", {"why": "it rains"})  # before anybody watches
    until(lambda: watcher(presence).notes == {"first": {"why": "it rains"}})
    tell(pipe, "second", 2)
    pipe.send(None)
    until(lambda: watcher(presence).ended)
    assert watcher(presence).notes == {"first": {"why": "it rains"}, "second": 2}


def test_a_crowd_of_strangers_keeps_no_end_from_being_noticed(visited, watcher):
    """Strangers take no memory and are sent away; so is a guest that sends more than its token."""
    presence, pipe = visited
    crowd = [socket.create_connection(("127.0.0.1", presence.port)) for _ in range(3 * STRANGERS)]
    for each in crowd[:STRANGERS]:
        each.setblocking(False)
        sent = 0
        try:
            while sent < 1 << 24:
                sent += each.send(b"x" * 65536)
        except (BlockingIOError, ConnectionError):
            pass
        assert sent < 1 << 24
    until(lambda: watcher(presence)._answered)
    pipe.send(None)
    until(lambda: watcher(presence).ended)
    for each in crowd:
        each.close()


def test_a_port_that_another_process_has_now(visited, watcher):
    presence, _ = visited
    other = Liveness(presence.host, presence.port, "elsewhere", "00" * doors.WORD)
    until(lambda: watcher(other).ended)
    until(lambda: watcher(presence)._answered)
    assert not watcher(presence).ended


@pytest.mark.parametrize(
    "own, local, address",
    [
        ("127.0.0.1", "4", "127.0.0.1"), ("127.0.0.1", "2", ""), ("10.1.2.3", "2", "10.1.2.3"),
        ("127.0.0.1", None, ""),
    ],
)  # fmt: skip
def test_addresses_of_open_ports(monkeypatch, own, local, address):
    """Other machines come from elsewhere, even if rank 0 reaches its store over loopback. Launchers
    such as srun set neither number."""
    for name, value in (("WORLD_SIZE", local and "4"), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert presences.open_to(own) == address


def test_a_connection_that_is_made_anew(visited, watcher):
    """After `ss -K`, or a link that was down; the answer was once read as a note."""
    presence, pipe = visited
    tell(pipe, "first", 1)
    until(lambda: watcher(presence).notes == {"first": 1})
    watcher(presence).close()  # as `look` does for such an error
    tell(pipe, "second", 2)
    until(lambda: watcher(presence).notes == {"first": 1, "second": 2})
    assert not watcher(presence).ended


def test_notes_to_a_process_that_does_not_read_are_not_cut(visited, watcher):
    presence, pipe = visited
    until(lambda: watcher(presence)._answered)
    for number in range(400):
        tell(pipe, f"note {number}", "x" * 20_000)  # more than a socket holds
    until(lambda: "note 0" in watcher(presence).notes)
    tell(pipe, "last", 1)
    until(lambda: "last" in watcher(presence).notes)
    pipe.send(None)
    until(lambda: watcher(presence).ended)
    assert not watcher(presence).left
