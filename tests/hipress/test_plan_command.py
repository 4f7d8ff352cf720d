"""`hipress probe` and `hipress plan`."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from casync.cost import CodecCost, Copies, Costs, Line, Transfer
from casync.topology import Topology
from hipress import options
from hipress.choose.search import candidates
from hipress.errors import ConfigError
from hipress.tools import profile
from hipress.tools.cli import app
from tests.hipress.fakes import Int8

CODECS = {"int8_fake": Int8()}
WIRE = Transfer(Line(1e-4, 1e-8), 0.25)
NODES = Topology.of([[0, 1], [2, 3]])


def costs(codecs):
    work = CodecCost(Line(1e-6, 1e-10), Line(1e-6, 2e-10), Line(2e-6, 3e-10))
    return Costs({1: WIRE, 3: WIRE}, {"float32": WIRE, "bfloat16": WIRE, "float16": WIRE},
                 dict.fromkeys(codecs, work), Transfer(Line(1e-5, 1e-10)), 0.5)  # fmt: skip


PLACES = {"gloo": costs(CODECS)}


@pytest.fixture
def path(tmp_path):
    """A profile of the codecs that auto may choose."""
    codecs = candidates(options.make("auto"))
    profile.write(tmp_path / "profile.json", {"gloo": costs(codecs)}, Topology.flat(2), codecs)
    return tmp_path / "profile.json"


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})


def changed(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_profile_is_read_as_it_was_written(tmp_path):
    profile.write(tmp_path / "p.json", PLACES, NODES, CODECS)
    read = profile.read(tmp_path / "p.json")
    assert (read.places, read.topology, read.device) == (PLACES, NODES, "cpu")
    assert read.differences(CODECS) == []


def test_differences_from_a_profile_are_printed(tmp_path):
    profile.write(tmp_path / "p.json", PLACES, NODES, CODECS)
    changed(tmp_path / "p.json", versions={**profile.versions(), "torch": "1.0"})
    read = profile.read(tmp_path / "p.json")
    others = {"int8_fake": replace(Int8(), digest="other"), "new": Int8()}
    told = read.differences(others)
    assert told[0].startswith("torch '1.0' there, ")
    assert told[1:] == [
        "codec 'new' is not in it",
        "codec 'int8_fake' has another text or other parameters",
    ]


@pytest.mark.parametrize(
    "text, told",
    [
        ("{", "p.json:1:2: no JSON"),
        ("[]", "no profile of `hipress probe`: expected a mapping"),
        ('{"format": 7}', "format 7; this reads 4"),
        ('{"nodes": [[0]]}', "format None; this reads 4"),
        ('{"format": 4, "nodes": [[0, 5]]}', "'versions' is missing"),
        (None, "cannot read the file"),
    ],
)
def test_a_malformed_profile_is_refused(tmp_path, text, told):
    if text is not None:
        (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)):
        profile.read(tmp_path / "p.json")


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"exchange": {"1": {"line": {"latency": -1, "per_byte": 0}}}},
         "places.gloo.exchange.1.line.latency: -1 is not at least 0"),
        ({"exchange": {"1": {"line": {"latency": 0, "per_byte": 0}, "slows": 2}}},
         "places.gloo.exchange.1.slows: 2 is not 0 to 1"),
        ({"exchange": {"a": {"line": {"latency": 0, "per_byte": 0}}}}, "places.gloo.exchange.a:"),
        ({"overlap": -0.5}, "places.gloo.overlap: -0.5 is not 0 to 1"),
        ({"overlap": 10**400}, "places.gloo.overlap: expected a number"),
        ({"overlap": math.nan}, "places.gloo.overlap: nan is not 0 to 1"),
        ({"x": 1}, "places.gloo: unknown key 'x'"),
        ({"exchange": {}}, "places.gloo: no exchange was measured"),
        ({"reduce": {}}, "places.gloo: no all-reduce of bfloat16 was measured"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_profile_is_told_with_its_path(path, wrong, told):
    data = json.loads(path.read_text())["places"]["gloo"]
    changed(path, places={"gloo": {**data, **wrong}})
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {told}")):
        profile.read(path)


def test_ranks_of_a_profile_are_all_of_a_world(path):
    changed(path, nodes=[[0, 5]])
    with pytest.raises(ConfigError, match="nodes: a topology of"):
        profile.read(path)


def test_a_profile_describes_the_link(tmp_path, monkeypatch):
    """An interface of 1 Gbit/s, of which two ranks of a node reach 80%: 5e7 bytes a second each."""
    for name, speed in (("lo", "-1"), ("eth0", "1000"), ("eth1", "-1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed)
    monkeypatch.setattr(profile._interface, "__defaults__", (tmp_path,))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    link = Transfer(Line(1e-4, 2e-8))
    found = profile.link_of(Costs({1: link}, {"float32": Transfer(Line(3e-4, 1e-8))}), NODES)
    assert found == profile.Link("eth0", 1.25e8, pytest.approx(0.8), 3e-4)
    profile.write(tmp_path / "p.json", PLACES, NODES, CODECS)
    assert profile.read(tmp_path / "p.json").link.interface == "eth0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert profile.link_of(Costs({1: link}, {}), NODES) == profile.Link("eth1", 0.0, 0.0, 0.0)


def test_the_plan_of_shapes(path):
    result = plan("1000x500,500", "--profile", path)
    assert result.exit_code == 0, result.output
    assert "Tried, in this order" in result.output
    assert "no compression" in result.output
    row = next(line for line in result.output.splitlines() if "0 1000x500" in line)
    assert "gains time" in row
    assert row.count("(ps)") == 1
    longer = plan("1000x500,500", "--profile", path, "--step", "1000")
    assert re.search(r"1\d\d\d\.\d\d", longer.output)


def test_the_plan_of_a_profile_without_codecs(path):
    changed(path, digests={})
    result = plan("1000x500", "--profile", path)
    assert result.exit_code == 0, result.output
    assert "no compression" in result.output


def test_the_plan_of_a_model(path):
    result = plan("tests.hipress.common:make", "--profile", path)
    assert result.exit_code == 0, result.output
    assert "second.weight 301x131" in result.output


@pytest.mark.parametrize("bandwidth, pays", [("64 Gbit/s", True), ("2400 Gbit/s", False)])
def test_the_plan_of_a_described_node_of_gpus(tmp_path, bandwidth, pays):
    """Over PCIe compression gains time, over NVLink it does not; no machine is measured."""
    node, found = tmp_path / "node.yaml", tmp_path / "profile.json"
    link = f"inside: {{bandwidth: {bandwidth}}}"
    node.write_text(f"nodes: 1\nranks_per_node: 8\ndevice: a40\n{link}\n")
    shapes, step = "4096x4096,4096x1024", ["--step", "20"]
    told = CliRunner().invoke(
        app, ["simulate", str(node), shapes, *step, "--method", "fp32", "--profile", str(found)]
    )
    assert told.exit_code == 0, told.output
    told = plan(shapes, "--profile", found, "--device", "cuda", *step)
    assert told.exit_code == 0, told.output
    tried = told.stdout.split("The first")[0]
    times = dict(re.findall(r"(?m)^(\S.*?)  +([0-9.]+)$", tried))
    plain = float(times.pop("no compression"))
    best = min(map(float, times.values()))
    assert (best < 0.95 * plain) == pays, told.stdout


def test_a_profile_of_another_version_is_flagged(path):
    changed(path, versions={**profile.versions(), "hipress": "0.0"})
    result = plan("1000x500", "--profile", path)
    assert result.exit_code == 0
    assert "warning" in result.output
    assert "hipress '0.0' there" in result.output


def on_device(path, kernels, copies):
    """A profile of a device. kernels: bytes of gradient a second; copies: bytes a second."""
    codecs = candidates(options.make("auto"), "reference")
    each = Line(1e-6, 1 / kernels)
    way = Line(1e-5, 1 / copies)
    host = costs([f"{name} on the host" for name in codecs])
    places = {
        "staged": replace(
            costs(codecs), codecs=dict.fromkeys(codecs, CodecCost(each, each, each)),
            overlap=0.0, copies=Copies(way, way, gradients=False),
        ),
        "host": replace(host, overlap=0.9, copies=Copies(way, way, gradients=True)),
    }  # fmt: skip
    profile.write(path, places, Topology.flat(2), codecs, "cuda")
    return places


@pytest.mark.parametrize(
    "kernels, copies, first", [(1e11, 1e10, False), (1e7, 1e11, True)], ids=["kernels", "copies"]
)
def test_the_faster_device_compresses(tmp_path, kernels, copies, first):
    """Slow kernels on a device that the backward pass needs, fast copies: compress on the host."""
    places = on_device(tmp_path / "p.json", kernels, copies)
    assert profile.read(tmp_path / "p.json").places == places
    result = plan("4000x1000,500", "--profile", tmp_path / "p.json", "--device", "cuda",
                  "--step", "200")  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    tried = lines[3 : lines.index("")]  # below the title, the names and a rule
    assert (" on the host (" in tried[0]) == first, result.output
    assert any(" on the host (" in line for line in tried)
    staged = next(line for line in lines if line.startswith("staged: "))
    host = next(line for line in lines if line.startswith("host: "))
    assert "0% of a codec's time hides behind the backward pass, payloads leave" in staged
    assert "90% of a codec's time hides behind the backward pass, gradients leave" in host
    assert "on the host (" in host
    assert "on the host (" not in staged


def test_a_profile_of_another_device_is_flagged(path, tmp_path):
    result = plan("3x5", "--profile", path, "--device", "cuda")
    assert result.exit_code == 2
    assert (
        "is for models on cpu, not cuda: add --device cpu, or measure one by hipress"
        in result.output
    )
    on_device(tmp_path / "p.json", 1e10, 1e10)
    changed(tmp_path / "p.json", versions={**profile.versions("cuda"), "device": "NVIDIA H100"})
    result = plan("3x5", "--profile", tmp_path / "p.json", "--device", "cuda")
    assert result.exit_code == 0
    here = profile.versions("cuda")["device"]
    assert f"warning: {tmp_path}/p.json may not hold here: device 'NVIDIA H100'" in result.output
    assert f"there, {here!r} here" in " ".join(result.output.split())
    assert plan("3x5", "--profile", path, "--device", "gpu").exit_code == 2


@pytest.mark.parametrize(
    "model, told",
    [
        ("tests.hipress.nowhere:make", "makes no model: ModuleNotFoundError"),
        ("tests.hipress.common:nothing", "makes no model: AttributeError"),
        ("tests.hipress.common:data", "makes no model: TypeError"),
        ("builtins:dict", "makes a dict, not a torch.nn.Module"),
        ("3x", "shapes such as 10000x512,512"),
        ("-3x5", "shapes such as 10000x512,512"),
    ],
)
def test_models_that_are_none(path, model, told):
    result = plan("--profile", path, "--", model)
    assert result.exit_code == 2
    assert told in result.output


def test_accepted_loss_is_printed_by_tensor(tmp_path):
    wanted = options.make("auto", optimizer="plain-sgd", accept_loss=0.01)
    codecs = candidates(wanted, only=["powersgd rank=4"])
    profile.write(tmp_path / "p.json", {"gloo": costs(codecs)}, Topology.flat(2), codecs)
    given = ("1000x1000", "--profile", tmp_path / "p.json", "--optimizer", "plain-sgd")
    found = plan(*given, "--accept-loss", "0.01")
    assert found.exit_code == 0
    assert "powersgd rank=4(columns=1000) (allreduce)" in found.output
    assert "within accept_loss=0.01: loss +0.3%" in " ".join(found.output.split())
    assert "powersgd" not in plan(*given).stdout
    assert "pass optimizer=" in plan(*given[:3], "--accept-loss", "0.01").stderr


def test_an_optimizer_that_is_none(path):
    result = plan("3x5", "--profile", path, "--optimizer", "sdg")
    assert result.exit_code == 2
    assert "did you mean 'sgd'" in result.output


def test_probe_needs_ranks():
    result = CliRunner().invoke(app, ["probe"])
    assert result.exit_code == 2
    assert "torchrun --nproc-per-node 2" in result.output


def test_probe_refuses_a_profile_that_cannot_be_written_before_it_measures(tmp_path):
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    output = tmp_path / "none" / "profile.json"
    result = CliRunner().invoke(app, ["probe", "--output", str(output)], env=alone)
    assert result.exit_code == 2
    assert "cannot be written: [Errno 2] No such file or directory" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_probe_of_a_device_that_is_not_there():
    result = CliRunner().invoke(app, ["probe", "--device", "cuda"], env={"RANK": "0"})
    assert result.exit_code == 2
    assert "--device cuda: torch finds no CUDA device here" in result.output


@pytest.mark.parametrize(
    "count, transport, told",
    [
        (1, "nccl", "2 ranks share 1 GPUs, which NCCL refuses: add --transport staged"),
        (2, "stagd", "unknown transport 'stagd'. did you mean 'staged'"),
    ],
)
def test_a_probe_of_devices_refuses_bad_options(count, transport, told, monkeypatch):
    for name, value in (("is_available", True), ("device_count", count), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    result = CliRunner().invoke(
        app, ["probe", "--device", "cuda", "--transport", transport],
        env={"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    )  # fmt: skip
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


@pytest.mark.slow
def test_probe_under_torchrun(tmp_path):
    output = tmp_path / "profile.json"
    root = Path(__file__).parents[2]
    program = [sys.executable, "-c", "from hipress.tools import main; main()"]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python",
         *program, "probe", "--output", str(output)],
        cwd=tmp_path, check=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    read = profile.read(output)
    assert read.topology == Topology.of([[0, 1]])
    assert read.differences(candidates(options.make("auto"))) == []
    (measured,) = read.places.values()
    assert measured.to(1).line.per_byte > 0
    assert 0 <= measured.overlap <= 1
    assert measured.copies is None
    assert all(each.hop.per_byte > 0 for each in measured.codecs.values())


def test_rounds_of_an_outer_loop(path, tmp_path):
    told = plan("1000x1000", "--profile", path, "--every", 50, "--delay", 5)
    assert told.exit_code == 2
    assert "add --step MILLISECONDS" in told.output
    codecs = candidates(options.make("auto"))
    profile.write(path, {"gloo": costs(codecs)}, Topology.of([[0], [1]]), codecs)
    told = plan("1000x1000", "--profile", path, "--every", 50, "--step", 10)
    text = " ".join(told.output.split())
    assert "Outer loop of 2 sites by int4_group, every 50 steps" in text
    exposed = float(re.search(r"a round takes [\d.]+ ms, ([\d.]+) of them exposed", text)[1])
    least = int(re.search(r"95% from --every (\d+) on", text)[1])
    assert least == pytest.approx(exposed / 10 * 19, abs=1)
    told = plan("1000x1000", "--profile", path, "--every", 50, "--fragments", 2, "--step", 10)
    text = " ".join(told.output.split())
    assert "every 50 steps, 2 fragments" in text
    half = float(re.search(r"a round takes [\d.]+ ms, ([\d.]+) of them exposed", text)[1])
    assert 0.4 * exposed < half < 0.7 * exposed
