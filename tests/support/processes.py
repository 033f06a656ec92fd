"""Ranks that are processes of this machine, connected over sockets."""

from __future__ import annotations

import multiprocessing
import secrets
import socket
from collections.abc import Callable
from typing import Any

from hybridmf.ranks.transport.sockets import SocketCommunicator


def exit_codes(size: int, function: Callable[..., None], args: tuple[Any, ...], *, timeout: float) -> list[int | None]:
    """How the process of each rank ends that runs ``function(communicator, *args)``; none outlives the call."""
    context, token = multiprocessing.get_context("spawn"), secrets.token_hex(32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
        processes = [
            context.Process(
                target=_rank,
                args=(rank, size, address, listener if rank == 0 else None, token, timeout, function, args),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(timeout)
            return [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(
    rank: int,
    size: int,
    address: tuple[str, int],
    listener: socket.socket | None,
    token: str,
    timeout: float,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    communicator = SocketCommunicator.connect(rank, size, address, token=token, timeout=timeout, listener=listener)
    function(communicator, *args)
    communicator.close()
