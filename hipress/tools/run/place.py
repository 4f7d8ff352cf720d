"""Places of ranks, with one interface: network namespaces on throttled links, or loopback."""

import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from hipress.tools.run import netns


class TestNetwork(Protocol):
    """A place that starts the processes of ranks, such as `netns.Network`."""

    @property
    def interface(self) -> str:
        """Network interface of the ranks, for gloo and for the byte counters."""

    def start(self, rank: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program at the place of `rank`, with options of Popen."""


class Loopback:
    """All ranks on this machine's loopback interface, which no rate limits."""

    interface = "lo"

    def start(self, rank: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program on this host, whatever the rank."""
        return subprocess.Popen(arguments, start_new_session=True, **options)


@dataclass(frozen=True)
class Choice:
    """A place that can be entered, and a sentence about it for the user."""

    emulated: bool
    sentence: str
    hosts: int
    rate: str

    def enter(self) -> AbstractContextManager[TestNetwork]:
        """Make the place; leaving the context removes it."""
        return netns.Network(self.hosts, self.rate) if self.emulated else nullcontext(Loopback())


def choose(hosts: int, rate: str, *, per_host: int = 1, loopback: bool = False) -> Choice:
    """Namespaces if possible and loopback was not requested. per_host: ranks, for the sentence.
    ValueError for a bad rate."""
    netns.parse_rate(rate)
    reason = "as asked" if loopback else netns.unavailable()
    if reason is None:
        ranks = f", {per_host} ranks each" if per_host > 1 else ""
        told = f"{hosts} hosts emulated by network namespaces{ranks}, links of {rate}"
        return Choice(True, told, hosts, rate)
    told = f"{hosts * per_host} processes on loopback, without a throttle ({reason})"
    return Choice(False, told, hosts, rate)
