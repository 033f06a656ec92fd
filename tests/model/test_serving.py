"""predict, copies, threads and processes of a fitted model."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from collections import defaultdict

import numpy as np
import pytest
import threadpoolctl
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import hybridmf as hmf
from hybridmf.errors import RatingsError
from hybridmf.model.base import FactorModel
from hybridmf.native import _als
from support.checkout import ROOT
from support.messages import says
from support.ratings import planted
from support.served_models import KINDS, N_ITEMS, M, assert_same, fitted, snapshot

# ----------------------------------------------------------------------------------------------------------- unfitted


@pytest.mark.parametrize("cls", [hmf.ExplicitALS, hmf.ImplicitALS])
def test_an_unfitted_model_raises(cls, tmp_path):
    model = cls()
    calls = [
        lambda: model.recommend(0), lambda: model.similar_items(0), lambda: model.similar_users(0),
        lambda: model.predict(0, 0), lambda: model.predict(planted()), lambda: model.transform(planted()),
        lambda: model.objective(planted()), lambda: model.score(planted()),
        lambda: model.partial_fit_users([0], planted()[:1]), lambda: model.partial_fit_items([0], planted()[:, :1]),
        lambda: model.save(tmp_path / "model"), lambda: model.user_factors, lambda: model.item_factors_,
        lambda: model.user_bias_, lambda: model.item_bias_, lambda: model.mean_, lambda: model.n_users,
        lambda: model.n_items, lambda: model.get_feature_names_out(),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(NotFittedError, match=cls.__name__):
            call()
    assert not list(tmp_path.iterdir())


def test_the_base_class_has_no_objective_or_solver():
    base = FactorModel()
    for call in (base._objective, lambda: base._solver(*[None] * 5)):
        with pytest.raises(NotImplementedError):
            call()


# ------------------------------------------------------------------------------------------------------------- predict


@pytest.mark.parametrize("kind", KINDS)
def test_predict_is_the_formula(kind):
    model = fitted(kind)
    dense = model.user_factors_.astype(float) @ model.item_factors_.astype(float).T
    if "biases" in kind:
        dense += model.mean_ + model.user_bias_[:, None].astype(float) + model.item_bias_.astype(float)
        assert model.mean_ == pytest.approx(planted().data.mean(dtype=float))
    else:
        assert model.mean_ == 0
        assert model.user_bias_ is None
        assert model.item_bias_ is None
    rows, columns = np.nonzero(planted().toarray())
    np.testing.assert_allclose(model.predict(rows, columns, clip=False), dense[rows, columns], rtol=1e-6, atol=1e-6)
    assert model.predict(3, 4, clip=False) == pytest.approx(dense[3, 4], abs=1e-6)
    assert np.ndim(model.predict(3, 4)) == 0
    np.testing.assert_allclose(model.predict(3, np.arange(N_ITEMS), clip=False), dense[3], atol=1e-6)
    np.testing.assert_allclose(model.predict(np.arange(M), [4], clip=False), dense[:, 4], atol=1e-6)
    assert model.predict([3], 4).shape == (1,)
    assert model.predict([], []).shape == model.predict(3, []).shape == (0,)


@pytest.mark.parametrize(
    ("users", "items", "kind", "parts"),
    [
        ([0, 1], [0, 1, 2], ValueError, ("users has 2 ids and items has 3", "as many of each")),
        ([0, 1], [], ValueError, ("users has 2 ids and items has 0",)),
        (60, 0, ValueError, ("users has 60 at position 0; expected 0 <= id < n_users=60",)),
        (0, 40, ValueError, ("items has 40 at position 0; expected 0 <= id < n_items=40",)),
        ([[0]], 0, ValueError, ("users must be one position or a vector",)),
        (0, True, TypeError, ("items must be integers", "bool")),
        (planted(), 0, TypeError, ("users must be integers",)),
        (np.ones((2, 7)), None, RatingsError, ("users has shape (2, 7), expected (n_rows, n_items=40)",)),
    ],
)
def test_predict_refuses(users, items, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        fitted().predict(users, items)


def test_predict_of_positions_without_items_names_items():
    with pytest.raises((TypeError, ValueError), match="items"):
        fitted().predict([0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_predict_of_rows_is_the_first_recommendation(kind):
    model, rows = fitted(kind), planted()
    top = model.predict(rows)
    assert top.dtype == np.int32
    np.testing.assert_array_equal(top, model.recommend(np.arange(M), N=1)[0][:, 0])  # training rows are the users
    np.testing.assert_array_equal(model.predict(rows.toarray()), top)
    np.testing.assert_array_equal(model.predict(np.ones((2, N_ITEMS))), [-1, -1])
    assert model.predict(rows[:0]).shape == (0,)


# --------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("kind", ["explicit", "biases", "implicit", "implicit64"])
def test_thread_count_changes_no_bit_of_an_answer(kind):
    results = []
    for threads in (1, 2, 5):
        model = fitted(kind, num_threads=threads)
        assert model.plan_.num_threads == threads
        more = {
            "score": model.score(planted(9, N_ITEMS, seed=1)),
            "objective": model.objective(planted()),
            "similar": model.similar_items(np.arange(N_ITEMS)),
            "predict": model.predict(np.arange(N_ITEMS), np.arange(N_ITEMS)),
        }
        results.append(snapshot(model) | more)
        del results[-1]["sizes"]
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_pickle_copy_and_clone():
    for kind in KINDS:
        model = fitted(kind)
        model.recommend(0)
        for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert_same(snapshot(model), snapshot(twin))
            twin.partial_fit_users([0], np.ones((1, N_ITEMS)))
            assert not np.array_equal(twin.user_factors_, model.user_factors_)
        fresh = clone(model)
        assert fresh.get_params() == model.get_params()
        with pytest.raises(NotFittedError):
            fresh.recommend(0)
        np.testing.assert_array_equal(fresh.fit(planted()).user_factors_, model.user_factors_)


def test_a_pickle_does_not_grow_with_use():
    model = fitted("implicit")
    size = len(pickle.dumps(model))
    model.recommend(0)
    model.similar_items(0)
    model.transform(planted())
    assert len(pickle.dumps(model)) == size


def test_factors_are_float32_in_c_order_for_every_device():
    for kind in KINDS:
        model = fitted(kind)
        for factors, own in ((model.user_factors, model.user_factors_), (model.item_factors, model.item_factors_)):
            assert factors.dtype == np.float32
            assert factors.flags.c_contiguous
            assert own.dtype == (np.float64 if kind.endswith("64") else np.float32)
            np.testing.assert_array_equal(factors, own.astype(np.float32))


@pytest.mark.parametrize("change", [{"regularization": 5.0}, {"regularization_scaling": "none"}, {"dtype": "float64"}])
def test_parameters_set_after_the_fit_wait_for_the_next_one(change):
    model = fitted()
    model.set_params(**change)
    np.testing.assert_array_equal(model.transform(planted()), model.user_factors_)


def test_kernels_get_arrays_that_fit_together(monkeypatch):
    model, widths = fitted(), []
    monkeypatch.setattr(
        _als, "cholesky_rows", lambda out, systems, *_: widths.append((out.shape[1], systems.fixed.shape[1]))
    )
    model.set_params(biases=True).transform(planted())
    assert widths == [(4, 4)]


# -------------------------------------------------------------------------------------------- the rest of the process


def test_answers_do_not_scan_the_libraries_of_the_process(monkeypatch):
    model = fitted("implicit")
    model.transform(planted())
    scans = []
    monkeypatch.setattr(threadpoolctl.ThreadpoolController, "_load_libraries", lambda self: scans.append(1))
    model.transform(planted()[:1])
    model.objective(planted())
    assert not scans


def test_fits_scan_the_libraries_of_the_process_after_imports_only(monkeypatch):
    """Which may bring another BLAS."""
    model = hmf.ImplicitALS(4, assembly="blas3", device="cpu", iterations=1).fit(planted())
    scans = []
    load = threadpoolctl.ThreadpoolController._load_libraries
    monkeypatch.setattr(
        threadpoolctl.ThreadpoolController, "_load_libraries", lambda self: (scans.append(1), load(self))
    )
    for name in ("imported", "imported", "imported too"):
        monkeypatch.setitem(sys.modules, name, None)
        model.fit(planted())
    assert len(scans) == 2


def test_concurrent_calls_leave_blas_unchanged(monkeypatch):
    pools = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    before = [pool.num_threads for pool in pools]
    if 1 in before:
        pytest.skip("BLAS has one thread anyway")
    model, entered, leave = fitted(), defaultdict(threading.Event), defaultdict(threading.Event)

    def solve(*_):
        name = threading.current_thread().name
        entered[name].set()
        assert leave[name].wait(30)

    monkeypatch.setattr(_als, "cholesky_rows", solve)
    threads = {name: threading.Thread(target=model.transform, args=(planted(),), name=name) for name in "ab"}
    for name in "ab":  # both enter before the first leaves
        threads[name].start()
        assert entered[name].wait(30)
    for name in "ab":
        leave[name].set()
        threads[name].join()
    after = [pool.num_threads for pool in pools]
    for pool, count in zip(pools, before, strict=True):
        pool.set_num_threads(count)
    assert after == before


FORK = """
import os, signal, sys
sys.path[:0] = {path!r}
import numpy as np
import scipy.sparse as sp
import hybridmf as hmf

rng = np.random.default_rng(0)
ratings = sp.csr_array((rng.random((800, 120)) < 0.5).astype(np.float32))  # enough entries for several threads
model = hmf.ImplicitALS(factors=4, iterations=1, num_threads=2, random_state=0)
uses = {{
    "fit": lambda: model.fit(ratings),
    "layouts": lambda: hmf.formats.reorder(ratings, num_threads=2),
    "top-K": lambda: model.recommend(np.arange(800), N=3),
}}


def failed(work):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # its default action ends the process
        os._exit(work() is True)
    return os.waitpid(child, 0)[1] != 0


def use(parent, child):
    model.fit(ratings)
    uses[parent]()
    return failed(uses[child])


# each parent is a child of this process, which has started no thread: importing takes longer than all they do
pairs = [("fit", "fit"), ("fit", "top-K"), ("layouts", "fit"), ("top-K", "layouts")]
print([pair for pair in pairs if failed(lambda: use(*pair))])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer's own locks stay held in a fork"
)
def test_a_forked_child_can_use_what_its_parent_used():
    """The parent's threads are gone in the child, whichever compiled module had started them."""
    script = FORK.format(path=[str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-c", script]
    assert subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE, text=True).stdout == "[]\n"


THREADS = """
import os, sys
sys.path[:0] = {path}
import numpy as np
import hybridmf as hmf

model = hmf.load(sys.argv[1])
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
model.recommend(3)
model.recommend(3, items=[1, 2, 3], filter_already_liked_items=False)
model.recommend(3, filter_items=[1, 2, 3])
model.recommend_new([1, 2, 3])
model.similar_items(3)
model.predict(3, 4)
few = count()
model.recommend(np.arange(model.n_users))
print(model.plan_.num_threads, few - before, count() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="the system does not list threads")
def test_requests_for_one_user_start_no_threads(tmp_path):
    ratings = hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.2, seed=0)
    path = tmp_path / "model.safetensors"
    hmf.ImplicitALS(factors=32, iterations=1, num_threads=4, random_state=0).fit(ratings).save(path)
    command = [sys.executable, "-W", "ignore", "-c", THREADS.format(path=[str(ROOT)]), str(path)]
    done = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "4 0 3\n"
