"""Fits that stop and go on from a checkpoint; checkpoints that are damaged or of something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.cpu.als import HalfSweep
from hybridmf.data import fingerprint
from hybridmf.errors import ModelFileError
from hybridmf.model import checkpoint as checkpoints
from hybridmf.ranks.su_als import RankALS
from support.messages import says
from support.model_files import KINDS, N_ITEMS, M, alter, assert_equal_models, fitted, make, read_parts
from support.ratings import planted

# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(autouse=True)
def in_step(monkeypatch):
    """An iteration's checkpoint is on the disk before the next begins; test_checkpoints.py is about when it is not."""
    offer = checkpoints.Writer.offer

    def offer_and_wait(self, model):
        offer(self, model)
        self._wait(report=True)

    monkeypatch.setattr(checkpoints.Writer, "offer", offer_and_wait)


def stop_after(k: int):
    """A callback that ends a fit the hard way after k iterations."""

    def callback(model, record):
        if record["iteration"] == k:
            raise KeyboardInterrupt

    return callback


def interrupted(kind: str, folder: Path, after: int = 3, ratings=None, **options):
    model = make(kind, **options)
    with pytest.raises(KeyboardInterrupt):
        model.fit(planted() if ratings is None else ratings, checkpoint=folder, callback=stop_after(after))
    return model


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def without_seconds(history: list[dict]) -> list[dict]:
    return [{key: record[key] for key in record if key not in ("seconds", "objective")} for record in history]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_fit_ends_with_the_same_bits(kind, tmp_path):
    folder = tmp_path / "runs" / "a"  # made if it does not exist
    interrupted(kind, folder)
    assert names(folder) == ["checkpoint-000002.safetensors", "checkpoint-000003.safetensors"]
    for source in (folder, folder / "checkpoint-000002.safetensors"):
        model = make(kind, random_state=99).fit(planted(), resume_from=source)
        assert model.n_iter_ == 5
        for side in ("user", "item"):
            ours, expected = (each._learned.state.side(side) for each in (model, fitted(kind)))
            np.testing.assert_array_equal(ours.matrix, expected.matrix)
            np.testing.assert_equal(ours.bias, expected.bias)
        assert without_seconds(model.history_) == without_seconds(fitted(kind).history_)


def test_a_resumed_fit_runs_only_the_remaining_iterations(tmp_path, monkeypatch):
    interrupted("explicit", tmp_path)
    sides, solve = [], RankALS.solve
    monkeypatch.setattr(RankALS, "solve", lambda self, side: sides.append(side) or solve(self, side))
    make().fit(planted(), resume_from=tmp_path)
    assert sides == ["item", "user"] * 2
    finished = make(iterations=3).fit(planted(), resume_from=tmp_path)
    assert (finished.n_iter_, len(sides)) == (3, 4)
    assert finished.recommend(0)[0].shape == (10,)


def test_a_resumed_fit_that_is_interrupted_at_once_has_the_checkpoint(tmp_path, monkeypatch):
    stopped = interrupted("biases", tmp_path)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    for model in (make("biases"), make("biases", iterations=1).fit(planted(9, N_ITEMS))):
        model.set_params(iterations=5)
        with monkeypatch.context() as patch:
            patch.setattr(HalfSweep, "steps", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model.fit(planted(), resume_from=tmp_path)
        assert_equal_models(model, stopped)
        np.testing.assert_array_equal(model.recommend([0, 59])[0], stopped.recommend([0, 59])[0])


def test_two_checkpoints_are_kept_and_other_files_left_alone(tmp_path):
    for name in ("notes.txt", "checkpoint-1.safetensors", "checkpoint-000001.safetensors.bak"):
        (tmp_path / name).write_text("mine")
    make().fit(planted(), checkpoint=tmp_path)
    assert names(tmp_path) == [
        "checkpoint-000001.safetensors.bak", "checkpoint-000004.safetensors", "checkpoint-000005.safetensors",
        "checkpoint-1.safetensors", "notes.txt",
    ]  # fmt: skip
    assert checkpoints.KEEP == 2


def test_a_run_may_checkpoint_into_the_folder_it_resumes_from(tmp_path):
    interrupted("implicit", tmp_path)
    make("implicit").fit(planted(), checkpoint=tmp_path, resume_from=tmp_path)
    assert names(tmp_path) == ["checkpoint-000004.safetensors", "checkpoint-000005.safetensors"]


def test_a_new_run_in_a_used_folder_is_refused_before_training(tmp_path, monkeypatch):
    make(random_state=1).fit(planted(), checkpoint=tmp_path)  # five iterations
    kept, sweeps = {path.name: path.read_bytes() for path in tmp_path.iterdir()}, []
    with monkeypatch.context() as patch:
        patch.setattr(HalfSweep, "steps", lambda *_, **__: sweeps.append(1))
        with pytest.raises(
            FileExistsError, match=says("holds checkpoints of an earlier run", "resume_from=", "another")
        ):
            make().fit(planted(), checkpoint=tmp_path)
    assert not sweeps
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
    make(iterations=6).fit(planted(), checkpoint=tmp_path, resume_from=tmp_path)


def test_only_the_run_that_wrote_a_folder_continues_in_it(tmp_path, monkeypatch):
    used, other = tmp_path / "used", tmp_path / "other"
    interrupted("explicit", used)
    interrupted("explicit", other)
    older, newest = used / "checkpoint-000002.safetensors", used / "checkpoint-000003.safetensors"
    monkeypatch.chdir(tmp_path)
    for source in (used, newest, str(used), "used", "other/../used"):
        assert checkpoints.prepare(used, source).folder == used
    for source in (None, older, other, other / newest.name, used / "nowhere"):
        with pytest.raises(
            FileExistsError, match=says("used", "the newest checkpoint-000003", "or give another folder")
        ):
            checkpoints.prepare(used, source)
    assert checkpoints.prepare(tmp_path / "new", used).folder.is_dir()


def test_skipped_checkpoints_replace_no_later_ones(tmp_path):
    interrupted("explicit", tmp_path)
    data = json.loads(read_parts(tmp_path / "checkpoint-000003.safetensors")[0]["state"])["data"]
    for k in (3, 7, 1_000_001):
        (tmp_path / f"checkpoint-{k:06d}.safetensors").write_bytes(b"")
    model = make(iterations=4).fit(planted(), resume_from=tmp_path)
    with checkpoints.Writer(hmf.Checkpoint(tmp_path), {"data": data}) as writer:
        for n_iter in (3, 4):
            model._learn(replace(model._learned, n_iter=n_iter))
            writer.offer(model)
    assert [name.removeprefix("checkpoint-") for name in names(tmp_path)] == [
        "000003.safetensors", "000004.safetensors", "000007.safetensors", "1000001.safetensors",
    ]  # fmt: skip
    assert make(iterations=5).fit(planted(), resume_from=tmp_path).n_iter_ == 5


def test_a_checkpoint_is_also_a_model(tmp_path):
    interrupted("biases", tmp_path)
    model = hmf.load(tmp_path / "checkpoint-000003.safetensors")
    assert model.n_iter_ == 3
    assert model.recommend([0, 1], planted()[[0, 1]])[0].shape == (2, 10)
    with pytest.raises(ValueError, match=says("saved without", "user_items")):
        model.recommend([0, 1])


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_corrupt_newest_checkpoint_falls_back_to_the_one_before(damage, tmp_path):
    interrupted("implicit-cg", tmp_path)
    newest = tmp_path / "checkpoint-000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] if damage is None else damage)
    with pytest.raises(ModelFileError, match=says("checkpoint-000003", "not a complete model file")):
        make("implicit-cg").fit(planted(), resume_from=newest)
    model = make("implicit-cg").fit(planted(), resume_from=tmp_path)
    np.testing.assert_array_equal(model.user_factors_, fitted("implicit-cg").user_factors_)
    (tmp_path / "checkpoint-000002.safetensors").write_bytes(b"")
    with pytest.raises(ModelFileError, match=says("checkpoint-000002", "not a complete model file")):
        make("implicit-cg").fit(planted(), resume_from=tmp_path)


def test_falling_back_is_logged(tmp_path, caplog):
    interrupted("explicit", tmp_path)
    (tmp_path / "checkpoint-000003.safetensors").write_bytes(b"")
    with caplog.at_level("WARNING", "hybridmf"):
        make().fit(planted(), resume_from=tmp_path)
    assert "checkpoint-000003" in caplog.text


def one_value_changed() -> sp.csr_array:
    matrix = planted()
    matrix.data[17] += 0.5
    return matrix


@pytest.mark.parametrize(
    ("kind", "options", "ratings", "parts"),
    [
        ("explicit", {}, planted(seed=1), ("was written for other data (60x40-487-", "resume with the same ratings")),
        ("explicit", {}, planted(M, N_ITEMS + 1), ("was written for other data (60x40-", ", this is 60x41-")),
        ("explicit", {}, one_value_changed(), ("was written for other data (60x40-487-", ", this is 60x40-487-")),
        ("explicit", {"regularization": 0.7}, None, ("was written with regularization=None, this model has", "=0.7")),
        ("explicit", {"factors": 4}, None, ("was written with factors=3, this model has factors=4",)),
        ("explicit", {"biases": True}, None, ("was written with biases=False, this model has biases=True",)),
        ("explicit", {"regularization_scaling": 0.5}, None, ("written with regularization_scaling=None", "=0.5")),
        ("implicit", {}, None, ("is a checkpoint of ExplicitALS, not of ImplicitALS",)),
        ("explicit", {"dtype": "float64"}, None, ("was written",)),
    ],
)
def test_a_checkpoint_of_another_fit_is_refused(kind, options, ratings, parts, tmp_path):
    interrupted("explicit", tmp_path)
    before = names(tmp_path)
    for source in (tmp_path, tmp_path / "checkpoint-000003.safetensors"):
        with pytest.raises(ModelFileError, match=says("checkpoint-000003.safetensors", *parts)):
            make(kind, **options).fit(planted() if ratings is None else ratings, resume_from=source)
    assert names(tmp_path) == before


def test_the_way_of_computing_may_change_between_runs(tmp_path):
    interrupted("explicit", tmp_path)
    options = {"iterations": 6, "num_threads": 2, "assembly": "bals", "reorder": "both", "random_state": 7}
    model = make(**options).fit(planted(), resume_from=tmp_path)
    expected = make(iterations=6).fit(planted())
    assert model.n_iter_ == 6
    np.testing.assert_allclose(model.user_factors_, expected.user_factors_, rtol=1e-3, atol=1e-4)


def test_dtypes_given_as_numpy_dtypes_are_compared(tmp_path):
    interrupted("explicit", tmp_path, dtype=np.dtype("float32"))
    header, _ = read_parts(tmp_path / "checkpoint-000003.safetensors")
    assert json.loads(header["params"])["dtype"] == "float32"
    assert make(dtype=np.float32).fit(planted(), resume_from=tmp_path).n_iter_ == 5
    with pytest.raises(ModelFileError, match=says("was written with dtype='float32', this model has dtype='float64'")):
        make(dtype=np.dtype("float64")).fit(planted(), resume_from=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {"factors": None}, "tensors": {"user_factors": np.ones((M, 4), np.float32),
                                                   "item_factors": np.ones((N_ITEMS, 4), np.float32)}},
         "its tensors are those of a model with factors=4, not factors=3"),
        ({"drop": ["seen_indptr", "seen_indices"], "tensors": {"user_factors": np.ones((M - 1, 3), np.float32)}},
         "is corrupt: it holds factors of 59x40 users x items for other data (60x40-487-"),
    ],
)  # fmt: skip
def test_a_checkpoint_whose_tensors_do_not_fit_the_run_is_refused(change, message, tmp_path):
    interrupted("explicit", tmp_path)
    path = alter(tmp_path / "checkpoint-000003.safetensors", **change)
    with pytest.raises(ModelFileError, match=says("checkpoint-000003", message)):
        make().fit(planted(), resume_from=path)


def test_resume_from_an_invalid_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=says("resume_from folder", "holds no checkpoint")):
        make().fit(planted(), resume_from=tmp_path)
    with pytest.raises(FileNotFoundError, match=says("there is no model file", "nowhere")):
        make().fit(planted(), resume_from=tmp_path / "nowhere")
    fitted().save(tmp_path / "model")
    with pytest.raises(
        ModelFileError,
        match=says("model", "is a saved model, not a checkpoint; pass a file or folder that"),
    ):
        make().fit(planted(), resume_from=tmp_path / "model")


def test_checkpoint_folders_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    sweeps = []
    monkeypatch.setattr(HalfSweep, "steps", lambda *_, **__: sweeps.append(1))
    with pytest.raises(NotADirectoryError, match=says("checkpoint", "file", "is a file; give a folder")):
        make().fit(planted(), checkpoint=tmp_path / "file")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(PermissionError, match=says("checkpoint folder", "cannot be written to")):
        make().fit(planted(), checkpoint=tmp_path / "folder")
    assert not sweeps  # before training rather than after


def test_a_callback_may_add_numpy_numbers_to_the_record(tmp_path):
    extra = {"norm": np.float32(0.5), "rank": np.int64(3), "good": np.bool_(True), "each": np.arange(2.0)}
    make().fit(planted(), checkpoint=tmp_path, callback=lambda m, record: record.update(extra))
    record = hmf.load(tmp_path / "checkpoint-000005.safetensors").history_[0]
    assert [record[key] for key in extra] == [0.5, 3, True, [0.0, 1.0]]


def test_records_that_no_file_can_hold(tmp_path):
    model = make(iterations=1).fit(planted(), callback=lambda m, record: record.update(seen={1}))
    with pytest.raises(TypeError, match=says("history_ holds a value of type set", "only numbers", "its record")):
        model.save(tmp_path / "model")


def test_resuming_a_labelled_model_with_validation(tmp_path):
    ids = {"user_ids": [f"u{k}" for k in range(M)], "item_ids": [f"i{k}" for k in range(N_ITEMS)]}
    train, test = hmf.split(hmf.Ratings.from_matrix(planted(), **ids), 0.2, 0)
    whole = make().fit(train, validation=test)
    with pytest.raises(KeyboardInterrupt):
        make().fit(train, validation=test, checkpoint=tmp_path, callback=stop_after(2))
    resumed = make().fit(train, validation=test, resume_from=tmp_path)
    assert [record["rmse"] for record in resumed.history_] == [record["rmse"] for record in whole.history_]
    assert resumed.user_ids_.tolist() == ids["user_ids"]


def test_the_fingerprint_covers_structure_and_values():
    matrix = planted()
    moved = sp.csr_array((matrix.data, (matrix.indices + 1) % N_ITEMS, matrix.indptr), shape=matrix.shape)
    prints = {fingerprint.fingerprint(m) for m in (matrix, one_value_changed(), moved, planted(seed=1))}
    assert len(prints) == 4
    wide = planted()
    wide.indptr = wide.indptr.astype(np.int64)
    assert fingerprint.fingerprint(wide) == fingerprint.fingerprint(matrix)
