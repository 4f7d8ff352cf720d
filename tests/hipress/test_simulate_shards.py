"""`hipress simulate` of FSDP2 and of an outer loop: steps by hand, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from casync.stages import WIRE, WORK, Stage
from hipress.errors import ConfigError
from hipress.outer.schedule import Schedule
from hipress.tools.cli import app
from hipress.tools.models import own
from hipress.tools.models.device_speeds import DEVICES
from hipress.tools.simulate import compared, outer_rounds, sharded
from hipress.tools.simulate.cluster import Cluster, Link
from hipress.tools.simulate.course import Collectives, Part, predict_step
from hipress.tools.simulate.simulation import Simulation

DEVICE = replace(DEVICES["v100"], slows=0.0)
TWO = Cluster(2, 1, DEVICE, Link(1e9, 0.0), Link(float("inf"), 0.0))  # a byte takes 1 ns
LAYER = 1000 * 1000  # elements of the only layer: 4 MB
CLUSTER = """\
nodes: {nodes}
device: v100
between: {{bandwidth: 8 Gbit/s, latency: 0 us, reach: 100%, collective: 0 us}}
"""


def shards(*methods, cluster=TWO, model="1000x1000", step=0.03, sharding="fsdp2", **more):
    made = [sharded.parse(each, sharding) for each in methods]
    return sharded.ShardSimulation(cluster, own.find(model), made, step, **more)


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.format(nodes=2))
    return path


def test_a_layer_is_gathered_twice_and_scattered_once():
    """Nothing is left to overlap: three times half of 4 MB at 1 GB/s, beside 30 ms."""
    made = shards("fp32", "bf16", "fp32+bf16")
    for method, width in (("fp32", 3 * 4), ("fp32+bf16", 4 + 2 * 2), ("bf16", 3 * 2)):
        assert made.outcome(method).step == pytest.approx(0.03 + width * LAYER / 2 * 1e-9)
    assert [each.node_bytes for each in made.outcomes()] == pytest.approx([3e6, 4e6, 6e6])
    # weights, gradients and two states of 2 MB; two layers of weights and one of gradients
    assert made.memory("fp32", "adamw") == pytest.approx(4 * 2e6 + 3 * 4e6)
    assert made.memory("fp32+bf16", "adamw") == pytest.approx(4 * 2e6 + 2 * 2e6 + 4e6)
    assert made.methods["fp32+bf16"].loss("adam") == "float32's"
    found = made.methods["bf16"].loss("adam")
    assert found == compared.parse("bf16").loss("adam") != "not measured"


def test_micro_batches_are_summed_on_each_rank():
    """Three gather weights twice each, and the last scatters gradients, which lie whole."""
    made = shards("fp32", micro_batches=3)
    outcome = made.outcomes()[0]
    assert outcome.step == pytest.approx(3 * 0.03 + (3 * 2 + 1) * 2e-3)
    assert outcome.exposed == pytest.approx(7 * 2e-3)
    assert outcome.node_bytes == pytest.approx(7 * 2e6)
    assert made.memory("fp32", "adamw") == shards("fp32").memory("fp32", "adamw") + 4e6
    methods = [compared.parse("fp32")]
    one, three = (
        Simulation(TWO, own.find("1000x1000"), methods, 0.03, count).outcome("fp32")
        for count in (1, 3)
    )
    assert three.step == pytest.approx(one.step + 2 * 0.03)
    assert three.exposed == pytest.approx(one.exposed)


def test_bytes_of_payloads():
    """4.25 bits an element of a gradient, once, and some 8 of a weight, twice; of half a layer."""
    (made,) = shards("int4_group").outcomes()
    gradients, weights = (
        codec.payload_bytes(LAYER // 2) for codec in sharded.parse("int4_group").codecs.values()
    )
    assert made.node_bytes == pytest.approx(gradients + 2 * weights)
    assert gradients == pytest.approx(LAYER / 2 * 4.25 / 8, rel=1e-3)
    (mixed,) = shards("int4_group+none").outcomes()
    assert mixed.node_bytes == pytest.approx(gradients + 2 * 2e6)
    (with_bias,) = shards("int4_group", model="1000x1000,1000").outcomes()
    assert with_bias.node_bytes == pytest.approx(made.node_bytes + 3 * 4 * 500)


def test_gloo_blocks_the_host_and_scatters_by_an_all_reduce():
    host = replace(TWO, device=DEVICES["cpu"])
    (made,) = shards("fp32", cluster=host).outcomes()
    assert made.node_bytes == pytest.approx(2 * 2e6 + 4e6)
    assert made.step == pytest.approx(0.03 + 8e-3)
    model, halves = "1000x1000,1000x1000", 2 * 8e-3
    (both,) = shards("fp32", cluster=host, model=model).outcomes()
    assert both.step == pytest.approx(0.03 + halves)  # nothing overlaps
    assert shards("fp32", model=model).outcome("fp32").step < 0.03 + 2 * 6e-3 - 3e-3


def test_shards_cross_between_nodes_once():
    """Two nodes of two: half of each rank's quarter of 4 MB crosses, not all three quarters."""
    cluster = replace(TWO, ranks_per_node=2, inside=Link(1e10, 0.0))
    (made,) = shards("int4_group", cluster=cluster).outcomes()
    gradients, weights = (
        codec.payload_bytes(LAYER // 4) for codec in sharded.parse("int4_group").codecs.values()
    )
    assert made.node_bytes == pytest.approx(2 * (gradients + 2 * weights))


def test_replicas_of_shards():
    """Within a node three times half of 4 MB at 10 GB/s; between two nodes each of two ranks
    all-reduces 2 MB, 2 MB a rank, at half of 1 GB/s."""
    cluster = replace(TWO, ranks_per_node=2, inside=Link(1e10, 0.0))
    made = shards("fp32", "int4_group", "onebit_group", cluster=cluster, sharding="hsdp")
    assert made.outcome("fp32").step == pytest.approx(0.03 + 3 * 2e-4 + 4e-3)
    sent = {each.method: each.node_bytes for each in made.outcomes()}
    assert sent["fp32"] == pytest.approx(2 * 2e6)
    assert sent["int4_group"] == pytest.approx(2 * LAYER / 2 * 4.25 / 8, rel=1e-3)
    assert made.memory("onebit_group", None) - made.memory("int4_group", None) == 4 * LAYER / 2


@pytest.mark.parametrize("between, told", [("8 Gbit/s", True), ("8000 Gbit/s", False)])
def test_replicas_that_would_be_faster_are_told(between, told, tmp_path):
    """Between nodes they send gradients alone; shards over all ranks weights, too, and twice."""
    path = tmp_path / "cluster.yaml"
    path.write_text(
        CLUSTER.format(nodes=2).replace("8 Gbit/s", between)
        + "ranks_per_node: 2\ninside: {bandwidth: 8000 Gbit/s, latency: 0 us}\n"
    )
    result = simulate(path, "8000x8000", "--step", 30, "--sharding", "fsdp2")
    text = " ".join(result.output.split())
    assert result.exit_code == 0, text
    assert ("--sharding hsdp is" in text) == told
    assert ("times as fast as int4_group+int8_group" in text) == told


def wire(seconds, **more):
    return (Stage(WIRE, seconds, **more),)


PARTS = [Part(2, 1.0, 2.0), Part(1, 1.0, 2.0)]
GATHERS, SCATTERS = [(), wire(1.5), wire(1.5)], [(), wire(3.0), wire(3.0)]


def test_the_next_weights_are_gathered_meanwhile():
    """Forward: gathers 0-1.5 and 1.5-3, computation 1.5-2.5 and 3-4. Backward: gathers 4-5.5 and
    5.5-7, computation 5.5-7.5 and 7.5-9.5, sums 7.5-10.5 and 10.5-13.5."""
    ahead = Collectives(GATHERS, SCATTERS, (True, True), 1)
    assert predict_step(PARTS, ahead) == pytest.approx((13.5, 6.5))
    assert predict_step(PARTS, replace(ahead, in_flight=2)) == pytest.approx((13.5, 5.5))
    blocking = Collectives(GATHERS, SCATTERS, (False, False), 0)
    assert predict_step(PARTS, blocking) == pytest.approx((18.0, 13.0))


def test_the_root_is_gathered_once():
    made = Collectives([wire(1.5)], [wire(3.0)], (True, True), 1)
    assert predict_step([Part(0, 1.0, 2.0)], made) == pytest.approx((7.5, 2.0))


def test_codecs_and_transfers_take_time_from_the_computation():
    """Encodes 0.5, decodes 0.25; the second gather, 2.25-3.75, takes half of the computation's
    speed for the second that it lasts."""
    chain = (Stage(WORK, 0.5), *wire(1.5, cores=0.5), Stage(WORK, 0.25))
    made = Collectives([(), chain, chain], [()] * 3, (True, False), 0)
    parts = [Part(2, 1.0, 0.0), Part(1, 1.0, 0.0)]
    forward = 0.5 + 1.5 + 0.25 + 0.5 + 1.5 + 0.25 + 1.0
    assert predict_step(parts, made)[0] == pytest.approx(forward + 0.5 + 2 * 2.25 - 0.5)
    inner = (*wire(1.0), Stage(WORK, 0.5), *wire(1.0), Stage(WORK, 0.25))
    made = Collectives([()], [inner], (True, True), 1)
    assert predict_step([Part(0, 1.0, 2.0)], made) == pytest.approx((5.75, 2.0))


SLOW = TWO.with_bandwidth(1e7)


def simulated(cluster=SLOW, methods=("bf16", "int4_group"), model="1000x1000"):
    made = [compared.parse(each) for each in methods]
    return Simulation(cluster, own.find(model), made, 0.01)


def predicted(schedule, cluster=SLOW, **more):
    made = simulated(cluster, **more)
    return made, outer_rounds.predict(made, own.find("1000x1000"), schedule, 0.01)


def test_a_round_by_hand():
    """4.25 bits an element to the other site, half as a sum and half as an average, at 10 MB/s."""
    _, loop = predicted(Schedule(every=10, delay=2))
    assert loop.site_bytes == pytest.approx(LAYER * 4.25 / 8, rel=1e-3)
    assert loop.seconds == pytest.approx(loop.site_bytes / 1e7, rel=0.02)
    assert loop.exposed == pytest.approx(loop.seconds - 2 * 0.01)
    assert loop.step == pytest.approx(0.01 + loop.exposed / 10)
    assert loop.training == pytest.approx(0.01 / loop.step)
    _, cut = predicted(Schedule(every=10, delay=3, fragments=2))
    assert cut.site_bytes == pytest.approx(loop.site_bytes / 2)
    assert (cut.exposed, cut.training) == (0, 1)


def test_ranks_of_a_site_share_its_link():
    cluster = replace(SLOW, ranks_per_node=2, inside=Link(1e11, 0.0))
    _, loop = predicted(Schedule(every=10), cluster)
    _, one = predicted(Schedule(every=10))
    assert loop.site_bytes == pytest.approx(2 * one.site_bytes)
    assert loop.seconds == pytest.approx(2 * one.seconds, rel=0.02)


def test_the_bandwidth_up_to_which_rounds_pay():
    made, loop = predicted(Schedule(every=100))
    assert loop.rival == "int4_group"
    for factor, pays in ((0.9, True), (1.1, False)):
        cluster = SLOW.with_bandwidth(factor * loop.pays_up_to)
        least = min(made.outcome(each, cluster.bandwidth).step for each in made.methods)
        assert (least >= 1.02 * predicted(Schedule(every=100), cluster)[1].step) == pays


def test_the_command(path, tmp_path):
    output = tmp_path / "o.json"
    arguments = [path, "1000x1000", "--step", 30, "--json", output]
    result = simulate(*arguments, "--sharding", "fsdp2", "--chart", tmp_path / "c.png")
    assert result.exit_code == 0, result.output
    assert "groups of parameters: 1 by numbered modules" in result.output
    rows = {each["method"]: each for each in json.loads(output.read_text())["methods"]}
    assert set(rows) == {"fp32", "fp32+bf16", "bf16", "int4_group+int8_group"}
    assert rows["fp32"]["step"] == pytest.approx(0.036)
    result = simulate(*arguments, "--every", 20, "--delay", 5, "--fragments", 2)
    assert result.exit_code == 0, result.output
    assert "Outer loop of 2 sites by int4_group, every 20 steps, 2 fragments, delay 5" in " ".join(
        result.output.split()
    )
    assert json.loads(output.read_text())["outer"]["training"] == 1


def planned(path, *arguments):
    given = ["plan", "1000x1000", "--step", "30", "--profile", path, *arguments]
    return CliRunner().invoke(app, [*map(str, given)], env={"COLUMNS": "200"})


@pytest.mark.parametrize("sharding", ["fsdp2", "hsdp"])
def test_plans_of_a_profile_are_those_of_its_cluster(sharding, tmp_path):
    """`hipress plan` of the profile that a cluster's simulation writes; the cluster file shards."""
    cluster, profile, output = (tmp_path / name for name in ("c.yaml", "p.json", "o.json"))
    cluster.write_text(
        f"nodes: 2\nranks_per_node: 2\ndevice: cpu\nsharding: {sharding}\n"
        "between: {bandwidth: 1 Gbit/s}\ninside: {bandwidth: 20 Gbit/s}\n"
    )
    made = simulate(cluster, "1000x1000", "--step", 30, "--profile", profile, "--json", output)
    assert made.exit_code == 0, made.output
    result = planned(profile, "--sharding", sharding, "--optimizer", "adamw")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    for row in json.loads(output.read_text())["methods"]:
        (line,) = (each for each in lines if each.startswith(f"{row['method']} "))
        step, sent = map(float, line.split()[-2:])
        assert step == pytest.approx(1e3 * row["step"], rel=0.01)
        assert sent == pytest.approx(row["node_bytes"] / 1e6, abs=0.006)
    both = planned(profile, "--sharding", sharding, "--every", "10")
    assert both.exit_code == 2
    assert "leave --sharding out" in " ".join(both.output.split())
    if sharding == "fsdp2":
        assert re.search(r"int4_group\+int8_group +\+0.3% on gpt", result.output)
        assert re.search(r"1000x1000 +int4_group \(hierarchical_push\)", result.output)


@pytest.mark.parametrize(
    "nodes, arguments, told",
    [
        (1, ["--sharding", "fsdp2"], "among two ranks at least, and the cluster has one"),
        (2, ["--sharding", "fsdp"], "unknown sharding 'fsdp'. did you mean 'fsdp2'?"),
        (2, ["--sharding", "hsdp"], "two of each at least"),
        (2, ["--sharding", "fsdp2", "--timeline", "t.png"], "leave --sharding out"),
        (2, ["--sharding", "fsdp2", "--method", "onebit_group"], "keeps states"),
        (2, ["--sharding", "fsdp2", "--method", "int4_group:strategy=ps"], "without a strategy"),
        (2, ["--sharding", "fsdp2", "--every", "10"], "leave --sharding out"),
        (2, ["--every", "10", "--micro-batches", "2"], "leave --micro-batches out"),
        (1, ["--every", "10"], "between nodes, and the cluster has one"),
        (2, ["--every", "10", "--delay", "10"], "at most 9 steps after its begin"),
        (2, ["--every", "10", "--fragments", "3"], "do not divide into fragments=3"),
        (2, ["--delay", "10"], "add --every STEPS"),
    ],
)
def test_arguments_that_are_wrong(path, nodes, arguments, told):
    path.write_text(CLUSTER.format(nodes=nodes))
    result = simulate(path, "1000x1000", "--step", 30, *arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


def test_a_host_that_compresses_is_refused():
    with pytest.raises(ConfigError, match="leave `pcie` out"):
        shards("fp32", cluster=replace(TWO, pcie=1e9))
