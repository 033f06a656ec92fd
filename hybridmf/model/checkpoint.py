"""Checkpoints: model files written periodically during training, from which a fit can resume (cuMF 4.4).

A fit replaces states and never modifies them, so the writer thread needs no copy: it keeps a reference until the state
is in the file. At most one state is being written and one is pending; a newer state replaces the pending one.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..core.files import remove_orphans, write_atomically
from ..core.objective import LazyFactors, State
from ..core.validate import check_bool, check_int, check_path, check_real
from ..data.manifest import MANIFEST
from ..errors import ModelFileError
from .files import ModelFile, jsonable, lasting_tensors, model_metadata, state_tensors, stored_iteration, write_model
from .learned import Learned

logger = logging.getLogger("hybridmf")

KEEP = 2  # checkpoints kept: the newest, and the one before it in case the newest cannot be read

FREE_PARAMS = frozenset(
    {"iterations", "device", "num_threads", "assembly", "reorder", "precision", "random_state", "gpu_memory_limit"}
    | {"init", "learning_rate", "decay", "schedule", "ordering", "order", "reduction", "deterministic"}
)
"""Parameters that may change when a fit resumes: they do not affect the objective. A diverged run of SGD continues with
a lower learning rate."""

OBJECTIVE_PARAMS = frozenset(
    {"regularization", "regularization_scaling", "bias_regularization", "alpha", "unobserved_weight"}
)
"""Parameters whose default, None, may mean what a checkpoint has as a number; compared by the objective."""

UNFINISHED = ".checkpoint-"  # prefix of files that are being written

_NAME = re.compile(r"checkpoint-(\d{6,})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often ``fit(checkpoint=)`` writes checkpoints.

    Attributes
    ----------
    directory : path-like
        Folder, created if it does not exist.
    every : int
        Iterations between checkpoints. The last iteration of a fit is always written.
    minutes : float, optional
        Minimum time between checkpoints.
    keep : int
        Number of newest checkpoints to keep.
    include_seen : bool
        Store the items seen by each user (4 bytes an entry, and up to 8 for its value), so that a checkpoint loaded as
        a model excludes them from recommendations. Resuming does not need them.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> hourly = hmf.Checkpoint("runs/a", minutes=60)
    """

    directory: str | os.PathLike[str]
    every: int = 1
    minutes: float | None = None
    keep: int = KEEP
    include_seen: bool = False

    @classmethod
    def check(cls, checkpoint: Any) -> Checkpoint:
        """A validated `Checkpoint` from a folder or a `Checkpoint`."""
        if not isinstance(checkpoint, cls):
            checkpoint = cls(checkpoint)
        if not isinstance(checkpoint.directory, (str, os.PathLike)):
            kind = type(checkpoint.directory).__name__
            raise TypeError(f"checkpoint must be the path of a folder, or a hybridmf.Checkpoint of one, got {kind}")
        return cls(
            Path(check_path("checkpoint", checkpoint.directory)),
            check_int("every", checkpoint.every, 1),
            None if checkpoint.minutes is None else check_real("minutes", checkpoint.minutes, 0.0),
            check_int("keep", checkpoint.keep, 1),
            check_bool("include_seen", checkpoint.include_seen),
        )

    @property
    def folder(self) -> Path:
        """The directory as a path."""
        return Path(self.directory)


# ------------------------------------------------------------------------------------------------------------- writing


def prepare(checkpoint: Any, resume_from: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Validate and create the checkpoint folder before training.

    A folder with checkpoints that this run does not continue is refused: two runs would overwrite each other's.
    """
    checkpoint = Checkpoint.check(checkpoint)
    path = checkpoint.folder
    resume_from = None if resume_from is None else check_path("resume_from", resume_from)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"checkpoint {str(path)!r} is a file; give a folder")
    if (path / MANIFEST).exists():
        raise FileExistsError(f"checkpoint folder {str(path)!r} is a store of ratings; give another folder")
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(f"checkpoint folder {str(path)!r} cannot be written to")
    newest = [each for _, each in _listed(path)[-1:]]
    if newest and (resume_from is None or Path(resume_from).resolve() not in (path.resolve(), newest[0].resolve())):
        raise FileExistsError(
            f"checkpoint folder {str(path)!r} holds checkpoints of an earlier run, the newest {newest[0].name}: "
            f"continue it with resume_from={str(path)!r}, or give another folder"
        )
    remove_orphans(path, UNFINISHED)
    return checkpoint


Snapshot: TypeAlias = tuple[int, dict[str, str], State]
"""A completed iteration, the metadata of its model file, and its factors."""


class Writer:
    """Writes checkpoints in a background thread while the fit continues.

    A failed write (a full disk, no memory for the copy from a GPU) is logged and retried with the next iteration;
    earlier checkpoints stay. A folder that was removed is created again. `checkpoint` is that of `prepare`; `extra` are
    fields of the state in each file, among them the fingerprint of the data as "data"; `completed` are the iterations
    before the fit was resumed.
    """

    def __init__(self, checkpoint: Checkpoint, extra: dict[str, Any], completed: int = 0) -> None:
        self.checkpoint, self.extra = checkpoint, extra
        self._written = completed
        self._newest: Path | None = None  # the last file written
        self._next_time = time.monotonic() + 60 * (checkpoint.minutes or 0)
        self._lasting: dict[str, np.ndarray] | None = None
        self._waiting: Snapshot | None = None
        self._busy = self._closed = self._failed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Wait until the newest state is on the disk; a second Ctrl-C does not wait."""
        try:
            self._wait(report=kind is None)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def due(self, iteration: int) -> bool:
        """Whether to write this iteration: by the schedule, or because the previous write failed."""
        return self._failed or (time.monotonic() >= self._next_time and iteration % self.checkpoint.every == 0)

    def offer(self, model: Any) -> None:
        """Take the model's state after a completed iteration if a checkpoint is due.

        Raises errors of the writer thread other than those that are retried.
        """
        self._raise()
        learned: Learned = model._learned
        if self.due(learned.n_iter):
            self._take(type(model).__name__, learned)

    def finish(self, model: Any) -> None:
        """Take the state of the last iteration if it is not written yet, or if its file is gone."""
        self._wait(report=False)
        learned: Learned = model._learned
        if learned.n_iter > self._written or (self._newest is not None and not self._newest.exists()):
            self._take(type(model).__name__, learned)

    def release(self) -> bool:
        """Wait until the writer holds no state; returns False in the writer thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            return False
        self._wait(report=False)
        return True

    def _take(self, kind: str, learned: Learned) -> None:
        if self._lasting is None:
            self._lasting = lasting_tensors(learned, include_seen=self.checkpoint.include_seen)
        # the history grows while the thread writes: it is serialized here
        snapshot = learned.n_iter, model_metadata(kind, learned, self.extra), learned.state
        for factors in _lazy(learned.state):
            factors.wait_by(self.release)
        self._next_time = time.monotonic() + 60 * (self.checkpoint.minutes or 0)
        with self._changed:
            self._waiting = snapshot
            if self._thread is None:
                # a daemon thread: a second Ctrl-C ends the process even if a disk does not respond
                self._thread = threading.Thread(target=self._run, name="hybridmf-checkpoint", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _wait(self, *, report: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._busy)
            if report:
                self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                snapshot, self._waiting = self._waiting, None
                if snapshot is None:
                    return
                self._busy = True
            try:
                self._try_to_write(snapshot)
            finally:
                for factors in _lazy(snapshot[2]):
                    factors.let_go()  # of host copies made for the file
                del snapshot  # frees its device memory
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _try_to_write(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
            self._failed, self._written = False, snapshot[0]
        except (OSError, MemoryError) as error:
            self._failed = True
            logger.warning(
                "the checkpoint of iteration %d could not be written to %r (%s: %s); training continues, %s; "
                "the next iteration tries again",
                snapshot[0],
                str(self.checkpoint.folder),
                type(error).__name__,
                str(error),  # as text: a kept log record would keep the state alive through the traceback
                self._newest_said(),
            )
        except Exception as error:  # a device failure or a bug: the fit raises it
            self._error = error

    def _newest_said(self) -> str:
        if not self._written:
            return "there is none yet"
        if self._newest is not None and not self._newest.exists():
            return f"the one of iteration {self._written} is gone"
        return f"iteration {self._written} is the newest that is safe"

    def _write(self, snapshot: Snapshot) -> None:
        """Write the file, then remove files older than those to keep."""
        (iteration, metadata, state), folder, lasting = snapshot, self.checkpoint.folder, self._lasting
        assert lasting is not None
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            logger.warning(
                "checkpoint folder %r was removed during the fit, with its files; created again", str(folder)
            )
        tensors = state_tensors(state.on_host(), resumable=True) | lasting
        newest = folder / _file_name(iteration)
        write_atomically(newest, lambda file: write_model(file, metadata, tensors), prefix=UNFINISHED)
        self._newest = newest
        # files of later iterations were unreadable when this run was resumed; renamed files were kept on purpose
        ours = [path for n, path in _listed(folder) if n <= iteration and path.name == _file_name(n)]
        for old in ours[: -self.checkpoint.keep]:
            old.unlink(missing_ok=True)


def _lazy(state: State) -> list[LazyFactors]:
    """Factors that are not host arrays."""
    return [each for each in (state.user, state.item) if isinstance(each, LazyFactors)]


def _file_name(iteration: int) -> str:
    return f"checkpoint-{iteration:06d}.safetensors"


def _listed(directory: Path) -> list[tuple[int, Path]]:
    """Checkpoints by the iteration that they hold; without a readable one, that of the name counts."""
    found = []
    for path in directory.iterdir():
        if named := _NAME.fullmatch(path.name):
            stored = stored_iteration(path)
            found.append((int(named[1]) if stored is None else stored, path))
    return sorted(found)


# ------------------------------------------------------------------------------------------------------------- reading


def has_checkpoints(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder, which need not exist, holds a checkpoint to resume from."""
    return Path(directory).is_dir() and any(_NAME.fullmatch(path.name) for path in Path(directory).iterdir())


def read(path: str | os.PathLike[str], model: Any, data: str, *, mapped: bool = False) -> ModelFile:
    """The checkpoint to resume from: a file, or the newest readable one of a folder; `mapped`: map its factors."""
    path = check_path("resume_from", path)
    content = _newest(Path(path), mapped) if Path(path).is_dir() else ModelFile(path, mapped=mapped)
    name = str(content.path)
    if "data" not in content.summary:
        raise ModelFileError(
            f"{name!r} is a saved model, not a checkpoint; pass a file or folder that checkpoint= wrote"
        )
    if content.model != type(model).__name__:
        raise ModelFileError(f"{name!r} is a checkpoint of {content.model}, not of {type(model).__name__}")
    ours = jsonable(model.get_params(deep=False))
    free = FREE_PARAMS | OBJECTIVE_PARAMS if _same_objective(model, content.params) else FREE_PARAMS
    for key, value in content.params.items():
        if key not in free and ours.get(key) != value:
            raise ModelFileError(f"{name!r} was written with {key}={value!r}, this model has {key}={ours.get(key)!r}")
    content.check_model(model)
    if content.summary["data"] != data:
        raise ModelFileError(
            f"{name!r} was written for other data ({content.summary['data']}, this is {data}: "
            "users x items - entries - checksum); resume with the same ratings"
        )
    shape = f"{len(content.state.user)}x{len(content.state.item)}"
    if not data.startswith(f"{shape}-"):
        raise ModelFileError(f"{name!r} is corrupt: it holds factors of {shape} users x items for other data ({data})")
    if content.summary["n_iter"] > model.iterations:
        logger.warning(
            "%r already has %d iterations and iterations=%d includes them: fit returns the model of the checkpoint "
            "without training; set iterations to more than %d to continue, or resume from an earlier checkpoint",
            name, content.summary["n_iter"], model.iterations, content.summary["n_iter"],
        )  # fmt: skip
    return content


def _same_objective(model: Any, params: dict[str, Any]) -> bool:
    """Whether the parameters of a checkpoint give the objective of the model, for ratings of any scale."""
    given = {name: params[name] for name in OBJECTIVE_PARAMS & params.keys()}
    written = type(model)(**(model.get_params(deep=False) | given))
    return all(written._objective(spread) == model._objective(spread) for spread in (1.0, 2.0))


def _newest(directory: Path, mapped: bool) -> ModelFile:
    problem: Exception = FileNotFoundError(f"resume_from folder {str(directory)!r} holds no checkpoint")
    for _, path in reversed(_listed(directory)):
        try:
            return ModelFile(path, mapped=mapped)
        except ModelFileError as error:
            problem = error
            logger.warning("skipped checkpoint: %s", error)
    raise problem
