"""`hipress simulate`: cluster files, costs of links, predictions, and the command."""

from __future__ import annotations

import json
import math
import re
from dataclasses import astuple, replace

import pytest
from typer.testing import CliRunner

from casync.cost import CodecCost, Costs, Line, Transfer
from casync.topology import Topology
from hipress.choose.probe import DTYPES
from hipress.codecs import compile_codec
from hipress.errors import ConfigError
from hipress.reporting.text_table import Table
from hipress.tools import profile
from hipress.tools.cli import app
from hipress.tools.models import own
from hipress.tools.models.device_speeds import DEVICES
from hipress.tools.simulate import codec_speeds, compared
from hipress.tools.simulate.cluster import Cluster, Link, read
from hipress.tools.simulate.costs import costs
from hipress.tools.simulate.simulation import Simulation

CLUSTER = """\
nodes: 4
ranks_per_node: 2
device: v100
inside: {bandwidth: 100 GB/s, latency: 5 us, reach: 1, collective: 10 us}
between: {bandwidth: 10 Gbit/s, latency: 30 us, reach: 80%, collective: 100 us}
"""
SIMPLE = Cluster(
    4, 2, replace(DEVICES["v100"], slows=0.0), Link(1.25e9, 3e-5, 0.8, 1e-4), Link(1e11, 5e-6)
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_cluster_file(path):
    found = read(path)
    assert (found.nodes, found.ranks_per_node, found.device) == (4, 2, DEVICES["v100"])
    assert astuple(found.between) == pytest.approx((1.25e9, 3e-5, 0.8, 1e-4))
    assert found.inside.speed == 1e11
    assert not found.assumed
    path.write_text(CLUSTER.replace(", reach: 80%, collective: 100 us", ""))
    assert read(path).assumed == (
        "links between nodes: 85% of its bandwidth is reached, a collective takes 100 us besides",
    )
    path.write_text(CLUSTER.replace("device: v100", "device: {name: a100, memory: 1555 GB/s}"))
    device = read(path).device
    assert (device.memory, device.flops) == (1555e9, DEVICES["a100"].flops)
    assert "given: memory" in device.about


def test_a_profile_stands_for_assumptions(path, tmp_path):
    """A profile's codecs, overlap, slow-down, reach and cost of a collective count instead."""
    compiled = compile_codec("int4_group", {}, "reference")
    known = CodecCost(Line(0.0, 1e-9), Line(0.0, 2e-9), Line(0.0, 3e-9))
    wire = Transfer(Line(1e-4, 1e-8), 0.0, 0.2)
    probed = Costs({1: wire}, dict.fromkeys(DTYPES, wire), {"int4_group": known}, wire, 0.4)
    profile.write(tmp_path / "p.json", {"gloo": probed}, Topology.flat(2), {"int4_group": compiled})
    less = CLUSTER.replace(", reach: 80%, collective: 100 us", "")
    path.write_text(less + "profile: p.json\n")
    found = read(path)
    assert (found.device.overlap, found.device.slows) == (0.4, 0.2)
    assert found.between.collective == pytest.approx(1e-4)
    assert "10 Gbit/s" not in "".join(found.assumed)
    made = Simulation(found, own.find("resnet50"), [compared.parse("int4_group")])
    assert made._costs["int4_group"] == known
    assert not [each for each in made.assumed if each.startswith("codecs:")]
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"p\.json: format None"):
        read(path)


@pytest.mark.parametrize(
    "before, after, told",
    [
        ("10 Gbit/s", "10", "4:22: 'bandwidth' in `between`: expected a bandwidth"),
        ("30 us", "30", "it has no unit"),
        ("30 us", "30 uss", "its unit is 'uss'"),
        ("80%", "180%", "is not 0.001 to 1"),
        ("10 Gbit/s", "0 Gbit/s", "is not more than nothing"),
        ("v100", "v10", "3:9: unknown device 'v10'"),
        ("nodes: 4", "nodes: 2.5", "2.5 is no whole number"),
        ("nodes: 4", "nodes: 0", "0 is not at least 1"),
        ("nodes: 4", "ranks: 9", "9 ranks do not divide into nodes of 2"),
        ("nodes: 4", "nodes: 4\nranks: 9", "4 nodes of 2 ranks are not 9 ranks"),
        ("inside:", "insde:", "unknown key 'insde'"),
        ("between: {", "between: [", "malformed YAML"),
        ("nodes: 4", "nodes: 4\nsharding: fdsp2", "2:11: unknown sharding 'fdsp2'"),
        ("nodes: 4", "nodes: 4\nprofile: nowhere.json", "there is no profile"),
    ],
)
def test_mistakes_in_a_cluster_file(path, before, after, told):
    path.write_text(CLUSTER.replace(before, after))
    with pytest.raises(ConfigError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}:")
    assert told.split(": ", 1)[-1] in str(raised.value)


def test_all_mistakes_are_told_at_once_with_their_places(path):
    path.write_text("nodes: x\ndevice: tpu\nbetween: {bandwidth: 3, latency: 1 us, far: 2}\n")
    result = simulate(path, "resnet50")
    assert result.exit_code == 2
    told = [line for line in result.output.splitlines() if f"{path}:" in line]
    places = [line.split(f"{path}:")[1].split(": ")[0] for line in told]
    assert places == ["1:8", "2:9", "3:22", "3:40"]


def test_link_costs():
    """Two ranks share a node's link, which reaches 1e9 bytes a second."""
    made = costs(SIMPLE, {})
    assert made.to(1).line == Line(3e-5, 2e-9)
    assert made.inside.line == Line(5e-6, 1e-11)
    around = 2 * 7 / 8
    assert made.reduce["bfloat16"].line == Line(
        pytest.approx(1e-4 + 4 * 3e-5), pytest.approx(around * 1e-9)
    )
    one = costs(replace(SIMPLE, nodes=1), {})
    assert one.reduce["float32"].line.per_byte == pytest.approx(1e-11)
    racks = replace(SIMPLE, rack=2, oversubscription=4.0)
    assert costs(racks, {}).to(3).line.per_byte == pytest.approx(2e-9 * 4 * 2 / 3)
    assert costs(racks, {}).to(1).line.per_byte == pytest.approx(2e-9 * 4 / 2)
    carried = replace(SIMPLE, device=replace(DEVICES["cpu"], core=1e-9))
    assert costs(carried, {}).to(1).cores == pytest.approx(0.5)
    assert (
        costs(replace(carried, device=replace(DEVICES["cpu"], core=4e-9)), {}).to(1).line.per_byte
        == 4e-9
    )


def test_bytes_touched_by_codecs():
    """int4_group reads a gradient and writes 4.25 bits per element; a joint kernel reads both."""
    found = codec_speeds.memory_traffic(compile_codec("int4_group", {}, "reference"))
    payload = 4.25 / 8
    assert found.encode == pytest.approx((4 + payload) / 4)
    assert found.decode == pytest.approx((8 + payload) / 4)
    assert found.hop == pytest.approx((4 + 2 * payload) / 4)
    kept = codec_speeds.memory_traffic(compile_codec("topk", {"ratio": 0.01}, "reference"))
    assert kept.decode < 0.1
    made = codec_speeds.cost(compile_codec("int4_group", {}, "reference"), DEVICES["h100"])
    assert made.encode.per_byte == pytest.approx(found.encode / (0.8 * 3.35e12))
    on_host = codec_speeds.cost(compile_codec("int4_group", {}, "reference"), DEVICES["cpu"])
    assert on_host == CodecCost(
        *(Line(2e-6, each) for each in codec_speeds.read_measured()["int4_group"])
    )


def simulation(cluster=SIMPLE, model="resnet50", given=("fp32", "bf16", "int4_group"), **more):
    return Simulation(cluster, own.find(model), [compared.parse(each) for each in given], **more)


def test_a_step_without_compression_by_hand():
    """Links are the bottleneck: first bucket, then all bytes, and collectives at the same time."""
    made = simulation()
    model = own.find("resnet50").model
    first = made.workload.rest
    expected = first + 2 * 7 / 8 * 4 * model.numel / 1e9
    assert made.outcome("fp32").step == pytest.approx(expected, rel=0.02)
    assert made.outcomes()[-1].node_bytes == pytest.approx(2 * 7 / 8 * 4 * model.numel, rel=1e-6)
    fast = replace(SIMPLE, between=Link(1e15, 0.0))
    assert simulation(fast).outcome("fp32").efficiency == pytest.approx(1.0, abs=0.01)


def test_the_baseline_is_cast_by_one_kernel_a_bucket():
    """PyTorch's hook: on fast links a step adds the casts' time, for any number of tensors."""
    fast = replace(SIMPLE, between=Link(1e15, 0.0), device=replace(SIMPLE.device, overlap=0.0))
    made = simulation(fast, "bert-large")
    casts = 2 * 1.5 * 4 * made.model.numel / fast.device.memory
    assert casts < made.outcome("bf16").exposed < 1.3 * casts  # and the last bucket within a node


def test_slow_and_uneven_ranks_make_everybody_wait():
    fast = replace(SIMPLE, between=Link(1e15, 0.0), slow_rank=0.5)
    made = simulation(fast).outcome("fp32")
    assert made.step == pytest.approx(1.5 * simulation(fast).alone.step, rel=0.01)
    uneven = replace(SIMPLE, nodes=500, jitter=0.01)
    assert uneven.straggling == pytest.approx(0.0324, rel=0.02)  # E max of 1000 normal deviates
    assert replace(SIMPLE, nodes=1, ranks_per_node=1, jitter=0.1).straggling == 0


def test_the_inverse_question():
    made = simulation(step=0.1)
    found = made.bandwidth_for("fp32", 0.9)
    assert (
        made.outcome("fp32", 1.05 * found).efficiency
        > 0.9
        > made.outcome("fp32", found / 1.05).efficiency
    )
    up_to = made.pays_up_to("int4_group")
    for factor, pays in ((0.9, True), (1.1, False)):
        own_, base = (made.outcome(m, factor * up_to).step for m in ("int4_group", "bf16"))
        assert (base >= 1.02 * own_) == pays
    assert made.pays_up_to("bf16") is None
    assert made.pays_up_to("fp32") == 0
    assert made.bandwidth_for("fp32", 0.9999999) is None


def test_the_command(path, tmp_path):
    outputs = [tmp_path / name for name in ("c.png", "t.png", "o.json")]
    result = simulate(path, "20000x500,500", "--step", "30", "--method", "bf16", "--method",
                      "int4_group", "--bandwidth-for", "90%", "--chart", outputs[0], "--timeline",
                      outputs[1], "--json", outputs[2])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Assumed, not measured:" in result.output
    assert (
        own.BY_ELEMENTS in result.output.replace("\n", " ") or "in proportion to" in result.output
    )
    assert "int4_group reaches 90%: from " in result.output
    assert all(each.read_bytes()[:4] == b"\x89PNG" for each in outputs[:2])
    data = json.loads(outputs[2].read_text())
    assert (data["kind"], data["alone_seconds"]) == ("simulation", pytest.approx(0.03))
    rows = {each["method"]: each for each in data["methods"]}
    assert rows["int4_group"]["gain"] == pytest.approx(
        rows["bf16"]["step"] / rows["int4_group"]["step"]
    )
    assert len(data["curve"]["bandwidths"]) == len(data["curve"]["efficiencies"]["bf16"])
    step = data["timelines"][1]
    assert step["method"] == "int4_group"
    assert max(event["end"] for event in step["events"]) == pytest.approx(step["step"])


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["resnet5"], "did you mean 'resnet50'"),
        (["resnet50", "--method", "int4_grup"], "did you mean 'int4_group'"),
        (["resnet50", "--method", "int4_group:strategy=gossip"], "strateg"),
        (["resnet50", "--method", "dgc:ratoi=1"], "did you mean 'ratio'"),
        (["resnet50", "--bandwidth-for", "90"], "expected a share such as 90%"),
        (["resnet50", "--optimizer", "adamm"], "did you mean 'adam'"),
        (["1000x20"], "pass --step MILLISECONDS"),
    ],
)
def test_arguments_that_are_wrong(path, arguments, told):
    result = simulate(path, *arguments)
    assert result.exit_code == 2
    assert told in result.output


def test_rounds_are_predicted_one_after_the_other():
    """PowerSGD: two all-reduces, so twice the cost of a collective."""
    cluster = replace(SIMPLE, between=Link(1e15, 0.0, 1.0, 1.0))
    made = simulation(cluster, "20000x500", ("powersgd:rank=4", "fp32"), step=0.1)
    assert made.outcome("powersgd:rank=4").step == pytest.approx(2.1, rel=0.02)
    assert made.outcome("fp32").step == pytest.approx(1.1, rel=0.02)
    assert math.isclose(made.outcome("powersgd:rank=4").exposed, 2.0, rel_tol=0.03)


def test_a_model_that_does_not_fit_is_told(path):
    """DDP and Adam hold 20 bytes of each float32 parameter: 161 GB of Llama 3 8B."""
    result = simulate(path, "llama-8b", "--method", "fp32", "--optimizer", "adamw")
    assert "take 161 GB a rank, and v100 is assumed to have 32: shard" in result.stderr
    assert re.search(r"^fp32 .* 161$", result.stdout, re.MULTILINE)
    assert "GB a rank" not in simulate(path, "resnet50", "--method", "fp32").stderr


@pytest.mark.parametrize("width", [40, 80])
def test_tables_cut_no_figure(width):
    table = Table("A table", "below")
    table.add_columns(["a text", "another one"], ["step ms", "MB a node"])
    table.add_row("one of many words", "more words", "23,715.5", "112,360.8")
    lines = table.text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.endswith("23,715.5  112,360.8") for line in lines)
    assert all(line.endswith("112,360.8") for line in table.text(10).splitlines() if "112" in line)
