"""Which device serves a request, and why."""

from __future__ import annotations

import importlib
import logging

from ._validate import check_choice
from .errors import DeviceError

logger = logging.getLogger("hybridmf")

DEVICES = ("auto", "cpu", "cuda")

NO_GPU_SOLVER = "this version of hybridmf has no GPU solvers"


def gpu_status() -> tuple[bool, str]:
    """Whether a CUDA GPU can be reached from Python, and the reason in words.

    Imports CuPy if it is installed; never raises.

    Returns
    -------
    usable : bool
        CuPy is installed and sees a device. This version has no GPU solvers, so "usable" is about the machine.
    reason : str
        The names of the GPUs, or what is missing.
    """
    return _look_for_gpus()[:2]


def _look_for_gpus() -> tuple[bool, str, Exception | None]:
    """`gpu_status`, and the exception that says no."""
    try:
        cupy = importlib.import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
        names = [cupy.cuda.runtime.getDeviceProperties(k)["name"].decode() for k in range(count)]
    except Exception as error:  # CuPy raises its own classes for a missing driver, library or device
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return False, "CuPy is not installed", error
        text = " ".join(str(error).split())  # one line of a plan
        return False, f"CuPy cannot use a GPU here: {type(error).__name__}: {text}", error
    if not count:
        return False, "CuPy found no CUDA device", None
    return True, ", ".join(names), None


def why_no_gpu(usable: bool, reason: str) -> str:
    """Why nothing runs on a GPU, from what `gpu_status` says: a GPU alone, or CuPy alone, would not change it."""
    return f"{NO_GPU_SOLVER} ({'found ' * usable}{reason})"


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
        ``device="cuda"``, which this version cannot serve; CuPy's own error is its cause.
    """
    choice = check_choice("device", device, DEVICES)
    if choice == "cpu":
        return "cpu", "asked for"
    usable, found, error = _look_for_gpus()
    reason = why_no_gpu(usable, found)
    if choice == "cuda":
        raise DeviceError(f'device="cuda" cannot be served: {reason}. Use device="auto" or "cpu"') from error
    logger.info("device='auto' chose the CPU: %s", reason)
    return "cpu", reason
