"""Versions from a trainer to workers that share no folder, over a process group.

The trainer gives the files of a version to all workers, which write them into folders of their own:
one after another, the index last. A header of fixed length comes before each file, which is cut
into blocks of few lengths, as a channel makes a program for each. After an index all ranks tell
which version they have.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

import torch
import torch.distributed as dist

from casync.errors import CasyncError
from casync.shutdown import end_with, start_thread
from hipress.channel import Channel, Exchange, Piece, rows
from hipress.errors import ConfigError, HipressError, StateError
from hipress.weights import delta_files
from hipress.weights.folders import ANCHOR, DELTA, INDEX, Folder, LocalFolder, lasting

log = logging.getLogger("hipress")
HEADER = 256  # bytes
LARGEST, SMALLEST = 16 << 20, 1 << 10  # bytes of a block
AHEAD = 4  # blocks on their way besides the one that is waited for


class Transport:
    """A group of which one rank sends folders of versions, and all others write them."""

    def __init__(
        self, group: dist.ProcessGroup, folder: Folder, version: int, timeout: float, *, sends: bool
    ) -> None:
        """Connect the ranks, each of which calls this, and compare what they have.

        version: the last one that the sender has published, or that a receiver has. timeout:
        seconds to wait for another rank. Raises ConfigError, on all ranks, unless one of them
        sends, and no other has a later version, or for a folder at a URL; and the errors of
        Channel.of.
        """
        if not isinstance(folder, LocalFolder):
            raise ConfigError(f"transport= needs a folder of this machine, not {folder}")
        self._folder, self._version = folder, version
        self._error: BaseException | None = None
        self._left = False
        self._channel = Channel.of(group, "weights", timeout=timeout)
        self.close = end_with(self, self._channel.close)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._kept = rows([Piece(4, strategy="pull")], self._size)
        told = self._tell(version, sends)
        senders = [rank for rank, (_, each) in enumerate(told) if each]
        if len(senders) != 1 or self._size < 2:
            raise ConfigError(
                f"transport: its ranks {senders} of {self._size} publish; one must, and all others "
                "receive"
            )
        self._sender = senders[0]
        last = told[self._sender][0]
        if late := [rank for rank, (each, _) in enumerate(told) if each > last]:
            raise ConfigError(
                f"transport: rank {late[0]} has version {told[late[0]][0]}, and version {last} is "
                "the last that is published: give each run folders of its own"
            )
        self._reached = min(each for each, _ in told)
        self._give(_header("", 0))  # makes the program by which receivers wait

    def send(self, version: int) -> None:
        """Send the folders that lead the receivers to a version; all have it afterwards."""
        self._channel.failures.refuse()
        with self._channel.failures.scope(version, f"version {version}"):
            for folder in self._way(version):
                path = self._folder.path / folder
                for file in (*sorted(path.glob("*.safetensors")), path / INDEX):
                    self._send_file(file)
                self._version = delta_files.number_of(folder)
                self._reached = min(each for each, _ in self._tell(self._version, sends=True))

    def end(self) -> None:
        """Tell the receivers that no version follows, unless they have left, and close."""
        with suppress(CasyncError, HipressError):
            self._give(_header("", 0))
        self.close()

    def start(self) -> None:
        """Write what the sender sends, in a thread."""
        self._thread = start_thread(self._receive, "hipress-weights")

    def leave(self) -> None:
        """End the thread; if versions may follow, the other ranks fail, and are told why."""
        if self._thread.is_alive():
            self._left = True
            self._channel.failures.fail(HipressError("its receiver was closed"), self._version)
        self._thread.join()

    def refuse_failed(self) -> None:
        """Raise the error that ended the thread."""
        if self._error is not None:
            raise self._error

    # ---------------------------------------------------------------------------------- the sender

    def _way(self, version: int) -> list[str]:
        """Folders that lead from what all receivers have to a version."""
        way, at = list[str](), version
        deltas, anchors = (delta_files.numbers(self._folder, kind) for kind in (DELTA, ANCHOR))
        while at > self._reached:
            if at in deltas:
                way.insert(0, delta_files.name_of(DELTA, at))
            elif at in anchors:
                return [delta_files.name_of(ANCHOR, at), *way]
            else:
                raise StateError(
                    f"a receiver has version {self._reached}, and {self._folder} leads no further "
                    f"back than version {at}: copy an anchor or the trainer's checkpoint to it"
                )
            at -= 1
        return way

    def _send_file(self, path: Path) -> None:
        size = path.stat().st_size
        self._give(_header(f"{path.parent.name}/{path.name}", size))
        with path.open("rb") as file:
            for _ in self._moved(_filled(file, length) for length in _lengths(size)):
                pass

    # ------------------------------------------------------------------------------- the receivers

    def _receive(self) -> None:
        try:
            with self._channel.failures.scope(self._version, "receiving versions"):
                while name := self._receive_file():
                    folder, _, file = name.partition("/")
                    if file == INDEX:
                        self._version = delta_files.number_of(folder)
                        self._tell(self._version, sends=False)
        except BaseException as error:
            self._error = error
            if not self._left:
                log.error("%s: no version will follow: %s", self._folder, error)
        self.close()

    def _receive_file(self) -> str:
        """Write the next file; its name with its folder, or "" if none follows."""
        name, size = json.loads(self._give(torch.empty(HEADER, dtype=torch.uint8, device="cpu")))
        if not name:
            return ""
        path = self._folder.path / delta_files.checked_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        blocks = (torch.empty(length, dtype=torch.uint8, device="cpu") for length in _lengths(size))
        with lasting(path) as file:
            for block in self._moved(blocks):
                file.write(block.numpy()[:size].data)
                size -= len(block)
        return str(name)

    # ---------------------------------------------------------------------------------- both sides

    def _tell(self, version: int, sends: bool) -> list[tuple[int, int]]:
        """All ranks' versions, and 1 for a sender, by rank."""
        table = torch.zeros(self._size, 2, dtype=torch.int64, device="cpu")
        table[self._rank] = torch.tensor([version, int(sends)], device="cpu")
        exchange = Exchange("versions that ranks have", self._kept)
        future = self._channel.submit(table.view(torch.float32).view(-1), exchange, draw=0)
        self._channel.wait(future, version)
        return [(each, role) for each, role in table.tolist()]

    def _give(self, header: torch.Tensor) -> bytes:
        """Exchange a header."""
        (moved,) = self._moved([header], "the header of the next file")
        return moved.numpy().tobytes()

    def _moved(
        self, blocks: Iterable[torch.Tensor], name: str = "a block of weights"
    ) -> Iterator[torch.Tensor]:
        """Exchange blocks of bytes, some at a time; those of the receivers are overwritten."""
        waiting = deque[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]]()
        for block in blocks:
            length = len(block) // 4
            piece = Piece(length, strategy="pull", shares=((0, self._sender),))
            flat = block.view(torch.float32)
            future = self._channel.submit(flat, Exchange(name, (piece,)), draw=0)
            waiting.append((block, future))
            if len(waiting) > AHEAD:
                yield self._waited(*waiting.popleft())
        while waiting:
            yield self._waited(*waiting.popleft())

    def _waited(
        self, block: torch.Tensor, future: torch.futures.Future[torch.Tensor]
    ) -> torch.Tensor:
        self._channel.wait(future, self._version)
        return block


def _header(name: str, size: int) -> torch.Tensor:
    text = json.dumps([name, size]).encode().ljust(HEADER)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _lengths(size: int) -> Iterator[int]:
    """Lengths of blocks for so many bytes: the largest, and powers of two for the rest."""
    while size > 0:
        length = max(SMALLEST, min(LARGEST, 1 << (size.bit_length() - 1)))
        yield length
        size -= length


def _filled(file: BufferedReader, length: int) -> torch.Tensor:
    """A block of the next bytes of a file, and zeros after its end."""
    block = torch.zeros(length, dtype=torch.uint8, device="cpu")
    file.readinto(block.numpy().data)
    return block
