"""Cached kernels without numba: the same bytes, and every way back to numba."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba.core.registry import cpu_target

import compll
from compll.backends.cpu import load as cpu_load
from compll.backends.cpu import native as cpu_native
from compll.backends.cpu import numba_kernels as cpu
from compll.backends.cpu import object as cpu_object
from compll.backends.cpu.declare import declared
from compll.backends.cpu.native import Stored
from compll.runtime import cache
from tests.patience import HANG
from tests.tiers import first_fast

pytestmark = pytest.mark.skipif(not cpu_native.possible(), reason="numba's kernels serve here")
of_one_cache = pytest.mark.xdist_group("native")

RUN = """
import hashlib, json, sys
import numpy as np
import compll
digest, x = hashlib.sha256(), np.sin(np.arange(3000, dtype=np.float32) ** 2)
for name in sys.argv[1:]:
    codec = compll.compile(name)
    state = codec.init_state(len(x))
    payload = codec.encode(x, state=state, seed=2**64 - 1, step=1)
    for array in (payload, codec.decode(payload, len(x), step=1), *state.values()):
        digest.update(array.tobytes())
loaded = [m for m in ("numba", "scipy") if m in sys.modules]
print(json.dumps([digest.hexdigest(), loaded]))
"""


def run(root=None, *, specs=("threelc",), jobs=1):
    """What fresh processes that start at once computed, and what they had to import."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, *specs],
            env=os.environ | ({"COMPLL_CACHE": str(root)} if root else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(jobs)
    ]
    found = []
    for job in started:
        out, err = job.communicate(timeout=HANG)
        assert (job.returncode, err) == (0, "")
        found.append(json.loads(out))
    return found


def of_arrays(name):
    """Whether a spec is computed an array at a time."""
    return compll.compile(name, "reference").module.arrays


def test_no_one_waits_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LONGEST", 0.1)
    done = []
    with cache.alone(tmp_path / "kernels.native"), cache.alone(tmp_path / "kernels.native"):
        done.append(1)
    with cache.alone(tmp_path / "nowhere" / "kernels.native"):
        done.append(2)
    assert done == [1, 2]


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """A cache that two processes would have filled at once, and what they computed."""
    root = tmp_path_factory.mktemp("cache")
    one, two = run(root, jobs=2)
    assert one[0] == two[0]
    # one compiled, the other waited
    assert sorted("numba" in loaded for _, loaded in (one, two)) == [False, True]
    (file,) = (root / "cpu").glob("*.native")
    assert not [*(root / "cpu").glob("*.tmp"), *(root / "cpu").glob("*.lock")]
    return root, file, one[0]


@of_one_cache
def test_a_warm_start_imports_no_numba(cached):
    root, _, digest = cached
    assert run(root) == [[digest, []]]


@pytest.mark.parametrize("name", first_fast([s for s in compll.list_specs() if of_arrays(s)]))
def test_specs_of_arrays_need_none_either(name):
    run(specs=[name])  # now they are cached
    ((_, loaded),) = run(specs=[name])
    assert loaded == []


def other_version(data):
    line, _, image = data.partition(b"\n")
    found = json.loads(line)
    found["here"]["llvmlite"] = "0.1"
    return json.dumps(found).encode() + b"\n" + image


DAMAGES = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-100],
    "flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "other version": other_version,
    "other arguments": lambda data: data.replace(b'"float64[2]"', b'"float32[2]"', 1),
    "no JSON": lambda data: b"\xff\x00" + data,
    "other JSON": lambda data: b"[1]\n" + data.partition(b"\n")[2],
}


@of_one_cache
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss(damage, cached, tmp_path):
    data = cached[1].read_bytes()
    path = tmp_path / "kernels.native"
    path.write_bytes(data)
    assert cpu_native.read(path) is not None
    damaged = DAMAGES[damage](data)
    path.unlink() if damaged is None else path.write_bytes(damaged)
    assert cpu_native.read(path) is None


@of_one_cache
@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "other version"])
def test_a_miss_is_made_good(damage, cached):
    root, file, digest = cached
    data = file.read_bytes()
    damaged = DAMAGES[damage](data)
    file.unlink() if damaged is None else file.write_bytes(damaged)
    ((again, loaded),) = run(root)
    assert again == digest
    assert "numba" in loaded
    assert run(root) == [[digest, []]]


def unlinkable():
    """Objects of right digest: no object, one without the entries, one that lacks a symbol."""
    import llvmlite.binding as llvm

    cpu_native.linker()
    machine = llvm.Target.from_default_triple().create_target_machine()
    lacking = "declare void @compll_lacks()\ndefine i64 @compll_check_0() {\n"
    lacking += "call void @compll_lacks()\nret i64 0\n}"
    texts = ["", lacking]
    images = [machine.emit_object(llvm.parse_assembly(text)) for text in texts]
    return [Stored({"check": [[]]}, (image,)) for image in [b"", b"\x7fELF" + bytes(99), *images]]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_what_cannot_be_linked_is_numbas(number, monkeypatch, capfd):
    text = cpu.Source(compll.compile("onebit", "reference").module).text
    monkeypatch.setattr(cpu_native, "read", lambda path: unlinkable()[number])
    kernels = cpu_load.load("onebit", text)
    assert all(map(is_numbas, vars(kernels).values()))
    assert capfd.readouterr() == ("", "")


def is_numbas(kernel):
    """Whether a kernel is a dispatcher of numba's."""
    return hasattr(kernel, "py_func")


def surprise(kernels):
    raise cpu_object.Unfit("not as known")


def onebit_module():
    """The module of onebit's declared kernels."""
    text = cpu.Source(compll.compile("onebit", "reference").module).text
    return cpu_load.imported(cpu_load.place("onebit", text), text)


def test_code_that_is_not_as_known_is_left_to_numba(monkeypatch, tmp_path):
    path = tmp_path / "kernels.native"
    monkeypatch.setattr(cpu_object, "stored", surprise)
    assert cpu_load.keep(path, lambda: path, onebit_module) == Stored({}, ())
    # No other process tries again.
    assert cpu_native.read(path) == Stored({}, ())


def by_numba(name, text):
    """The kernels as numba's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_native, "possible", lambda: False)
        return cpu_load.load(name, text)


@pytest.fixture(scope="module")
def known():
    """Kernels that are taken."""
    found = declared(onebit_module())
    kernels = {name: found[name] for name in ("encode_feed", "check")}
    assert list(cpu_object.stored(kernels).kernels) == ["encode_feed", "check"]
    return kernels


@pytest.mark.slow
@of_one_cache
@pytest.mark.parametrize("change", ["result", "argument", "runtime", "memory"])
def test_another_interface_of_numba_is_noticed(change, known, monkeypatch):
    if change == "result":
        monkeypatch.setattr(cpu_object, "RESULTS", (cpu_object.types.void,))
    elif change == "argument":
        monkeypatch.setitem(cpu_object.LLVM, "bool", "i1")
    elif change == "runtime":
        monkeypatch.setitem(cpu_object.RUNTIME, "NRT_MemInfo_alloc_aligned", "ptr (i64, i64)")
    else:
        monkeypatch.setattr(cpu_object, "MEMINFO", "{i64}")
    with pytest.raises(cpu_object.Unfit):
        cpu_object.stored(known)


@pytest.mark.parametrize("has", [True, False])
def test_vectors_of_512_bits_are_for_processors_that_bear_them(has, monkeypatch):
    codegen = cpu_target.target_context.codegen()
    before = codegen._tm
    features = [f for f in codegen._tm_features.split(",") if "avx512vbmi2" not in f]
    features.append("+avx512vbmi2" if has else "-avx512vbmi2")
    monkeypatch.setattr(codegen, "_tm_features", ",".join(features))
    monkeypatch.setattr(cpu_object, "wider", lambda codegen: "wider")
    with cpu_object.wide(codegen) as machine:
        assert machine == codegen._tm == ("wider" if has else before)
    assert codegen._tm is before


@pytest.mark.parametrize("name", first_fast(["dgc", "sketch", "inceptionn"]))
def test_numbas_own_kernels_give_the_same_bytes(name, rng):
    """Where there are no native ones, as on other systems."""
    cpu = compll.compile(name)
    native, numbas = cpu.backend, type(cpu.backend)(cpu.module, cpu.params)
    assert not any(map(is_numbas, vars(native.kernels).values()))
    numbas.kernels = by_numba(cpu.module.name, native.source.text)
    numbas.stateless_kernels = numbas.kernels
    for n in (1, 700, 4133):
        x = rng.standard_normal(n).astype(np.float32)
        found = [both(backend, cpu, x.copy()) for backend in (native, numbas)]
        for one, other in zip(*found, strict=True):
            assert one.tobytes() == other.tobytes()


def both(backend, codec, x):
    """Payload, state and decoded values of one tensor."""
    n = len(x)
    state = codec.init_state(n) or None
    table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    out = np.zeros(8 * n + 4096, np.uint8)
    place = {"seed": 2**63 + 5, "step": 3}
    used = backend.encode_batch(x, table, out, at, state, **place, scale=0.5, writeback=False)
    y = np.ones(n, np.float32)
    backend.decode_batch(out, table, at, used, y, add=True)
    return [out[: used[0]], y, used, *(state or {}).values()]


@pytest.fixture(scope="module")
def onebit():
    """onebit's kernels as numba makes them."""
    return cpu.Kernels(compll.compile("onebit", "reference").module, {})


def arguments(n):
    """Of onebit's decode_set, for no piece."""
    at, none = np.zeros(0, np.int64), np.zeros((0, 0))
    table, lim = np.zeros((0, 5), np.int64), np.zeros((0, 0), np.int64)
    return [np.zeros(9, np.uint8), table, at, at.copy(), lim, none, np.zeros(n, np.float32)]


WRONG = {
    "dtype": lambda y: y.astype(np.float64),
    "byte order": lambda y: y.astype(">f4"),
    "dimensions": lambda y: y.reshape(2, -1),
    "strides": lambda y: y[::2],
    "read-only": lambda y: np.frombuffer(y.tobytes(), np.float32),
    "no array": lambda y: None,
    "list": list,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_other_arguments_are_refused_as_numba_does(wrong, onebit):
    args = arguments(10)
    onebit.kernels.decode_set(*args)
    args[-1] = WRONG[wrong](args[-1])
    with pytest.raises(TypeError):
        onebit.kernels.decode_set(*args)
    with pytest.raises(TypeError):
        onebit.kernels.decode_set(*args[:-1])


def test_no_memory_is_told(onebit):
    table = np.array([[0, 2**60, 0, 0, 0]], np.int64)
    x, out, at = np.zeros(1, np.float32), np.zeros(99, np.uint8), np.zeros(1, np.int64)
    lim, st = np.zeros((1, 0), np.int64), np.zeros((1, 0))
    rest = [np.zeros(1, np.int64), lim, st, 0, 0, 1.0, False]
    with pytest.raises(MemoryError, match="encode: no memory"):
        onebit.stateless().encode(x, table, out, at, *rest)


def test_threads_at_once(rng):
    onebit = compll.compile("onebit")
    xs = [rng.standard_normal(20_000 + i).astype(np.float32) for i in range(8)]
    expected = [onebit.encode(x).tobytes() for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert [p.tobytes() for p in pool.map(onebit.encode, xs)] == expected


def test_a_call_lets_other_threads_run(onebit):
    ready, go, ran = threading.Event(), threading.Event(), []

    def other():
        ready.set()
        go.wait()
        ran.append(True)

    thread = threading.Thread(target=other)
    args = arguments(0)
    args[1] = np.tile([[0, 0, 0, 0, 0]], (1 << 18, 1))  # many pieces of nothing
    thread.start()
    ready.wait()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nothing makes a thread give up the lock, it must let it go
    try:
        go.set()
        calls = 0
        while not ran and calls < 1000:
            onebit.kernels.decode_set(*args)
            calls += 1
        assert ran
    finally:
        sys.setswitchinterval(before)
        thread.join()


@pytest.mark.parametrize(("value", "native"), [("0", False), ("1", True), ("", True)])
def test_the_user_may_do_without(value, native, monkeypatch):
    monkeypatch.setenv("COMPLL_NATIVE", value)
    assert cpu_native.possible.__wrapped__() == native
