"""Emulated hosts: isolation, throttle, counters, and a complete removal."""

import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from bench import netns
from hipress.tools.run import netns as implementation

REASON = netns.unavailable()
emulated = pytest.mark.skipif(REASON is not None, reason=f"no emulated hosts: {REASON}")


def names() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if line]


def mine() -> list[str]:
    return [name for name in names() if name.startswith(f"hipress-{os.getpid()}-")]


@pytest.mark.parametrize(
    "text, bits", [("1gbit", 10**9), ("100mbit", 10**8), ("2.5Gbit", 25 * 10**8)]
)
def test_rates_are_read_as_tc_writes_them(text, bits):
    assert netns.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "1", "1gb", "-1gbit", "0mbit", "1e9bit", "1gbit; ls"])
def test_a_bad_rate_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="such as 1gbit or 100mbit"):
        netns.parse_rate(text)


@pytest.mark.slow
@emulated
def test_a_request_to_end_leaves_neither_hosts_nor_what_runs_there():
    """Processes started by a program there end, too: they would hold the pipe open."""
    script = "echo $$; sleep 1000 & wait"
    command = [sys.executable, "-m", "bench.netns", "run", "--hosts", "2", "--", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        for _ in range(2):
            assert program.stdout.readline().strip().isdigit()
        assert any(name.startswith(f"hipress-{program.pid}-") for name in names())
        program.terminate()
        assert program.stdout.read() == ""
        assert program.wait() == 128 + signal.SIGTERM
    assert not any(name.startswith(f"hipress-{program.pid}-") for name in names())


@pytest.mark.parametrize("hosts", [0, -1, 251])
def test_a_bad_number_of_hosts_is_refused(hosts):
    with pytest.raises(ValueError, match="hosts"):
        netns.Network(hosts)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "--rate", "fast", "true"], "rate 'fast': expected 100kbit to 100gbit"),
        (["run", "--hosts", "0", "true"], "0 hosts: expected 1 to 250"),
        (["check", "--hosts", "1"], "1 hosts: expected 2 to 250"),
    ],
)
def test_bad_options_are_refused_in_a_line(arguments, message):
    result = CliRunner().invoke(netns.app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"bench: {message}")
    assert result.stderr.count("\n") == 1


def test_it_says_why_hosts_cannot_be_emulated(monkeypatch):
    monkeypatch.setattr(implementation.sys, "platform", "darwin")
    assert netns.unavailable() == "network namespaces need Linux, this is darwin"
    monkeypatch.undo()
    monkeypatch.setattr(implementation.os, "geteuid", lambda: 1000)
    assert "root" in (netns.unavailable() or "") or not sys.platform.startswith("linux")


@emulated
@pytest.mark.network
def test_hosts_reach_each_other_and_nothing_is_left():
    with netns.Network(hosts=2) as network:
        assert len(mine()) == 3
        listen = "import socket; s = socket.create_server(('', 4000)); s.settimeout(20); s.accept()"
        call = (
            "import socket, time\n"
            "for _ in range(100):\n"
            "    try: socket.create_connection(('10.77.0.1', 4000), 1); break\n"
            "    except OSError: time.sleep(.05)\n"
            "else: raise SystemExit(1)"
        )
        server = network.start(0, [sys.executable, "-c", listen])
        client = network.start(1, [sys.executable, "-c", call])
        assert [client.wait(30), server.wait(30)] == [0, 0]
        assert network.counters(1).sent > 0
    assert mine() == []


@emulated
@pytest.mark.network
def test_links_of_another_rate_from_now_on():
    with netns.Network(hosts=2) as network:
        network.throttle("50mbit")
        shown = subprocess.run(
            network.command(1, ["tc", "qdisc", "show", "dev", netns.INTERFACE]),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "rate 50Mbit" in shown.stdout
        with pytest.raises(ValueError):
            network.throttle("fast")


@emulated
@pytest.mark.network
def test_networks_side_by_side_do_not_meet():
    with netns.Network(hosts=1) as first, netns.Network(hosts=1) as second:
        assert first.command(0, ["true"]) != second.command(0, ["true"])
        assert len(mine()) == 4
    assert mine() == []


@emulated
@pytest.mark.network
def test_a_failure_inside_cleans_up():
    with pytest.raises(KeyboardInterrupt):
        with netns.Network(hosts=2):
            raise KeyboardInterrupt
    assert mine() == []


@emulated
@pytest.mark.network
def test_a_failure_while_making_cleans_up(monkeypatch):
    def fail(*arguments):
        raise netns.NetworkError("tc: no such qdisc")

    monkeypatch.setattr(netns.Network, "_throttle", fail)
    assert netns.unavailable() == "tc: no such qdisc"
    assert mine() == []


@pytest.mark.slow
@emulated
@pytest.mark.network
def test_leftovers_of_a_killed_process_are_removed():
    code = "import os; from bench.netns import Network; Network(1).__enter__(); os._exit(9)"
    child = subprocess.Popen([sys.executable, "-c", code])
    assert child.wait(60) == 9
    netns.remove_stale()  # or another test's Network has done it already
    assert [name for name in names() if name.startswith(f"hipress-{child.pid}-")] == []


@emulated
@pytest.mark.network
@pytest.mark.slow
def test_a_link_is_as_fast_as_it_says():
    gbits, overhead = netns.measure(hosts=2, rate="100mbit")
    assert 0.07 < gbits < 0.11
    assert 1.0 <= overhead < 1.1
