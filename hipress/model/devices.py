"""The device of a model's gradients, and the transport of payloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from casync.codec import Codec
from casync.memory import Memory
from casync.memory.device import DeviceMemory
from casync.memory.host import HostMemory
from hipress.errors import ConfigError, unknown
from hipress.model.params import Param

__all__ = ["NCCL", "ON_HOST", "TRANSPORTS", "Placement", "backends_of", "by_gloo", "place"]

#: NCCL binding (see casync/nccl/) by transport
NCCL = {"nccl": "distributed", "nccl4py": "nccl4py", "pynccl": "pynccl"}
TRANSPORTS = ("auto", "gloo", "staged", "host", *NCCL)


@dataclass(frozen=True)
class Placement:
    """A device, and the transport of its payloads: one of TRANSPORTS, except "auto"."""

    device: torch.device
    transport: str

    @property
    def on_host(self) -> bool:
        """True if gradients are compressed on the CPU."""
        return self.device.type == "cpu" or self.copies

    @property
    def copies(self) -> bool:
        """True if a device's gradients are copied to the host, and averages back."""
        return self.transport == "host"

    @property
    def by_nccl(self) -> bool:
        """True if payloads travel from device to device, by communicators of hipress."""
        return self.transport in NCCL

    @property
    def target(self) -> str:
        """The compll backend that compiles codecs for this placement."""
        return "cpu" if self.on_host else "cuda"

    def memory(self) -> Memory:
        """Memory of the gradients."""
        return HostMemory() if self.device.type == "cpu" else DeviceMemory(self.device)

    def refuse_capture(self, capture: bool | str) -> None:
        """Raise ConfigError if capture is asked for and there are no CUDA graphs."""
        if capture is True and not self.by_nccl:
            raise ConfigError(
                f"capture=True makes CUDA graphs, over NCCL; payloads of a model on {self.device} "
                f"travel by {self.transport!r}: leave it out"
            )

    def refuse_checksum(self, checksum: bool) -> None:
        """Raise ConfigError if checksums are asked for, and no host sees the payloads."""
        if checksum and self.by_nccl:
            raise ConfigError(
                f"checksum=True adds a CRC-32 where a host sends, and payloads of a model on "
                f"{self.device} travel by {self.transport!r} from device to device: leave it out, "
                'or pass transport="staged" or "host"'
            )

    def refuse_other_current(self) -> None:
        """Raise ConfigError if another GPU is the current one: kernels would run there."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            raise ConfigError(
                f"the model is on {self.device}, and cuda:{torch.cuda.current_device()} is the "
                f"current device: call torch.cuda.set_device({self.device.index}) first"
            )

    def refuse_sparse(self, params: Iterable[Param]) -> None:
        """Raise ConfigError for sparse gradients, whose lengths vary, if gradients are copied."""
        for param in params:
            if self.copies and param.sparse:
                raise ConfigError(
                    f"the gradient of {param.name!r} is sparse, and transport='host' copies dense "
                    'ones: pass transport="staged"'
                )

    def refuse(self, codec: Codec) -> None:
        """Raise ConfigError for a codec that does not work with this placement."""
        target = getattr(codec, "target", None)  # None: a Python object for NumPy arrays
        if self.on_host:
            if target == "cuda":
                raise ConfigError(
                    f"codec {codec.name!r} was compiled for 'cuda', and {self._who_compresses}: "
                    "pass its spec's name or path, or the codec that "
                    'compll.compile(..., "cpu") returns'
                )
            return
        if target != "cuda":
            kind = "is a Python object" if target is None else f"was compiled for {target!r}"
            raise ConfigError(
                f"the model is on {self.device}, and codec {codec.name!r} {kind}: pass its spec's "
                'name or path, the codec that compll.compile(..., "cuda") returns, or '
                'transport="host"'
            )

    @property
    def _who_compresses(self) -> str:
        if self.copies:
            return "transport='host' compresses on the CPU"
        return "the model is on the CPU"


ON_HOST = Placement(torch.device("cpu"), "gloo")


def place(
    parameters: Iterable[tuple[str, torch.device]], transport: str, backends: Mapping[str, str]
) -> Placement:
    """The placement of named parameters. backends: the process group's, by type of device.

    Raises ConfigError for several devices, and for what the transport or the group cannot carry.
    """
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    first: dict[torch.device, str] = {}
    for name, device in parameters:
        first.setdefault(device, name)
    if len(first) > 1:
        where = " and ".join(f"{name!r} on {device}" for device, name in list(first.items())[:2])
        raise ConfigError(f"a model on several devices: {where}; use one device a process")
    for device, name in first.items():
        if device.type == "cuda":
            return Placement(device, _device_transport(device, transport, backends))
        if device.type != "cpu":
            raise ConfigError(
                f"parameter {name!r} is on {device}; gradients are synchronized on the CPU and on "
                "CUDA devices"
            )
    return Placement(ON_HOST.device, _host_transport(transport, backends))


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a process group for each type of device, such as {"cpu": "gloo"}."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def by_gloo(group: dist.ProcessGroup) -> bool:
    """True if gloo moves the group's GPU memory."""
    return isinstance(group, dist.ProcessGroupGloo) or backends_of(group).get("cuda") == "gloo"


def _host_transport(transport: str, backends: Mapping[str, str]) -> str:
    if transport not in ("auto", "gloo"):
        raise ConfigError(f"transport={transport!r} is for models on a GPU; this one is on the CPU")
    if backends.get("cpu", "nccl") == "nccl":
        raise ConfigError(
            "the model is on the CPU, and the process group is NCCL's, which moves GPU memory: "
            'move the model to the GPU, or init_process_group("gloo")'
        )
    return "gloo"


def _device_transport(device: torch.device, transport: str, backends: Mapping[str, str]) -> str:
    if transport not in ("auto", "gloo"):
        return transport
    if transport == "gloo" or backends.get("cuda") != "nccl":
        raise ConfigError(
            f"the model is on {device}, and gloo moves host memory: pass "
            'transport="staged" (payloads go through pinned memory) or "host" (the CPU '
            'compresses), or init_process_group("nccl")'
        )
    return "nccl"
