"""Weights from a trainer to workers: bit for bit, or an error and the checkpoint as it was."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hipress
from hipress.errors import ConfigError, HipressError, StateError
from hipress.weights import delta_files, deltas, folders, receiver, servers
from hipress.weights.folders import INDEX
from hipress.weights.redo import redo
from hipress.weights.transport import Transport
from tests.hipress import weights_ranks
from tests.hipress.launch import CONTEXT, DIED, launch
from tests.hipress.weights_ranks import bits, bring, lines_of, save, step, stored, tensors
from tests.patience import HANG

ENCODINGS = pytest.mark.parametrize("encoding", deltas.ENCODINGS)


class Run:
    """A trainer with its folder, a checkpoint of version 0, and the bits of each version."""

    def __init__(self, root, versions=0, source=None, **options):
        self.tensors, self.checkpoint = tensors(), root / "checkpoint"
        self.source = source or root / "to"
        save(self.tensors, self.checkpoint)
        self.publisher = hipress.Publisher(self.tensors, self.source, **options)
        self.bits = [bits(self.tensors)]
        for _ in range(versions):
            self.publish()

    def publish(self):
        step(self.tensors, len(self.bits))
        self.publisher.publish()
        self.bits.append(bits(self.tensors))
        return self.publisher.wait()

    def receiver(self, checkpoint=None):
        return hipress.Receiver(checkpoint or self.checkpoint, self.source)

    def folder(self, version, kind="weight"):
        return self.source / f"{kind}_v{version:06d}"

    def file(self, version):
        return self.folder(version) / "model-00001-of-00001.safetensors"

    def refuses(self, version, text, error=StateError):
        """The checkpoint stays as it is, through prefetch and apply."""
        here, before = self.receiver(), stored(self.checkpoint)
        number = here.version
        for method in (here.prefetch, here.apply):
            with pytest.raises(error, match=text):
                method(version)
        assert stored(self.checkpoint) == before
        assert self.receiver().version == number

    def edit_index(self, number, /, **metadata):
        path = self.folder(number) / INDEX
        index = json.loads(path.read_text())
        index["metadata"] |= metadata
        path.write_text(json.dumps(index))


@ENCODINGS
def test_versions_arrive_bit_for_bit(tmp_path, encoding):
    run = Run(tmp_path, 1, encoding=encoding)
    here = run.receiver()
    here.prefetch(1)
    assert stored(run.checkpoint) == run.bits[0]
    for version in (1, 2, 3):
        here.apply(version)
        assert stored(run.checkpoint) == run.bits[version]
        assert (here.version, here.latest()) == (version, version)
        here.verify()
        run.publish()
    run.publish()
    here.apply(5)  # two at once
    assert stored(run.checkpoint) == run.bits[5]


def test_a_version_that_changes_nothing(tmp_path):
    run = Run(tmp_path)
    run.publisher.publish()
    run.publisher.wait()
    run.receiver().apply(1)
    assert run.receiver().version == 1
    assert stored(run.checkpoint) == run.bits[0]


def test_the_folder_is_that_of_other_frameworks(tmp_path):
    """Keys of the index, and payloads, read here without hipress."""
    import zlib

    import zstandard
    from safetensors import safe_open

    run = Run(tmp_path, 1)
    index = json.loads((run.folder(1) / INDEX).read_text())
    expected = {
        "version": "000001", "base_version": "000000", "delta_encoding": "xor",
        "compression_format": "zstd", "checksum_format": "adler32",
    }  # fmt: skip
    assert expected.items() <= index["metadata"].items()
    with safe_open(run.file(1), "np") as file:
        assert set(file.keys()) == set(index["weight_map"])
        for name in file.keys():  # noqa: SIM118
            raw = zstandard.ZstdDecompressor().decompress(file.get_tensor(name).tobytes())
            new = bytes(a ^ b for a, b in zip(raw, run.bits[0][name], strict=True))
            assert new == run.bits[1][name]
            assert file.metadata()[name] == f"{zlib.adler32(new):08x}"


def test_an_anchor_is_a_checkpoint(tmp_path):
    run = Run(tmp_path, 2, anchor_every=2)
    anchor = run.folder(2, "anchor")
    assert bits(load_file(anchor / "model-00001-of-00001.safetensors")) == run.bits[2]
    shutil.copytree(anchor, tmp_path / "late")
    run.publish()
    late = run.receiver(tmp_path / "late")
    assert late.version == 2
    late.apply(3)
    late.verify()


def test_a_chain_longer_than_what_is_kept_goes_by_the_next_anchor(tmp_path):
    run = Run(tmp_path, 9, anchor_every=2, keep=2)
    assert sorted(p.name for p in run.source.iterdir() if p.is_dir()) == [
        "anchor_v000006", "anchor_v000008", "weight_v000007", "weight_v000008", "weight_v000009",
    ]  # fmt: skip
    run.refuses(5, "version 5 is not published in .*to, nor an anchor: .* stays at version 0")
    run.receiver().apply(9)
    assert stored(run.checkpoint) == run.bits[9]
    run.receiver().verify()


def test_load_into_a_model(tmp_path):
    """Tied, non-contiguous and wider parameters, and values that compare badly."""

    class Model(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.embed = nn.Embedding(8, 6, dtype=dtype)
            self.head = nn.Linear(6, 8, bias=False, dtype=dtype)
            self.head.weight = self.embed.weight
            self.turned = nn.Parameter(torch.zeros(5, 4, dtype=dtype).t())
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    trained = Model(torch.bfloat16)
    named = dict(trained.named_parameters()) | dict(trained.named_buffers())
    assert "head.weight" not in named
    save(named, tmp_path / "checkpoint")
    publisher = hipress.Publisher(named, tmp_path / "to")
    with torch.no_grad():
        trained.embed.weight[0, :4] = torch.tensor(weights_ranks.SPECIAL)
        trained.turned[1] = 7
        trained.count += 3
    publisher.publish()
    publisher.close()
    here = hipress.Receiver(tmp_path / "checkpoint", tmp_path / "to")
    here.apply(1)
    worker, wide = Model(torch.bfloat16), Model(torch.float32)
    here.load_into(worker)
    assert bits(worker.state_dict()) == bits(trained.state_dict())
    assert worker.turned.stride() == trained.turned.stride() == (1, 4)
    here.load_into(wide)
    assert torch.equal(wide.turned, trained.turned.float())
    for other, text in (
        (Model(torch.float16), "BF16: torch.float16 cannot hold"),
        (nn.Linear(6, 8), "other names"),
    ):
        before = bits(other.state_dict())
        with pytest.raises(StateError, match=text):
            here.load_into(other)
        assert bits(other.state_dict()) == before


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_transformers(tmp_path, tied):
    """Its checkpoint, of several files, is patched, and gives the trainer's logits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM
    trained = kind.from_config(config, dtype=torch.bfloat16).eval()
    trained.save_pretrained(tmp_path / "checkpoint", max_shard_size="20KB")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 1
    publisher = hipress.Publisher(dict(trained.named_parameters()), tmp_path / "to")
    tokens = torch.arange(12)[None]
    trained(tokens, labels=tokens).loss.backward()
    torch.optim.AdamW(trained.parameters(), 1e-2).step()
    publisher.publish()
    publisher.close()
    bring(tmp_path / "checkpoint", tmp_path / "to", 1)
    worker = kind.from_pretrained(tmp_path / "checkpoint").eval()
    assert bits(dict(worker.named_parameters())) == bits(dict(trained.named_parameters()))
    assert torch.equal(worker(tokens).logits, trained(tokens).logits)


def test_tensors_are_published_in_another_type(tmp_path):
    made = {"a": torch.randn(50)}
    save({"a": made["a"].bfloat16()}, tmp_path / "checkpoint")
    publisher = hipress.Publisher(made, tmp_path / "to", dtype=torch.bfloat16)
    made["a"] += 1
    publisher.publish()
    made["a"] += 1  # publish has copied the tensors
    publisher.close()
    bring(tmp_path / "checkpoint", tmp_path / "to", 1)
    assert stored(tmp_path / "checkpoint") == bits({"a": (made["a"] - 1).bfloat16()})


@pytest.mark.slow
def test_a_trainer_and_a_worker_learn_by_reinforcement(tmp_path):
    """The example, in two processes: the worker's rewards rise with the trainer's versions."""
    script = Path(hipress.__file__).parents[1] / "examples" / "rollouts.py"
    sides = [
        subprocess.Popen(
            [sys.executable, script, side, tmp_path / "run"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for side in ("trainer", "worker")
    ]  # fmt: skip
    try:
        told = [side.communicate(timeout=HANG)[0] for side in sides]
    finally:
        for side in sides:
            side.kill()
    assert [side.returncode for side in sides] == [0, 0], told
    rewards = [float(reward) for reward in re.findall(r"reward ([0-9.]+)", told[1])]
    assert len(rewards) == 20
    assert rewards[-1] > rewards[0] + 0.3


# ------------------------------------------------------------------------------ a run goes on


def test_a_run_that_resumes_at_its_last_version_goes_on_with_differences(tmp_path):
    run = Run(tmp_path, 2)
    state = json.loads(json.dumps(run.publisher.state_dict()))
    run.publisher.close()
    run.publisher = hipress.Publisher(run.tensors, run.source)
    run.publisher.load_state_dict(state)
    assert run.publish() == 3
    assert run.folder(3).exists()
    run.receiver().apply(3)
    assert stored(run.checkpoint) == run.bits[3]


@pytest.mark.parametrize("told", [True, False])
def test_a_fork_from_an_earlier_version_begins_with_an_anchor(tmp_path, told):
    run = Run(tmp_path, 1)
    state, early = run.publisher.state_dict(), {n: t.clone() for n, t in run.tensors.items()}
    run.publish()
    run.receiver().apply(2)
    run.publisher.close()
    run.publisher = hipress.Publisher(early, run.source)
    if told:
        run.publisher.load_state_dict(state)
    assert run.publisher.publish() == 3
    run.publisher.wait()
    assert not run.folder(3).exists()
    run.receiver().apply(3)
    assert stored(run.checkpoint) == run.bits[1]


def test_a_state_of_other_weights_is_followed_by_an_anchor(tmp_path):
    run = Run(tmp_path, 1)
    state = run.publisher.state_dict()
    run.publisher.close()
    run.tensors["norm"][5] += 1
    run.publisher = hipress.Publisher(run.tensors, run.source)
    run.publisher.load_state_dict(state)
    run.publish()
    assert run.folder(2, "anchor").exists()
    with pytest.raises(StateError, match="no state of a"):
        run.publisher.load_state_dict({"version": 1})


def test_two_publishers_in_one_folder(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(ConfigError, match=r"another publisher has .*to"):
        hipress.Publisher(run.tensors, run.source)
    run.folder(1).mkdir()  # of one that the lock does not reach
    with pytest.raises(HipressError, match=r"another publisher has written .*weight_v000001"):
        run.publish()
    assert run.folder(1).exists()


def test_changed_tensors(tmp_path):
    run = Run(tmp_path)
    for other, text in (
        ({"more": torch.zeros(1)}, "other names than before: .'more'."),
        ({"norm": torch.zeros(8)}, r"'norm' was torch.float32 \[7\] and is torch.float32 \[8\]"),
        ({"norm": torch.zeros(7).double()}, r"'norm' was .* is torch.float64"),
    ):
        with pytest.raises(StateError, match=text):
            run.publisher.publish(run.tensors | other)
    assert run.publish() == 1  # goes on
    run.publisher.close()
    with pytest.raises(StateError, match="was closed"):
        run.publish()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"encoding": "ulps"}, "encoding='ulps': 'xor' or 'overwrite'"),
        ({"anchor_every": 0}, "at least 1"),
        ({"tensors": {"m": torch.empty(2, device="meta")}}, "'m' .* cannot be published"),
        ({"tensors": {"m": torch.eye(2).to_sparse()}}, "'m' .* cannot be published"),
    ],
)
def test_bad_options(tmp_path, options, text):
    made = options.pop("tensors", {"a": torch.zeros(2)})
    with pytest.raises(ConfigError, match=text):
        hipress.Publisher(made, tmp_path, **options)


# ------------------------------------------------------------------------------ wrong versions


@ENCODINGS
def test_another_base_under_the_same_version(tmp_path, encoding):
    run = Run(tmp_path, 1, encoding=encoding)
    other = tensors()
    other["mask"][0] = False  # which this version does not change
    save(other, run.checkpoint)
    run.refuses(1, r"version 1 \(run \w+\) was made from another version 0 .* 'mask' differs")


def test_a_skipped_version(tmp_path):
    run = Run(tmp_path, 3)
    shutil.rmtree(run.folder(2))
    run.refuses(3, "version 2 is not published .* stays at version 0")


def test_replay_and_the_wrong_order(tmp_path):
    run = Run(tmp_path, 3)
    run.receiver().apply(2)
    run.receiver().apply(2)
    assert stored(run.checkpoint) == run.bits[2]
    run.refuses(1, "is at version 2, and cannot go back to 1")
    run.folder(3).rename(run.folder(4))
    run.refuses(4, "the folder of version 4 holds version 3")


def test_no_index(tmp_path):
    run = Run(tmp_path, 1)
    (run.folder(1) / INDEX).unlink()
    assert run.receiver().latest() == -1
    run.refuses(1, "version 1 is not published")


@ENCODINGS
@pytest.mark.parametrize("place", [-1, -9, 0.5, 0.9])
def test_a_flipped_bit(tmp_path, encoding, place):
    run = Run(tmp_path, 1, encoding=encoding)
    data = bytearray(run.file(1).read_bytes())
    data[place if place < 0 else int(len(data) * place)] ^= 4
    run.file(1).write_bytes(data)
    run.refuses(1, "damaged|wrong checksum|too many|index or a file only|no checksum")


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1])
def test_a_payload_that_is_cut_off(tmp_path, kept):
    run = Run(tmp_path, 1)
    size = run.file(1).stat().st_size
    os.truncate(run.file(1), int(size * kept) if isinstance(kept, float) else kept % size)
    run.refuses(1, "cut off|damaged")


def test_a_payload_that_is_gone(tmp_path):
    run = Run(tmp_path, 1)
    run.file(1).unlink()
    run.refuses(1, "lacks 'model-00001-of-00001.safetensors'")


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..", "x\0y", ""]
)
def test_names_do_not_lead_out_of_a_folder(tmp_path, file):
    run = Run(tmp_path, 1)
    shutil.copy(run.file(1), run.source / "model.safetensors")
    path = run.folder(1) / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], file)
    path.write_text(json.dumps(index))
    run.refuses(1, "is not the name of a safetensors file in it")


def test_links_are_refused(tmp_path):
    run = Run(tmp_path, 1)
    run.file(1).rename(tmp_path / "elsewhere")
    run.file(1).symlink_to(tmp_path / "elsewhere")
    run.refuses(1, "is a link")


@pytest.mark.parametrize(
    "metadata, text",
    [
        ({"delta_encoding": "ulps"}, "'ulps' with 'zstd' is not known"),
        ({"compression_format": "lz4"}, "'xor' with 'lz4' is not known"),
        ({"checksum_format": "blake3"}, "checksums of 'blake3' are not known"),
        ({"version": "one"}, "damaged"),
        ({"base_version": 4}, "version 1 from version 4"),
        ({"base_checksums": 3}, "damaged"),
    ],
)
def test_an_index_that_is_not_understood(tmp_path, metadata, text):
    run = Run(tmp_path, 1)
    run.edit_index(1, **metadata)
    run.refuses(1, text, HipressError)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"metadata": 1, "weight_map": {}}', "\xff"])
def test_an_index_that_is_damaged(tmp_path, text):
    run = Run(tmp_path, 1)
    (run.folder(1) / INDEX).write_bytes(text.encode("latin1"))
    run.refuses(1, "damaged")


@ENCODINGS
def test_sizes_are_checked_before_memory_is_taken(encoding):
    """A frame of 4 kB that says and holds 64 MB, for a tensor of 100 bytes."""
    import tracemalloc

    bomb = deltas.zstd().compress(bytes(64 << 20))
    tracemalloc.start()
    with pytest.raises(StateError, match="67108864 bytes are too many"):
        deltas.apply(encoding, bomb, np.zeros(100, np.uint8))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "raw, text",
    [
        (b"\x01\0\0\0" + b"\x64\0\0\0" + b"\1", "position 100 in a tensor of 100"),
        (b"\xff\xff\xff\xff" + b"\0\0\0\0" + b"\1", "4294967295 positions"),
        (b"\1", "1 positions|0 positions"),
    ],
)
def test_an_overwrite_that_does_not_fit(raw, text):
    payload = deltas.zstd().compress(raw)
    with pytest.raises(StateError, match=text):
        deltas.apply("overwrite", payload, np.zeros(100, np.uint8))


def test_foreign_checksums(tmp_path):
    """Folders of others: xxh3-128, without what hipress adds to the index."""
    xxhash = pytest.importorskip("xxhash")
    run = Run(tmp_path, 1)
    entries, _ = delta_files.read_header(run.file(1))
    items = {n: delta_files.Item("U8", e.shape, bytes(e.read())) for n, e in entries.items()}
    sums = {n: xxhash.xxh3_128_hexdigest(run.bits[1][n]) for n in items}
    with run.file(1).open("wb") as file:
        delta_files.write_tensors(file, items, sums)
    run.edit_index(1, checksum_format="xxh3-128", base_checksums={})
    run.receiver().apply(1)
    assert stored(run.checkpoint) == run.bits[1]
    run.receiver().verify()


class FolderStore:
    """ModelExpress's object store, as a folder."""

    def __init__(self, root):
        self.root = root

    def get(self, uri):
        return (self.root / uri.removeprefix("s3://bucket/")).read_bytes()

    def size(self, uri):
        return len(self.get(uri))


def test_modelexpress_applies_the_folders(tmp_path):
    """The receiver of ModelExpress 0.7, if it is installed, without its control plane."""
    other = pytest.importorskip(
        "modelexpress_rl.inference.receiver", reason="pip install modelexpress==0.7.0"
    )
    from modelexpress_rl.object_storage import ObjectStorageType
    from modelexpress_rl.train import WeightPayloadFormat

    run = Run(tmp_path, 3)
    config = other.ObjectStorageGeneratorConfig(
        storage_type=ObjectStorageType.S3, initial_base_version_id="000000",
        seed_checkpoint_path=run.checkpoint, refit_checkpoint_dir=tmp_path / "refit",
    )  # fmt: skip
    local = other._LocalCheckpoint(model_name="m", config=config, s3=FolderStore(run.source))
    local.initialize()
    for number in (1, 2, 3):
        uri = f"s3://bucket/weight_v{number:06d}/{INDEX}"
        version = other._S3Version(
            f"{number:06d}", f"{number - 1:06d}", WeightPayloadFormat.XOR_DELTA, uri
        )
        prepared = local.prepare(version)
        local.activate(prepared)
        assert stored(prepared.path) == run.bits[number]


class Server:
    """Updates of SGLang 0.5 as its source has them; no SGLang runs here."""

    def __init__(self, model, loaders=()):
        self.model, self.loaders = model, loaders

    def update_weights_from_disk(self, folder):
        """Loads each file of the folder that its index, if any, names, as DefaultModelLoader."""
        from safetensors import safe_open

        files, index = sorted(folder.glob("*.safetensors")), folder / INDEX
        if index.exists():
            named = set(json.loads(index.read_text())["weight_map"].values())
            files = [file for file in files if file.name in named]
        for file in files:
            with safe_open(file, "pt") as opened:
                self.load_weights((n, opened.get_tensor(n)) for n in opened.keys())  # noqa: SIM118

    def update_weights_from_tensor(self, request, load_format):
        """Calls the loader with tensors that came from another process, as ModelRunner."""
        import importlib

        request = pickle.loads(pickle.dumps(request))
        assert load_format in self.loaders, f"Unknown load_format={load_format}"
        module, _, name = load_format.rpartition(".")
        getattr(importlib.import_module(module), name)(self, request)

    def load_weights(self, weights):
        """Copies tensors of a checkpoint into parameters."""
        for name, tensor in weights:
            self.model.get_parameter(name).data.copy_(tensor)


def test_sglang_loads_a_version(tmp_path):
    """From disk, and by a custom loader; a version that is not published changes nothing."""
    model, loader = weights_ranks.model(), "hipress.weights.servers.load_in_sglang"
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save(weights, tmp_path / "checkpoint")
    first, second = Server(weights_ranks.model(1.0)), Server(weights_ranks.model(2.0), [loader])
    with hipress.Publisher(weights, tmp_path / "to") as publisher:
        for number in (1, 2):
            weights_ranks.change(model, number)
            publisher.publish()
            publisher.wait()
            request = servers.sglang_request(
                str(tmp_path / "checkpoint"), str(tmp_path / "to"), number
            )
            second.update_weights_from_tensor(request, loader)
            first.update_weights_from_disk(tmp_path / "checkpoint")
            for server in (first, second):
                assert bits(server.model.state_dict()) == bits(model.state_dict())
    with pytest.raises(StateError, match="version 3 is not published"):
        second.update_weights_from_tensor(
            servers.sglang_request(str(tmp_path / "checkpoint"), str(tmp_path / "to"), 3), loader
        )
    assert bits(second.model.state_dict()) == bits(model.state_dict())


# ------------------------------------------------------------------------------ folders at a URL


class UrlRun(Run):
    """The same in fsspec's memory, which keeps what is written for the time of the process."""

    def __init__(self, root, versions=0, **options):
        self.files, self.path = fsspec.filesystem("memory"), f"/{root.name}/to"
        super().__init__(root, versions, source=f"memory:/{self.path}", **options)

    def at(self, version, file="model-00001-of-00001.safetensors", kind="weight"):
        return f"{self.path}/{kind}_v{version:06d}/{file}"

    def folders(self):
        return sorted({p.split("/")[-2] for p in self.files.find(self.path)} - {"to"})


@ENCODINGS
def test_versions_arrive_from_a_url(tmp_path, encoding, monkeypatch):
    """Differences alone are copied if they lead there; copies and the redo file are local."""
    run = UrlRun(tmp_path, 2, encoding=encoding, anchor_every=2)
    here, copied = run.receiver(), []
    get = run.files.get_file

    def counted(path, to):
        copied.append(path)
        get(path, to)

    monkeypatch.setattr(type(run.files), "get_file", lambda _, path, to: counted(path, to))
    here.prefetch(2)
    assert copied == [run.at(1), run.at(2)]
    here.apply(2)
    assert len(copied) == 2
    assert stored(run.checkpoint) == run.bits[2]
    here.wait(2)
    here.verify()
    assert sorted(p.name for p in (run.checkpoint / ".hipress").iterdir()) == ["lock", "state.json"]


def test_a_run_at_a_url_resumes_and_is_pruned(tmp_path):
    run = UrlRun(tmp_path, 3, anchor_every=2, keep=1)
    state = run.publisher.state_dict()
    run.publisher.close()
    run.files.pipe_file(run.at(4), b"of a publisher that was killed")
    run.publisher = hipress.Publisher(run.tensors, run.source, anchor_every=2, keep=1)
    run.publisher.load_state_dict(state)
    assert run.publish() == 4
    assert run.publish() == 5
    assert run.folders() == ["anchor_v000004", "weight_v000005"]
    run.receiver().apply(5)
    assert stored(run.checkpoint) == run.bits[5]


def test_a_file_at_a_url_that_is_torn_or_gone(tmp_path):
    run = UrlRun(tmp_path, 1)
    data = run.files.cat_file(run.at(1))
    run.files.pipe_file(run.at(1), data[: len(data) // 2])
    run.refuses(1, f"memory:/{run.at(1)} is .*cut off")
    run.files.rm_file(run.at(1))
    run.refuses(1, "memory://.*weight_v000001 lacks 'model-00001-of-00001.safetensors'")
    run.files.pipe_file(run.at(1), data)
    index = run.files.cat_file(run.at(1, INDEX))
    run.files.pipe_file(run.at(1, INDEX), index[:-9])
    run.refuses(1, f"memory:/{run.at(1, INDEX)} is damaged")
    run.files.rm_file(run.at(1, INDEX))
    run.refuses(1, "version 1 is not published in memory://")
    run.files.pipe_file(run.at(1, INDEX), index)
    run.receiver().apply(1)
    assert stored(run.checkpoint) == run.bits[1]


def test_a_url_that_does_not_answer(tmp_path, monkeypatch):
    """Errors of stores need not be those of disks."""

    def silent(*_, **__):
        raise RuntimeError("no route")

    run = UrlRun(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(type(run.files), "find", silent)
        with pytest.raises(HipressError, match=r"memory://.* cannot be listed .*no route"):
            run.receiver().latest()
        patch.setattr(type(run.files), "get_file", silent)
        run.refuses(1, r"version 1 cannot be prepared, it stays at 0 .*no route", HipressError)
        patch.setattr(type(run.files), "_open", silent)
        with pytest.raises(HipressError, match=r"version 2 was not published: memory://.*no route"):
            run.publish()
    assert run.publish() == 2
    run.receiver().apply(2)
    assert stored(run.checkpoint) == run.bits[-1]


def test_two_publishers_at_a_url(tmp_path):
    """The second has it: the first is told, and publishes nothing more."""
    run = UrlRun(tmp_path, 1)
    second = hipress.Publisher(run.tensors, run.source)
    with pytest.raises(HipressError, match=r"another publisher has taken memory://"):
        run.publish()
    assert run.folders() == ["weight_v000001"]
    assert second.publish() == 2
    second.close()
    run.receiver().apply(2)
    assert stored(run.checkpoint) == bits(run.tensors)


def test_urls(tmp_path):
    run = Run(tmp_path, 1)
    hipress.Receiver(run.checkpoint, run.source.as_uri()).apply(1)
    with pytest.raises(ConfigError, match="another publisher has"):  # the folder's lock holds
        hipress.Publisher(run.tensors, run.source.as_uri())
    for url in ("nosuch://bucket/run", "nosuch://"):
        with pytest.raises(ConfigError, match=f"{url!r} cannot be opened"):
            hipress.Receiver(run.checkpoint, url)
    with pytest.raises(ConfigError, match="needs a folder of this machine, not memory://"):
        Transport(None, folders.folder_at("memory://run"), 0, 1.0, sends=True)


# --------------------------------------------------------------------- the checkpoint and disks


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@ENCODINGS
def test_a_checkpoint_that_was_changed_from_outside(tmp_path, encoding):
    run = Run(tmp_path, 1, encoding=encoding)
    here = run.receiver()
    last = max(delta_files.read_header(run.checkpoint / "model.safetensors")[0].items(),
               key=lambda each: each[1].begin)[0]  # fmt: skip
    flip(run.checkpoint / "model.safetensors")
    with pytest.raises(StateError, match=f"{last!r} in .* changed from outside"):
        here.verify()
    if last in delta_files.read_header(run.file(1))[0]:
        run.refuses(1, "changed from outside")


def test_a_checkpoint_of_other_tensors(tmp_path):
    run = Run(tmp_path, 2, anchor_every=2)
    made = tensors()
    del made["weight"]
    save(made, run.checkpoint)
    run.refuses(1, "version 1 has 'weight', the checkpoint has not")
    made = tensors() | {"norm": torch.zeros(7, dtype=torch.int32)}
    shutil.rmtree(run.checkpoint)
    save(made, run.checkpoint)
    shutil.rmtree(run.folder(1))
    run.refuses(2, r"'norm' is F32 \[7\] in version 2, and I32 \[7\] in the checkpoint")
    with pytest.raises(ConfigError, match="has no safetensors file"):
        hipress.Receiver(tmp_path, run.source)


def no_room(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_of_the_publisher(tmp_path, monkeypatch):
    run = Run(tmp_path, 1)
    for name in ("write_tensors", "write_index"):
        with monkeypatch.context() as patch:
            patch.setattr(delta_files, name, no_room)
            with pytest.raises(HipressError, match=r"version 2 was not published: .*No space left"):
                run.publish()
        assert not run.folder(2).exists()
        assert run.publisher.version == 1
    run.publish()
    run.receiver().apply(2)
    assert stored(run.checkpoint) == run.bits[-1]


@pytest.mark.parametrize("place", ["os.fsync", "os.replace"])
def test_a_full_disk_of_the_receiver(tmp_path, monkeypatch, place):
    run = Run(tmp_path, 1)
    here = run.receiver()
    with monkeypatch.context() as patch:
        if place == "os.fsync":
            patch.setattr(folders.os, "fsync", no_room)
        else:
            patch.setattr(receiver.RedoWriter, "end", no_room)
        with pytest.raises(HipressError, match=r"cannot be prepared, it stays at 0.*No space left"):
            here.apply(1)
    assert stored(run.checkpoint) == run.bits[0]
    here.apply(1)
    assert stored(run.checkpoint) == run.bits[1]


def test_changes_that_are_half_made_are_completed(tmp_path, monkeypatch):
    run = Run(tmp_path, 1)

    def stops(file, root):
        redo(file, root)
        no_room()

    with monkeypatch.context() as patch:
        patch.setattr(receiver, "redo", stops)
        with pytest.raises(HipressError, match="half applied: the next call completes it"):
            run.receiver().apply(1)
    assert run.receiver().version == 1
    assert stored(run.checkpoint) == run.bits[1]


def test_a_checkpoint_replaced_while_changes_were_made(tmp_path, monkeypatch):
    run = Run(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(receiver, "redo", no_room)
        with pytest.raises(HipressError):
            run.receiver().apply(1)
    save({"other": torch.zeros(3)}, run.checkpoint)
    with pytest.raises(StateError, match="was changed from outside while"):
        run.receiver()


def test_a_checkpoint_changed_after_prefetch(tmp_path):
    run = Run(tmp_path, 1)
    here = run.receiver()
    here.prefetch(1)
    path = run.checkpoint / "model.safetensors"
    place = delta_files.read_header(path)[0]["weight"]
    data = bytearray(path.read_bytes())
    data[place.begin + place.size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match=r"'weight' in .* changed from outside"):
        here.apply(1)
    assert here.version == 0


def test_what_was_prefetched_for_another_version_is_not_used(tmp_path):
    run = Run(tmp_path, 3)
    here = run.receiver()
    here.prefetch(3)
    here.apply(1)
    assert stored(run.checkpoint) == run.bits[1]
    here.prefetch(2)
    (run.checkpoint / ".hipress" / "next.json").unlink()  # killed before it was written
    here.apply(3)
    assert stored(run.checkpoint) == run.bits[3]


# ---------------------------------------------------------------------------------- kill -9


def kill(events, work, *args):
    """A process that runs work and is killed after so many lines; True if it was."""
    process = CONTEXT.Process(target=weights_ranks.killed, args=(events, work, *args))
    process.start()
    process.join(HANG)
    assert process.exitcode in (0, -9)
    return process.exitcode == -9


@pytest.mark.parametrize(
    "kills", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(5 * HANG)])]
)
@pytest.mark.parametrize("encoding", [*deltas.ENCODINGS, deltas.FULL])
def test_a_receiver_that_is_killed_anywhere(tmp_path, encoding, kills):
    if encoding == deltas.FULL:
        run = Run(tmp_path, 3, anchor_every=1, keep=1)
        assert delta_files.numbers(folders.LocalFolder(run.source), "weight") == []
    else:
        run = Run(tmp_path, 3, encoding=encoding)
    fresh = tmp_path / "fresh"
    shutil.copytree(run.checkpoint, fresh)
    shutil.copytree(run.checkpoint, tmp_path / "counted")
    lines = lines_of(bring, tmp_path / "counted", run.source, 3)
    assert stored(tmp_path / "counted") == run.bits[3]
    draws, died = random.Random(encoding), 0
    for number in range(kills):  # one in each part of the way
        events = int(lines * (number + draws.random()) / kills)
        shutil.rmtree(run.checkpoint)
        shutil.copytree(fresh, run.checkpoint)
        died += kill(events, bring, run.checkpoint, run.source, 3)
        here = run.receiver()
        assert stored(run.checkpoint) == run.bits[here.version], f"after {events} lines"
        here.verify()
        here.apply(3)
        assert stored(run.checkpoint) == run.bits[3], f"after {events} lines"
    assert died == kills


@pytest.mark.slow
def test_every_line_between_commit_and_end_may_be_the_last(tmp_path, monkeypatch):
    """Stop, in this process, at each line that completes a change."""

    class Killed(BaseException):
        pass

    run = Run(tmp_path, 2)
    run.receiver().prefetch(2)
    fresh = tmp_path / "fresh"
    shutil.copytree(run.checkpoint, fresh)
    states = set()
    for stop in range(1, 200):
        shutil.rmtree(run.checkpoint)
        shutil.copytree(fresh, run.checkpoint)
        here, left = run.receiver(), stop

        def trace(frame, event, _):
            nonlocal left
            if frame.f_code.co_name not in ("redo", "_complete", "sync"):
                return trace if "hipress/weights/" in frame.f_code.co_filename else None
            left -= event == "line"
            if left == 0:
                raise Killed
            return trace

        sys.settrace(trace)
        try:
            here.apply(2)
        except Killed:
            pass
        finally:
            sys.settrace(None)
        again = run.receiver()
        states.add(again.version)
        again.verify()
        assert stored(run.checkpoint) == run.bits[2]
        if left > 0:
            break
    assert left > 0
    assert states == {2}


@pytest.mark.parametrize("part", [0.5, 0.8, 0.9, 0.97])
def test_a_publisher_that_is_killed(tmp_path, part):
    """No index, or a whole version; the next publisher removes what has no index."""
    made = tensors()
    save(made, tmp_path / "checkpoint")
    lines = lines_of(weights_ranks.publish_once, tmp_path / "counted")
    assert kill(int(lines * part), weights_ranks.publish_once, tmp_path / "to")
    here = hipress.Receiver(tmp_path / "checkpoint", tmp_path / "to")
    if here.latest() < 1:
        with pytest.raises(StateError, match="version 1 is not published"):
            here.apply(1)
    publisher = hipress.Publisher(made, tmp_path / "to")
    step(made, 1)
    version = publisher.publish()
    publisher.close()
    here.apply(version)
    assert stored(tmp_path / "checkpoint") == bits(made)


# ------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    "encoding, world_size, replicas",
    [("xor", 2, 1), ("overwrite", 2, 1), pytest.param("xor", 4, 2, marks=pytest.mark.slow)],
)
def test_ranks_publish_their_shards(tmp_path, encoding, world_size, replicas):
    source = tmp_path / "to"
    publish_shards(tmp_path, world_size, str(source), encoding, replicas)
    assert (source / "anchor_v000002" / "model-00002-of-00002.safetensors").exists() or replicas > 1


def test_ranks_publish_their_shards_at_a_url(tmp_path):
    """A file system of fsspec that processes share and that is not taken for a folder."""
    (tmp_path / "store").mkdir()
    publish_shards(tmp_path, 2, f"dir::file://{tmp_path}/store", "xor", 1)
    assert len([*(tmp_path / "store").rglob(INDEX)]) == 4


def publish_shards(root, world_size, source, encoding, replicas):
    """Publish three versions of a model of FSDP2, and compare them with those of a whole one."""
    made = weights_ranks.model()
    save(dict(made.named_parameters()), root / "checkpoint")
    states = launch(
        weights_ranks.sharded, world_size, root / "checkpoint", source, encoding, replicas
    )
    for number in (1, 2, 3):
        weights_ranks.change(made, number)
    assert stored(root / "checkpoint") == bits(dict(made.named_parameters()))
    assert all(state == states[0] for state in states)


def test_trainers_of_ddp_and_shard(tmp_path):
    """The worker's model, by the trainer's versions, is bit for bit the model that was trained."""
    for found in launch(weights_ranks.trained, 2, tmp_path):
        assert found == {"ddp": True, "shard": True}


def test_a_rank_that_fails_to_publish(tmp_path):
    for text, left, version in launch(weights_ranks.failing, 2, str(tmp_path / "to")):
        assert "version 1 was not published: rank 1: OSError" in text
        assert "No space left" in text
        assert left == [".publisher"]
        assert version == 1


def test_a_rank_that_ends(tmp_path):
    text, _ = launch(weights_ranks.ending, 2, str(tmp_path / "to"), may_die=[1])
    assert "version 1 was not published" in text
    assert not list((tmp_path / "to").glob("weight_v*"))


def test_a_rank_with_another_tensor(tmp_path):
    for text in launch(weights_ranks.reshaped, 2, str(tmp_path / "to")):
        assert "version 1 was not published: rank 1: 'a' was torch.float32 [4] and is" in text


@ENCODINGS
def test_receivers_that_share_no_folder(tmp_path, encoding):
    trainer, *others = launch(weights_ranks.sent, 3, tmp_path, encoding)
    for found in others:
        assert found == trainer
    folders = [p.name for p in (tmp_path / "1" / "from").iterdir()]
    assert folders == ["weight_v000003"]  # older ones were removed


def test_receivers_that_come_later_are_sent_what_they_lack(tmp_path):
    found = launch(weights_ranks.sent_to_those_behind, 4, tmp_path)
    for stored_bits, had in found[2:]:
        assert stored_bits == found[0][0]
        assert had == ["weight_v000001", "weight_v000002"]


def test_transports_one_after_the_other(tmp_path):
    assert launch(weights_ranks.sent_again, 2, tmp_path) == [[1, 1, 1]] * 2


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "weight_v000001/../../x.safetensors", "weight_v000001/x.py", "a/b"]
)
def test_names_that_are_sent_do_not_lead_out_of_a_folder(name):
    with pytest.raises(StateError, match="is no file of a version"):
        delta_files.checked_name(name)
    assert delta_files.checked_name(f"anchor_v000050/{INDEX}") == f"anchor_v000050/{INDEX}"


def test_files_of_many_blocks_travel_as_they_are(tmp_path):
    trainer, worker = launch(weights_ranks.many_blocks, 2, tmp_path)
    assert worker[0] == trainer[0]
    assert worker[1] > 3 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, told",
    [
        ("full", "NotADirectoryError: .*/1/from"),
        ("killed", "rank 1 ended"),
        ("left", "rank 1 failed.*: its receiver was closed|^HipressError: its receiver was closed"),
        ("late", "ConfigError: transport: rank 1 has version 5, and version 0 is the last that"),
        ("silent", "rank 0 did not answer in step 0 .*peer 0, task `recv"),
    ],
)
def test_a_transport_that_fails(tmp_path, how, told):
    """All ranks learn why; the receivers as they look for a version."""
    found = launch(weights_ranks.sent_in_vain, 3, tmp_path, how, may_die={1})
    for text in found:
        assert text == DIED or re.search(told, text), found


def test_adler_of_parts():
    data = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8)
    cuts = [0, 0, 1, 777, 150_000, 200_000]
    parts = [(a, b - a, deltas.adler(data[a:b])) for a, b in itertools.pairwise(cuts)]
    assert deltas.adler_of_all(parts) == deltas.adler(data)
