"""Which device serves a request, and why."""

from __future__ import annotations

import importlib
import importlib.util
import logging

from ._validate import check_choice
from .errors import DeviceError

logger = logging.getLogger("hybridmf")

DEVICES = ("auto", "cpu", "cuda")


def gpu_status() -> tuple[bool, str]:
    """Whether a CUDA GPU can be reached from Python, and the reason in words.

    Imports CuPy only if it is installed; never raises.

    Returns
    -------
    usable : bool
        CuPy is installed and sees a device. This version has no GPU solvers, so "usable" is about the machine.
    reason : str
    """
    if importlib.util.find_spec("cupy") is None:
        return False, "CuPy is not installed: pip install hybridmf[cuda13] (or [cuda12])"
    try:
        cupy = importlib.import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
        names = [cupy.cuda.runtime.getDeviceProperties(k)["name"].decode() for k in range(count)]
    except Exception as error:  # CuPy raises its own classes for a missing driver, library or device
        return False, f"CuPy cannot use a GPU here: {type(error).__name__}: {error}"
    if not count:
        return False, "CuPy found no CUDA device"
    return True, ", ".join(names)


NO_GPU_SOLVER = "this version of hybridmf has no GPU solvers"


def resolve_device(device: object) -> tuple[str, str]:
    """The device that will run and the reason for it.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda"}

    Returns
    -------
    device : str
    reason : str

    Raises
    ------
    DeviceError
        ``device="cuda"``, which nothing here can serve; the message says what is missing.
    """
    choice = check_choice("device", device, DEVICES)
    if choice == "cpu":
        return "cpu", "asked for"
    usable, found = gpu_status()
    if choice == "cuda":
        cause = f"{NO_GPU_SOLVER}, though it found {found}" if usable else found
        raise DeviceError(f'device="cuda" cannot be served: {cause}. Use device="auto" or "cpu"')
    reason = f"{NO_GPU_SOLVER} (found {found})" if usable else f"no GPU: {found}"
    logger.info("device='auto' chose the CPU: %s", reason)
    return "cpu", reason
