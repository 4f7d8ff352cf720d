"""Inputs of bench.fuzz, of each kind: a damaged input, and its reader.

A kind is a function that makes a trial: called with a random number generator, it damages an input,
has it read, and returns "taken" or "refused". A refusal is one of the errors that are meant for it;
any other exception, or an AssertionError for two readers that differ, is a finding.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml

import compll
from bench import mutations
from casync.cost import CodecCost, Costs, Line, Transfer
from casync.topology import Topology
from compll.backends.cpu import backend
from compll.runtime import library, lint
from compll.runtime.library import locate
from hipress import options
from hipress.channel.records import GRADIENTS, check_record
from hipress.channel.states import Runs
from hipress.choose import rules as rules_
from hipress.choose.places import Places
from hipress.choose.plan import fixed_plan
from hipress.choose.search import Registry, Search, candidates
from hipress.choose.workload import timed
from hipress.codecs import compile_codec
from hipress.engine import saving
from hipress.engine.residuals import Residuals
from hipress.errors import ConfigError, StateError
from hipress.model.params import describe
from hipress.tools import profile
from hipress.tools import results as results_
from hipress.tools.run.figures import Report
from hipress.tools.run.jobs import Curve, Result, Workload
from hipress.tools.simulate import cluster

Trial = Callable[[Random], str]
TAKEN, REFUSED = "taken", "refused"
#: draws by which `unbiased` is checked, whose result does not count here: 200 draws take nine
#: tenths of the time of all trials
DRAWS = 4
LENGTHS = (0, 1, 33, 300, 1061)
MODEL = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7))
TWO = Topology.flat(2)


def payloads() -> Trial:
    """Payloads of every spec: the CPU and the reference both refuse one, or decode it alike."""
    known: dict[tuple[str, int], tuple[Any, Any, Any]] = {}
    names = compll.list_specs()

    def trial(random: Random) -> str:
        key = random.choice(names), random.choice(LENGTHS)
        if key not in known:
            cpu, reference = (compll.compile(key[0], target) for target in ("cpu", "reference"))
            x = np.random.default_rng(key[1]).standard_normal(key[1]).astype(np.float32)
            known[key] = (
                cpu,
                reference,
                reference.encode(x, state=reference.init_state(key[1]) or None),
            )
        cpu, reference, payload = known[key]
        damaged = mutations.of_bytes(payload, random)
        one, other = (_decoded(codec, damaged, key[1]) for codec in (cpu, reference))
        assert (one is None) == (other is None), (
            f"{key}: refused by one alone: {damaged.tobytes()!r}"
        )
        if one is None:
            return REFUSED
        assert np.array_equal(one, other, equal_nan=True), f"{key}: differ: {damaged.tobytes()!r}"
        return TAKEN

    return trial


def _decoded(codec: Any, payload: Any, n: int) -> Any:
    try:
        with np.errstate(all="ignore"):
            return codec.decode(payload, n)
    except compll.PayloadError:
        return None


def specs() -> Trial:
    """Texts of specs: diagnostics with places, or a codec that runs and has code for the CPU."""
    texts = {name: locate(name).read_text() for name in compll.list_specs()}
    known = mutations.tokens([*texts.values()])
    others = sorted({part for text in texts.values() for part in mutations.sections(text)})
    path = Path(tempfile.mkdtemp()) / "spec.yaml"

    def trial(random: Random) -> str:
        text = texts[random.choice(sorted(texts))]
        how = random.random()
        if how < 0.35:
            text = mutations.by_tokens(text, known, random)
        elif how < 0.4:
            text = mutations.by_bulk(text, random)
        elif how < 0.7:
            text = mutations.by_sections(text, others, random)
        else:
            text = mutations.by_values(text, random)
        return REFUSED if spec_outcome(text, path, printed=random.random() < 0.1) is None else TAKEN

    return trial


def spec_outcome(text: str, path: Path, *, printed: bool) -> Any:
    """Compile and run a spec's text as far as it goes: its codec, or None if it is refused.

    printed: also print its code for the CPU, which takes ten times as long as all the rest.
    """
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        codec = compll.compile(path, "reference")
        if printed:
            backend.source(codec.module)
    except compll.SpecError as error:
        _check_diagnostics(error.diagnostics, text)
        return None
    with mock.patch.object(lint, "DRAWS", DRAWS):
        warned = library.warnings(path, {})
    if warned:
        _check_diagnostics(warned, text)
    x = np.linspace(-1, 1, 100, dtype=np.float32)
    try:
        with np.errstate(all="ignore"):
            payload = codec.encode(x, state=codec.init_state(100) or None, step=1)
            assert len(payload) <= codec.payload_bytes(100)
            assert codec.decode(payload, 100).shape == (100,)
    except compll.UsageError:  # a matrix too small for this number of elements
        return None
    return codec


def _check_diagnostics(diagnostics: Any, text: str) -> None:
    """Every problem has a message and a place inside the text."""
    last = len(text.splitlines()) + 2
    assert diagnostics
    good = [d.message and 1 <= d.span.line <= last and d.span.col >= 1 for d in diagnostics]
    assert all(good), diagnostics


def states() -> Trial:
    """Saved states, as torch.load returns them."""
    params = describe(MODEL)
    cases = []
    for name in ("onebit_group", "topk", "dgc", "powersgd"):
        codec = compile_codec(name, {}, "cpu")
        wanted = options.make(name, min_size=0)
        residuals = Residuals(
            params,
            fixed_plan(params, codec, wanted, TWO),
            {p.index: Runs([(0, p.numel)]) for p in params},
        )
        residuals.place_all()
        cases.append((residuals, saving.export([0, 2], residuals, 3)))

    def trial(random: Random) -> str:
        residuals, saved = random.choice(cases)
        damaged = mutations.of_value(saved, random)
        try:
            check_record(damaged, GRADIENTS)
            fitting = saving.validate(residuals, damaged, [0, 2], strict=random.random() < 0.5)
        except StateError:
            return REFUSED
        saving.restore(residuals, damaged, fitting)
        for side in (s for p in residuals.places for s in residuals.arrays(p).values()):
            assert all(np.isfinite(array).all() for array in side.values()), (
                "loaded what is not finite"
            )
        return TAKEN

    return trial


CLUSTER = """nodes: 8
ranks_per_node: 4
device: {name: v100, memory: 900 GB/s}
between: {bandwidth: 100 Gbit/s, latency: 30 us, reach: 0.85}
inside: {bandwidth: 150 GB/s}
rack: {nodes: 4, oversubscription: 2}
jitter: 0.05
"""
RULES: Mapping[str, Any] = {
    "0.weight": {"compressor": "topk", "ratio": 0.1},
    "*.weight 7x*": "onebit_group", "1.*": None, "*": {"compressor": "int4_group"},
}  # fmt: skip


def rules() -> Trial:
    """Files of rules."""
    text, params = yaml.safe_dump(dict(RULES)), describe(MODEL)
    known = mutations.tokens([text, *compll.list_specs()])
    path = Path(tempfile.mkdtemp()) / "rules.yaml"
    codec = compile_codec("bf16", {}, "reference")

    def trial(random: Random) -> str:
        damaged = _damage(text, known, random)
        if random.random() < 0.3:
            damaged = yaml.dump(mutations.of_value(dict(RULES), random))
        path.write_text(damaged, "utf-8", errors="replace")
        try:
            wanted = options.make(codec, rules=path)
            compiled = rules_.compiled(wanted, "reference")
            rules_.decide(compiled, params, [codec], wanted, 2)
        except ConfigError:
            return REFUSED
        return TAKEN

    return trial


def _damage(text: str, known: Sequence[str], random: Random) -> str:
    """A text of YAML or JSON, damaged in one of three ways."""
    how = random.random()
    if how < 0.4:
        return mutations.by_tokens(text, known, random)
    return (mutations.by_values if how < 0.7 else mutations.by_bulk)(text, random)


def _files(texts: Sequence[str], read: Callable[[Path], Any], suffix: str) -> Trial:
    """Files of some texts, which are JSON or YAML, and their reader."""
    known = mutations.tokens(texts)
    path = Path(tempfile.mkdtemp()) / f"file.{suffix}"

    def trial(random: Random) -> str:
        text = random.choice(texts)
        if suffix == "json" and random.random() < 0.5:
            damaged = json.dumps(mutations.of_value(json.loads(text), random), default=str)
        else:
            damaged = _damage(text, known, random)
        path.write_text(damaged, "utf-8", errors="replace")
        try:
            read(path)
        except ConfigError as error:
            message = str(error)
        else:
            return TAKEN
        assert message.startswith(f"{path}:"), f"a message without its file: {message}"
        assert len(message) < 200_000, "an endless message"
        return REFUSED

    return trial


def clusters() -> Trial:
    """Files of clusters."""
    return _files([CLUSTER], cluster.read, "yaml")


def results() -> Trial:
    """Results of `hipress bench`, compared with themselves."""

    def compared(path: Path) -> None:
        results = results_.Results.read(path)
        results_.compare(results, results)
        results_.differences(results, results)

    seconds, losses = [0.1, 0.2], [2.0, 1.5]
    rows = [
        asdict(Result(name, f"[b]{name}", 2, 0, seconds, losses, curves=[Curve(seconds, losses)]))
        for name in ("ddp-fp32", "hipress:topk")
    ]
    report = Report("two hosts", 2, "1gbit", 2, Workload(), [], "hipress bench")
    whole = {"format": results_.FORMAT, "reports": [{**asdict(report), "results": rows}]}
    return _files([json.dumps(whole, indent=1)], compared, "json")


def profiles() -> Trial:
    """Profiles: refused, or read and planned by, with no plan faster than its floor."""
    params, wanted = describe(MODEL), options.make("auto")
    workload = timed([*reversed(params)], [0.01 * (i + 1) for i in range(len(params))], 0.06)
    codecs = candidates(wanted, "reference")
    line = Line(1e-5, 1e-9)
    wire = Transfer(line, 0.3)
    costs = Costs({1: wire}, dict.fromkeys(("float32", "bfloat16", "float16"), wire),
                  dict.fromkeys(codecs, CodecCost(line, line, line)), wire, 0.5)  # fmt: skip
    path = Path(tempfile.mkdtemp()) / "profile.json"
    profile.write(path, {"gloo": costs}, TWO, codecs)
    text = path.read_text()
    whole, known = json.loads(text), mutations.tokens([text])

    def trial(random: Random) -> str:
        if random.random() < 0.5:
            path.write_text(_damage(text, known, random), "utf-8")
        else:
            damaged = mutations.of_value(whole, random)
            path.write_text(json.dumps(damaged, default=str, skipkeys=True), "utf-8")
        try:
            read = profile.read(path)
            read.differences(codecs)
            here = {name: codec for name, codec in codecs.items() if name in read.digests}
            places = Places.read(
                Search(params, Registry(here, wanted), wanted, read.topology), read.places
            )
            plans = places.plans(workload) if random.random() < 0.1 else ()
        except ConfigError:
            return REFUSED
        assert all(each.seconds >= 0.1 * (1 - 1e-9) for each in plans), "a plan below its floor"
        return TAKEN

    return trial


#: by name: the option of bench.fuzz that counts them, and a function that makes the trial
KINDS: Mapping[str, tuple[str, Callable[[], Trial]]] = {
    "payloads": ("payloads", payloads),
    "specs": ("specs", specs),
    "states": ("files", states),
    "rules": ("files", rules),
    "profiles": ("files", profiles),
    "clusters": ("files", clusters),
    "results": ("files", results),
}


@contextmanager
def quiet() -> Iterator[None]:
    """A context without warnings: each damaged input would cause some."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
