"""Model files: a saved model is read back bit for bit, damaged and foreign files are refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import hybridmf as hmf
from hybridmf.core import files as _files
from hybridmf.device.mapped import file_behind
from hybridmf.errors import DeviceError, ModelFileError
from hybridmf.model import checkpoint as checkpoints
from support.messages import says
from support.model_files import KINDS, N_ITEMS, M, alter, assert_equal_models, fitted, make, read_parts
from support.ratings import planted


def altered(path: Path, kind: str = "explicit", **changes) -> Path:
    """A model file some parts of which were changed."""
    fitted(kind).save(path)
    return alter(path, **changes)


def raw_safetensors(path: Path, header: dict, body: bytes) -> Path:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


# ---------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize(("kind", "labels"), [*((kind, False) for kind in KINDS), ("biases", True), ("implicit", True)])
def test_a_model_comes_back_bit_for_bit(kind, labels, tmp_path):
    model, path = fitted(kind, labels), tmp_path / "model.safetensors"
    model.save(path)
    loaded = hmf.load(str(path))
    assert type(loaded) is type(model)
    assert loaded.get_params() == model.get_params()
    assert_equal_models(model, loaded)
    assert loaded.plan_ == model.plan_
    users = np.arange(M)
    for call in (
        lambda m: m.recommend(users, N=N_ITEMS), lambda m: m.similar_items(3), lambda m: m.similar_users(3),
        lambda m: m.predict(users, 3), lambda m: m.transform(planted(5, N_ITEMS, seed=1)),
        lambda m: m.score(planted()), lambda m: m.objective(planted()),
        lambda m: m.score(planted(9, N_ITEMS, seed=1)), lambda m: m.predict(planted(9, N_ITEMS, seed=1)),
    ):  # fmt: skip
        np.testing.assert_equal(call(loaded), call(model))
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert loaded.fit(planted()).n_iter_ == 5


@pytest.mark.parametrize(
    "model",
    [
        hmf.ExplicitALS(biases=False, factors=3, iterations=2, random_state=0),
        hmf.SGD(factors=3, iterations=2, biases=False, random_state=0),
    ],
)
def test_a_model_with_gpu_features_is_served_without_a_gpu(model, tmp_path, monkeypatch):
    def none(name):
        raise DeviceError("there is none")

    monkeypatch.setattr("hybridmf.device.cuda.open_device", none)
    fitted = clone(model).set_params(device="cpu").fit(planted())
    wanted = fitted.recommend([0, 1], N=3)
    own = {"precision": "bf16x3", "assembly": "fused"} if isinstance(model, hmf.ExplicitALS) else {}
    fitted.set_params(device="cuda", **(own or {"schedule": "batch_hogwild", "precision": "float16"}))
    fitted._learned = replace(fitted._learned, params=fitted.get_params(deep=False))
    fitted.save(tmp_path / "model.safetensors")
    loaded = hmf.load(tmp_path / "model.safetensors")
    assert loaded.device_ == "cpu"
    np.testing.assert_array_equal(loaded.recommend([0, 1], N=3)[0], wanted[0])
    assert loaded.transform(planted()).shape[1] == 3


def test_a_loaded_model_takes_updates(tmp_path):
    fitted("biases").save(tmp_path / "model")
    loaded = hmf.load(tmp_path / "model").partial_fit_users([M], np.ones((1, N_ITEMS)))
    loaded.partial_fit_items([N_ITEMS], np.ones((M + 1, 1)))
    loaded.save(tmp_path / "model")
    again = hmf.load(tmp_path / "model")
    assert (again.n_users, again.n_items, again.n_features_in_) == (M + 1, N_ITEMS + 1, N_ITEMS + 1)
    assert_equal_models(loaded, again)


def test_without_the_record_of_seen_items(tmp_path):
    model = fitted()
    model.save(tmp_path / "full")
    model.save(tmp_path / "lean", include_seen=False)
    assert (tmp_path / "lean").stat().st_size < (tmp_path / "full").stat().st_size - 4 * planted().nnz
    lean = hmf.load(tmp_path / "lean")
    with pytest.raises(ValueError, match=says("saved without seen items: pass user_items, or filter_")):
        lean.recommend(0)
    np.testing.assert_array_equal(lean.recommend([0, 5], planted())[0], model.recommend([0, 5])[0])
    everything = {"filter_already_liked_items": False}
    np.testing.assert_array_equal(lean.recommend(3, **everything)[0], model.recommend(3, **everything)[0])
    np.testing.assert_array_equal(lean.predict(planted()), model.predict(planted()))
    assert lean.score(planted()) == model.score(planted())
    lean.partial_fit_users([M], np.ones((1, N_ITEMS))).partial_fit_items([N_ITEMS], np.ones((M + 1, 1)))
    lean.save(tmp_path / "lean")
    assert hmf.load(tmp_path / "lean").n_users == M + 1
    with pytest.raises(TypeError, match=says("include_seen must be True or False, got 1")):
        model.save(tmp_path / "x", include_seen=1)


def test_parameters_that_json_cannot_hold(tmp_path):
    given = {"random_state": np.random.default_rng(0), "regularization": np.float32(0.5), "factors": np.int64(3),
             "dtype": np.float64, "num_threads": np.int32(1)}  # fmt: skip
    model = make(**given).fit(planted())
    model.save(tmp_path / "model")
    loaded = hmf.load(tmp_path / "model")
    assert loaded.random_state is None
    assert (loaded.regularization, loaded.factors, loaded.dtype, loaded.num_threads) == (0.5, 3, "float64", 1)
    np.testing.assert_array_equal(loaded.transform(planted()), model.user_factors_)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_given_as_a_numpy_dtype(tmp_path, dtype):
    model = make(dtype=np.dtype(dtype)).fit(planted())
    model.save(tmp_path / "model")
    loaded = hmf.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.transform(planted()), model.user_factors_)
    assert loaded.dtype == dtype


def test_parameters_set_after_the_fit_do_not_spoil_the_file(tmp_path):
    model = make("biases").fit(planted()).set_params(factors=50, dtype="float64", biases=False)
    model.save(tmp_path / "model")
    loaded = hmf.load(tmp_path / "model")
    assert (loaded.factors, loaded.dtype, loaded.biases) == (3, "float32", True)
    assert_equal_models(model, loaded)


def test_the_file_format_is_what_the_module_says(tmp_path):
    fitted("biases", labels=True).save(tmp_path / "model")
    header, tensors = read_parts(tmp_path / "model")
    assert set(header) == {"format", "version", "model", "params", "state", "checksums"}
    assert (header["format"], header["version"], header["model"]) == ("hybridmf", "1", "ExplicitALS")
    assert set(tensors) == {"user_factors", "item_factors", "user_bias", "item_bias", "user_ids", "item_ids",
                            "seen_indptr", "seen_indices", "seen_values", "item_counts"}  # fmt: skip
    assert tensors["item_ids"].dtype == np.int64
    assert json.loads(tensors["user_ids"].tobytes())[:2] == ["u0", "u1"]


# -------------------------------------------------------------------------------------------------------------- labels


LABELS = {
    "int": np.arange(100, 100 + M),
    "int32": np.arange(M, dtype=np.int32) - 5,
    "bool and int": np.array([True, *range(2, M + 1)], dtype=object),
    "strings": [f"user {k}" for k in range(M)],
    "unicode": [chr(0x1F600 + k) + '"\\\n' for k in range(M)],
    "object strings": np.array([f"u{k}" for k in range(M)], dtype=object),
    "floats": np.arange(M) / 4,
    "float32": (np.arange(M) / 7).astype(np.float32),
    "mixed": ["a", 1, 2.5, "1", *(f"u{k}" for k in range(M - 4))],
    "int and float": np.array([1, 2.5, *range(3, M + 1)], dtype=object),
    "large ints": np.array([2**70 + k for k in range(M)], dtype=object),
    "signed and unsigned": np.array([-1, *(2**63 + k for k in range(1, M))], dtype=object),
    "end in NUL": ["a", "a\0", *(f"u{k}" for k in range(M - 2))],
    "unsigned": np.arange(M, dtype=np.uint64) + np.uint64(2**63),
    "booleans": np.array([True, *(f"u{k}" for k in range(1, M))], dtype=object),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_come_back(name, tmp_path):
    model = make(iterations=1).fit(hmf.Ratings.from_matrix(planted(), user_ids=LABELS[name]))
    model.save(tmp_path / "model")
    loaded = hmf.load(tmp_path / "model")
    assert loaded.user_ids_.tolist() == model.user_ids_.tolist()
    assert [type(label) for label in loaded.user_ids_.tolist()] == [type(label) for label in model.user_ids_.tolist()]
    assert loaded.item_ids_ is None


@pytest.mark.parametrize(
    ("labels", "kinds"),
    [
        ([uuid.UUID(int=k) for k in range(M)], "UUID"),
        ([("a", k) for k in range(M)], "tuple"),
        ([b"a%d" % k for k in range(M)], "bytes"),
        (np.arange(M).astype("M8[D]"), "date"),
        (np.arange(M).astype("M8[ns]"), "datetime64"),
        (np.array([np.timedelta64(k, "ns") for k in range(M)], dtype=object), "timedelta64"),
        ([uuid.UUID(int=7), *(f"u{k}" for k in range(1, M))], "UUID, str"),
    ],
    ids=["UUIDs", "tuples", "bytes", "dates", "nanoseconds", "durations", "mixed"],
)
def test_labels_that_cannot_be_stored_are_refused_by_fit(labels, kinds):
    for side in ("user", "item"):
        matrix = planted() if side == "user" else planted().T
        model, ratings = make(iterations=1), hmf.Ratings.from_matrix(matrix, **{f"{side}_ids": labels})
        message = says(
            f"{side}_ids holds labels of type", kinds, "only strings and numbers", "[str(label) for label in"
        )
        with pytest.raises(TypeError, match=message):
            model.fit(ratings)
        assert not hasattr(model, "_learned")


def test_labels_that_cannot_be_stored_are_not_added():
    model = make(iterations=1).fit(hmf.Ratings.from_matrix(planted(), user_ids=[f"u{k}" for k in range(M)]))
    with pytest.raises(TypeError, match="labels holds labels of type UUID"):
        model.partial_fit_users([M], np.ones((1, N_ITEMS)), labels=[uuid.UUID(int=7)])
    assert model.n_users == M


def test_labels_of_numpy_types_are_stored_as_plain_values(tmp_path):
    plain = ["text", 1, 2.5, False, *(f"u{k}" for k in range(4, M))]
    labels = np.array([np.str_("text"), np.int16(1), np.float64(2.5), np.bool_(False), *plain[4:]], dtype=object)
    make(iterations=1).fit(hmf.Ratings.from_matrix(planted(), user_ids=labels)).save(tmp_path / "model")
    loaded = hmf.load(tmp_path / "model").user_ids_.tolist()
    assert loaded == plain
    assert [type(label) for label in loaded] == [type(label) for label in plain]


def test_npz_files_cannot_hold_labels_that_end_in_nul(tmp_path):
    ratings = hmf.Ratings.from_matrix(planted(2, 2), user_ids=["a", "a\0"])
    assert ratings.user_index(["a\0", "a"]).tolist() == [1, 0]
    with pytest.raises(ValueError, match=says("user_ids has labels that end in NUL", "strip them first")):
        ratings.save(tmp_path / "ratings.npz")
    found = hmf.Ratings.from_coo(["a\0", "a"], ["x", "x"], [1, 2])
    assert found.user_ids.tolist() == ["a", "a\0"]


def test_added_labels_can_be_saved(tmp_path):
    mixed = [1, *(f"u{k}" for k in range(1, M))]
    model = make(iterations=1).fit(hmf.Ratings.from_matrix(planted(), user_ids=mixed))
    model.partial_fit_users([M], np.ones((1, N_ITEMS)), labels=["new"])
    model.save(tmp_path / "model")
    assert hmf.load(tmp_path / "model").user_ids_.tolist() == [*mixed, "new"]


# ------------------------------------------------------------------------------------------------------------- writing


def test_saving_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(b"old")
    fitted().save(path)
    assert hmf.load(path).n_iter_ == 5
    assert list(tmp_path.iterdir()) == [path]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_the_old_file_survives_a_failed_save(step, error, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    path = tmp_path / "model"
    fitted("implicit").save(path)
    before = path.read_bytes()
    monkeypatch.setattr(step, fail)
    with pytest.raises(type(error)) as caught:
        fitted("explicit").save(path)
    if isinstance(error, OSError):
        assert str(caught.value) == f"[Errno 28] No space left on device: {str(path)!r}"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_targets_that_cannot_be_written(tmp_path):
    with pytest.raises(IsADirectoryError, match=says("path", str(tmp_path), "is a folder; give the name of a file")):
        fitted().save(tmp_path)
    with pytest.raises(FileNotFoundError, match=says("the folder", "missing", "of path", "model", "does not exist")):
        fitted().save(tmp_path / "missing" / "model")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileNotFoundError, match=says("the folder", "file", "is no folder")):
        fitted().save(tmp_path / "file" / "model")
    for path, kind in ((3, "int"), (None, "NoneType")):
        with pytest.raises(TypeError, match=says("path must be a path", kind)):
            fitted().save(path)
        with pytest.raises(TypeError, match=says("path must be a path", kind)):
            hmf.load(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    fitted().save(os.fsencode(tmp_path / "bytes"))
    assert hmf.load(os.fsencode(tmp_path / "bytes")).n_items


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "socket", "character device"])
def test_only_regular_files_are_replaced(kind, linked, tmp_path):
    path = target = tmp_path / "target"
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "socket":
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(os.path.relpath(target))
    else:
        try:
            os.mknod(target, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except OSError as error:
            pytest.skip(f"no right to make a device: {error}")
    if linked:
        path = tmp_path / "link"
        path.symlink_to(target)
    before = os.stat(path)
    model = fitted()
    with pytest.raises(FileExistsError, match=says("path", str(path), f"is a {kind}", "give the name of a file")):
        model.save(path)
    assert os.path.samestat(os.stat(path), before) and len(list(tmp_path.iterdir())) == 1 + linked


def test_a_pipe_that_appears_while_a_file_is_written_stays(tmp_path):
    path = tmp_path / "target"
    with pytest.raises(FileExistsError, match="is a pipe"):
        _files.write_atomically(path, lambda _: os.mkfifo(path))
    assert stat.S_ISFIFO(path.stat().st_mode) and list(tmp_path.iterdir()) == [path]


def test_a_replaced_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "model"
    fitted().save(path)
    mask = os.umask(0o022)
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
        for mode in (0o600, 0o664):
            path.chmod(mode)
            fitted().save(path)
            assert stat.S_IMODE(path.stat().st_mode) == mode
            temporary = []  # other users may not read it while it is written, either
            _files.write_atomically(path, lambda file, found=temporary: found.append(os.fstat(file.fileno()).st_mode))
            assert list(map(stat.S_IMODE, temporary)) == [mode]
    finally:
        os.umask(mask)


# ----------------------------------------------------------------------------------------------------------- open files


@pytest.mark.parametrize("kind", KINDS)
def test_open_files(kind, tmp_path):
    model, file = fitted(kind, True), io.BytesIO()
    model.save(file)
    model.save(tmp_path / "model")
    assert file.getvalue() == (tmp_path / "model").read_bytes()
    file.seek(0)
    assert_equal_models(model, hmf.load(file))
    with open(tmp_path / "model", "rb") as stored:
        assert_equal_models(model, hmf.load(stored))
    with open(tmp_path / "other", "wb") as written:
        model.save(written)
        assert not written.closed
    assert_equal_models(model, hmf.load(tmp_path / "other"))


def test_open_files_that_are_refused(tmp_path):
    model, file = fitted(), io.BytesIO()
    with pytest.raises(TypeError, match=says("path is a text file (StringIO)", "mode 'wb'")):
        model.save(io.StringIO())
    with pytest.raises(TypeError, match=says("path is a text file (StringIO)", "mode 'rb'")):
        hmf.load(io.StringIO())
    with pytest.raises(ValueError, match=says("mapped=True needs the path of a file")):
        hmf.load(file, mapped=True)
    model.save(file)
    for content in (b"", file.getvalue()[:-1], file.getvalue() + b"x"):
        with pytest.raises(ModelFileError, match=says("'BytesIO' is not a complete model file")):
            hmf.load(io.BytesIO(content))
    (tmp_path / "model").write_bytes(file.getvalue()[:40])
    with open(tmp_path / "model", "rb") as cut, pytest.raises(ModelFileError, match=says(str(tmp_path / "model"))):
        hmf.load(cut)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            fitted().save(tmp_path / "model")
    finally:
        tmp_path.chmod(0o700)


WRITER = """
import os, sys, time
from pathlib import Path
from hybridmf.core.files import write_atomically

def content(file):
    file.write(bytes(1000))
    file.flush()
    print("writing", flush=True)
    time.sleep(60)

write_atomically(Path(sys.argv[1]) / "other", content, prefix=sys.argv[2])
"""


@contextlib.contextmanager
def writing(folder: Path, prefix: str = ".hybridmf-"):
    """A process that is writing a file; its temporary file."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(folder), prefix], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"writing\n"
            yield process, *folder.glob(f"{prefix}{_files._host()}-*.tmp")
        finally:
            process.kill()


def test_the_next_save_removes_files_of_a_killed_one(tmp_path):
    """Once its writer is dead, not before, and nothing else of the folder."""
    others = [tmp_path / name for name in (".hybridmf-notes.tmp", ".hybridmf-0123456789abcdef", "0123456789abcdef.tmp")]
    for other in others:
        other.write_text("not ours")
        os.utime(other, (0, 0))
    with writing(tmp_path) as (process, temporary), writing(tmp_path, ".checkpoint-") as (_, checkpoint):
        fitted().save(tmp_path / "model")
        assert temporary.stat().st_size == 1000
        process.kill()
        process.wait()
        assert temporary.exists()
        fitted().save(tmp_path / "model")
        assert not temporary.exists()
        assert checkpoint.exists()
    fitted().save(tmp_path / "model")
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "model", checkpoint])
    checkpoints.prepare(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "model"])


@pytest.mark.parametrize("kind", ["another host", "no host", "no locks"])
def test_temporary_files_of_unknown_owners_are_removed_after_a_day(kind, tmp_path, monkeypatch):
    host = {"another host": "00000000-", "no host": "", "no locks": f"{_files._host()}-"}[kind]
    if kind == "no locks":
        monkeypatch.setattr(_files.fcntl, "flock", refuse_to_lock)
    fresh, stale, held = (tmp_path / f".hybridmf-{host}{k:016x}.tmp" for k in range(3))
    for path in (fresh, stale, held):
        path.write_bytes(b"")
    for path in (stale, held):
        os.utime(path, (time.time() - 25 * 3600,) * 2)
    with open(held, "rb") as file:
        if kind != "no locks":
            fcntl.flock(file, fcntl.LOCK_EX)
        fitted().save(tmp_path / "model")
    kept = [fresh, tmp_path / "model"] + ([] if kind == "no locks" else [held])
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def refuse_to_lock(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def test_saving_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "fcntl", None)
    fitted().save(tmp_path / "model")
    assert hmf.load(tmp_path / "model").n_iter_ == 5


def test_only_plain_files_of_ours_are_removed(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    link, fifo, folder = (tmp_path / f".hybridmf-{_files._host()}-{k:016x}.tmp" for k in range(3))
    link.symlink_to(target)
    os.mkfifo(fifo)
    folder.mkdir()
    fitted().save(tmp_path / "model")
    assert sorted(tmp_path.iterdir()) == sorted([link, fifo, folder, target, tmp_path / "model"])
    _files.remove_orphans(tmp_path / "nowhere")


def test_a_temporary_file_that_is_removed_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    """Another process takes it for abandoned: it holds the lock, or has removed the file already."""
    lock, holders = fcntl.flock, []

    def late(handle, operation):
        (path,) = tmp_path.glob(".hybridmf-*.tmp")
        if not holders:
            holders.append(open(path))  # noqa: SIM115
            lock(holders[0], operation)
        elif len(holders) == 1:
            holders.append(path.unlink())
        if len(holders) == 1:
            path.unlink()
        lock(handle, operation)

    monkeypatch.setattr(_files, "remove_orphans", lambda *_: None)
    monkeypatch.setattr(_files.fcntl, "flock", late)
    fitted().save(tmp_path / "model")
    holders[0].close()
    assert len(holders) == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_long_file_names(tmp_path):
    path = tmp_path / ("m" * 250)
    path.write_bytes(b"the file system takes this name")
    fitted().save(path)


def test_a_model_of_a_subclass_is_one_of_its_class(tmp_path):
    mine = type("Mine", (hmf.ImplicitALS,), {"__module__": "__main__"})(2, iterations=1).fit(planted(9, 8, 0.5))
    mine.save(tmp_path / "model")
    loaded = hmf.load(tmp_path / "model")
    assert type(loaded) is hmf.ImplicitALS
    np.testing.assert_array_equal(loaded.user_factors, mine.user_factors)


def test_an_unfitted_model_is_not_saved(tmp_path):
    with pytest.raises(NotFittedError):
        make().save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- damaged files


def test_every_truncation_is_refused(tmp_path):
    path, cut = tmp_path / "model", tmp_path / "cut"
    ratings = hmf.Ratings.from_coo(["a", "b"], ["x", "y"], [1.0, 2.0])
    make("biases", factors=1, iterations=1).fit(ratings).save(path)
    content = path.read_bytes()
    cut.write_bytes(content + b"\0")
    with pytest.raises(ModelFileError, match="cut"):
        hmf.load(cut)
    for length in reversed(range(len(content))):
        os.truncate(cut, length)  # in place: the system may wait for the disk when a file is replaced
        with pytest.raises(ModelFileError, match=says("cut", "truncated, altered, or of another format")):
            hmf.load(cut)


def test_every_changed_byte_is_refused_or_harmless(tmp_path):
    """Whatever byte is changed: a ModelFileError, or a model that is consistent in itself."""
    path, problems = tmp_path / "model", set()
    make("biases", factors=1, iterations=1).fit(sp.csr_array(np.eye(2) + 1)).save(path)
    content = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:  # in place: the system may wait for the disk when a file is replaced
        for position in range(len(content)):
            for byte in (content[position] ^ 0x01, content[position] ^ 0x10):
                os.pwrite(file.fileno(), bytes([byte]), position)
                try:
                    model = hmf.load(path)
                    if (model.factors, model.biases) != (model.item_factors_.shape[1], model.item_bias_ is not None):
                        problems.add("inconsistent parameters")
                except ModelFileError:
                    pass
                except Exception as error:
                    problems.add(type(error).__name__)
            os.pwrite(file.fileno(), content[position : position + 1], position)
    assert not problems
    assert path.read_bytes() == content


def test_paths_that_are_no_model_file(tmp_path):
    with pytest.raises(IsADirectoryError, match=says("path", str(tmp_path), "is a folder, not a model file")):
        hmf.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=says("there is no model file", "nowhere")):
        hmf.load(tmp_path / "nowhere")
    for content in (b"", b"user,item,rating\n1,2,3\n", b"\0" * 64, b"\xff" * 64, b"PK\x03\x04" + b"\0" * 60):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(ModelFileError, match=says("other", "is not a complete model file", "of another format")):
            hmf.load(tmp_path / "other")


@pytest.mark.parametrize("header", [None, {"format": "pt"}, {"format": "HYBRIDMF"}])
def test_foreign_safetensors_files(header, tmp_path):
    safetensors.numpy.save_file({"weight": np.ones((2, 2))}, tmp_path / "other", header)
    with pytest.raises(ModelFileError, match=says("other", "is a safetensors file, but not a hybridmf model")):
        hmf.load(tmp_path / "other")


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("BF16", 2),
        ("F8_E4M3", 1),
    ],
)
def test_tensors_numpy_does_not_know(dtype, size, tmp_path):
    header = {"__metadata__": {"format": "hybridmf", "version": "1"},
              "user_factors": {"dtype": dtype, "shape": [2, 2], "data_offsets": [0, 4 * size]}}  # fmt: skip
    with pytest.raises(ModelFileError, match="other"):
        hmf.load(raw_safetensors(tmp_path / "other", header, bytes(4 * size)))


def as_json(value) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


SEEN = planted()
ALTERED = {
    "newer version": ({"version": "2"}, "has format version '2'; this hybridmf reads version 1: upgrade hybridmf"),
    "no version": ({"version": None}, "has format version None"),
    "unknown model": (
        {"model": "SVD"},
        "holds a model of class 'SVD'; this hybridmf supports CCD, ExplicitALS, ImplicitALS",
    ),
    "no model": ({"model": None}, "is corrupt: KeyError: 'model'"),
    "unknown parameter": ({"params": {"gamma": 1}}, "holds parameters this hybridmf cannot use", "gamma"),
    "bad parameter": ({"params": {"factors": -1}}, "holds parameters this hybridmf cannot use: factors must satisfy"),
    "no mean": ({"state": {"mean": None}}, "is corrupt: KeyError: 'mean'"),
    "mean of text": ({"state": {"mean": "x"}}, "is corrupt: TypeError: mean must be a real number, got 'x'"),
    "mean too large": ({"state": {"mean": 10**400}}, "is corrupt: ValueError: mean must be finite"),
    "mean beyond float32": (
        {"kind": "biases", "state": {"mean": 1e300}},
        "is corrupt: its mean is beyond 3.40282e+38, the largest float32",
    ),
    "mean of NaN": ({"kind": "biases", "state": {"mean": float("nan")}}, "is corrupt: ValueError: mean must be finite"),
    "no n_iter": ({"state": {"n_iter": None}}, "is corrupt: KeyError: 'n_iter'"),
    "infinite n_iter": ({"state": {"n_iter": float("inf")}}, "is corrupt: TypeError: n_iter must be an integer"),
    "negative n_iter": ({"state": {"n_iter": -1}}, "is corrupt: ValueError: n_iter must satisfy 0 <= n_iter"),
    "nnz of text": ({"state": {"nnz": "many"}}, "is corrupt: TypeError: nnz must be an integer"),
    "nnz too large": ({"state": {"nnz": 10**400}}, "is corrupt: ValueError: nnz must satisfy"),
    "total of text": ({"state": {"total": "all"}}, "is corrupt: TypeError: total must be a real number"),
    "no history": ({"state": {"history": None}}, "is corrupt: KeyError: 'history'"),
    "history of numbers": ({"state": {"history": [1, 2]}}, "is corrupt: history is not a list of records"),
    "history of text": ({"state": {"history": "{}"}}, "is corrupt: history is not a list of records"),
    "unknown tensors": ({"tensors": {"item_biar": np.ones(2)}}, "is corrupt: unknown tensors ['item_biar']"),
    "factors= of another width": (
        {"params": {"factors": 50}},
        "is corrupt: its tensors are those of a model with factors=3, not factors=50",
    ),
    "dtype= of another type": (
        {"params": {"dtype": "float64"}},
        "is corrupt: its tensors are those of a model with dtype='float32', not dtype='float64'",
    ),
    "biases= without biases": ({"params": {"biases": True}}, "with biases=False, not biases=True"),
    "biases without biases=": ({"kind": "biases", "params": {"biases": False}}, "with biases=True, not biases=False"),
    "biases of implicit feedback": (
        {
            "kind": "implicit",
            "tensors": {"user_bias": np.ones(M, np.float32), "item_bias": np.ones(N_ITEMS, np.float32)},
        },
        "with biases=True, not biases=False",
    ),
    "biases on one side": (
        {"kind": "biases", "drop": ["item_bias"]},
        "is corrupt: one side has biases and the other has none",
    ),
    "integer biases": (
        {"kind": "biases", "tensors": {"item_bias": np.ones(N_ITEMS, np.int64)}},
        "is corrupt: item_bias has shape (40,) and dtype int64, expected (40,) and float32",
    ),
    "factors without columns": (
        {"tensors": {f"{s}_factors": np.ones((k, 0), np.float32) for s, k in (("user", M), ("item", N_ITEMS))}},
        "is corrupt: user_factors (60, 0) and item_factors (40, 0) do not fit together",
    ),
    "no user factors": ({"drop": ["user_factors"]}, "is corrupt: KeyError: 'user_factors'"),
    "no item factors": ({"drop": ["item_factors"]}, "is corrupt: KeyError: 'item_factors'"),
    "factors of other widths": (
        {"tensors": {"item_factors": np.ones((N_ITEMS, 4), np.float32)}},
        "is corrupt: user_factors (60, 3) and item_factors (40, 4) do not fit together",
    ),
    "vector of factors": (
        {"tensors": {"item_factors": np.ones(3, np.float32)}},
        "item_factors (3,) do not fit together",
    ),
    "integer factors": (
        {"tensors": {"item_factors": np.ones((N_ITEMS, 3), np.int32)}},
        "is corrupt: factors have dtypes float32 and int32",
    ),
    "two float types": (
        {"tensors": {"item_factors": np.ones((N_ITEMS, 3), np.float64)}},
        "is corrupt: factors have dtypes float32 and float64",
    ),
    "half floats": (
        {"tensors": {f"{s}_factors": np.ones((k, 3), np.float16) for s, k in (("user", M), ("item", N_ITEMS))}},
        "is corrupt: factors have dtypes float16 and float16",
    ),
    "NaN in factors": (
        {"tensors": {"user_factors": np.full((M, 3), np.nan, np.float32)}},
        "is corrupt: user_factors has values that are not finite",
    ),
    "inf in a bias": (
        {"kind": "biases", "tensors": {"item_bias": np.full(N_ITEMS, np.inf, np.float32)}},
        "is corrupt: item_bias has values that are not finite",
    ),
    "short bias": (
        {"kind": "biases", "tensors": {"user_bias": np.ones(59, np.float32)}},
        "is corrupt: user_bias has shape (59,) and dtype float32, expected (60,)",
    ),
    "too few users": (
        {"tensors": {"user_factors": np.ones((M - 1, 3), np.float32)}},
        "the seen items are inconsistent",
    ),
    "seen items out of range": (
        {"tensors": {"seen_indices": np.full(SEEN.nnz, N_ITEMS, np.int32)}},
        "the seen items are inconsistent",
    ),
    "negative seen items": (
        {"tensors": {"seen_indices": np.full(SEEN.nnz, -1, np.int32)}},
        "the seen items are inconsistent",
    ),
    "falling seen pointer": (
        {"tensors": {"seen_indptr": np.array([0, SEEN.nnz, *SEEN.indptr[2:]], np.int32)}},
        "the seen items are inconsistent",
    ),
    "seen pointer from 1": (
        {"tensors": {"seen_indptr": np.maximum(SEEN.indptr, 1).astype(np.int32)}},
        "the seen items are inconsistent",
    ),
    "seen pointer beyond the end": (
        {"tensors": {"seen_indptr": np.append(SEEN.indptr[:-1], SEEN.nnz + 1).astype(np.int32)}},
        "the seen items are inconsistent",
    ),
    "falling unsigned seen pointer": (
        {"tensors": {"seen_indptr": np.array([0, SEEN.nnz, *SEEN.indptr[2:]], np.uint64)}},
        "the seen items are inconsistent",
    ),
    "seen pointer whose differences overflow": (
        {"tensors": {"seen_indptr": np.array([0, 2**63 - 1, -(2**63), *SEEN.indptr[3:]])}},
        "the seen items are inconsistent",
    ),
    "matrix of seen items": (
        {"tensors": {"seen_indices": SEEN.indices.astype(np.int32)[:, None]}},
        "the seen items are inconsistent",
    ),
    "seen items of floats": (
        {"tensors": {"seen_indices": SEEN.indices.astype(np.float32)}},
        "the seen items are inconsistent",
    ),
    "seen items out of order": (
        {"tensors": {"seen_indices": SEEN.indices[::-1].astype(np.int32)}},
        "the seen items are inconsistent",
    ),
    "seen items that repeat": (
        {"tensors": {"seen_indices": np.zeros(SEEN.nnz, np.int32)}},
        "the seen items are inconsistent",
    ),
    "seen items beyond 32 bits": (
        {"tensors": {"seen_indices": SEEN.indices.astype(np.int64) + 2**32}},
        "the seen items are inconsistent",
    ),
    "seen items without pointer": ({"drop": ["seen_indptr"]}, "is corrupt: KeyError: 'seen_indptr'"),
    "values of no entries": (
        {"tensors": {"seen_values": np.ones((2, 2), np.float32)}},
        "is corrupt: ValueError: seen_val",
    ),
    "too few values": ({"tensors": {"seen_values": np.ones(2, np.float32)}}, "seen_values has 2 values for"),
    "a code without a value": (
        {"tensors": {"seen_values": np.ones(1, np.float32), "seen_codes": np.ones(SEEN.nnz, np.uint8)}},
        "is corrupt: ValueError: seen_codes has shape",
    ),
    "seen pointer without items": ({"drop": ["seen_indices"]}, "is corrupt: KeyError: 'seen_indices'"),
    "too few labels": ({"tensors": {"item_ids": np.arange(7)}}, "is corrupt: 7 item_ids for 40 rows of factors"),
    "labels that are no JSON": (
        {"tensors": {"user_ids": np.frombuffer(b"[1, 2", np.uint8)}},
        "is corrupt: JSONDecodeError",
    ),
    "matrix of labels": (
        {"tensors": {"user_ids": np.arange(2 * M).reshape(M, 2)}},
        "is corrupt: user_ids is a tensor of shape (60, 2) and dtype int64",
    ),
    "labels of floats": ({"tensors": {"user_ids": np.arange(M) / 2}}, "user_ids is a tensor", "and dtype float64"),
    "repeated labels": (
        {"tensors": {"user_ids": np.zeros(M, np.int64)}},
        "corrupt: user_ids has a label more than once",
    ),
    "labels in an object": ({"tensors": {"user_ids": as_json(dict.fromkeys(map(str, range(M))))}}, "expected a list"),
    "labels in lists": ({"tensors": {"user_ids": as_json([[]] * M)}}, "TypeError: user_ids holds labels of type list"),
    "absurdly nested labels": (
        {"tensors": {"user_ids": np.frombuffer(b"[" * 100_000, np.uint8)}},
        "is corrupt: RecursionError",
    ),
    "labels that are no text": ({"tensors": {"user_ids": np.full(9, 255, np.uint8)}}, "is corrupt: UnicodeDecodeError"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_altered_files_are_refused(name, tmp_path):
    change, *message = ALTERED[name]
    with pytest.raises(ModelFileError, match=says("model", *message)):
        hmf.load(altered(tmp_path / "model", **change))


@pytest.mark.parametrize("key", ["params", "state"])
@pytest.mark.parametrize("text", [None, "", "{", "[1]", "7", "null", pytest.param("[" * 100_000, id="absurdly nested")])
def test_headers_that_are_no_json_objects(key, text, tmp_path):
    fitted().save(tmp_path / "model")
    header, tensors = read_parts(tmp_path / "model")
    header[key] = text
    safetensors.numpy.save_file(tensors, tmp_path / "model", {k: v for k, v in header.items() if v is not None})
    with pytest.raises(ModelFileError, match="model"):
        hmf.load(tmp_path / "model")


def test_a_model_that_requests_a_gpu_can_be_used_without_one(tmp_path):
    try:
        model = hmf.load(altered(tmp_path / "model", params={"device": "cuda"}))
    except DeviceError:
        pytest.fail("the file is whole and every method of a fitted model runs on the CPU")
    assert model.recommend(0)[0].shape == (10,)


# -------------------------------------------------------------------------------------------------------------- mapped


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapped_model_is_the_model(kind, tmp_path):
    path = tmp_path / "model"
    fitted(kind).save(path)
    read, mapped = hmf.load(path), hmf.load(path, mapped=True)
    state = mapped._learned.state
    for array in (state.user.matrix, state.item.matrix, mapped._learned.seen.indices):
        assert file_behind(array) is not None and type(array) is np.ndarray
    assert_equal_models(read, mapped)
    np.testing.assert_array_equal(mapped.recommend(np.arange(M))[0], read.recommend(np.arange(M))[0])
    np.testing.assert_array_equal(mapped.transform(planted()), read.transform(planted()))


def test_a_mapped_model_outlives_its_file_and_takes_updates(tmp_path):
    path = tmp_path / "model"
    fitted().save(path)
    mapped = hmf.load(path, mapped=True)
    before = mapped.recommend(np.arange(M))
    fitted("implicit").save(path)  # another model replaces the file
    np.testing.assert_array_equal(mapped.recommend(np.arange(M))[0], before[0])
    assert mapped.partial_fit_users([M], np.ones((1, N_ITEMS))).n_users == M + 1
    with pytest.raises(TypeError, match=says("mapped must be True or False, got 'r'")):
        hmf.load(path, mapped="r")
