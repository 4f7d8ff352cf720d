"""Hosts on one machine: network namespaces joined by a bridge, every link throttled.

    with Network(hosts=2, rate="1gbit") as network:
        children = [network.start(rank, ["hostname", "-I"]) for rank in range(2)]

Each host is a namespace with one interface, `eth0`, at 10.77.0.(rank + 1). Its veth peer is a port
of a bridge in a namespace of its own, so nothing is made in the machine's own network, whose
firewall might drop bridged packets. Both directions are throttled by a token bucket (`tc tbf`):
egress at the host's end, ingress at the bridge's. No delay is added: many kernels lack `netem`.

Linux, root, `ip` and `tc` are needed; `unavailable()` says which of them is missing.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

INTERFACE = "eth0"
_PREFIX = "hipress"
_SERIAL = itertools.count()
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class NetworkError(RuntimeError):
    """A namespace, link or throttle could not be made; the message has the command's output."""


class Counters(NamedTuple):
    """Bytes that an interface has sent and received since it was made, headers included."""

    sent: int
    received: int


def parse_rate(text: str) -> int:
    """Bits per second of a rate as `tc` writes it: 100mbit, 1gbit, 2.5gbit. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.strip().lower())
    rate = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 100_000 <= rate <= 10**11:
        raise ValueError(f"rate {text!r}: expected 100kbit to 100gbit, such as 1gbit or 100mbit")
    return rate


def unavailable() -> str | None:
    """The reason why hosts cannot be emulated here, in a few words; None if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Debian package iproute2)"
    try:
        with Network(hosts=1, rate="1gbit"):
            return None
    except NetworkError as error:
        return str(error)


def remove_stale() -> list[str]:
    """Delete namespaces whose process is gone (it was killed); return their names."""
    stale = [name for name in _namespaces() if not Path("/proc", name.split("-")[1]).exists()]
    for name in stale:
        _delete(name)
    return stale


class Network:
    """A context manager of `hosts` namespaces on links of `rate`; always removes them.

    Names hold the process id, so parallel runs do not collide, though they use the same addresses.
    """

    interface = INTERFACE

    def __init__(self, hosts: int, rate: str = "1gbit") -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"{hosts} hosts: expected 1 to 250")
        self.hosts, self.rate = hosts, rate
        parse_rate(rate)
        self._name = f"{_PREFIX}-{os.getpid()}-{next(_SERIAL)}"

    def __enter__(self) -> Self:
        remove_stale()
        try:
            self._make_switch()
            for rank in range(self.hosts):
                self._make_host(rank)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the namespaces, and with them the links. May be called twice."""
        for name in _namespaces():
            if name.startswith(self._name + "-"):
                _delete(name)

    def address(self, rank: int) -> str:
        """Address of the host, reachable only from the other hosts."""
        return f"10.77.0.{rank + 1}"

    def command(self, rank: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on a host; `ip` replaces itself by the program."""
        return ["ip", "netns", "exec", self._host(rank), *arguments]

    def start(self, rank: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program on a host, with options of Popen. The caller waits for it; `close` does
        not end it, and a keyboard interrupt does not reach it."""
        return subprocess.Popen(self.command(rank, arguments), start_new_session=True, **options)

    def throttle(self, rate: str) -> None:
        """Set the speed of all links, from now on."""
        self.rate = rate
        for host in range(self.hosts):
            self._throttle(self._host(host), INTERFACE)
            self._throttle(self._switch, _port(host))

    def counters(self, rank: int) -> Counters:
        """Counters of the host's interface."""
        folder = f"/sys/class/net/{INTERFACE}/statistics"
        sent, received = _run(
            *self.command(rank, ["cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes"])
        ).split()
        return Counters(int(sent), int(received))

    def _host(self, rank: int) -> str:
        return f"{self._name}-{rank}"

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _make_switch(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")

    def _make_host(self, rank: int) -> None:
        host, switch, port = self._host(rank), self._switch, _port(rank)
        _run("ip", "netns", "add", host)
        link = ["type", "veth", "peer", "name", port, "netns", switch]
        _run("ip", "link", "add", INTERFACE, "netns", host, *link)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", host, "address", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
        _run("ip", "-n", host, "link", "set", "lo", "up")
        _run("ip", "-n", host, "link", "set", INTERFACE, "up")
        self._throttle(host, INTERFACE)
        self._throttle(switch, port)

    def _throttle(self, namespace: str, device: str) -> None:
        # A burst of one millisecond, and at least one 64 KiB segment of TCP (a smaller one is
        # split, which costs 4%): so short that a step gains nothing from an idle link. The queue
        # holds 50 ms.
        bits = parse_rate(self.rate)
        burst = max(bits // 8 // 1000, 64 * 1024)
        bucket = ["rate", f"{bits}bit", "burst", str(burst), "latency", "50ms"]
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def _port(rank: int) -> str:
    """Name of the bridge's end of a host's link."""
    return f"port{rank}"


def _namespaces() -> list[str]:
    """The namespaces that this module made, in any process."""
    lines = _run("ip", "netns", "list").splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    return [name for name in names if re.fullmatch(rf"{_PREFIX}-\d+-\d+-\w+", name)]


def _delete(name: str) -> None:
    # Another process may have removed the same leftover, which is fine.
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)


def _run(*command: str) -> str:
    """Run a command and return its output; NetworkError with its output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
