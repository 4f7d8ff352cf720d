"""A worker's side: a checkpoint on its disk that follows a trainer's versions."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hipress.errors import AgreementTimeout, ConfigError, HipressError, StateError
from hipress.model.shards import local
from hipress.weights import delta_files, deltas
from hipress.weights.delta_files import DTYPES, Entry, Index, Version
from hipress.weights.deltas import FULL, Bytes
from hipress.weights.folders import ANCHOR, DELTA, INDEX, folder_at, lasting, sync
from hipress.weights.redo import RedoWriter, redo
from hipress.weights.transport import Transport
from hipress.weights.weight_shards import span_of

log = logging.getLogger("hipress")
NOTES = ".hipress"  # folder in a checkpoint


class Receiver:
    """Brings a checkpoint, a folder of safetensors files, from version to version, in place.

    ::

        receiver = hipress.Receiver("/local/checkpoint", "/shared/run7")
        receiver.prefetch(7)  # while the worker still generates
        receiver.apply(7)  # in the pause
        receiver.load_into(model)

    Changes are written down in the checkpoint's folder `.hipress` before they are made. A process
    that is killed at any moment leaves a published version; if it was making changes, the next
    receiver completes them. Several processes may have a receiver of one checkpoint.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        source: str | os.PathLike[str],
        *,
        version: int | None = None,
        transport: dist.ProcessGroup | None = None,
        timeout: float = 3600.0,
    ) -> None:
        """Take a checkpoint, and complete what an earlier process began.

        source: the folder of the publisher, or its URL. version: of a checkpoint that no receiver
        has had; default: the one in its index, if it is a copy of an anchor, else 0. transport: a
        group of receivers and the one publisher; then `source` is a folder of this receiver alone,
        into which a thread writes what the publisher sends, and older versions go as one is
        applied. timeout: seconds that the publisher may take from a version to the next.

        Raises ConfigError if the folder has no safetensors file, StateError for a damaged one.
        """
        deltas.zstd()
        self._root, self._source = Path(checkpoint), folder_at(source)
        self._notes = self._root / NOTES
        if not any(self._root.glob("*.safetensors")):
            raise ConfigError(f"{self._root} has no safetensors file")
        self._notes.mkdir(exist_ok=True)
        self._state_file, self._redo_file = self._notes / "state.json", self._notes / "redo"
        self._next_state, self._next = self._notes / "next.json", self._notes / "next"
        self._copies = self._notes / "copies"  # of files at a URL
        with self._locked():
            if self._state_file.exists():
                self._recover()
            else:
                self._begin(version)
        self._transport: Transport | None = None
        if transport is not None:
            last = max(self.version, self._last())
            self._transport = Transport(transport, self._source, last, timeout, sends=False)
            self._transport.start()

    def close(self) -> None:
        """Leave `transport`: versions that arrived can be applied, no others follow. Publisher and
        receivers that go on without this one fail, and need a group of those that stay."""
        if self._transport:
            self._transport.leave()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """The version of the checkpoint."""
        return int(self._state()["version"])

    def latest(self) -> int:
        """The last version that is published; -1 if there is none. Raises the error of `transport`
        if it has failed."""
        self._refuse_failed()
        return self._last()

    def _refuse_failed(self) -> None:
        if self._transport:
            self._transport.refuse_failed()

    def _last(self) -> int:
        with self._disk(f"versions in {self._source} cannot be listed"):
            return max([-1, *delta_files.numbers(self._source, DELTA, ANCHOR)])

    def prefetch(self, version: int) -> None:
        """Read and check all that `apply` needs, and keep it beside the checkpoint.

        Raises StateError if the version is not published, was made from other weights than the
        checkpoint has, or is damaged; HipressError if the disk refuses. The checkpoint stays as it
        was.
        """
        with self._locked():
            self._recover()
            self._prepare(version)

    def apply(self, version: int) -> None:
        """Bring the checkpoint to a version, as a whole or not at all; without `prefetch` it does
        that, too, and raises its errors. A version that the checkpoint has is no error."""
        with self._locked():
            self._recover()
            if self._prepare(version):
                self._next.replace(self._redo_file)  # from here on it will be completed
                sync(self._notes)
                with self._disk(f"version {version} is half applied: the next call completes it"):
                    self._complete()
        if self._transport:
            for kind in (DELTA, ANCHOR):
                for number in delta_files.numbers(self._source, kind):
                    if number < version:
                        self._source.remove(delta_files.name_of(kind, number))

    def wait(self, version: int, timeout: float = 300.0) -> None:
        """Wait until a version is published. Raises AgreementTimeout after so many seconds, and the
        errors of `latest`."""
        end = time.monotonic() + timeout
        while max(self.version, self._last()) < version:
            self._refuse_failed()
            if time.monotonic() > end:
                raise AgreementTimeout(
                    f"version {version} was not published in {self._source} within {timeout:g} s"
                )
            time.sleep(self._source.pause)

    def verify(self) -> None:
        """Read the whole checkpoint. Raises StateError for a tensor that is not the publisher's."""
        with self._locked():
            self._recover()
            self._check(self._state()["checksums"])

    def load_into(self, model: nn.Module) -> None:
        """Copy the checkpoint into a model's parameters and buffers of the same names, bit for bit.

        Values may become wider, as bfloat16 to float32. Names that the checkpoint lacks must share
        memory with others. DTensors take their rows. Raises StateError, before any change, if names
        or shapes differ.
        """
        with self._locked():
            self._recover()
            places, state = self._places(), model.state_dict(keep_vars=True)
            targets = {n: each for n, each in state.items() if isinstance(each, torch.Tensor)}
            self._refuse_unlike(places, targets)
            with torch.no_grad():
                for name, place in places.items():
                    here, target = local(targets[name]), targets[name]
                    values = _tensor(place)
                    if values.ndim:
                        span = span_of(name, target)
                        values = values[span.first : span.last]
                    here.copy_(values)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the checkpoint, one after the other, for a server's loader."""
        with self._locked():
            self._recover()
            for name, place in self._places().items():
                yield name, _tensor(place)

    def _refuse_unlike(
        self, places: Mapping[str, Entry], targets: Mapping[str, torch.Tensor]
    ) -> None:
        unknown = sorted(places.keys() - targets.keys())
        loaded = {local(targets[name]).data_ptr() for name in places if name in targets}
        absent = [n for n, t in targets.items() if n not in places and t.numel()]
        absent = [n for n in absent if local(targets[n]).data_ptr() not in loaded]
        if unknown or absent:
            raise StateError(
                f"the checkpoint and the model have other names: {unknown[:4]} are not in the "
                f"model, {absent[:4]} not in the checkpoint"
            )
        for name, place in places.items():
            target, dtype = targets[name], DTYPES.get(place.dtype)
            if tuple(target.shape) != place.shape:
                raise StateError(f"{name!r} is {list(place.shape)}, the model has {target.shape}")
            if dtype is None or torch.promote_types(dtype, target.dtype) != target.dtype:
                raise StateError(
                    f"{name!r} is {place.dtype}: {target.dtype} cannot hold its values"
                )

    # ------------------------------------------------------------------ the notes of a checkpoint

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Only one process changes a checkpoint, or reads it."""
        with (self._notes / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _disk(self, text: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise HipressError(f"{self._root}: {text} ({error})") from error

    def _state(self) -> Any:
        return self._read_json(self._state_file)

    def _read_json(self, path: Path) -> Any:
        with path.open("rb") as file:
            return delta_files.read_json(file, path)

    def _write_state(self, path: Path, version: int, sums: Mapping[str, str]) -> None:
        state = {"version": version, "checksums": dict(sums)}
        with lasting(path) as file:
            file.write(json.dumps(state).encode())

    def _begin(self, version: int | None) -> None:
        """Note the checksums of a checkpoint that no receiver has had."""
        index = self._root / INDEX
        if version is None and index.exists():
            version = int(self._read_json(index).get("metadata", {}).get("version", 0))
        sums = {n: deltas.text_of(deltas.adler(p.read())) for n, p in self._places().items()}
        self._write_state(self._state_file, version or 0, sums)

    def _recover(self) -> None:
        """Complete a change under way."""
        for draft in self._notes.glob("*.part"):
            draft.unlink()
        shutil.rmtree(self._copies, ignore_errors=True)
        if self._redo_file.exists():
            changed = self._complete()
            sums = self._state()["checksums"]
            self._check({name: sums[name] for name in changed})

    def _complete(self) -> list[str]:
        """Make the changes that are written down; may be repeated."""
        changed = redo(self._redo_file, self._root)
        if self._next_state.exists():
            self._next_state.replace(self._state_file)
            sync(self._notes)
        self._redo_file.unlink()
        return changed

    def _check(self, sums: Mapping[str, str]) -> None:
        places = self._places()
        for name, expected in sums.items():
            if name not in places or not deltas.matches("adler32", places[name].read(), expected):
                raise StateError(
                    f"{name!r} in {self._root} was changed from outside: it is not that of version "
                    f"{self.version}. Copy the checkpoint anew, without its folder {NOTES}"
                )

    def _places(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for path in sorted(self._root.glob("*.safetensors")):
            found |= delta_files.read_header(path)[0]
        return found

    # ---------------------------------------------------------------------- the way to a version

    def _prepare(self, version: int) -> bool:
        """Write down the changes to a version; False if the checkpoint has it."""
        state = self._state()
        base = int(state["version"])
        if version == base:
            return False
        if version < base:
            raise StateError(
                f"{self._root} is at version {base}, and cannot go back to {version}. To begin "
                f"anew, copy an anchor, without its folder {NOTES}"
            )
        if self._next.exists() and self._next_state.exists():
            following = self._read_json(self._next_state)
            if following["version"] == version and following.get("made") == self._made_from(base):
                return True
        self._next_state.unlink(missing_ok=True)  # first: it says what the other is
        self._next.unlink(missing_ok=True)
        steps = self._steps(base, version, state["checksums"])
        with self._disk(f"version {version} cannot be prepared, it stays at {base}"):
            try:
                read = [delta_files.read_version(self._source, s, self._copies) for s in steps]
                self._write_down(read, state)
            finally:
                shutil.rmtree(self._copies, ignore_errors=True)
        return True

    def _made_from(self, base: int) -> list[Any]:
        """The version, and sizes and times of the files, for which changes were written down."""
        files = [path.stat() for path in sorted(self._root.glob("*.safetensors"))]
        return [base, [[each.st_size, each.st_mtime_ns] for each in files]]

    def _steps(self, base: int, version: int, sums: Mapping[str, str]) -> list[Index]:
        """Versions to be applied in order: differences, or an anchor and differences from it."""
        steps, at = list[Index](), version
        while at != base:
            step = self._read(DELTA, at)
            if step is None or step.base < base:
                missing = f"version {at} is not published in {self._source}, nor an anchor"
                break
            steps.insert(0, step)
            if step.encoding == FULL:
                return steps
            at = step.base
        else:
            missing = _other_base(steps[0], sums)
            if not missing:
                return steps
        for later in range(len(steps) + 1):
            first = len(steps) - later
            if full := self._read(ANCHOR, steps[first].base if later else version):
                log.info("%s goes to version %d by an anchor", self._root, version)
                return [full, *steps[first:]]
        raise StateError(f"{missing}: {self._root} stays at version {base}")

    def _read(self, kind: str, number: int) -> Index | None:
        with self._disk(f"version {number} cannot be read"):
            found = delta_files.read_index(self._source, delta_files.name_of(kind, number))
        if found and found.number != number:
            raise StateError(f"the folder of version {number} holds version {found.number}")
        return found

    def _write_down(self, steps: Sequence[Version], state: Mapping[str, Any]) -> None:
        """Write a redo file and the state after it."""
        sums, places = dict(state["checksums"]), self._places()
        made = self._made_from(int(state["version"]))
        for step in steps:
            if step.encoding != FULL and (text := _other_base(step, sums)):
                raise StateError(f"{text}: {self._root} stays at version {state['version']}")
            _refuse_unknown(step, places)
            sums |= step.checksums
        with lasting(self._next) as file:
            writer = RedoWriter(file, self._root)
            for name in dict.fromkeys(name for step in steps for name in step.entries):
                place = places[name]
                old = place.read()
                new = old.copy()
                for step in steps:
                    if name in step.entries:
                        self._change(name, step, new, state)
                if any(step.checksum != "adler32" for step in steps):
                    sums[name] = deltas.text_of(deltas.adler(new))
                writer.add(name, place, old, new)
            writer.end()
        following = {"version": steps[-1].number, "checksums": sums, "made": made}
        with lasting(self._next_state) as file:
            file.write(json.dumps(following).encode())

    def _change(self, name: str, step: Version, new: Bytes, state: Mapping[str, Any]) -> None:
        """Bring one tensor to a version, in memory."""
        try:
            deltas.apply(step.encoding, step.entries[name].read(), new)
            right = deltas.matches(step.checksum, new, step.checksums[name])
        except StateError as error:
            raise StateError(f"version {step.number}, {name!r}, damaged: {error}") from error
        if not right:
            self._check({name: state["checksums"][name]})  # may be the reason
            raise StateError(
                f"version {step.number}, {name!r}: wrong checksum, damaged or made from other "
                f"weights. {self._root} stays at version {state['version']}"
            )


def _other_base(step: Index, sums: Mapping[str, str]) -> str:
    """A text if a step is from other weights than those with these checksums, else empty."""
    for name, expected in step.base_checksums.items():
        if name in sums and sums[name] != expected:
            return (
                f"version {step.number} (run {step.run}) was made from another version {step.base} "
                f"than this checkpoint has: {name!r} differs"
            )
    return ""


def _refuse_unknown(step: Version, places: Mapping[str, Entry]) -> None:
    """Raise StateError if a step has tensors that the checkpoint lacks, or of another kind."""
    for name, entry in step.entries.items():
        place = places.get(name)
        if place is None:
            raise StateError(f"version {step.number} has {name!r}, the checkpoint has not")
        if step.encoding == FULL and entry[1:3] != place[1:3]:
            raise StateError(
                f"{name!r} is {entry.dtype} {list(entry.shape)} in version {step.number}, and "
                f"{place.dtype} {list(place.shape)} in the checkpoint"
            )


def _tensor(place: Entry) -> torch.Tensor:
    """A tensor of a file, on the host."""
    data = torch.from_numpy(place.read() if place.size else np.empty(0, np.uint8))
    return data.view(DTYPES[place.dtype]).reshape(place.shape)
