"""The command line: bad input is one clear line and exit status 2; a small demo runs to its end."""

import signal
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

import compll
import hipress
from compll.tools import cli
from hipress.tools import bench_command
from hipress.tools.bench import measure
from hipress.tools.cli import app
from hipress.tools.results import Results
from hipress.tools.run import ending, methods
from hipress.tools.run.jobs import Workload

KNOWN = ["auto", "onebit_group", "onebit_fine", "int4_group", "dgc"]


@pytest.fixture(autouse=True)
def known_codecs(monkeypatch):
    monkeypatch.setattr(methods, "codecs", lambda: KNOWN)


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"hipress {hipress.__version__}\n")
    assert compll.__version__ == hipress.__version__  # written in both, for one distribution


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--rate", "fast"], "rate 'fast': expected 100kbit to 100gbit, such as 1gbit or 100mbit"),
        (["--methods", "momentum:int4_group"], "sgd has none: use --optimizer adamw"),
        (["--methods", "ddp"], "unknown method 'ddp'; choose from none, ddp-noop, ddp-fp32,"),
        (["--methods", "hipress:twobit"], "hipress:CODEC"),
        (["--methods", "hipress:onebit_grup"], "did you mean hipress:onebit_group?"),
        (["--methods", "sync:onebit_grup"], "did you mean sync:onebit_group?"),
        (["--methods", "none,dgcc"], "did you mean hipress:dgc?"),
        (["--methods", "none,hipress:dgc:ratoi=1"], "no parameter 'ratoi'; did you mean 'ratio'?"),
        (["--methods", "none,hipress:dgc:ratio=7"], "parameter 'ratio' is from 1e-07 to 1, not 7"),
        (["--methods", "none,hipress:dgc:strategy=rng"], "did you mean 'ring'?"),
        (["--methods", "none,hipress:auto:ratio=1"], "need a compressor given by name"),
        (
            ["--methods", "none,outer:int4_group:every=0"],
            "every is a whole number from 1 on, not 0",
        ),
        (["--methods", "none,outer:int4_group:every=x"], "a whole number from 1 on, not 'x'"),
        (["--methods", "none,outer:int4_group:lr=-1"], "lr of OuterSGD is a number from 0 on"),
        (["--methods", "none,outer:auto"], "outer needs a compressor by name"),
        (["--methods", "shard:onebit_group"], "reduce_scatter takes compressors without states"),
        (["--methods", "hsdp:auto"], "hsdp needs a compressor by name"),
        (["--methods", "shard:int4_group:in_fligt=2"], "no parameter 'in_fligt'"),
        (["--methods", "hipress:dgc:ratio"], "expected option=value, found 'ratio'"),
        (["--methods", "none,none"], "expected different methods, separated by commas"),
        (["--methods", ","], "expected different methods, separated by commas"),
        (["--methods", "hipress:no.yaml"], "'no.yaml': no.yaml:1:1: cannot read the file"),
        (["--hosts", "1"], "1 ranks: expected 2 or more"),
        (["--steps", "1"], "1 steps: expected 2 or more"),
        (["--ranks-per-host", "9"], "18 ranks on one machine: expected at most 16"),
        (["--output", "/proc"], "'/proc"),  # where root, too, can make no file
        (["--optimizer", "adamm"], "unknown optimizer 'adamm'. did you mean 'adam'?"),
        (["--optimizer", "adagrad"], "'adagrad': the workload trains with sgd or adamw"),
        (["--device", "tpu"], "unknown device 'tpu'; choose from: cpu, cuda"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("hipress bench: ")


@pytest.mark.parametrize(
    "command, optimizer, steps, rounds",
    [
        (["demo"], "sgd", 60, 1),
        (["bench", "--quick"], "sgd", 60, 1),
        (["bench"], "adamw", 20, 3),
        (["bench", "--quick", "--optimizer", "adam", "--steps", "9"], "adamw", 9, 1),
    ],
)
def test_the_demo_is_a_quick_benchmark(command, optimizer, steps, rounds, monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(bench_command, "run", found.append)
    result = CliRunner().invoke(app, [*command, "--loopback", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    (request,) = found
    quick = command != ["bench"]
    suite = request.suite
    assert request.quick == quick
    assert (suite.optimizer, suite.steps, suite.rounds) == (optimizer, steps, rounds)
    assert suite.methods == (methods.DEFAULTS if quick else bench_command.METHODS)


def test_a_cluster_may_have_more_ranks_than_emulated_hosts(tmp_path):
    suite = measure.Suite(("none",), hosts=4, per_host=8)
    bench_command.Request(suite, ("lstm",), ("1gbit",), tmp_path).check()


@pytest.mark.parametrize(
    "text, options",
    [
        ("hipress:dgc", {}),
        ("hipress:dgc:ratio=0.01:strategy=ring", {"ratio": 0.01, "strategy": "ring"}),
        (
            "hipress:dgc:ratio=1e-3:steps=4:nesterov=true",
            {"ratio": 0.001, "steps": 4, "nesterov": True},
        ),
    ],
)
def test_options_have_their_types(text, options):
    method = methods.parse(text)
    assert (method.codec, method.options) == ("dgc", options)


def test_a_label_tells_codec_and_options():
    assert methods.parse("hipress:dgc:ratio=0.01").label == "HiPress dgc ratio=0.01"
    assert methods.parse("sync:dgc").label == "HiPress, no DDP, dgc"


def test_a_codec_may_be_a_path(tmp_path):
    path = cli.start("own", "quantizer", tmp_path)
    method = methods.parse(f"hipress:{path}:bits=4")
    assert (method.codec, method.options) == (str(path), {"bits": 4})
    assert method.label == "HiPress own.yaml bits=4"
    methods.check([methods.parse(f"hipress:{path}")])
    path.write_text("name: own")
    with pytest.raises(ValueError, match="section 'payload' is missing"):
        methods.check([methods.parse(f"hipress:{path}")])


@pytest.mark.slow
def test_a_small_demo_writes_figures_and_chart(tmp_path, monkeypatch):
    tiny = Workload(vocabulary=200, width=16, batch=2, length=5)
    monkeypatch.setattr(measure, "Workload", lambda **options: replace(tiny, **options))
    arguments = ["--methods", "none,ddp-fp32", "--steps", "3", "--loopback"]
    result = CliRunner().invoke(app, ["demo", *arguments, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "2 processes on loopback, without a throttle (as asked)" in result.output
    (report,) = Results.read(tmp_path / "bench.json").reports
    assert [each.method for each in report.results] == ["none", "ddp-fp32"]
    assert report.results[1].identical is True
    assert report.command.startswith("hipress")
    assert (tmp_path / "bench.png").exists()
    assert "not probed" not in (tmp_path / "bench.html").read_text()


@pytest.mark.parametrize("columns", [80, 100])
def test_the_help_shows_all_default_methods(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERMINAL_WIDTH", str(columns))
    shown = CliRunner().invoke(app, ["bench", "--help"]).output
    words = "".join(shown.translate(str.maketrans("", "", "│ \n")).split())
    assert ",".join(bench_command.METHODS) in words, shown
    assert "…" not in shown


@pytest.fixture
def handled():
    """Handle a signal until the test ends; the tests themselves may run under nohup."""
    before = {}

    def handle(number, how):
        before[number] = signal.signal(number, how)

    yield handle
    for number, how in before.items():
        signal.signal(number, how)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_request_to_end_and_a_closed_terminal_leave_in_order(name, handled):
    number = getattr(signal, name)
    handled(number, signal.SIG_DFL)
    with pytest.raises(typer.Exit) as left, ending.orderly_end("demo"):
        signal.raise_signal(number)
    assert left.value.exit_code == 128 + number
    assert signal.getsignal(number) == signal.SIG_DFL


def test_nohup_is_heeded(handled):
    handled(signal.SIGHUP, signal.SIG_IGN)
    with ending.orderly_end("demo"):
        signal.raise_signal(signal.SIGHUP)
