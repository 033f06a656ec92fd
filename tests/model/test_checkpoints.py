"""Checkpoints: written during the training, despite failures of disk or process; resumed to the same factors."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core.files import combine_crc32
from hybridmf.core.objective import State
from hybridmf.cpu.als import HalfSweep
from hybridmf.data import fingerprint
from hybridmf.errors import ModelFileError
from hybridmf.gpu.factors import to_device
from hybridmf.model import checkpoint as checkpoints
from hybridmf.model import files as _io
from support.checkout import ROOT
from support.ratings import planted

SMALL = {"factors": 3, "random_state": 0, "device": "cpu", "num_threads": 1}
PACKAGE = Path(hmf.__file__).parents[1]


def als(iterations: int = 5, **options) -> hmf.ExplicitALS:
    return hmf.ExplicitALS(**SMALL | {"biases": False, "iterations": iterations} | options)


def iterations_in(folder: Path) -> list[int]:
    """Iterations that a folder has, which holds nothing but checkpoints."""
    names = sorted(path.name for path in folder.iterdir())
    assert all(name.startswith("checkpoint-") for name in names), names
    return [int(name.removeprefix("checkpoint-").removesuffix(".safetensors")) for name in names]


@pytest.fixture
def in_step(monkeypatch):
    """An iteration's checkpoint is on the disk, or has failed, before the next begins."""
    offer = checkpoints.Writer.offer

    def offer_and_wait(self, model):
        offer(self, model)
        self._wait(report=True)

    monkeypatch.setattr(checkpoints.Writer, "offer", offer_and_wait)


def assert_same_factors(one, other) -> None:
    for side in ("user", "item"):
        ours, theirs = one._learned.state.side(side), other._learned.state.side(side)
        np.testing.assert_array_equal(ours.matrix, theirs.matrix)
        np.testing.assert_equal(ours.bias, theirs.bias)


# ---------------------------------------------------------------------------------------------------------- how often


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": 9}, [1, 2, 3, 4, 5, 6, 7]),
        ({}, [6, 7]),
        ({"keep": 1}, [7]),
        ({"every": 3, "keep": 9}, [3, 6, 7]),
        ({"every": 100}, [7]),
        ({"minutes": 2.5, "keep": 9}, [3, 6, 7]),  # a minute an iteration, as the clock of this test goes
        ({"minutes": 2.5, "every": 2, "keep": 9}, [4, 7]),
    ],
)
def test_checkpoint_intervals_and_counts(options, expected, tmp_path, monkeypatch, in_step):
    clock = [0.0]
    monkeypatch.setattr("hybridmf.model.checkpoint.time.monotonic", lambda: clock[0])
    solve = HalfSweep.steps
    monkeypatch.setattr(HalfSweep, "steps", lambda *a, **k: clock.__setitem__(0, clock[0] + 30.0) or solve(*a, **k))
    als(7).fit(planted(), checkpoint=hmf.Checkpoint(tmp_path / "a", **options))
    assert iterations_in(tmp_path / "a") == expected


@pytest.mark.parametrize(
    ("error", "match", "checkpoint"),
    [
        (TypeError, "checkpoint must be the path of a folder, or a hybridmf.Checkpoint of one, got int", 3),
        (ValueError, "every must satisfy every >= 1, got 0", hmf.Checkpoint("a", every=0)),
        (TypeError, "every must be an integer", hmf.Checkpoint("a", every=1.5)),
        (ValueError, "minutes must be >= 0", hmf.Checkpoint("a", minutes=-1)),
        (ValueError, "keep must satisfy keep >= 1, got 0", hmf.Checkpoint("a", keep=0)),
        (TypeError, "include_seen must be", hmf.Checkpoint("a", include_seen=1)),
        (TypeError, "must be the path of a folder, .* got int", hmf.Checkpoint(3)),
        (ValueError, "checkpoint must be a path without zero bytes, got ''", ""),
        (ValueError, "checkpoint must be a path without zero bytes", "a\0b"),
    ],
)
def test_invalid_checkpoint_schedules_are_refused(error, match, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=match):
        als().fit(planted(), checkpoint=checkpoint)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [3, True, b"a", [], ""])
def test_invalid_paths_to_resume_from_are_refused(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for saving in ({}, {"checkpoint": "a"}):
        with pytest.raises((TypeError, ValueError), match="resume_from must be a path"):
            als().fit(planted(), resume_from=place, **saving)
    assert not list(tmp_path.iterdir())


def test_a_store_is_no_folder_of_checkpoints(tmp_path):
    store = hmf.convert(planted(), tmp_path / "store")
    before = sorted(path.name for path in store.path.iterdir())
    with pytest.raises(FileExistsError, match="is a store of ratings; give another folder"):
        als().fit(store, checkpoint=store.path)
    assert sorted(path.name for path in store.path.iterdir()) == before


def test_a_checkpoint_may_hold_seen_items(tmp_path):
    model = als().fit(planted(), checkpoint=hmf.Checkpoint(tmp_path, include_seen=True))
    loaded = hmf.load(tmp_path / "checkpoint-000005.safetensors")
    np.testing.assert_array_equal(loaded.recommend([0, 59])[0], model.recommend([0, 59])[0])


def test_an_interrupted_fit_writes_the_last_whole_iteration(tmp_path, monkeypatch):
    """Whatever the schedule: interrupted in the first half of a sweep, the state is still that of the one before."""
    solve, calls = HalfSweep.steps, []

    def interrupt_in_the_fourth(self, *arguments, **options):
        calls.append(self.side)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return solve(self, *arguments, **options)

    monkeypatch.setattr(HalfSweep, "steps", interrupt_in_the_fourth)
    for stop, found in ((7, [3]), (8, [])):  # items of the fourth iteration; its users
        calls.clear()
        model, folder = als(), tmp_path / str(stop)
        with pytest.raises(KeyboardInterrupt):
            model.fit(planted(), checkpoint=hmf.Checkpoint(folder, every=100))
        assert iterations_in(folder) == found and model.n_iter_ == 3
        assert model.recommend(0)[0].shape == (10,)


# ------------------------------------------------------------------------------------------------ beside the training


class Disk:
    """A disk that takes its time: each write waits until it is let through."""

    def __init__(self, monkeypatch) -> None:
        self.begun, self.through, self.most, self.now = [], threading.Semaphore(0), 0, 0
        self.write = _io.write_model
        monkeypatch.setattr(checkpoints, "write_model", self)

    def __call__(self, file, metadata, tensors) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        self.begun.append(threading.current_thread().name)
        assert self.through.acquire(timeout=20)
        self.write(file, metadata, tensors)
        self.now -= 1


def test_training_continues_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The first is being written during all of the training; of those that wait the newest is left."""
    disk, finished = Disk(monkeypatch), []

    def look_on(model, record):
        finished.append(record["iteration"])
        if record["iteration"] == 1:
            wait_until(lambda: disk.begun)
        if record["iteration"] == 5:
            assert len(disk.begun) == 1 and not list(tmp_path.glob("checkpoint-*"))
            disk.through.release(2)

    model = als().fit(planted(), checkpoint=tmp_path, callback=look_on)
    assert finished == [1, 2, 3, 4, 5]
    assert iterations_in(tmp_path) == [1, 5]  # before fit returned
    assert disk.begun == ["hybridmf-checkpoint"] * 2 and disk.most == 1
    for iterations, expected in ((5, model), (1, als(1).fit(planted()))):  # of when it was taken, not written
        assert_same_factors(hmf.load(tmp_path / f"checkpoint-{iterations:06d}.safetensors"), expected)
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "hybridmf-checkpoint"])


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_second_interruption_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def look_on(model, record):
        wait_until(lambda: disk.begun)
        monkeypatch.setattr(checkpoints.Writer, "_wait", interrupt)
        raise KeyboardInterrupt

    model = als()
    with pytest.raises(KeyboardInterrupt):
        model.fit(planted(), checkpoint=tmp_path, callback=look_on)
    assert model.n_iter_ == 1 and model.recommend(0)[0].shape == (10,)
    disk.through.release(9)


def test_factors_on_a_device_come_to_the_host_in_the_writers_thread(tmp_path):
    from support import emulated

    model, threads = als().fit(planted()), []
    expected = model._learned.state

    class Device(emulated.EmulatedDevice):
        def download(self, array, **options):
            threads.append(threading.current_thread().name)
            return super().download(array)

    device = Device()
    sides = {side: to_device(device, expected.side(side), 4) for side in ("user", "item")}
    object.__setattr__(model._learned, "state", State(sides["user"], sides["item"], expected.mean))
    with checkpoints.Writer(hmf.Checkpoint(tmp_path), {"data": ""}) as writer:
        writer.offer(model)
    assert set(threads) == {"hybridmf-checkpoint"}
    stored = hmf.load(tmp_path / "checkpoint-000005.safetensors")._learned.state
    np.testing.assert_array_equal(stored.user.matrix, expected.user.matrix)
    np.testing.assert_array_equal(stored.item.matrix, expected.item.matrix)


# ------------------------------------------------------------------------------------------------------ failing disks


def failing(monkeypatch, stage: str, number: int, code: int) -> None:
    """Let the disk fail at the calls of a stage from that number on, four times."""
    calls = []

    def fails() -> None:
        calls.append(stage)
        if number <= len(calls) < number + 4:
            raise OSError(code, os.strerror(code))

    if stage == "write":

        def write(file, metadata, tensors):
            file.write(b"half of it")
            fails()
            file.seek(0)
            _io.write_model(file, metadata, tensors)

        monkeypatch.setattr(checkpoints, "write_model", write)
        return
    real = getattr(os, stage)

    def call(*arguments):
        if threading.current_thread().name == "hybridmf-checkpoint":
            fails()
        return real(*arguments)

    monkeypatch.setattr(os, stage, call)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("stage", ["write", "fsync", "replace"])
def test_training_survives_a_full_disk(stage, code, tmp_path, monkeypatch, in_step, caplog):
    failing(monkeypatch, stage, 5 if stage == "fsync" else 3, code)  # fsync: of the file, and of the folder
    with monkeypatch.context() as patch, caplog.at_level("WARNING", "hybridmf"):
        patch.setattr(checkpoints.Writer, "finish", lambda self, model: None)
        whole = als(6).fit(planted(), checkpoint=tmp_path)
    # the last good ones stay, nothing half-written does
    assert iterations_in(tmp_path) == [1, 2]
    assert caplog.text.count("could not be written") == 4
    assert os.strerror(code) in caplog.text and "iteration 2 is the newest that is safe" in caplog.text
    assert whole.n_iter_ == 6
    assert_same_factors(als(6).fit(planted(), resume_from=tmp_path), whole)


def test_a_failed_checkpoint_is_retried_with_the_next_iteration(tmp_path, monkeypatch, in_step, caplog):
    """Also where the schedule would have had it later."""
    failing(monkeypatch, "write", 1, errno.ENOSPC)
    als(12).fit(planted(), checkpoint=hmf.Checkpoint(tmp_path, every=5, keep=9))
    assert iterations_in(tmp_path) == [9, 10, 12]  # 5 to 8 failed
    assert "there is none yet" in caplog.text


def removes(folder: Path, iteration: int):
    """A callback that removes a folder, and the one it is in, after an iteration."""

    def callback(model, record) -> None:
        if record["iteration"] == iteration:
            shutil.rmtree(folder.parent)

    return callback


def test_a_folder_that_was_removed_is_made_again(tmp_path, in_step, caplog):
    folder = tmp_path / "runs" / "a"
    als(6).fit(planted(), checkpoint=hmf.Checkpoint(folder, every=2, keep=9), callback=removes(folder, 3))
    assert iterations_in(folder) == [4, 6]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"checkpoint folder {str(folder)!r} was removed during the fit, with its files" in caplog.text
    assert_same_factors(als(8).fit(planted(), resume_from=folder), als(8).fit(planted()))


def test_the_last_iteration_is_written_again_if_it_is_gone(tmp_path, in_step, monkeypatch):
    folder, offer = tmp_path / "runs" / "a", checkpoints.Writer.offer

    def offer_and_lose(self, model) -> None:
        offer(self, model)
        removes(folder, 4)(model, model.history_[-1])

    monkeypatch.setattr(checkpoints.Writer, "offer", offer_and_lose)
    als(4).fit(planted(), checkpoint=folder)
    assert iterations_in(folder) == [4]


def test_a_file_in_place_of_the_folder_does_not_end_the_fit(tmp_path, in_step, caplog):
    folder = tmp_path / "a"

    def replace(model, record) -> None:
        if record["iteration"] == 2:
            shutil.rmtree(folder)
            folder.write_text("mine")

    assert als(4).fit(planted(), checkpoint=folder, callback=replace).n_iter_ == 4
    assert folder.read_text() == "mine" and "could not be written" in caplog.text
    assert "is no folder" in caplog.text and "training continues, the one of iteration 2 is gone" in caplog.text
    assert "newest that is safe" not in caplog.text
    # whoever keeps the record keeps no state by a traceback
    assert not [one for record in caplog.records for one in record.args if isinstance(one, BaseException)]


def test_the_last_iteration_is_tried_once_more(tmp_path, monkeypatch, in_step):
    failing(monkeypatch, "write", 1, errno.ENOSPC)
    als(4).fit(planted(), checkpoint=tmp_path)  # fails four times
    assert iterations_in(tmp_path) == [4]


def test_no_memory_for_a_checkpoint_is_no_reason_to_stop(tmp_path, monkeypatch, caplog):
    def no_memory(state, *, resumable):
        raise MemoryError("no room for the copy")

    monkeypatch.setattr(checkpoints, "state_tensors", no_memory)
    assert als().fit(planted(), checkpoint=tmp_path).n_iter_ == 5
    assert iterations_in(tmp_path) == [] and "no room for the copy" in caplog.text


def test_faults_of_the_library_are_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "state_tensors", lambda state, resumable: {}["missing"])
    for options in ({}, {"every": 100}):  # while it runs, and when it ends
        with pytest.raises(KeyError, match="missing"):
            als().fit(planted(), checkpoint=hmf.Checkpoint(tmp_path, **options))
    model = als()
    with pytest.raises(KeyboardInterrupt):  # which is not hidden by them
        model.fit(planted(), checkpoint=tmp_path, callback=interrupted)
    assert model.n_iter_ == 1


def interrupted(model, record):
    raise KeyboardInterrupt


def test_a_folder_that_cannot_be_synced_is_no_error_where_the_file_system_does_not_know_how(tmp_path, monkeypatch):
    fsync = os.fsync

    def for_files_only(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", for_files_only)
    als().fit(planted()).save(tmp_path / "model")
    assert hmf.load(tmp_path / "model").n_iter_ == 5


# ------------------------------------------------------------------------------------------------------------- kill -9

STAGES = {
    "item half sweep": "HalfSweep.steps = dying_at(5, HalfSweep.steps)",
    "user half sweep": "HalfSweep.steps = dying_at(6, HalfSweep.steps)",
    "nothing written": "checkpoints.write_model = dying_at(3, checkpoints.write_model)",
    "half written": "checkpoints.write_model = half_at(3, checkpoints.write_model)",
    "before the file's fsync": "os.fsync = dying_at(5, os.fsync)",
    "before the rename": "os.replace = dying_at(3, os.replace)",
    "before the folder's fsync": "os.fsync = dying_at(6, os.fsync)",
    "before old ones go": "checkpoints._listed = dying_at(4, checkpoints._listed)",
}

DRIVER = """
import os, signal, sys
sys.path.insert(0, TESTS)
from support.ratings import planted
import hybridmf as hmf
from hybridmf.cpu.als import HalfSweep
from hybridmf.model import checkpoint as checkpoints

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def dying_at(number, function):
    calls = []
    def call(*arguments, **options):
        calls.append(1)
        if len(calls) == number:
            die()
        return function(*arguments, **options)
    return call

def half_at(number, function):
    calls = []
    def call(file, metadata, tensors):
        function(file, metadata, tensors)
        calls.append(1)
        if len(calls) == number:
            file.flush()
            file.truncate(file.tell() // 2)
            die()
    return call

model = hmf.ExplicitALS(biases=False, **SMALL, iterations=5)  # importing takes longer than all of the fits
offer = checkpoints.Writer.offer
def in_step(self, model):
    offer(self, model)
    self._wait(report=True)
checkpoints.Writer.offer = in_step

for folder, stage in STAGES:
    if not os.fork():
        exec(stage)
        model.fit(planted(), checkpoint=folder)
        os._exit(0)
    print(os.wait()[1])
"""


def test_killed_at_every_stage_a_fit_resumes_to_the_same_factors(tmp_path):
    folders = [str(tmp_path / stage) for stage in STAGES]
    names = {"TESTS": str(ROOT / "tests"), "SMALL": SMALL, "STAGES": list(zip(folders, STAGES.values()))}  # noqa: B905
    code = "\n".join(f"{name} = {value!r}" for name, value in names.items()) + DRIVER
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["9"] * len(STAGES), done.stderr  # killed, all of them
    whole = als().fit(planted())
    for folder in folders:
        found = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
        assert found[:2] == ["checkpoint-000001.safetensors", "checkpoint-000002.safetensors"], folder
        resumed = als().fit(planted(), checkpoint=folder, resume_from=folder)
        assert_same_factors(resumed, whole)
        # what the killed process was writing is gone
        assert iterations_in(Path(folder)) == [4, 5] or iterations_in(Path(folder))[1:] == [5], folder


# ------------------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("schedule", ["msgd", "blocks"])
def test_shuffles_continue_where_they_stopped_for_every_seed(schedule, tmp_path):
    def sgd(iterations, random_state):
        options = SMALL | {"schedule": schedule, "iterations": iterations, "random_state": random_state}
        return hmf.SGD(**options)

    whole = sgd(5, np.random.default_rng(3)).fit(planted())
    sgd(2, np.random.default_rng(3)).fit(planted(), checkpoint=tmp_path)
    resumed = sgd(5, None).fit(planted(), resume_from=tmp_path)
    assert_same_factors(resumed, whole)


def test_any_altered_byte_is_noticed(tmp_path):
    als(2).fit(planted(), checkpoint=tmp_path)
    path = tmp_path / "checkpoint-000002.safetensors"
    content = path.read_bytes()
    for position in np.random.default_rng(0).choice(len(content), 40, replace=False):
        altered = bytearray(content)
        altered[position] ^= 1 << int(position) % 8
        path.write_bytes(altered)
        try:
            hmf.load(path)
        except ModelFileError:
            continue
        # the only bytes without meaning are the blanks that align the tensors
        pytest.fail(f"byte {position} of {len(content)}: {content[position]} became {altered[position]}")


def test_an_altered_checkpoint_is_skipped(tmp_path, in_step, caplog):
    als(4).fit(planted(), checkpoint=hmf.Checkpoint(tmp_path, keep=9))
    kept = iterations_in(tmp_path)
    path = tmp_path / f"checkpoint-{kept[-1]:06d}.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # a low bit of a factor: as a number it is sound
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"is corrupt: user_factors was altered or damaged after it was written"):
        hmf.load(path)
    resumed = als(5).fit(planted(), resume_from=tmp_path)
    assert_same_factors(resumed, als(5).fit(planted()))
    assert "skipped checkpoint" in caplog.text


def test_the_newest_is_found_by_content_and_not_by_name(tmp_path, in_step):
    """A copy of an old one under a high name neither shadows newer ones nor is taken for one that has had its time."""
    als(3).fit(planted(), checkpoint=hmf.Checkpoint(tmp_path, keep=9))
    renamed = (tmp_path / "checkpoint-000001.safetensors").rename(tmp_path / "checkpoint-000900.safetensors")
    gone_on = []
    als(5).fit(planted(), resume_from=tmp_path, callback=lambda _, record: gone_on.append(record["iteration"]))
    assert gone_on == [4, 5]
    with pytest.raises(FileExistsError, match=r"the newest checkpoint-000003.safetensors"):
        als(5).fit(planted(), checkpoint=tmp_path, resume_from=renamed)
    als(6).fit(planted(), checkpoint=tmp_path, resume_from=tmp_path)
    assert iterations_in(tmp_path) == [5, 6, 900]


def test_a_checkpoint_without_iteration_has_that_of_its_name(tmp_path, caplog):
    als(2).fit(planted(), checkpoint=tmp_path)
    for name, content in (("000007", b""), ("000008", (8).to_bytes(8, "little") + b"{}      ")):
        (tmp_path / f"checkpoint-{name}.safetensors").write_bytes(content)
    assert als(3).fit(planted(), resume_from=tmp_path).n_iter_ == 3
    first, second = caplog.messages
    assert "checkpoint-000008" in first and "checkpoint-000007" in second


def test_a_checkpoint_with_more_iterations_than_requested_logs_a_warning(tmp_path, caplog):
    whole = als(6).fit(planted(), checkpoint=tmp_path)
    again = als(4).fit(planted(), resume_from=tmp_path)
    assert again.n_iter_ == 6
    assert_same_factors(again, whole)
    (message,) = caplog.messages
    assert "checkpoint-000006.safetensors' already has 6 iterations and iterations=4 includes them" in message
    assert "set iterations to more than 6 to continue, or resume from an earlier checkpoint" in message
    caplog.clear()
    als(6).fit(planted(), checkpoint=tmp_path, resume_from=tmp_path)  # a job that was done and is started again
    assert not caplog.messages


def test_altered_metadata_are_noticed(tmp_path):
    als(4).fit(planted()).save(tmp_path / "model")
    content = (tmp_path / "model").read_bytes()
    (tmp_path / "model").write_bytes(content.replace(b'\\"n_iter\\": 4', b'\\"n_iter\\": 7'))
    with pytest.raises(ModelFileError, match="its metadata were altered or damaged"):
        hmf.load(tmp_path / "model")


def test_a_gpus_memory_limit_may_change_between_runs(tmp_path):
    als(2, gpu_memory_limit="6GB").fit(planted(), checkpoint=tmp_path)
    assert als(3, gpu_memory_limit="1GB").fit(planted(), resume_from=tmp_path).n_iter_ == 3


def test_has_checkpoints_finds_readable_checkpoints(tmp_path):
    assert not checkpoints.has_checkpoints(tmp_path / "nowhere")
    assert not checkpoints.has_checkpoints(tmp_path)
    als(1).fit(planted(), checkpoint=tmp_path)
    assert checkpoints.has_checkpoints(tmp_path)


# --------------------------------------------------------------------------------------------------------------- files


def test_a_file_is_written_without_a_copy_of_it(tmp_path):
    tensors = {"user_factors": np.ones((1 << 19, 16), np.float32), "item_factors": np.ones((1 << 10, 16), np.float32)}
    metadata = {"model": "ExplicitALS", "params": "{}", "state": "{}"}
    tracemalloc.start()
    with open(tmp_path / "file", "wb") as file:
        _io.write_model(file, metadata, tensors)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < tensors["user_factors"].nbytes / 20
    found = safetensors.numpy.load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)


@settings(max_examples=50)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_crc_of_two_pieces(first, second):
    expected = zlib.crc32(first + second)
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == expected


@settings(max_examples=20)
@given(st.lists(st.integers(0, 60), max_size=4), st.sampled_from([np.float32, np.float64]))
def test_the_fingerprint_does_not_depend_on_how_rows_are_cut(cuts, dtype):
    matrix = planted().astype(dtype)
    bounds = [0, *sorted(cuts), 60]
    checksums = [fingerprint.checksum_of(matrix[a:b]) for a, b in itertools.pairwise(bounds)]
    assert fingerprint.join_fingerprints(matrix.indptr, checksums, matrix.shape) == fingerprint.fingerprint(matrix)


def test_the_fingerprint_sees_where_rows_end():
    one = sp.csr_array((np.ones(3, np.float32), [0, 1, 2], [0, 2, 3]), shape=(2, 3))
    other = sp.csr_array((np.ones(3, np.float32), [0, 1, 2], [0, 1, 3]), shape=(2, 3))
    assert fingerprint.fingerprint(one) != fingerprint.fingerprint(other)


# ----------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["explicit", "implicit", "sgd"])
def test_a_gpus_checkpoint_resumes_on_the_gpu_and_on_the_cpu(kind, tmp_path):
    from support.devices import open_or_skip

    open_or_skip("cuda")  # skips without one
    classes = {"explicit": hmf.ExplicitALS, "implicit": hmf.ImplicitALS, "sgd": hmf.SGD}
    matrix = planted(300, 200)

    def make(iterations, device):
        return classes[kind](factors=8, random_state=0, iterations=iterations, device=device)

    whole = make(6, "cuda").fit(matrix)
    make(3, "cuda").fit(matrix, checkpoint=tmp_path)
    assert iterations_in(tmp_path)[-1] == 3
    assert_same_factors(make(6, "cuda").fit(matrix, resume_from=tmp_path), whole)
    on_cpu = make(6, "cpu").fit(matrix, resume_from=tmp_path)
    np.testing.assert_allclose(on_cpu.user_factors, whole.user_factors, rtol=2e-3, atol=2e-4)
