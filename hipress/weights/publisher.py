"""A trainer's side: versions of its weights, as differences from the one before."""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from hipress.errors import ConfigError, HipressError, StateError
from hipress.model.shards import is_sharded, local
from hipress.weights import delta_files, deltas
from hipress.weights.deltas import ENCODINGS, FULL, Bytes, Part
from hipress.weights.folders import ANCHOR, DELTA, INDEX, folder_at
from hipress.weights.transport import Transport
from hipress.weights.weight_shards import Ranks, span_of

log = logging.getLogger("hipress")
_NAMES = {dtype: name for name, dtype in delta_files.DTYPES.items()}


class Publisher:
    """Publishes weights in a folder, each version as the bits that changed since the one before.

    ::

        publisher = hipress.Publisher(dict(model.named_parameters()), "/shared/run7")
        ...
        version = publisher.publish()  # after a step; a thread writes it meanwhile

    Version 0 is the state of the tensors now, which receivers have as a checkpoint. In a folder
    that has versions the next one is an anchor, all weights, unless `load_state_dict` says that the
    tensors are the last version.

    It takes twice the memory of this rank's tensors on the host, pinned for those of a GPU.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        to: str | os.PathLike[str],
        *,
        encoding: str = "xor",
        anchor_every: int = 50,
        keep: int = 2,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        transport: dist.ProcessGroup | None = None,
        timeout: float = 300.0,
    ) -> None:
        """Take the tensors as version 0, or as what the first anchor in a used folder is made of.

        tensors: by the names of the receivers' checkpoint; each `publish` reads them. DTensors must
        be replicated or sharded along dimension 0, and then all ranks of `group` (default: all)
        make a publisher and publish together. to: a folder that all of them see, or a URL that
        fsspec knows. encoding: "xor", or "overwrite", which takes 1.5 to 3 times its bytes.
        anchor_every: versions from an anchor to the next; receivers that come later or are behind
        begin there. keep: anchors that stay, with the versions after the first of them. dtype:
        publish floating tensors in this type. transport: a group of this process, or rank 0 of
        `group`, and of receivers that share no folder with it: they get each version by messages,
        and its ranks make their receivers meanwhile. timeout: seconds to wait for another rank.

        Raises ConfigError for what cannot be published, or if another publisher has the folder.
        """
        deltas.zstd()
        if encoding not in ENCODINGS:
            raise ConfigError(f"encoding={encoding!r}: 'xor' or 'overwrite'")
        if anchor_every < 1 or keep < 1:
            raise ConfigError(f"anchor_every={anchor_every}, keep={keep}: at least 1 each")
        if group is None and any(map(is_sharded, tensors.values())):
            group = dist.group.WORLD
        self._ranks = Ranks(group, timeout)
        self._to, self._encoding, self._dtype = folder_at(to), encoding, dtype
        self._anchor_every, self._keep = anchor_every, keep
        self._thread = ThreadPoolExecutor(1, "hipress-publisher")
        self._job: Future[None] | None = None
        self._unlock: Callable[[], object] = bool
        self._tensors, self._closed = tensors, False
        self._transport: Transport | None = None
        self._run = self._ranks.share(secrets.token_hex(8))[0]
        self._version, self._anchor, self._anchor_due = 0, False, False
        with self._ranks.together():
            self._take(tensors)
            self._open(transport)
        with self._ranks.together():
            if transport and self._ranks.rank == 0:
                self._transport = Transport(transport, self._to, self._version, timeout, sends=True)
                self._transport.send(self._version)  # to those that are behind
        self._version = self._ranks.share(self._version)[0]
        self._anchor = self._version > 0
        self._sums = self._sums_of_all(self._own_sums(self._last))

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check the tensors, and copy this rank's part of them."""
        self._spans, self._shapes = {}, {}
        self._last: dict[str, torch.Tensor] = {}
        self._now: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            self._spans[name] = span_of(name, tensor, self._ranks.rank)
            dtype = self._published_dtype(tensor)
            if tensor.is_meta or tensor.layout != torch.strided or dtype not in _NAMES:
                raise ConfigError(f"{name!r} ({tensor.dtype}, {tensor.device}) cannot be published")
            size = math.prod(tensor.shape) * dtype.itemsize
            if self._encoding == "overwrite" and size >= 1 << 32:
                raise ConfigError(f"{name!r} has {size} bytes: 'overwrite' takes less than 4 GiB")
            self._shapes[name] = (tuple(tensor.shape), dtype, size)
            if self._spans[name].own:
                here = local(tensor.detach())
                for copies in (self._last, self._now):
                    copies[name] = torch.empty(
                        here.shape, dtype=dtype, pin_memory=here.is_cuda, device="cpu"
                    )
                self._last[name].copy_(here)

    def _published_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype

    def _open(self, transport: dist.ProcessGroup | None) -> None:
        """Take the folder for this publisher, and find its last version; on rank 0."""
        if self._ranks.rank > 0:
            if isinstance(transport, dist.ProcessGroup):  # outsiders have a number
                raise ConfigError("transport: a group of rank 0 of `group` and of the receivers")
            return
        self._unlock = self._to.take()
        for kind in (DELTA, ANCHOR):
            for number in delta_files.numbers(self._to, kind, published=False):
                self._to.remove(delta_files.name_of(kind, number))  # its writer ended
        self._version = max([0, *delta_files.numbers(self._to, DELTA, ANCHOR)])

    @property
    def version(self) -> int:
        """The last version that is published."""
        return self._version

    def publish(self, tensors: Mapping[str, torch.Tensor] | None = None) -> int:
        """Copy the tensors, and write them behind as the next version, whose number this returns.

        tensors: replaces those given before; names, shapes and types must be the same. All ranks
        must call this. It waits until the version before is written; after an error the next call
        publishes what changed since the last version that was.

        Raises StateError for changed tensors or after `close`, and the errors of `wait` for the
        version before.
        """
        if self._closed:
            raise StateError(f"this publisher was closed: make another one for {self._to}")
        self.wait()
        failure: Exception | None = None
        try:
            self._snapshot(self._tensors if tensors is None else tensors)
        except Exception as error:
            failure = error
            if self._ranks.size == 1:
                raise
        version = self._version + 1
        self._job = self._thread.submit(self._publish, version, failure)
        if failure is not None:
            self.wait()
        return version

    def wait(self) -> int:
        """Wait until all is written; the last version. Raises HipressError if it was not: no
        receiver sees that version."""
        job, self._job = self._job, None
        if job is not None:
            job.result()
        return self._version

    def close(self) -> None:
        """Wait as `wait` does, and leave the folder to others."""
        try:
            self.wait()
        finally:
            self._closed = True
            self._thread.shutdown()
            if self._transport:
                self._transport.end()
            self._unlock()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """The last version and its checksums, to be saved with the trainer's checkpoint. It waits
        as `wait` does."""
        self.wait()
        return {"version": self._version, "run": self._run, "checksums": dict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the version of a state. All ranks must call this, before the first `publish`.

        If the folder has later versions, or the tensors are others, the next version is an anchor,
        with a number that no version had. Raises StateError for a state that is none.
        """
        self.wait()
        try:
            version, run, sums = int(state["version"]), str(state["run"]), dict(state["checksums"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"no state of a hipress.Publisher: {error!r}") from error
        last = self._ranks.share(self._run_of_last() if self._ranks.rank == 0 else None)[0]
        if version == self._version and sums == self._sums and last in (run, None):
            self._run, self._anchor = run, False
            return
        log.warning("%s: not at version %d any more: the next is an anchor", self._to, version)
        self._version = max(self._version, version)
        self._anchor = True

    def _run_of_last(self) -> str | None:
        for kind in (DELTA, ANCHOR):
            if index := delta_files.read_index(self._to, delta_files.name_of(kind, self._version)):
                return index.run
        return None

    def _snapshot(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part. Raises StateError for tensors that changed in kind."""
        if changed := sorted(tensors.keys() ^ self._shapes.keys()):
            raise StateError(f"published tensors have other names than before: {changed[:4]}")
        for name, tensor in tensors.items():
            shape, dtype, _ = self._shapes[name]
            now = tuple(tensor.shape), self._published_dtype(tensor)
            if now != (shape, dtype):
                raise StateError(
                    f"{name!r} was {dtype} {list(shape)} and is {now[1]} {list(now[0])}: begin a "
                    "folder of its own, with a new checkpoint for the receivers"
                )
            if span_of(name, tensor, self._ranks.rank) != self._spans[name]:
                raise StateError(f"{name!r} is sharded in another way than before")
        for name, copy in self._now.items():
            copy.copy_(local(tensors[name].detach()))
        self._tensors = tensors

    def _publish(self, version: int, failure: Exception | None) -> None:
        """Write a version and, if it is time, an anchor; in the thread."""
        kind, encoding = (ANCHOR, FULL) if self._anchor else (DELTA, self._encoding)
        try:
            sums = self._write(kind, encoding, version, self._now, failure)
        except Exception as error:
            raise _logged(f"version {version} was not published: {error}") from error
        self._last, self._now = self._now, self._last
        self._version, self._sums = version, sums
        self._anchor_due |= version % self._anchor_every == 0
        if kind == ANCHOR:
            self._anchor = self._anchor_due = False
        elif self._anchor_due:
            try:
                self._write(ANCHOR, FULL, version, self._last)
            except Exception as error:
                text = f"version {version} is published, but its anchor is not, and comes with the"
                raise _logged(f"{text} next version: {error}") from error
            self._anchor_due = False
        self._send(version)
        self._prune()

    def _send(self, version: int) -> None:
        """Send a version to receivers that do not see the folder."""
        try:
            with self._ranks.together():
                if self._transport:
                    self._transport.send(version)
        except Exception as error:
            raise _logged(
                f"version {version} is in {self._to}, but did not reach all receivers; to go on "
                f"make all anew, with a `transport` of the ranks that stay: {error}"
            ) from error

    def _write(
        self, kind: str, encoding: str, version: int, new: Mapping[str, torch.Tensor],
        failure: Exception | None = None,
    ) -> dict[str, str]:  # fmt: skip
        """Write a folder, whose index comes last; the checksums of the new state. If a rank fails,
        all raise, and there is no index."""
        folder = delta_files.name_of(kind, version)
        first = self._ranks.rank == 0
        parts: list[dict[str, Part]] = []
        with self._ranks.together(failure):
            parts = self._parts(encoding, new)
        got = self._ranks.exchange(parts)
        sums = self._sums_of_all(self._own_sums(new))
        with self._ranks.together():
            if first:
                self._to.begin(folder)
        try:
            names: list[str] = []
            with self._ranks.together():
                names = self._write_file(folder, encoding, got, sums)
            files = {self._file(r): each for r, each in enumerate(self._ranks.share(names)) if each}
            with self._ranks.together():
                if first:
                    metadata = self._metadata(encoding, version)
                    delta_files.write_index(self._to, folder, metadata, files)
        except BaseException:
            if first and INDEX not in self._to.versions().get(folder, ()):  # else it may be read
                self._to.remove(folder)
            raise
        return sums

    def _parts(self, encoding: str, states: Mapping[str, torch.Tensor]) -> list[dict[str, Part]]:
        """Differences of this rank's parts, by the rank that writes them."""
        parts: list[dict[str, Part]] = [{} for _ in range(self._ranks.size)]
        for number, (name, (shape, _, size)) in enumerate(self._shapes.items()):
            if name not in states:
                continue
            new = _bytes(states[name])
            payload = deltas.encode(encoding, _bytes(self._last[name]), new)
            rows = max(shape[0] if shape else 1, 1)
            begin = self._spans[name].first * (size // rows)
            parts[number % self._ranks.size][name] = Part(begin, len(new), payload)
        return parts

    def _write_file(
        self, folder: str, encoding: str, got: list[dict[str, Part]], sums: Mapping[str, str]
    ) -> list[str]:
        """Write the tensors that are this rank's to write; their names."""
        items = dict[str, delta_files.Item]()
        for name in (n for i, n in enumerate(self._shapes) if self._mine(i)):
            shape, dtype, size = self._shapes[name]
            parts = [each[name] for each in got if name in each]
            if encoding == FULL:
                data = deltas.join(encoding, parts, size)
                items[name] = delta_files.Item(_NAMES[dtype], shape, data)
            elif any(part.payload for part in parts):
                data = deltas.join(encoding, parts, size)
                items[name] = delta_files.Item("U8", (len(data),), data)
        if items:
            with self._to.writing(f"{folder}/{self._file(self._ranks.rank)}") as file:
                delta_files.write_tensors(file, items, {name: sums[name] for name in items})
        return list(items)

    def _mine(self, number: int) -> bool:
        return number % self._ranks.size == self._ranks.rank

    def _file(self, rank: int) -> str:
        return f"model-{rank + 1:05d}-of-{self._ranks.size:05d}.safetensors"

    def _metadata(self, encoding: str, version: int) -> dict[str, Any]:
        common = {"version": f"{version:06d}", "checksum_format": "adler32", "run": self._run}
        if encoding == FULL:
            size = sum(size for *_, size in self._shapes.values())
            return {**common, "total_size": size}
        return {
            **common, "base_version": f"{version - 1:06d}", "delta_encoding": encoding,
            "compression_format": "zstd", "base_checksums": self._sums,
        }  # fmt: skip

    def _own_sums(self, copies: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int, int]]:
        """First row, size and checksum of this rank's part of each tensor."""
        found = {}
        for name, copy in copies.items():
            data = _bytes(copy)
            found[name] = (self._spans[name].first, len(data), deltas.adler(data))
        return found

    def _sums_of_all(self, own: Mapping[str, tuple[int, int, int]]) -> dict[str, str]:
        """Checksums of whole tensors; all ranks call this."""
        shared = self._ranks.share(own)
        found = {}
        for name in self._shapes:
            parts = [each[name] for each in shared if name in each]
            found[name] = deltas.text_of(deltas.adler_of_all(parts))
        return found

    def _prune(self) -> None:
        """Remove what no receiver needs, index first; on rank 0."""
        if self._ranks.rank > 0:
            return
        anchors = delta_files.numbers(self._to, ANCHOR)
        first = [0, *anchors][-self._keep :][0]
        old = [(ANCHOR, n) for n in anchors if n < first]
        old += [(DELTA, n) for n in delta_files.numbers(self._to, DELTA) if n <= first]
        for kind, number in old:
            self._to.remove(delta_files.name_of(kind, number))


def _logged(text: str) -> HipressError:
    log.error("%s", text)
    return HipressError(text)


def _bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor, in the same memory."""
    found: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return found
