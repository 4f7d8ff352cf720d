"""Transports of models' gradients, and refusals, without any device."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import compll
from compll.backends.cuda import device as cuda_device
from hipress.codecs import compile_codec
from hipress.errors import ConfigError
from hipress.model.devices import ON_HOST, Placement, backends_of, place
from hipress.model.params import describe
from hipress.policies import Warmup
from tests.casync.fakes import CODECS
from tests.hipress import device_ranks
from tests.hipress.fakes import Int8
from tests.hipress.launch import launch
from tests.tiers import first_fast

CPU, GPU, OTHER, DEVICE = map(torch.device, ("cpu", "cuda:0", "cuda:1", "meta"))
GLOO = {"cpu": "gloo", "cuda": "gloo"}
NCCL = {"cuda": "nccl"}
BOTH = {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(
    "device, transport, backends, chosen",
    [
        (CPU, "auto", GLOO, "gloo"),
        (CPU, "gloo", BOTH, "gloo"),
        (GPU, "auto", NCCL, "nccl"),
        (GPU, "auto", BOTH, "nccl"),
        (GPU, "staged", GLOO, "staged"),
        (GPU, "staged", NCCL, "staged"),
        (GPU, "nccl4py", GLOO, "nccl4py"),
        (GPU, "host", GLOO, "host"),
        (GPU, "host", NCCL, "host"),
    ],
)
def test_the_transport_follows_from_the_group_and_the_device(device, transport, backends, chosen):
    assert place([("w", device), ("b", device)], transport, backends) == Placement(device, chosen)


@pytest.mark.parametrize(
    "devices, transport, backends, told",
    [
        ([GPU], "auto", GLOO, r'model is on cuda:0, and gloo .*transport="staged".*nccl'),
        ([GPU], "gloo", NCCL, r'gloo moves host memory: pass transport="staged"'),
        ([CPU], "auto", NCCL, r"model is on the CPU, and the process group is NCCL's"),
        ([CPU], "staged", GLOO, r"transport='staged' is for models on a GPU; this one is on the"),
        ([CPU], "host", GLOO, r"transport='host' is for models on a GPU; this one is on the CPU"),
        ([CPU, GPU], "auto", BOTH, r"several devices: 'p0' on cpu and 'p1' on cuda:0; use one"),
        ([GPU, OTHER], "auto", NCCL, r"'p0' on cuda:0 and 'p1' on cuda:1; use one device a proc"),
        ([torch.device("meta")], "auto", GLOO, r"parameter 'p0' is on meta; gradients are sync"),
        ([GPU], "stagd", GLOO, r"unknown transport 'stagd'.*staged"),
    ],
)
def test_unworkable_devices_are_refused(devices, transport, backends, told):
    with pytest.raises(ConfigError, match=told):
        place([(f"p{i}", device) for i, device in enumerate(devices)], transport, backends)


def test_a_model_on_another_gpu_than_the_current_one_is_refused(monkeypatch):
    """Models on several GPUs of one process, one after the other."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(ConfigError, match=r"on cuda:0, and cuda:1 .*torch.cuda.set_device\(0\)"):
        Placement(GPU, "nccl").refuse_other_current()
    Placement(OTHER, "nccl").refuse_other_current()
    ON_HOST.refuse_other_current()


def test_codecs_of_hosts_are_refused_on_a_device():
    on_gpu, cpu = Placement(GPU, "staged"), compll.compile("onebit_group")
    with pytest.raises(ConfigError, match="codec 'onebit_group' was compiled for 'cpu'"):
        on_gpu.refuse(cpu)
    with pytest.raises(ConfigError, match="codec 'sign' is a Python object: pass its spec's name"):
        on_gpu.refuse(CODECS["sign"])
    ON_HOST.refuse(cpu)


@pytest.mark.parametrize("transport, who", [("gloo", "the model is"), ("host", "transport='host'")])
def test_codecs_of_devices_are_refused_where_the_cpu_compresses(transport, who):
    with pytest.raises(ConfigError, match=f"codec 'int8_fake' was compiled for 'cuda', and {who}"):
        Placement(CPU, transport).refuse(device_ranks.ForCuda())


def test_codecs_of_hosts_take_gradients_that_are_copied_there():
    placement = Placement(GPU, "host")
    assert placement.target == "cpu"
    placement.refuse(CODECS["sign"])


def test_sparse_gradients_are_not_copied_to_the_host():
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 3, sparse=True), torch.nn.Linear(3, 3))
    params = describe(model)
    with pytest.raises(ConfigError, match=r"gradient of '0.weight' is sparse.*pass .*staged"):
        Placement(GPU, "host").refuse_sparse(params)
    Placement(GPU, "host").refuse_sparse(params[1:])
    Placement(GPU, "staged").refuse_sparse(params)


def test_the_backends_of_a_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert backends_of(dist.group.WORLD)["cpu"] == "gloo"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", first_fast([torch.bfloat16, torch.float32]))
def test_the_engine_on_a_device_is_that_of_the_host(dtype):
    """Real processes over gloo, with device memory and kernels emulated."""
    launch(device_ranks.alike, 2, dtype)


def test_a_bucket_is_used_before_later_ones_are_there():
    """On a device as on the host, an optimizer's step overlaps with buckets that are under way."""
    launch(device_ranks.in_turn, 2)


@pytest.mark.parametrize("dtype", first_fast([torch.float32, torch.bfloat16]))
def test_uncompressed_buckets_of_a_device_go_through_pinned_memory(dtype):
    """Uncompressed buckets between compressed ones, over gloo."""
    launch(device_ranks.uncompressed, 2, dtype)


@pytest.mark.parametrize("dtype", first_fast([torch.bfloat16, torch.float32]))
def test_over_nccl_uncompressed_buckets_do_not_go_to_the_host(dtype):
    """Also if the group is gloo's, as a Synchronizer's is: our own communicators reduce."""
    launch(device_ranks.over_slots, 2, dtype, "onebit_group")


@pytest.mark.parametrize(
    "dtype, codec, strategy, min_size",
    [
        (torch.float32, "onebit_group", "ps", 1000),
        (torch.bfloat16, "topk", "exchange", 0),
    ],
)
def test_gradients_that_go_to_the_host_are_averaged_as_its_own(dtype, codec, strategy, min_size):
    launch(device_ranks.hosted, 2, dtype, codec, strategy, min_size)


WAYS = {
    "unused": ("wrap", {"compressor": "onebit_group"}, True),
    "auto": ("wrap", {"compressor": "auto"}, False),
    "policy": ("wrap", {"policy": Warmup("topk", ratios=(0.1, 0.01), steps=2)}, False),
    "synchronizer": ("synchronizer", {"compressor": "int8_group", "verify": True}, False),
}


@pytest.mark.slow
def test_gradients_copied_to_the_host_train_as_on_the_cpu():
    first, other = launch(device_ranks.wrapped, 2, WAYS)
    assert first == other
    for name, (without, copied) in first.items():
        assert without == copied or name == "auto", name  # which depends on times


def test_a_failure_reaches_who_waits_for_copies():
    for told in launch(device_ranks.lost, 2):
        assert len(told) == 2, told
        assert all("no gradient" in text or "closed the conn" in text for text in told), told


@pytest.mark.parametrize("strategy", first_fast(["ps", "exchange"]))
def test_a_payload_that_a_kernel_refuses_ends_the_step(strategy):
    """No optimizer steps on the decoding rank, and the next step fails on all ranks."""
    told = launch(device_ranks.broken, 3, strategy)
    assert any(text.startswith("step 0: ") for text in told), told
    for text in told:
        assert re.search(r"rank \d(, peer 2)?, task `merge rank=\d part=", text), text
        assert "PayloadError: topk: an index lies outside its tensor" in text
        # of two that find it in this step, one or both may hear of the other first
        alone = text.startswith("step 0: SyncError: step 0 failed: rank ")
        assert alone or re.match("step [01]: RankLost: rank [0-2] failed ", text)


CUPY = "needs CuPy (pip install 'hipress[cuda12]' or 'hipress[cuda13]'"


@pytest.mark.parametrize(
    "where, asked, told",
    first_fast([
        ((CPU, "gloo"), {"compressor": device_ranks.ForCuda()}, "and the model is on the CPU"),
        ((CPU, "host"), {"compressor": device_ranks.ForCuda()}, "transport='host' compresses on"),
        ((CPU, "gloo"), {"rules": {"*": device_ranks.ForCuda()}}, "was compiled for 'cuda'"),
        ((CPU, "gloo"), {"down": device_ranks.ForCuda(digest="2")}, "was compiled for 'cuda'"),
        ((DEVICE, "staged"), {"compressor": Int8()}, "codec 'int8_fake' is a Python object"),
        ((DEVICE, "staged"), {}, CUPY),
        ((DEVICE, "staged"), {"compressor": "auto"}, CUPY),
        ((DEVICE, "nccl4py"), {"compressor": device_ranks.ForCuda()}, "hipress[cuda12]"),
    ]),
)  # fmt: skip
def test_bad_options_raise_on_every_rank_before_training(where, asked, told):
    for text in launch(device_ranks.refused, 2, where, asked, False):
        assert text.startswith("ConfigError: ")
        assert told in text


@pytest.mark.parametrize(
    "where, asked, told",
    [
        (None, {"transport": "staged"}, "transport='staged' is for models on a GPU"),
        ((DEVICE, "staged"), {}, CUPY),
    ],
)
def test_bad_options_of_one_rank_raise_on_all(where, asked, told):
    first, *others = launch(device_ranks.refused, 2, where, asked, True)
    assert first.startswith("ConfigError: ")
    assert told in first
    assert all("rank 0" in text and told in text for text in others), others


def test_a_cupy_of_another_cuda_than_the_driver_s_is_named(monkeypatch):
    class CUDARuntimeError(RuntimeError):
        pass

    def get_device_count():
        raise CUDARuntimeError("cudaErrorInsufficientDriver: driver version is insufficient")

    runtime = SimpleNamespace(getDeviceCount=get_device_count, CUDARuntimeError=CUDARuntimeError)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(cuda_device, "cupy", cuda_device.cupy.__wrapped__)
    with pytest.raises(ConfigError, match=r"driver version is .*insufficient.*hipress\[cuda12\]"):
        compile_codec("onebit_group", {}, "cuda")
