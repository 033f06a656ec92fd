"""Fits on a Dask cluster of two worker processes: the factors of a fit in one process, and what happens to faults."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.errors import CommunicatorError, DuplicateEntriesError, NotPositiveDefiniteError, RatingsError
from support.ratings import planted

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")  # dask.dataframe and dask.array take a second, in tests alone

import hybridmf.dask as hmf_dask  # noqa: E402

SMALL = {"factors": 3, "random_state": 0, "device": "cpu", "num_threads": 1}


@pytest.fixture(scope="module")
def client():
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    # workers, among them the one in place of a lost one, fork from one process that has imported what they need
    multiprocessing.get_context("forkserver").set_forkserver_preload(["distributed", "pandas", "hybridmf.dask"])
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def frame(matrix: sp.csr_array | None = None) -> pd.DataFrame:
    triplets = (planted() if matrix is None else matrix).tocoo()
    users, items = (np.char.add(letter, at.astype(str)) for letter, at in zip("ui", triplets.coords, strict=True))
    table = pd.DataFrame({"user": users, "item": items, "rating": triplets.data})
    return table.sample(frac=1, random_state=0, ignore_index=True)  # users and items in all partitions


def partitioned(table: pd.DataFrame, parts: int = 3):
    from dask.dataframe import from_pandas

    return from_pandas(table, npartitions=parts, sort=False)


def ones(*shape: int):
    from dask.array import ones

    return ones(shape)


def assert_close(model, expected) -> None:
    for side in ("user", "item"):
        ours, theirs = model._learned.state.side(side), expected._learned.state.side(side)
        np.testing.assert_allclose(ours.matrix, theirs.matrix, rtol=2e-4, atol=2e-5)
        if theirs.bias is not None:
            np.testing.assert_allclose(ours.bias, theirs.bias, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: hmf.ExplicitALS(biases=False, **SMALL | o),
        lambda **o: hmf.ExplicitALS(**SMALL | {"biases": True} | o),
        lambda **o: hmf.ImplicitALS(**SMALL | {"solver": "cg", "alpha": 3.0} | o),
    ],
)
def test_workers_give_the_factors_of_one_process(client, make):
    table = frame()
    expected = make(iterations=3).fit(hmf.Ratings.from_frame(table))
    model = make(iterations=3)
    assert hmf.dask.fit(model, partitioned(table), track_objective=True) is model
    np.testing.assert_array_equal(model.user_ids_, expected.user_ids_)
    np.testing.assert_array_equal(model.item_ids_, expected.item_ids_)
    assert_close(model, expected)
    assert model.history_[-1]["objective"] == pytest.approx(expected.objective(hmf.Ratings.from_frame(table)), rel=1e-5)
    assert model.n_iter_ == 3
    user = expected.user_ids_.tolist().index("u5")
    row = hmf.Ratings.from_frame(table).user_items[[user]]
    np.testing.assert_array_equal(model.recommend(user, row)[0], expected.recommend(user, row)[0])


@pytest.mark.parametrize(
    ("make", "metric"),
    [
        (lambda **o: hmf.ExplicitALS(**SMALL | o), "rmse"),
        (lambda **o: hmf.ImplicitALS(**SMALL | {"alpha": 3.0} | o), "ndcg@10"),
    ],
)
def test_workers_measure_what_one_process_measures_and_stop_together(client, make, metric):
    train, test = hmf.split(hmf.Ratings.from_frame(frame()), random_state=0)
    triplets = train.user_items.tocoo()
    users, items = (ids[at] for ids, at in zip((train.user_ids, train.item_ids), triplets.coords, strict=True))
    table = pd.DataFrame({"user": users, "item": items, "rating": triplets.data})
    strangers = hmf.Ratings.from_coo(["nobody"], ["i1"], [1.0])
    with pytest.raises(hmf.errors.UnknownLabelError, match="nobody"):
        hmf_dask.fit(make(), partitioned(table), validation=strangers)
    expected = make(iterations=2).fit(train, validation=test, unknown="drop")
    model, ranks = make(iterations=5), []

    def stop(model, record):
        ranks.append(distributed.get_worker().address)
        return record["iteration"] == 2

    hmf_dask.fit(model, partitioned(table), validation=test, unknown="drop", callback=stop)
    assert model.n_iter_ == 2 and not ranks  # it ran on a worker, which has a copy
    for record, other in zip(model.history_, expected.history_, strict=True):
        assert record[metric] == pytest.approx(other[metric], rel=1e-5)
        assert record["objective"] == pytest.approx(other["objective"], rel=1e-5)
    assert list(model.timings_) == list(expected.timings_) and min(model.timings_.values()) >= 0


def test_workers_stop_early_and_the_client_has_the_best_factors(client):
    train, test = hmf.split(hmf.Ratings.from_frame(frame()), 0.3, random_state=1)
    triplets = train.user_items.tocoo()
    users, items = (ids[at] for ids, at in zip((train.user_ids, train.item_ids), triplets.coords, strict=True))
    table = pd.DataFrame({"user": users, "item": items, "rating": triplets.data})
    options = SMALL | {"biases": False, "regularization": 0.05}
    watched = {"validation": test, "unknown": "drop", "early_stopping": hmf.EarlyStopping(2, min_delta=0.2)}
    expected = hmf.ExplicitALS(**options, iterations=25).fit(train, **watched)
    found = hmf_dask.fit(hmf.ExplicitALS(**options, iterations=25), partitioned(table), **watched)
    assert found.n_iter_ == expected.n_iter_ and len(found.history_) == len(expected.history_) < 25
    assert_close(found, expected)
    with pytest.raises(ValueError, match="early_stopping measures held-out entries"):
        hmf_dask.fit(hmf.ExplicitALS(**SMALL), partitioned(table), early_stopping=2)


def test_workers_keep_a_side(client):
    ratings = hmf.Ratings.from_frame(frame())
    trained = hmf.ExplicitALS(biases=False, **SMALL, iterations=2).fit(ratings)
    options = {"regularization": 2.0, "init": (None, trained.item_factors), "biases": False}
    expected = hmf.ExplicitALS(**SMALL | options).fit(ratings, freeze="item")
    found = hmf_dask.fit(hmf.ExplicitALS(**SMALL | options), partitioned(frame()), freeze="item")
    assert_close(found, expected)
    np.testing.assert_array_equal(found.item_factors, trained.item_factors)


def test_an_array_of_triplets(client):
    from dask.array import from_array

    triplets = planted().tocoo()
    rows = np.column_stack((triplets.coords[0] * 10, triplets.coords[1], triplets.data)).astype(np.float64)
    expected = hmf.ExplicitALS(biases=False, **SMALL, iterations=2).fit(
        hmf.Ratings.from_frame(
            pd.DataFrame({"user": triplets.coords[0] * 10, "item": triplets.coords[1], "rating": triplets.data})
        )
    )
    model = hmf_dask.fit(
        hmf.ExplicitALS(biases=False, **SMALL, iterations=2),
        from_array(rows, chunks=(200, 2)),
        client=client,
    )
    assert_close(model, expected)
    assert model.user_ids_.tolist() == expected.user_ids_.tolist()


def test_a_store_that_every_worker_reads(client, tmp_path):
    pytest.importorskip("hybridmf.data.store")
    store = hmf.convert(hmf.Ratings.from_frame(frame()), tmp_path / "store", slab_bytes=600)
    expected = hmf.ImplicitALS(**SMALL, iterations=2).fit(hmf.Ratings.from_frame(frame()))
    for given in (store, tmp_path / "store"):
        model = hmf_dask.fit(hmf.ImplicitALS(**SMALL, iterations=2), given)
        assert_close(model, expected)
        np.testing.assert_array_equal(model.recommend(5)[0], expected.recommend(5)[0])  # without items seen
        assert model.user_ids_.tolist() == expected.user_ids_.tolist()


@pytest.mark.gpu
def test_workers_with_a_gpu_each(tmp_path):
    """As dask-cuda starts them: each sees its own GPU first."""
    from hybridmf.device.cuda import device_count
    from hybridmf.plan.dispatch import gpu_status

    if not gpu_status()[0] or device_count() < 2:
        pytest.skip("fewer than two GPUs")
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    workers = {
        k: {"cls": distributed.Nanny, "options": {"nthreads": 1, "env": {"CUDA_VISIBLE_DEVICES": cards[k]}}}
        for k in range(2)
    }
    scheduler = {"cls": distributed.Scheduler, "options": {"dashboard": False, "port": 0}}
    options = {"iterations": 3, "num_threads": None}
    with (
        distributed.SpecCluster(workers=workers, scheduler=scheduler) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.wait_for_workers(2)
        for device, make in (("cuda", hmf.ExplicitALS), ("auto", hmf.ImplicitALS)):
            expected = make(**SMALL | options).fit(hmf.Ratings.from_frame(frame()))
            model = hmf_dask.fit(make(**SMALL | options | {"device": device}), partitioned(frame()), client=client)
            assert model.plan_.gpu is not None
            assert_close(model, expected)
        store = hmf.convert(hmf.Ratings.from_frame(frame()), tmp_path / "store", slab_bytes=600)
        model = hmf_dask.fit(
            make(**SMALL | options | {"device": "cuda"}), store, client=client, checkpoint=tmp_path / "run"
        )
        assert_close(model, expected)
    resumed = make(**SMALL | options).fit(hmf.Ratings.from_frame(frame()), resume_from=tmp_path / "run")
    assert_close(resumed, expected)


def test_one_of_the_workers(client):
    address = sorted(client.nthreads())[1]
    model = hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL, iterations=2), partitioned(frame()), workers=[address])
    assert_close(model, hmf.ExplicitALS(biases=False, **SMALL, iterations=2).fit(hmf.Ratings.from_frame(frame())))


def test_two_fits_at_a_time_take_turns(client):
    results = {}

    def run(seed):
        model = hmf.ExplicitALS(biases=False, **SMALL | {"random_state": seed}, iterations=3)
        results[seed] = hmf_dask.fit(model, partitioned(frame()), client=client)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for seed in (1, 2):
        expected = hmf.ExplicitALS(biases=False, **SMALL | {"random_state": seed}, iterations=3).fit(
            hmf.Ratings.from_frame(frame())
        )
        assert_close(results[seed], expected)


def test_a_run_resumes_on_the_cluster_and_off_it(client, tmp_path):
    table = frame()
    expected = hmf.ExplicitALS(biases=False, **SMALL, iterations=5).fit(hmf.Ratings.from_frame(table))
    hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL, iterations=2), partitioned(table), checkpoint=tmp_path)
    alone = hmf.ExplicitALS(biases=False, **SMALL, iterations=5).fit(
        hmf.Ratings.from_frame(table), resume_from=tmp_path
    )
    again = hmf.ExplicitALS(biases=False, **SMALL, iterations=5)
    hmf_dask.fit(again, partitioned(table, 2), checkpoint=tmp_path, resume_from=tmp_path)
    assert_close(alone, expected)
    assert_close(again, expected)


# ------------------------------------------------------------------------------------------------------------- faults


def test_the_first_cause_comes_out_as_it_was_raised(client):
    table = frame()
    with pytest.raises(DuplicateEntriesError, match=r"more than once .*duplicates=\"sum\""):
        hmf_dask.fit(
            hmf.ExplicitALS(biases=False, **SMALL), partitioned(pd.concat([table, table[:5]], ignore_index=True))
        )
    with pytest.raises(RatingsError, match="has no column 'stars'"):
        hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL), partitioned(table), value="stars")
    with pytest.raises(NotPositiveDefiniteError, match="normal equations of"):
        hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL | {"factors": 30}, regularization=0.0), partitioned(table))
    # and the workers are free again
    assert hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL, iterations=1), partitioned(table)).n_iter_ == 1


def test_labels_of_one_fit_are_not_those_of_another(client):
    """Dask may be releasing the labels of the fit before when the next one sends equal ones."""
    addresses = list(client.nthreads())
    chunks = [client.submit(hmf_dask._chunk_of_frame, frame(), "auto", "auto", "auto", pure=False)]
    first, second = (hmf_dask._labels(client, addresses, chunks) for _ in range(2))
    assert first.key != second.key


@pytest.mark.parametrize(
    ("error", "match", "given", "options"),
    [
        (TypeError, "ratings must be a Dask DataFrame, .* got DataFrame.*model.fit", frame(), {}),
        (ValueError, "duplicates must be", None, {"duplicates": "last"}),
        (ValueError, "the cluster does not have tcp://1.2.3.4:5; it has", None, {"workers": ["tcp://1.2.3.4:5"]}),
        (ValueError, "the cluster does not have tcp://1.2.3.4:5; it has", None, {"workers": "tcp://1.2.3.4:5"}),
        (ValueError, "the cluster does not have any; it has", None, {"workers": []}),
        (ValueError, "timeout must be a finite number", None, {"timeout": 0}),
        (TypeError, "timeout must be a number of seconds, got '9'", None, {"timeout": "9"}),
        (TypeError, "client must be a distributed.Client of the cluster, got 'here'", None, {"client": "here"}),
        (ValueError, r"freeze must be one of 'user', 'item'", None, {"freeze": "both"}),
        (ValueError, r"weights are not available on a cluster.*\(w - 1\) / alpha", None, {"weights": frame()}),
        (RatingsError, "columns user, item, value; got shape", lambda: ones(3), {}),
        (RatingsError, "columns user, item, value; got a block of", lambda: ones(4, 2), {}),
        (RatingsError, "must be whole numbers", lambda: ones(4, 3) / 2, {}),
    ],
)
def test_requests_that_cannot_be_served(client, error, match, given, options):
    given = given() if callable(given) else partitioned(frame()) if given is None else given
    with pytest.raises(error, match=match):
        hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL), given, **options)


def test_each_worker_is_one_rank(client):
    worker = next(iter(client.nthreads()))
    with pytest.raises(ValueError, match=rf"workers names {worker} more than once; name each worker once"):
        hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL), partitioned(frame()), workers=[worker, worker])
    with pytest.raises(ValueError, match=r"device=\['cpu', 'cpu'\]: each worker has its own device"):
        hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL | {"device": ["cpu", "cpu"]}), partitioned(frame()))


def test_objects_that_are_no_model_are_refused(client):
    with pytest.raises(TypeError, match=r"model must be an estimator .* make one: ExplicitALS\(\)"):
        hmf_dask.fit(hmf.ExplicitALS, partitioned(frame()))
    with pytest.raises(TypeError, match="callback must be callable"):
        hmf_dask.fit(hmf.ExplicitALS(**SMALL), partitioned(frame()), callback=3)
    with pytest.raises(ValueError, match="unknown must be"):
        hmf_dask.fit(hmf.ExplicitALS(**SMALL), partitioned(frame()), unknown=3)


def test_a_missing_client_is_an_error(monkeypatch):
    def none():
        raise ValueError("No clients found")

    monkeypatch.setattr(distributed, "default_client", none)
    with pytest.raises(ValueError, match=r"client: there is no Dask client yet; make one with"):
        hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL), partitioned(frame()))


class Hanging(hmf.ExplicitALS):
    """Waits on one of the workers, before it begins, until the fit has failed."""

    def _objective(self, spread=1.0, degrees=None):
        with contextlib.suppress(ValueError):  # not on a worker
            if distributed.get_worker().address == self.__dict__.get("victim"):
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline and not any(inbox.cause for inbox in hmf_dask._inboxes.values()):
                    time.sleep(0.01)
        return super()._objective(spread, degrees)


def test_a_rank_that_hangs_stops_all(client):
    model = Hanging(**SMALL)
    model.victim = sorted(client.nthreads())[1]
    with pytest.raises(CommunicatorError, match=r"rank 1 did not answer rank 0 within 1 s in allreduce"):
        hmf_dask.fit(model, partitioned(frame()), timeout=1.0)


def test_an_interrupted_client_stops_the_ranks(client, monkeypatch):
    def interrupt(*_):
        time.sleep(0.2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hmf_dask, "_watch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL, iterations=1_000_000), partitioned(frame()))
    assert hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL, iterations=1), partitioned(frame())).n_iter_ == 1


def test_gpus_are_dealt_out_by_the_cluster(client):
    with pytest.raises(ValueError, match='each worker has its own device; use "cuda"'):
        hmf_dask.fit(hmf.ExplicitALS(biases=False, **SMALL | {"device": "cuda:1"}), partitioned(frame()))


def test_a_lost_worker_stops_all_and_the_fit_resumes(client, tmp_path):
    """Killed in the middle of a long fit; the other rank stops at once, and a new run continues from the checkpoint."""
    table = frame(planted(300, 200))
    pids = client.run(os.getpid)
    victim = pids[sorted(pids)[1]]

    def kill():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(list(tmp_path.glob("checkpoint-*"))) < 2:
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(CommunicatorError, match=r"lost|cannot reach"):
        hmf_dask.fit(
            hmf.ExplicitALS(biases=False, **SMALL, iterations=100_000), partitioned(table), checkpoint=tmp_path
        )
    killer.join()
    done = max(int(path.stem.removeprefix("checkpoint-")) for path in tmp_path.glob("checkpoint-*"))
    client.wait_for_workers(2, timeout=60)  # the cluster starts a new one
    model = hmf.ExplicitALS(biases=False, **SMALL, iterations=done + 2)
    hmf_dask.fit(model, partitioned(table), resume_from=tmp_path, checkpoint=tmp_path, client=client)
    assert model.n_iter_ == done + 2
    expected = hmf.ExplicitALS(biases=False, **SMALL, iterations=done + 2).fit(hmf.Ratings.from_frame(table))
    np.testing.assert_allclose(
        model.user_factors @ model.item_factors.T, expected.user_factors @ expected.item_factors.T, rtol=1e-2, atol=1e-2
    )


def test_other_names_are_missing_as_usual():
    with pytest.raises(AttributeError, match="module 'hybridmf' has no attribute 'flask'"):
        hmf.flask


def test_the_error_names_the_package_to_install(monkeypatch):
    import importlib
    import sys

    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "hybridmf.dask")
    with pytest.raises(ImportError, match=r'pip install "hybridmf\[dask\]"'):
        importlib.import_module("hybridmf.dask")
