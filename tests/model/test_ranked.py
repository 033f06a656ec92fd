"""One fit by many ranks, each with its share of the ratings: the factors of a fit in one process."""

from __future__ import annotations

import threading
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.validate import as_csr
from hybridmf.cpu.als import HalfSweep
from hybridmf.data import fingerprint
from hybridmf.data.slabs import InMemory
from hybridmf.errors import CommunicatorError, DuplicateEntriesError, ModelFileError, NonFiniteError, RatingsError
from hybridmf.model import checkpoint as checkpoints
from hybridmf.model import ranked
from hybridmf.model.ranked import RankedRatings
from hybridmf.plan.grid import Grid, RankLayout
from hybridmf.plan.types import DegreeFacts
from hybridmf.ranks.shares import SharedEntries, StoredRatings, WholeRatings, check_same_data, exchange
from hybridmf.ranks.transport.communicator import Single
from hybridmf.ranks.transport.threads import run_ranks
from support.ranks import entries, fit_rank
from support.ratings import planted

SMALL = {"factors": 3, "random_state": 0, "device": "cpu", "num_threads": 1}
KINDS = {
    "explicit": lambda **o: hmf.ExplicitALS(biases=False, **SMALL | o),
    "biases": lambda **o: hmf.ExplicitALS(**SMALL | {"biases": True} | o),
    "implicit": lambda **o: hmf.ImplicitALS(**SMALL | {"alpha": 3.0} | o),
    "implicit-cg": lambda **o: hmf.ImplicitALS(**SMALL | {"solver": "cg"} | o),
    "balanced": lambda **o: hmf.ExplicitALS(biases=False, **SMALL | {"balance": True} | o),
}


def fit(size: int, make, matrix=None, share=entries, **options):
    """The model of the first rank."""
    matrix = planted() if matrix is None else matrix
    models = run_ranks(size, lambda c: fit_rank(make(), share(matrix, c.rank, size), c, **options), timeout=30)
    assert all(model is None for model in models[1:])
    return models[0]


def whole(matrix, rank, size):
    return WholeRatings(as_csr(matrix, name="matrix"))


def assert_close(model, expected) -> None:
    for side in ("user", "item"):
        ours, theirs = model._learned.state.side(side), expected._learned.state.side(side)
        np.testing.assert_allclose(ours.matrix, theirs.matrix, rtol=2e-4, atol=2e-5)
        if theirs.bias is not None:
            np.testing.assert_allclose(ours.bias, theirs.bias, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("kind", "size"), [*product(KINDS, (2, 3)), ("biases", 1), ("implicit", 1)])
def test_ranks_give_the_factors_of_one_process(kind, size):
    expected = KINDS[kind](iterations=3).fit(planted())
    for share in (entries, whole):
        model = fit(size, lambda: KINDS[kind](iterations=3), share=share, track_objective=True)
        assert_close(model, expected)
        assert model.n_iter_ == 3 and [record["iteration"] for record in model.history_] == [1, 2, 3]
        assert model.history_[-1]["objective"] == pytest.approx(expected.objective(planted()), rel=1e-5)
        row = planted()[[0]]
        np.testing.assert_allclose(model.recommend(0, row)[1], expected.recommend(0, row)[1], rtol=1e-3)


@pytest.mark.parametrize("share", [entries, whole])
def test_exact_model_parallel_ranks_give_the_same_bits(share):
    for size in (2, 4):
        model = fit(size, lambda: KINDS["explicit"](iterations=3), share=share)
        np.testing.assert_array_equal(model.user_factors_, KINDS["explicit"](iterations=3).fit(planted()).user_factors_)


@pytest.mark.parametrize("share", [entries, whole])
def test_plans_of_ranks_use_the_degrees(share):
    """Of all ranks' entries together: room for the longest row depends on it."""
    matrix = as_csr(planted(), name="matrix")
    facts = fit(3, lambda: KINDS["explicit"](iterations=1), share=share).plan_.facts
    assert facts == DegreeFacts.of(matrix, items=True)
    assert facts.positions == (np.diff(matrix.indptr).argmax(), np.bincount(matrix.indices).argmax())
    assert facts.empty == 2


@pytest.mark.parametrize("grids", [(1, 4), (2, 2), (4, 1)])
def test_entries_go_where_a_cut_of_the_matrix_would_have_them(grids):
    matrix = as_csr(planted(), name="matrix")
    both = {"user": Grid(*grids), "item": Grid(*grids)}

    def compare(communicator):
        shared = entries(matrix, communicator.rank, 4)
        layout = RankLayout.even(shared.degrees(communicator), both, 1.0)
        for side, rows in (("user", matrix), ("item", as_csr(matrix.T, name="matrix"))):
            expected = layout.cut(side, communicator.rank, InMemory(rows)).csr
            ours = shared.block(communicator, layout, side).csr
            assert ours.shape == expected.shape and (ours != expected).nnz == 0

    run_ranks(4, compare, timeout=30)


@pytest.mark.parametrize("drop_zeros", [False, True])
@pytest.mark.parametrize("grids", [(1, 4), (2, 2)])
def test_ranks_read_their_part_of_a_store(grids, drop_zeros, tmp_path):
    stores = pytest.importorskip("hybridmf.data.store")
    matrix = planted()
    matrix.data[::5] = 0
    hmf.convert(hmf.Ratings.from_matrix(matrix), tmp_path / "store", slab_bytes=1500)
    store, both = stores.Store.open(tmp_path / "store"), {"user": Grid(*grids), "item": Grid(*grids)}
    whole = as_csr(matrix, name="matrix", drop_zeros=drop_zeros)

    def compare(communicator):
        stored = StoredRatings(store, np.float32, drop_zeros)
        layout = RankLayout.even(stored.degrees(communicator), both, 1.0)
        for side, rows in (("user", whole), ("item", as_csr(whole.T, name="matrix"))):
            expected = layout.cut(side, communicator.rank, InMemory(rows)).csr
            ours = stored.block(communicator, layout, side).csr
            assert ours.shape == expected.shape and ours.nnz == expected.nnz and (ours != expected).nnz == 0

    run_ranks(4, compare, timeout=30)


@pytest.mark.parametrize("share", ["entries", "whole", "store", "store, streamed"])
@pytest.mark.parametrize("grid", [(1, 4), (2, 2)])
def test_rows_of_users_come_to_the_first_rank(share, grid, tmp_path):
    matrix = as_csr(planted(), name="matrix", drop_zeros=True)
    store = hmf.convert(matrix, tmp_path / "store", slab_bytes=1500)
    wanted = np.random.default_rng(0).random(60) < 0.5

    def run(ranks):
        ratings = entries(matrix, ranks.rank, 4) if share == "entries" else WholeRatings(matrix)
        if share.startswith("store"):
            ratings = StoredRatings(store, np.float32, True)
        both = {"user": Grid(*grid), "item": Grid(*grid)}
        source = RankedRatings(KINDS["implicit"](), ratings, ranks)
        source.cut(both, 1.0, share == "store, streamed")
        return source.rows_of_users(wanted)

    rows, *others = run_ranks(4, run, timeout=30)
    assert others == [None] * 3 and rows.dtype == np.int8 and rows.shape == matrix.shape
    np.testing.assert_array_equal(rows.toarray(), (matrix.toarray() != 0) & wanted[:, None])


def test_exchange_sends_each_entry_where_it_belongs():
    def move(communicator):
        rank = communicator.rank
        dest = np.array([0, 2, 2, rank])
        names, halves = exchange(communicator, dest, [10 * rank + np.arange(4), np.full(4, rank / 2)])
        return names.tolist(), halves.tolist()

    one, two, three = run_ranks(3, move, timeout=30)
    assert one[0] == [0, 3, 10, 20] and two[0] == [13] and three[0] == [1, 2, 11, 12, 21, 22, 23]
    assert three[1] == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("rule", ["sum", "mean", "max"])
def test_pairs_that_several_ranks_have_are_merged(rule):
    users, items, values = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 0]), np.array([1.0, 2.0, 3.0, 4.0])

    def share(_, rank, size):
        return SharedEntries(users, items, values + rank, (3, 2), duplicates=rule)

    merged = {"sum": 2 * values + 1, "mean": values + 0.5, "max": values + 1}[rule]
    expected = KINDS["biases"](iterations=2).fit(sp.csr_array((merged, (users, items)), shape=(3, 2)))
    assert_close(fit(2, lambda: KINDS["biases"](iterations=2), share=share), expected)
    labels = (np.array(["a", "b", "c"]), np.array(["x", "y"]))
    with pytest.raises(DuplicateEntriesError, match=r"user '[ab]', item '[xy]' more than once .*duplicates=\"sum\""):
        fit(2, KINDS["biases"], share=lambda *_: SharedEntries(users, items, values, (3, 2), labels=labels))


def test_zeros_are_no_implicit_feedback():
    matrix = planted()
    matrix.data[::3] = 0
    kept = matrix.copy()
    kept.eliminate_zeros()
    model = fit(2, KINDS["implicit"], matrix, lambda *a: entries(*a, drop_zeros=True))
    assert model.plan_.nnz == kept.nnz
    assert_close(model, KINDS["implicit"]().fit(matrix))


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", ["biases", "implicit"])
def test_a_run_of_ranks_resumes_alone_and_the_other_way_round(kind, tmp_path):
    expected = KINDS[kind](iterations=5).fit(planted())
    fit(3, lambda: KINDS[kind](iterations=2), checkpoint=tmp_path / "a")
    assert_close(KINDS[kind](iterations=5).fit(planted(), resume_from=tmp_path / "a"), expected)
    KINDS[kind](iterations=2).fit(planted(), checkpoint=tmp_path / "b")
    model = fit(2, lambda: KINDS[kind](iterations=5), checkpoint=tmp_path / "b", resume_from=tmp_path / "b")
    assert_close(model, expected)
    assert model.n_iter_ == len(model.history_) == 5
    assert hmf.load(tmp_path / "b" / "checkpoint-000005.safetensors").n_iter_ == 5


def test_ranks_have_the_fingerprint_of_the_whole(tmp_path):
    fit(3, lambda: KINDS["explicit"](iterations=1), checkpoint=tmp_path)
    found = checkpoints.ModelFile(tmp_path / "checkpoint-000001.safetensors").summary["data"]
    assert found == fingerprint.fingerprint(as_csr(planted(), name="matrix"))
    with pytest.raises(ModelFileError, match="was written for other data"):
        fit(3, KINDS["explicit"], planted(seed=1), resume_from=tmp_path)


# ------------------------------------------------------------------------------------------------------------ faults


def test_a_rank_with_other_data_is_named():
    with pytest.raises(CommunicatorError, match=r"rank 1 has other data than rank 0: 60x40-.*give all ranks the same"):
        fit(2, KINDS["explicit"], share=lambda _, rank, __: whole(planted(seed=rank), rank, 2))
    check_same_data(Single(), "anything")


def test_ranks_with_other_parameters_stop(tmp_path):
    def different(communicator):
        model = KINDS["explicit"](regularization=1.0 + communicator.rank)
        return fit_rank(model, entries(planted(), communicator.rank, 2), communicator)

    with pytest.raises(CommunicatorError, match="another layout, objective or plan"):
        run_ranks(2, different, timeout=30)


def test_not_a_number_on_one_rank_stops_all_with_its_cause(monkeypatch, tmp_path):
    solve = HalfSweep.steps

    def fail_on_users(self, *arguments, **options):
        if self.side == "user" and self.names[0] > 0:
            raise NonFiniteError("factors of user 40 became infinite or NaN")
        return solve(self, *arguments, **options)

    monkeypatch.setattr(HalfSweep, "steps", fail_on_users)
    causes = []

    def run(communicator):
        try:
            fit_rank(KINDS["explicit"](), entries(planted(), communicator.rank, 2), communicator)
        except Exception as error:
            causes.append((communicator.rank, type(error), str(error)))
            raise

    with pytest.raises(NonFiniteError, match="factors of user 40"):
        run_ranks(2, run, timeout=30)
    assert sorted(rank for rank, *_ in causes) == [0, 1]
    assert all("factors of user 40 became" in text for *_, text in causes)


def test_features_that_ranks_do_not_support():
    with pytest.raises(ValueError, match="model: SGD is not served by ranks; fit ImplicitALS or ExplicitALS"):
        fit(2, lambda: hmf.SGD(factors=3, device="cpu"))
    with pytest.raises(ValueError, match="reorder='both' is not served by ranks; use reorder='none'"):
        fit(2, lambda: KINDS["explicit"](reorder="both"))
    with pytest.raises(RatingsError, match="nothing to fit"):
        fit(2, KINDS["explicit"], sp.csr_array((5, 4), dtype=np.float32))


def test_different_plans_of_ranks_are_explained(monkeypatch):
    """As GPUs with different memory free may."""
    make_plan, ranks = ranked.make_plan, []

    def differently(*arguments):
        plan = make_plan(*arguments)
        ranks.append(plan)
        grid = Grid(2, 1) if threading.current_thread().name.endswith("1") else Grid(1, 2)
        return plan.changed(scale=SimpleNamespace(grids={"user": grid, "item": grid}))

    monkeypatch.setattr(ranked, "make_plan", differently)
    with pytest.raises(CommunicatorError, match=r"rank 1 plans grids of \[2, 2\] splits and rank 0 of \[1, 1\].*limit"):
        fit(2, KINDS["explicit"])


def test_labels_that_cannot_be_stored_fail_before_training(tmp_path):
    ids = np.empty(60, dtype=object)
    ids[:] = [("u", k) for k in range(60)]
    with pytest.raises(TypeError, match="user_ids holds labels of type tuple"):
        fit(2, KINDS["explicit"], share=lambda *a: entries(*a, labels=(ids, None)), checkpoint=tmp_path)


def test_seeds_that_are_no_integers_are_drawn_once():
    model = fit(3, lambda: KINDS["explicit"](iterations=1, random_state=None))
    assert np.isfinite(model.user_factors_).all()


# --------------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["explicit", "biases", "implicit"])
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_on_gpus(kind, size, tmp_path):
    """A GPU a rank; a checkpoint of theirs resumes in one process on the CPU."""
    from hybridmf.device.cuda import device_count
    from hybridmf.errors import DeviceError

    try:
        if device_count() < size:
            pytest.skip(f"fewer than {size} GPUs")
    except DeviceError as error:
        pytest.skip(f"no GPU: {error}")
    matrix = planted(300, 200)

    def run(communicator):
        share, device = entries(matrix, communicator.rank, size), f"cuda:{communicator.rank}"
        model = KINDS[kind](device="cuda", factors=8, iterations=3)
        return fit_rank(model, share, communicator, device, checkpoint=tmp_path, track_objective=True)

    model = run_ranks(size, run, timeout=120)[0]
    expected = KINDS[kind](factors=8, iterations=3).fit(matrix)
    np.testing.assert_allclose(model.user_factors, expected.user_factors, rtol=5e-3, atol=5e-4)
    assert model.history_[-1]["objective"] == pytest.approx(expected.objective(matrix), rel=1e-4)
    resumed = KINDS[kind](factors=8, iterations=5).fit(matrix, resume_from=tmp_path)
    straight = KINDS[kind](factors=8, iterations=5).fit(matrix)
    np.testing.assert_allclose(resumed.user_factors, straight.user_factors, rtol=5e-3, atol=5e-4)
