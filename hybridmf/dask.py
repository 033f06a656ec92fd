"""Fits on the workers of a Dask cluster: each worker is a rank, and ranks use Dask's own connections.

One task is pinned to each worker and occupies it until the end of the fit. A lock over all workers prevents a deadlock
of two fits that hold half of the workers each. XGBoost uses the same scheme on Dask.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .core.objective import Side
from .core.validate import check_choice
from .data.labels import Entries, factorize, places_among
from .data.layout import FileOptions
from .data.readers import frame_entries
from .data.store import Store
from .errors import CommunicatorError, RatingsError
from .model.base import check_model
from .model.early_stopping import EarlyStopping
from .model.fit import Fit, Options
from .model.loop import Callback
from .model.ranked import RankedRatings, aborting
from .model.stopwatch import Stopwatch
from .plan.dispatch import gpu_status
from .ranks.shares import RankRatings, SharedEntries, StoredRatings
from .ranks.transport.communicator import TIMEOUT
from .ranks.transport.messages import MessageCommunicator, Transport, check_timeout

try:
    import distributed
    from distributed.protocol.serialize import to_serialize
except ImportError as missing:
    raise ImportError(f'hybridmf.dask needs Dask ({missing}): pip install "hybridmf[dask]"') from missing


MERGE_RULES = ("error", "sum", "mean", "max")
"""Rules for duplicate pairs. No "last": partitions have no order among workers."""

CHECK_SECONDS = 0.5  # seconds between two checks that all workers are alive, by the client and by waiting ranks
PATIENCE = 10.0  # seconds for ranks to end after one of them has failed, and for a worker to respond to a health check


# ----------------------------------------------------------------------------------------------------------- messages


@dataclass
class Inbox:
    """Messages received by one rank of one fit, and the failure of the fit, if any."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    boxes: dict[tuple[str, int], dict[int, tuple[str, np.ndarray]]] = field(default_factory=dict)
    cause: str = ""
    ended: bool = False

    def fail(self, cause: str) -> None:
        """Record the first cause of failure and wake waiting threads."""
        with self.changed:
            self.cause = self.cause or cause
            self.changed.notify_all()


_inboxes: dict[str, Inbox] = {}  # inboxes of this worker, by the name of the fit


def _receive(job: str, context: str, source: int, number: int, what: str, array: np.ndarray) -> str:
    inbox = _inboxes.get(job)
    if inbox is None:
        return "gone"
    with inbox.changed:
        inbox.boxes.setdefault((context, source), {})[number] = (what, array)
        inbox.changed.notify_all()
    return "taken"


def _state(job: str) -> str:
    """State of this rank for a rank that waits for it: "" while it is running, else what happened."""
    inbox = _inboxes.get(job)
    if inbox is None or inbox.ended:
        return "has ended"
    return inbox.cause


def _fail(job: str, cause: str) -> None:
    inbox = _inboxes.get(job)
    if inbox is not None:
        inbox.fail(cause)


def _open_inbox(job: str, dask_worker: Any = None) -> None:
    """Prepare a worker before any rank starts, since messages may arrive before its own rank starts."""
    handlers = {"hybridmf_receive": _receive, "hybridmf_state": _state, "hybridmf_fail": _fail}
    dask_worker.handlers.update(handlers)
    _inboxes[job] = Inbox()


def _close_inbox(job: str) -> None:
    _inboxes.pop(job, None)


class WorkerTransport(Transport):
    """Messages between the workers of the fit named `job`, whose addresses are those of the ranks, over Dask."""

    def __init__(self, worker: Any, job: str, rank: int, addresses: Sequence[str], timeout: float) -> None:
        self.worker, self.job, self.rank, self.addresses = worker, job, rank, list(addresses)
        self.timeout = check_timeout(timeout)
        self.inbox = _inboxes[job]
        self._sent: dict[tuple[str, int], int] = {}
        self._taken: dict[tuple[str, int], int] = {}

    def _in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.worker.loop.asyncio_loop)

    def send(self, context: str, source: int, dest: int, what: str, array: np.ndarray) -> None:
        """Send through the worker's event loop; messages are numbered since they may arrive out of order."""
        self.check()
        if dest == self.rank:
            _receive(self.job, context, source, self._number(self._sent, context, dest), what, array)
            return
        number = self._number(self._sent, context, dest)
        self._in_loop(self._deliver(dest, context, source, number, what, array))

    async def _deliver(self, dest: int, context: str, source: int, number: int, what: str, array: np.ndarray) -> None:
        address = self.addresses[dest]
        try:
            answer = await self.worker.rpc(address).hybridmf_receive(
                job=self.job, context=context, source=source, number=number, what=what, array=to_serialize(array)
            )
            if answer != "taken":
                raise CommunicatorError("it has ended")
        except Exception as error:  # any error must stop the other ranks
            self.fail(f"rank {self.rank} cannot reach rank {dest} at {address}: {type(error).__name__}: {error}")

    @staticmethod
    def _number(counters: dict[tuple[str, int], int], context: str, peer: int) -> int:
        number = counters.get((context, peer), 0)
        counters[context, peer] = number + 1
        return number

    def receive(self, context: str, source: int, dest: int, what: str) -> tuple[str, np.ndarray]:
        """Wait for the next message of a rank; check periodically that the rank is running."""
        number, deadline = self._number(self._taken, context, source), time.monotonic() + self.timeout
        with self.inbox.changed:
            while True:
                self.check()
                message = self.inbox.boxes.get((context, source), {}).pop(number, None)
                if message is not None:
                    called, array = message
                    return called, array if array.flags.writeable else array.copy()
                if time.monotonic() > deadline:
                    self.give_up(source, self.rank, what)
                elif not self.inbox.changed.wait(CHECK_SECONDS):
                    self._check_source(context, source, number, what)

    def _check_source(self, context: str, source: int, number: int, what: str) -> None:
        """Fail if the sending rank is no longer running."""
        address = self.addresses[source]
        self.inbox.changed.release()
        try:
            answer = self._in_loop(self._ask(address)).result()
        finally:
            self.inbox.changed.acquire()
        arrived = number in self.inbox.boxes.get((context, source), {})
        if answer and not arrived:
            self.give_up(source, self.rank, what, f"at {address} {answer}")

    async def _ask(self, address: str) -> str:
        try:
            return str(await asyncio.wait_for(self.worker.rpc(address).hybridmf_state(job=self.job), PATIENCE))
        except TimeoutError:
            return ""  # busy; `timeout` decides
        except Exception as error:
            return f"is lost ({type(error).__name__}: {error})"

    def fail(self, cause: str) -> None:
        """Make every later call on every rank fail."""
        first = not self.inbox.cause
        self.inbox.fail(cause)
        if first:
            for rank, address in enumerate(self.addresses):
                if rank != self.rank:
                    self._in_loop(self._notify(address, cause))

    async def _notify(self, address: str, cause: str) -> None:
        with contextlib.suppress(Exception):  # this worker may be the lost one
            await self.worker.rpc(address).hybridmf_fail(job=self.job, cause=cause)

    def check(self) -> None:
        """Raise CommunicatorError if the fit has failed."""
        if self.inbox.cause:
            raise CommunicatorError(self.inbox.cause)

    def close(self, rank: int) -> None:
        """Mark this rank as ended; ranks that wait for it fail."""
        self.inbox.ended = True


# ------------------------------------------------------------------------------------------------------------ ratings


def _chunk_of_frame(partition: Any, user: Any, item: Any, value: Any) -> Entries:
    """Entries of a partition, with its own sorted labels."""
    found = frame_entries(partition, "a partition of the ratings", FileOptions(user=user, item=item, value=value))
    return Entries(found.users, found.items, found.values, found.user_ids, found.item_ids, found.shape)


def _chunk_of_array(block: Any) -> Entries:
    rows = np.atleast_2d(np.asarray(block))
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise RatingsError(f"a Dask array of ratings has the columns user, item, value; got a block of {rows.shape}")
    if not np.all(rows[:, :2] == np.rint(rows[:, :2])):
        raise RatingsError("users and items of a Dask array must be whole numbers; use a Dask DataFrame for others")
    users, user_ids = factorize("user", rows[:, 0].astype(np.int64), "row")
    items, item_ids = factorize("item", rows[:, 1].astype(np.int64), "row")
    return Entries(users, items, rows[:, 2], user_ids, item_ids, (len(user_ids), len(item_ids)))


def _merged(name: str, parts: list[np.ndarray]) -> np.ndarray:
    """Sorted union of the labels of all partitions."""
    alike = all(part.dtype.kind in "iu" for part in parts)
    every = np.concatenate(parts) if alike else [label for part in parts for label in part.tolist()]
    return factorize(f"column {name!r} of the ratings", every, "label")[1]


def _positions(ids: np.ndarray, labels: Any, codes: np.ndarray) -> np.ndarray:
    """Positions of a partition's entries among `ids`."""
    if ids.dtype.kind in "iu" and labels.dtype.kind in "iu":
        return np.searchsorted(ids, labels)[codes]
    return places_among(ids, labels)[codes]


@dataclass(frozen=True)
class _FitRequest:
    """Arguments of a fit of one rank; the validation set comes beside them."""

    job: str
    addresses: tuple[str, ...]
    model: Any
    timeout: float
    duplicates: str
    device: str
    options: Options


def _rank_ratings(request: _FitRequest, chunks: list[Entries], labels: Any, store: str | None) -> RankRatings:
    model = request.model
    dtype, implicit = model._settings().dtype, model._objective().is_implicit
    if store is not None:
        return StoredRatings(Store.open(store), dtype, implicit)
    user_ids, item_ids = labels
    users = [_positions(user_ids, chunk.user_ids, chunk.users) for chunk in chunks]
    items = [_positions(item_ids, chunk.item_ids, chunk.items) for chunk in chunks]
    return SharedEntries(
        np.concatenate([np.empty(0, np.int64), *users]),
        np.concatenate([np.empty(0, np.int64), *items]),
        np.concatenate([np.empty(0), *(np.asarray(chunk.values, dtype=np.float64) for chunk in chunks)]),
        (len(user_ids), len(item_ids)),
        dtype=dtype,
        drop_zeros=implicit,
        duplicates=request.duplicates,
        labels=(user_ids, item_ids),
    )


def _run_rank(
    request: _FitRequest, rank: int, chunks: list[Entries], labels: Any, store: str | None, validation: Any
) -> Any:
    stopwatch = Stopwatch()
    worker, model = distributed.get_worker(), request.model
    transport = WorkerTransport(worker, request.job, rank, request.addresses, request.timeout)
    communicator = MessageCommunicator(transport, range(len(request.addresses)), rank)
    threads = worker.state.nthreads if model.num_threads is None else None
    try:
        with aborting(communicator):
            ratings = _rank_ratings(request, chunks, labels, store)
            source = RankedRatings(model, ratings, communicator, request.device, threads)
            options = request.options if validation is None else replace(request.options, validation=validation)
            return Fit(model, source, options, communicator, stopwatch).run()
    finally:
        communicator.close()


# ------------------------------------------------------------------------------------------------------------- client


def fit(
    model: Any,
    ratings: Any,
    *,
    client: Any = None,
    user: int | str = "auto",
    item: int | str = "auto",
    value: int | str | None = "auto",
    duplicates: str = "error",
    workers: Sequence[str] | None = None,
    validation: Any = None,
    callback: Callback | None = None,
    checkpoint: Any = None,
    resume_from: str | os.PathLike[str] | None = None,
    unknown: str = "error",
    early_stopping: EarlyStopping | int | bool | None = None,
    freeze: Side | None = None,
    weights: None = None,
    validation_users: int | None = None,
    validate_every: int = 1,
    track_objective: bool = False,
    timeout: float = TIMEOUT,
) -> Any:
    """Fit ALS on the workers of a Dask cluster.

    Parameters
    ----------
    model : ImplicitALS or ExplicitALS
        With ``device="cuda"`` each worker uses the GPU assigned by dask-cuda; with "auto" only if every worker has one.
    ratings : Dask DataFrame, Dask array, Store or path of a store
        A DataFrame has columns `user`, `item` and `value`. An array has these three columns, with users and items as
        whole numbers. Every worker must be able to read a store. Only labels are transferred to the client.
    client : distributed.Client, optional
        Default: the current client.
    user, item : str or int
        Columns of a DataFrame, found as by `Ratings.from_frame`. Ids become sorted labels, independent of the
        partitioning.
    value : str, int or None
        None makes every entry 1.
    duplicates : {"error", "sum", "mean", "max"}
        What to do with a pair that occurs more than once, within or across partitions.
    workers : sequence of str, optional
        Addresses. Default: all workers. Each worker is busy until the fit ends; other fits on these workers wait.
    validation, callback, checkpoint, resume_from, unknown, early_stopping, freeze, validation_users, validate_every
        As for ``fit`` of a model. `validation` is in the memory of the client and sent to the worker of the first rank,
        which evaluates it, runs `callback` (it is pickled), and decides for all when to stop. Checkpoints are on
        storage shared by the workers, and may come from a fit on other devices.
    weights : None
        Not available on a cluster; values ``(w - 1) / alpha`` have the confidence ``w``, if all are above 1.
    track_objective : bool
        Record the objective of each iteration in ``history_``, even without observers.
    timeout : float
        Seconds that a rank waits for another rank.

    Returns
    -------
    model
        The given model, fitted, with ``history_`` and ``timings_`` as after ``fit`` of a model. Unless it was fitted on
        a store, it does not have the items seen by users: ``recommend`` needs `user_items`.

    Raises
    ------
    CommunicatorError
        A worker was lost or does not respond. All ranks have stopped; with a checkpoint, the fit can be resumed by
        `resume_from`.
    Exception
        An error on a rank, as raised there.
    """
    stopwatch = Stopwatch()
    check_choice("duplicates", duplicates, MERGE_RULES)
    check_timeout(timeout)
    check_model(model)
    options = Options(
        validation, callback, False, checkpoint, resume_from, unknown, early_stopping, freeze, validation_users,
        validate_every, track_objective,
    )  # fmt: skip
    options.settings(model)
    if weights is not None:
        raise ValueError(
            "weights are not available on a cluster, whose workers have parts of the ratings; give values (w - 1) / "
            "alpha, whose confidence 1 + alpha |r| is w, or use hybridmf.scale.fit, where each rank has all of them"
        )
    client = _client() if client is None else client
    if not isinstance(client, distributed.Client):
        raise TypeError(f"client must be a distributed.Client of the cluster, got {client!r}")
    known = client.nthreads()
    workers = [workers] if isinstance(workers, str) else workers
    addresses = tuple(sorted(known) if workers is None else workers)
    strangers = [address for address in addresses if address not in known]
    if strangers or not addresses:
        have = ", ".join(sorted(known)) or "no workers"
        raise ValueError(f"workers: the cluster does not have {', '.join(strangers) or 'any'}; it has {have}")
    twice = [address for address in addresses if addresses.count(address) > 1]
    if twice:
        raise ValueError(f"workers names {twice[0]} more than once; name each worker once, it is one rank")
    store, chunks, labels = None, [], None
    if isinstance(ratings, (str, os.PathLike, Store)):
        store = str(getattr(ratings, "path", ratings))
    else:
        chunks = _chunks(client, addresses, ratings, user, item, value)
        labels = _labels(client, addresses, chunks)
    held_out = None if validation is None else client.scatter(validation, workers=[addresses[0]], hash=False)
    job = uuid.uuid4().hex
    with distributed.MultiLock([f"hybridmf {address}" for address in addresses], client=client):
        device = _device(client, addresses, model)
        sent = replace(options, validation=None if validation is None else True)
        request = _FitRequest(job, addresses, model, timeout, duplicates, device, sent)
        stopwatch.lap("check")
        with _inboxes_on(client, addresses, job):
            by_worker = _by_worker(client, addresses, chunks)
            fitted = _run(client, request, by_worker, labels, store, held_out)
    model.__dict__.update(fitted.__dict__)
    stopwatch.lap("finish")
    stopwatch.split("finish", fitted.timings_)
    model.timings_ = stopwatch.seconds
    return model


def _client() -> Any:
    try:
        return distributed.default_client()
    except ValueError as error:
        raise ValueError(
            "client: there is no Dask client yet; make one with distributed.Client(address of the scheduler), or "
            "distributed.Client() for a cluster on this machine"
        ) from error


def _chunks(client: Any, addresses: Sequence[str], ratings: Any, user: Any, item: Any, value: Any) -> list[Any]:
    """Futures of the entries of each partition, on the worker that holds the partition."""
    where = {"workers": list(addresses), "allow_other_workers": False, "pure": False}
    if hasattr(ratings, "to_delayed") and hasattr(ratings, "columns"):
        parts = client.compute(ratings.to_delayed(), workers=list(addresses))
        return [client.submit(_chunk_of_frame, part, user, item, value, **where) for part in parts]
    if hasattr(ratings, "to_delayed") and hasattr(ratings, "chunks"):
        if ratings.ndim != 2:
            raise RatingsError(f"a Dask array of ratings has the columns user, item, value; got shape {ratings.shape}")
        parts = client.compute(list(np.ravel(ratings.rechunk({1: -1}).to_delayed())), workers=list(addresses))
        return [client.submit(_chunk_of_array, part, **where) for part in parts]
    raise TypeError(
        f"ratings must be a Dask DataFrame, a Dask array or the path of a store, got {type(ratings).__name__}; "
        "fit ratings in memory with model.fit, or bring them to the cluster with dask.dataframe.from_pandas"
    )


def _labels(client: Any, addresses: Sequence[str], chunks: list[Any]) -> Any:
    """Labels of all users and items, on all workers."""
    parts = client.gather(
        [client.submit(lambda entries: (entries.user_ids, entries.item_ids), chunk, pure=False) for chunk in chunks]
    )
    merged = tuple(_merged(name, [part[k] for part in parts]) for k, name in enumerate(("user", "item")))
    # A unique key: one derived from the content could equal that of an earlier fit's labels, just being released.
    return client.scatter([merged], workers=list(addresses), broadcast=True, hash=False)[0]


def _by_worker(client: Any, addresses: Sequence[str], chunks: list[Any]) -> list[list[Any]]:
    """Assign chunks to ranks, to the worker that holds the chunk where possible."""
    holders = client.who_has(chunks) if chunks else {}
    dealt: list[list[Any]] = [[] for _ in addresses]
    for k, chunk in enumerate(chunks):
        there = [address for address in holders.get(chunk.key, ()) if address in addresses]
        dealt[addresses.index(there[0]) if there else k % len(addresses)].append(chunk)
    return dealt


def _device(client: Any, addresses: Sequence[str], model: Any) -> str:
    """Device of the ranks: dask-cuda makes each worker's own GPU its first one."""
    asked = model._settings().device
    if asked == "cpu":
        return "cpu"
    if not isinstance(asked, str) or asked.startswith("cuda:"):
        names = asked if isinstance(asked, str) else list(asked)
        raise ValueError(f'device={names!r}: each worker has its own device; use "cuda", "cpu" or "auto"')
    with_gpu = asked == "cuda" or all(usable for usable, _ in client.run(gpu_status, workers=list(addresses)).values())
    return "cuda:0" if with_gpu else "cpu"


@contextlib.contextmanager
def _inboxes_on(client: Any, addresses: Sequence[str], job: str) -> Iterator[None]:
    client.run(_open_inbox, job, workers=list(addresses))
    try:
        yield
    finally:
        alive = [address for address in addresses if address in client.nthreads()]
        if alive:
            client.run(_close_inbox, job, workers=alive, on_error="ignore")


def _run(
    client: Any, request: _FitRequest, chunks: list[list[Any]], labels: Any, store: str | None, held_out: Any
) -> Any:
    """Run all ranks; the first failure stops them."""
    others = replace(request, options=request.options.on(1))
    futures = [
        client.submit(
            _run_rank,
            request if rank == 0 else others,
            rank,
            chunks[rank],
            labels,
            store,
            None if rank else held_out,
            workers=[address],
            allow_other_workers=False,
            pure=False,
            retries=0,
            key=f"hybridmf-rank-{rank}-{request.job}",
        )
        for rank, address in enumerate(request.addresses)
    ]
    try:
        lost = _watch(client, request.addresses, futures)
        failed = [future.exception() for future in futures if future.status == "error"]
        if not lost and not failed:
            return futures[0].result()
        _stop(client, request, futures, lost or f"{type(failed[0]).__name__}: {failed[0]}")
        if lost:
            saved = request.options.checkpoint is not None
            again = "start it again with resume_from= the folder of the checkpoints" if saved else "start the fit again"
            raise CommunicatorError(f"{lost}; all ranks have stopped: {again}")
        errors = [future.exception() for future in futures if future.status == "error"]
        # CommunicatorErrors of other ranks only report the original one
        raise next((error for error in errors if not isinstance(error, CommunicatorError)), errors[0])
    except KeyboardInterrupt:
        _stop(client, request, futures, "stopped by KeyboardInterrupt")
        raise
    finally:
        client.cancel(futures)


def _watch(client: Any, addresses: Sequence[str], futures: list[Any]) -> str:
    """Wait until all ranks are done or one has failed; return a message if a worker was lost, else ""."""
    while True:
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            distributed.wait(futures, timeout=CHECK_SECONDS, return_when="FIRST_COMPLETED")
        if all(future.status == "finished" for future in futures):
            return ""
        there = client.nthreads()
        for address, future in zip(addresses, futures, strict=True):
            if address not in there and future.status != "finished":
                return f"the worker of rank {addresses.index(address)} at {address} was lost"
        if any(future.status in ("error", "cancelled", "lost") for future in futures):
            return ""
        time.sleep(CHECK_SECONDS / 10)


def _stop(client: Any, request: _FitRequest, futures: list[Any], cause: str) -> None:
    """Stop the remaining ranks, and wait up to `PATIENCE` seconds for them."""
    there = client.nthreads()
    alive = [address for address in request.addresses if address in there]
    if alive:
        client.run(_fail, request.job, cause, workers=alive, on_error="ignore")
    left = [future for address, future in zip(request.addresses, futures, strict=True) if address in alive]
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and any(future.status == "pending" for future in left):
        time.sleep(CHECK_SECONDS / 10)
