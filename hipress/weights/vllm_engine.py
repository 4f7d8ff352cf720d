"""The weight-transfer backend of vLLM, which loads this module in its workers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from hipress.weights.receiver import Receiver


@dataclass
class Followed:
    """The `init_info`: a host's copy of the checkpoint, and the folder of versions."""

    checkpoint: str
    source: str


@dataclass
class Update:
    """The `update_info`."""

    version: int
    prefetch: bool = False  # True: only read and check it, as before a pause


class HipressEngine(WeightTransferEngine):  # type: ignore[misc]
    """Brings the checkpoint to a version, then loads it into the model.

    A version that cannot be applied raises the receiver's error, and the model stays as it was.
    """

    init_info_cls, update_info_cls = Followed, Update

    def init_transfer_engine(self, init_info: Followed) -> None:
        """Take the checkpoint."""
        self._receiver = Receiver(init_info.checkpoint, init_info.source)

    def start_weight_update(self) -> None:
        """Nothing: layers are emptied once the checkpoint is right."""

    def receive_weights(self, update_info: Update) -> None:
        """Bring checkpoint and model to a version. Raises the errors of Receiver.apply."""
        if update_info.prefetch:
            self._receiver.prefetch(update_info.version)
            return
        self._receiver.apply(update_info.version)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(self._receiver.tensors())
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing: all was loaded."""

    def shutdown(self) -> None:
        """Nothing: no connection is kept."""
