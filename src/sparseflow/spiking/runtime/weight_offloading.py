"""`OffloadedWeights`: parameters of a network whose values are in slower memory than usual.

The parameters stay usable: every operation reads and writes them where they are. On a CPU they are in a
memory-mapped file, whose pages the operating system drops and reads again. On a GPU they are in page-locked
memory of the host, which kernels read over the bus.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MIN_OFFLOADED_BYTES = 16 << 10
"""Smaller parameters stay: all of them together hold less than one large weight."""

_ALIGNMENT = 64
_DEFAULT_DIRECTORY = "/var/tmp"
"""On many systems `/tmp` is in memory, and this is not."""


def find_offloadable(model: nn.Module, used: Container[nn.Parameter]) -> list[nn.Parameter]:
    """Find the parameters of a network that can be offloaded.

    Args:
        model: The network.
        used: Parameters that stay, because calls read them.

    Returns:
        Parameters that own all of their memory, so that no other tensor of the network changes with them.
    """
    tensors = [*model.parameters(), *model.buffers()]
    owners = Counter(t.untyped_storage().data_ptr() for t in tensors if _has_memory(t))
    return [
        parameter
        for parameter in model.parameters()
        if parameter not in used
        and type(parameter) is nn.Parameter
        and _has_memory(parameter)
        and parameter.nbytes >= MIN_OFFLOADED_BYTES
        and parameter.untyped_storage().nbytes() == parameter.nbytes
        and owners[parameter.untyped_storage().data_ptr()] == 1
        and torch.empty_like(parameter, device="meta").stride() == parameter.stride()  # without gaps
    ]


def _has_memory(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_inference()  # which cannot be replaced
    )


class OffloadedWeights:
    """Moves parameters to slower memory. They keep their identity, values, device, shape and strides.

    Tensors outside of the network that share their memory, such as those of an earlier `state_dict`, keep the
    old memory and no longer change with them.

    Args:
        parameters: Parameters of `find_offloadable`.

    Attributes:
        nbytes: Size of all parameters, in bytes.

    Raises:
        OSError: The file cannot be written.
        RuntimeError: The GPU cannot read memory of the host.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            in_file = [parameter for parameter in parameters if not parameter.is_cuda]
            on_host = [parameter for parameter in parameters if parameter.is_cuda]
            copies = [*_copy_to_file(in_file), *map(_copy_to_host, on_host)]
            self._addresses: list[tuple[nn.Parameter, int]] = []
            for parameter, copy in zip([*in_file, *on_host], copies, strict=True):
                parameter.data = copy
                self._addresses.append((parameter, copy.data_ptr()))
        self.nbytes = sum(parameter.nbytes for parameter in parameters)

    def load(self) -> None:
        """Move the parameters back, except those that were moved elsewhere in the meantime."""
        with torch.inference_mode(False), torch.no_grad():
            for parameter, address in self._addresses:
                if parameter.data_ptr() == address:
                    parameter.data = parameter.detach().clone()


def _copy_to_file(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Copy parameters on a CPU to tensors over one temporary file, which has no name.

    A write to such a tensor changes neither the file nor the tensor in a forked process. `torch.from_file`
    would do, too, but its tensors cannot be sent to other processes.
    """
    if not parameters:
        return []
    offsets: list[int] = []
    with tempfile.TemporaryFile(dir=_choose_directory()) as file:
        for parameter in parameters:
            offsets.append(file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR))
            content = parameter.detach().as_strided((parameter.numel(),), (1,)).view(torch.uint8)
            file.write(content.numpy().data)
        file.flush()
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return [
        torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=offset).as_strided(
            parameter.size(), parameter.stride()
        )
        for parameter, offset in zip(parameters, offsets, strict=True)
    ]


def _choose_directory() -> str | None:
    """Return the directory of the file; None for Python's default."""
    use_default = "TMPDIR" in os.environ or not Path(_DEFAULT_DIRECTORY).is_dir()
    return None if use_default else _DEFAULT_DIRECTORY


class _HostMemory:
    """Page-locked memory of the host, which torch can view as a tensor of a GPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.address = self._bytes.data_ptr()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self._bytes.numel(),),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        with suppress(RuntimeError):  # in a forked process
            torch.cuda.synchronize(self._device)  # a kernel may still read it


def _copy_to_host(parameter: nn.Parameter) -> Tensor:
    """Copy a parameter on a GPU to a tensor of that GPU over memory of the host."""
    with torch.cuda.device(parameter.device):
        memory = _HostMemory(parameter.nbytes, parameter.device)
        view = torch.as_tensor(memory, device=parameter.device).view(parameter.dtype)
        copy = view.as_strided(parameter.size(), parameter.stride()).copy_(parameter)
    if copy.data_ptr() != memory.address or not torch.equal(copy, parameter):
        raise RuntimeError(f"{parameter.device} does not read memory of the host in place")
    return copy
