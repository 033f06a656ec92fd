"""Which device serves a request, and why."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from .errors import DeviceError

if TYPE_CHECKING:
    from .gpu.device import DeviceSpec

logger = logging.getLogger("hybridmf")

DEVICES = '"auto", "cpu", "cuda" or "cuda:N", or a list such as ["cuda:0", "cuda:1"]'


def check_device(device: object) -> str | tuple[str, ...]:
    """A device's name, or the names of several (one a rank; the CPU may be named more than once), judged.

    Raises
    ------
    TypeError, ValueError
    """
    if isinstance(device, (list, tuple)):
        return _check_ranks(device)
    if not isinstance(device, str):
        raise TypeError(f"device must be {DEVICES}, got {type(device).__name__} {device!r}")
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
        raise ValueError(f"device must be {DEVICES}; got {device!r}")
    return device


def _check_ranks(devices: list[object] | tuple[object, ...]) -> tuple[str, ...]:
    names = [name if isinstance(name, str) else "" for name in devices]
    if not names or not all(re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) for name in names):
        raise ValueError(f'a list of devices holds "cpu", "cuda" or "cuda:N", once a rank; got {devices!r}')
    names = ["cuda:0" if name == "cuda" else name for name in names]
    if len({name == "cpu" for name in names}) > 1:
        raise ValueError(f"device={devices!r} mixes CPU and GPUs; name devices of one kind")
    gpus = [name for name in names if name != "cpu"]
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"device={devices!r} names a GPU twice; name each once")
    return tuple(names)


def gpu_status() -> tuple[bool, str]:
    """Whether a CUDA GPU can be used, and the reason in words.

    Imports CuPy if it is installed; never raises.

    Returns
    -------
    usable : bool
    reason : str
        The GPUs with their compute capability and free memory, or what is missing and how to get it.
    """
    from .gpu.device import device_count, open_device

    try:
        count = device_count()
    except DeviceError as error:
        return False, str(error)
    usable, reasons = False, []
    for index in range(count):
        try:
            reasons.append(str(open_device(f"cuda:{index}").spec))
            usable = True
        except (DeviceError, ValueError) as error:  # a GPU that is too old; a memory limit that is no size
            reasons.append(str(error))
    return usable, "; ".join(dict.fromkeys(reasons))


def find_gpu(device: str) -> tuple[DeviceSpec | None, str]:
    """The GPU a request may run on, None for the CPU, and the reason.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda", "cuda:N"}

    Raises
    ------
    DeviceError
        A GPU was asked for by name and cannot be used; the message says what to install or change.
    """
    if device == "cpu":
        return None, "asked for"
    from .gpu.device import open_device

    try:
        spec = open_device("cuda" if device == "auto" else device).spec
    except DeviceError as error:
        if device != "auto":
            raise DeviceError(f'device="{device}" cannot be served: {error}. Use device="auto" or "cpu"') from error
        logger.info("device='auto' chose the CPU: %s", error)
        return None, f"no GPU: {error}"
    return spec, "asked for" if device != "auto" else "there is a GPU"
