"""The command line, the cache between processes, and the cost of imports."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import compll
from compll.passes import lower
from compll.passes.values import Unsupported
from compll.tools.cli import app

WRONG = "name: wrong\nencode: {s: meen(g)}\npayload: {s: float32}\ndecode: s + t\n"


def run(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_version():
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"compll {compll.__version__}\n")


def test_list_names_every_spec():
    result = run("list")
    assert result.exit_code == 0
    lines = [line.split()[0] for line in result.output.splitlines()]
    assert lines == ["name", *compll.list_specs()]
    assert "The sign of every element, scaled by the mean magnitude of 1024 elements." in (
        result.output
    )


def test_check(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(WRONG)
    result = run("check", "onebit", path, "onebitt")
    assert result.exit_code == 1
    assert re.search(r"wrong.yaml:2:13: unknown operator 'meen'\n    hint: .*'mean'", result.output)
    assert "wrong.yaml:4:13: unknown name 't'" in result.output
    assert "there is no spec 'onebitt'\n    hint: did you mean 'onebit'?" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", compll.list_specs())
def test_explain_shows_every_stage(name):
    result = run("explain", name)
    assert result.exit_code == 0, result.output
    for word in ("--- syntax", "--- types", "--- layout", "payload_bytes(1000)", "least possible"):
        assert word in result.output


def test_explain_proves_single_passes():
    for name in ("int4_group", "onebit_group", "mxnet_2bit", "fp16"):
        text = run("explain", name, "--traffic").output
        assert "ratio 1.00" in text
        assert "walks 1, least possible 1" in text


def test_traffic_tells_why_another_walk_is_needed():
    lines = run("explain", "onebit", "--traffic").output.splitlines()
    assert lines[1].startswith("walk 2: reads g again, residual again (8 B), writes residual (4 B)")
    assert lines[2:4] == ["  after scale", "walks 2, least possible 2"]
    text = run("explain", "graddrop", "--traffic").output
    assert "walks 1, least possible 1" in text, "a sample is no walk over all elements"
    assert run("explain", "onebit", "--stage", "traffic").output.splitlines() == lines


def test_explain_of_a_spec_that_compares_texts(tmp_path):
    path = tmp_path / "worded.yaml"
    path.write_text(
        "name: worded\nparams: {mode: {type: str, default: a, choices: [a, b]}}\n"
        "encode: {v: \"g if mode == 'a' else -g\"}\npayload: {v: 'float32[n]'}\ndecode: v\n"
    )
    result = run("explain", path, "--stage", "syntax")
    assert result.output.splitlines()[0] == "encode  v = choose(eq(mode, 'a'), g, neg(g))"


def test_traffic_of_merges_and_of_specs_without_feedback(tmp_path):
    text = run("explain", "onebit_group", "--traffic").output
    assert "moved 12.26, least possible 12.26 (as two kernels 20.26)" in text
    plain = tmp_path / "plain.yaml"
    spec = (compll.runtime.library.specs_dir() / "onebit.yaml").read_text()
    plain.write_text(spec.replace("feedback: error\n", ""))
    text = run("explain", plain, "--traffic").output
    assert "reads nothing" not in text
    assert "walks 1, least possible 1" in text
    assert "moved 4.125" in text


def test_build_reports_every_wrong_spec(tmp_path):
    paths = [tmp_path / "first.yaml", tmp_path / "second.yaml"]
    for path in paths:
        path.write_text(WRONG)
    result = run("build", paths[0], "onebit", paths[1], "onebitt", "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert result.output.count("unknown operator 'meen'") == 2
    assert "there is no spec 'onebitt'" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_build_for_cuda_needs_no_device(tmp_path):
    result = run("build", "onebit", "--target", "cuda", "--arch", "sm_90", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert "__global__" in (tmp_path / "onebit.float16.cu").read_text()
    assert (tmp_path / "onebit.float32.sm_90.cubin").read_bytes()[:4] == b"\x7fELF"
    report = json.loads((tmp_path / "onebit.report.json").read_text())
    assert report["target"] == "cuda"
    encode = report["kernels"]["sm_90"]["bfloat16"]["encode_walk0"]
    assert 0 < encode["registers"] < 256
    assert encode["shared"] > 0
    assert "| encode_walk0 |" in (tmp_path / "onebit.report.md").read_text()
    assert "__global__" in run("explain", "onebit", "--stage", "source", "--target", "cuda").output


@pytest.mark.slow
def test_build_for_several_targets_and_architectures(tmp_path):
    result = run("build", "onebit", "--target", "cuda", "--target", "cpu",
                 "--arch", "sm_80,sm_90", "-o", tmp_path)  # fmt: skip
    assert result.exit_code == 0, result.output
    files = {path.name for path in tmp_path.iterdir()}
    assert {f"onebit.float32.{arch}.cubin" for arch in ("sm_80", "sm_90")} <= files
    assert {
        "onebit.cpu.ll",
        "onebit.cpu.s",
        "onebit.cpu.report.json",
        "onebit.cuda.report.json",
    } <= files


REFUSED = """
name: refused
encode: {some: drawn(9), v: "g[some]", least: "kth_largest(abs(g), 3)"}
payload: {v: "float32[some]", least: float32}
decode: scatter(indices(some), v + least)
"""


def test_build_of_everything_lists_what_the_target_refuses(tmp_path, monkeypatch):
    path, out = tmp_path / "refused.yaml", tmp_path / "out"
    path.write_text(REFUSED)

    def refuse(module, whole=lower._kernels):
        if module.name == "refused":
            raise Unsupported("`kth_largest`", "least")
        return whole(module)

    monkeypatch.setattr(lower, "_kernels", refuse)
    monkeypatch.setattr("compll.runtime.library.list_specs", lambda: [str(path), "onebit"])
    result = run("build", "--target", "cuda", "-o", out)
    assert result.exit_code == 0, result.output
    assert "refused.yaml:3:40: the cuda backend does not compile `kth_largest`" in result.output
    assert (out / "onebit.float32.cu").exists()
    assert not (out / "refused.float32.cu").exists()
    result = run("build", path, "--target", "cuda", "-o", out)
    assert result.exit_code == 1


def test_cuda_compiles_every_spec(tmp_path, monkeypatch):
    monkeypatch.setattr("compll.runtime.library.warnings", lambda *_: [])  # see test_lint.py
    result = run("build", "--target", "cuda", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert "does not compile" not in result.output
    assert all((tmp_path / f"{name}.float32.cu").exists() for name in compll.list_specs())


@pytest.mark.slow
def test_build(tmp_path):
    result = run("build", "terngrad_uniform", "-p", "bits=4", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "terngrad_uniform.report.json").read_text())
    assert report["parameters"] == {"bits": 4}
    assert report["passes"] == 2
    assert 'define void @"encode"' in (tmp_path / "terngrad_uniform.cpu.ll").read_text()
    assert "encode:" in (tmp_path / "terngrad_uniform.cpu.s").read_text()
    text = (tmp_path / "terngrad_uniform.report.md").read_text()
    for words in ("bits = 4", report["digest"], "| q | uint4[n] |", "| 1000 |", "pass 2, over"):
        assert words in text
    assert text.count("```") % 2 == 0


@pytest.mark.parametrize(
    "args, code, words",
    [
        (("build", "onebit", "--target", "gpu"), 2, "no backend 'gpu'"),
        (("build", "onebit", "-p", "x"), 2, "expected name=value"),
        (("build", "onebit", "-p", "x=1"), 1, "no parameter 'x'"),
        (("build", "onebit", "-o", "/proc/none"), 2, "cannot write"),
        (("build", "onebit", "--arch", "sm_90"), 2, "--arch belongs to --target cuda"),
        (("build", "onebit", "--target", "cuda", "--arch", "sm_1"), 2, "sm_1: NVRTC"),
        (("explain", "onebit", "--stage", "foo"), 2, "no stage 'foo'"),
        (("explain", "dgc", "-p", "ratio=7"), 1, "from 1e-07 to 1"),
    ],
)
def test_mistakes_give_one_line(args, code, words):
    result = run(*args)
    assert result.exit_code == code
    assert words in result.output
    assert "Traceback" not in result.output


def test_import_is_light():
    heavy = ("llvmlite", "torch", "cupy", "typer", "rich", "networkx", "matplotlib")
    code = f"import sys, compll; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_build_never_overwrites_one_spec_with_another(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("name: same\nencode: {q: g * 1}\npayload: {q: 'float32[n]'}\ndecode: q\n")
    second.write_text(first.read_text().replace("g * 1", "g * 2"))
    folder = tmp_path / "out"
    result = run("build", first, second, "--target", "reference", "-o", folder)
    assert result.exit_code == 2
    assert f"{first} and {second} are both named 'same'" in result.output
    assert not folder.exists()
    again = tmp_path / "." / "a.yaml"
    result = run("build", first, again, "--target", "reference", "-o", folder)
    assert result.exit_code == 0, result.output
