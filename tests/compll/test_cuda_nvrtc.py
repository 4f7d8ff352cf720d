"""Compilation of CUDA kernels to machine code that a device loads."""

import importlib.metadata
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from compll.backends.cuda import device as cuda_device
from compll.backends.cuda import nvrtc as cuda_nvrtc
from compll.backends.cuda import source as cuda_source
from compll.errors import UsageError
from compll.runtime.library import type_check


@pytest.fixture
def source():
    return cuda_source.source(type_check("onebit_group", {})[0])


@pytest.fixture
def module(monkeypatch, tmp_path):
    """A stand-in for CuPy, on a device of compute capability 9.0."""
    monkeypatch.setattr(cuda_nvrtc, "folder", lambda kind: tmp_path)
    runtime = SimpleNamespace(getDevice=lambda: 0)
    device = SimpleNamespace(compute_capability="90")
    made = SimpleNamespace(
        cuda=SimpleNamespace(runtime=runtime, Device=lambda: device),
        RawModule=lambda path: SimpleNamespace(get_function=lambda name: (path, name)),
    )
    monkeypatch.setattr(cuda_device, "cupy", lambda: made)
    return made


def test_kernels_are_compiled_once_and_loaded_from_a_file(module, source, monkeypatch):
    path, name = cuda_device.CupyDevice(source).function("float32", "encode_walk0")
    assert name == "encode_walk0"
    code = Path(path).read_bytes()
    assert code[:4] == b"\x7fELF"
    assert b"encode_walk0" in code
    monkeypatch.setattr(cuda_nvrtc, "cubin", lambda *_: pytest.fail("compiled again"))
    again, _ = cuda_device.CupyDevice(source).function("float32", "decode_set_walk0")
    assert again == path


@pytest.fixture
def compiler(monkeypatch):
    """A stand-in for NVRTC, which takes seconds."""
    monkeypatch.setattr(cuda_nvrtc, "cubin", lambda *_: b"\x7fELF made")


@pytest.mark.usefixtures("compiler")
def test_machine_code_that_others_may_write_is_not_loaded(module, source):
    path = cuda_nvrtc.kept(source.full(), "90")
    path.write_bytes(b"planted")
    path.chmod(0o666)
    assert cuda_nvrtc.kept(source.full(), "90") == path
    assert path.read_bytes() == b"\x7fELF made"


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("data", [b"", b"\x7fELF"])
def test_cut_machine_code_is_compiled_again(module, source, data):
    """A loss of power may leave the file's beginning."""
    path = cuda_nvrtc.kept(source.full(), "90")
    whole = path.read_bytes()
    path.write_bytes(data)
    assert cuda_nvrtc.kept(source.full(), "90").read_bytes() == whole


def disassembler():
    """The disassembler of the development set-up; None without it, as at run time."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((file.locate() for file in files if file.name == "nvdisasm"), None)


@pytest.mark.skipif(disassembler() is None, reason="needs nvidia-cuda-nvdisasm")
def test_denormal_floats_stay(source):
    """CuPy's own options would flush them to zero, and payloads would differ."""
    tool = disassembler()
    path = cuda_nvrtc.kept(source.full(), "90")
    code = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    assert "FMUL" in code
    assert "FMUL.FTZ" not in code


def test_architectures():
    assert cuda_nvrtc.architecture("90") == "sm_90"
    assert cuda_nvrtc.architecture("199").startswith("compute_1")
    with pytest.raises(RuntimeError, match="capability 50"):
        cuda_nvrtc.architecture("50")


def test_a_device_newer_than_nvrtc_gets_ptx(source):
    path = cuda_nvrtc.kept(source.full(), "199")
    assert path.suffix == ".ptx"
    assert ".entry encode_walk0" in path.read_text()


def test_a_codec_belongs_to_a_device(module, source):
    device = cuda_device.CupyDevice(source)
    module.cuda.runtime.getDevice = lambda: 2
    with pytest.raises(UsageError, match="made on device 0, and 2 is the current one"):
        device.function("float32", "encode_walk0")


def test_an_old_device_is_refused(module, source):
    module.cuda.Device = lambda: SimpleNamespace(compute_capability="50")
    with pytest.raises(UsageError, match="capability 50: NVRTC knows no device"):
        cuda_device.CupyDevice(source).function("float32", "encode_walk0")
