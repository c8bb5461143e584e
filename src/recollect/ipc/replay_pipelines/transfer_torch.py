"""Transfers to the devices of torch: cuda (ROCm too), xpu and mps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from recollect.ipc.replay_pipelines import native_h2d
from recollect.ipc.replay_pipelines.transfer import (
    Block,
    StreamTransfer,
    TransferBackend,
    UnqueuedTransfer,
    describe,
)

_log = logging.getLogger(__name__)


def make(device: Any) -> TransferBackend:
    """Return the backend for a torch.device that is not the CPU."""
    makers: dict[str, Any] = {"cuda": CudaTransfer, "xpu": XpuTransfer, "mps": MpsTransfer}
    if device.type not in makers:
        raise ValueError(f"device: must be numpy, cpu, cuda, xpu or mps, got {device}; copy batches yourself")
    kind = torch.mps if device.type == "mps" else getattr(torch, device.type)
    if not kind.is_available():
        raise ValueError(f"device: must be one that this machine has, got {device}; is its driver installed?")
    made: TransferBackend = makers[device.type](str(device))
    return made


class TorchStreamTransfer(StreamTransfer):
    """Streams and events of a torch device module (`torch.cuda`, `torch.xpu`)."""

    def __init__(self, device: str, module: Any) -> None:
        super().__init__(device)
        self._module, self._tensors = module, list[Any]()

    def new_stream(self) -> Any:
        return self._module.Stream(device=self.device)

    def new_event(self, name: str) -> Any:
        return self._module.Event(enable_timing=not name.startswith("released"))

    def current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    def new_block(self, like: Block) -> Block:
        return torch.empty(like.shape, dtype=torch.uint8, device=self.device)

    def register_host_slots(self, slots: Sequence[Block]) -> None:
        super().register_host_slots([torch.from_numpy(slot) for slot in slots])

    def queue_copy(self, to: Block, source: Block, stream: Any) -> None:
        with self._module.stream(stream):
            to.copy_(source, non_blocking=True)


class XpuTransfer(TorchStreamTransfer):
    """Intel GPUs: a side stream and events, from pageable memory."""

    def __init__(self, device: str) -> None:
        super().__init__(device, torch.xpu)

    def describe(self) -> dict[str, Any]:
        return describe(
            type(self), self.device, "xpu", "torch_xpu_copy_stream", asynchronous=True, timing=True
        )


class CudaTransfer(TorchStreamTransfer):
    """NVIDIA and AMD GPUs: the shared slots are pinned where they lie, so a copy needs no staging.

    If the driver refuses that, batches go through private pinned memory; if it refuses that too, they are copied from
    pageable memory. Either is logged, and stands in the manifest.
    """

    def __init__(self, device: str, module: Any = None) -> None:
        super().__init__(device, module or torch.cuda)
        self._shared: list[Any] = []  # what was registered with the driver
        self._kind = "shared"
        self._native = native_h2d.ensure_available()

    def new_event(self, name: str) -> Any:
        # blocking: who waits for it on the host sleeps; without, the runtime spins
        return self._module.Event(enable_timing=not name.startswith("released"), blocking=True)

    def register_host_slots(self, slots: Sequence[Block]) -> None:
        super().register_host_slots(slots)
        self._filled = list(self._host)
        if self._register():
            self._kind = "shared_registered"
            return
        _log.warning(
            "%s: the driver refused to pin shared memory; batches go through a staging copy", self.device
        )
        try:
            self._host = [torch.empty(t.shape, dtype=torch.uint8, pin_memory=True) for t in self._filled]
            self._kind = "private_pinned"
        except RuntimeError as error:
            _log.warning(
                "%s: nor private memory (%s); batches are copied from pageable memory", self.device, error
            )

    def _register(self) -> bool:
        runtime = self._module.cudart()
        for tensor in self._host:
            if int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)) != 0:
                self._unregister()
                return False
            self._shared.append(tensor)
        return True

    def _unregister(self) -> None:
        while self._shared:
            self._module.cudart().cudaHostUnregister(self._shared.pop().data_ptr())

    def submit_h2d(self, slot: int) -> None:
        if self._host[slot] is not self._filled[slot]:  # its last copy has finished: the packer waited for it
            self._host[slot].copy_(self._filled[slot])
        super().submit_h2d(slot)

    def queue_copy(self, to: Block, source: Block, stream: Any) -> None:
        if self._native and self._kind != "shared":
            native_h2d.submit_h2d(to, source, stream)
        else:
            super().queue_copy(to, source, stream)

    def describe(self) -> dict[str, Any]:
        pinned = self._kind != "shared"
        submitter = "native" if self._native and pinned else "torch_copy_stream"
        direct = self._kind == "shared_registered"
        return describe(
            type(self), self.device, "cuda", submitter, kind=self._kind, pinned=pinned, direct=direct,
            asynchronous=pinned, timing=True,
        )  # fmt: skip

    def close(self) -> None:
        if self._shared:
            self._module.synchronize(self.device)  # nothing may still be reading what is given back
            self._unregister()
        self._filled = []
        super().close()


class MpsTransfer(UnqueuedTransfer):
    """Apple GPUs: the learner's thread issues the copy, in order with its own work, so nothing has to wait."""

    submits_in_learner = True

    def __init__(self, device: str) -> None:
        self.device, self._host, self._blocks = device, list[Any](), list[Any]()
        self._copied = [False, False]

    def register_host_slots(self, slots: Sequence[np.ndarray[Any, Any]]) -> None:
        self._host = [torch.from_numpy(slot) for slot in slots]

    def allocate_device_slots(self, count: int) -> list[Block]:
        self._blocks = [
            torch.empty(t.shape, dtype=torch.uint8, device=self.device) for t in self._host[:count]
        ]
        return list(self._blocks)

    def submit_h2d(self, slot: int) -> None:
        self._blocks[slot].copy_(self._host[slot])  # complete on return: the slot may be filled again
        self._copied[slot] = True

    def clear_ready(self, slot: int) -> None:
        self._copied[slot] = False

    def ready_query(self, slot: int) -> bool:
        return self._copied[slot]

    def describe(self) -> dict[str, Any]:
        return describe(type(self), self.device, "mps", "torch_copy_main_thread")

    def close(self) -> None:
        self._host, self._blocks = [], []
