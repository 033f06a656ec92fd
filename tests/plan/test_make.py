"""Plans, devices and configuration: decisions before any work, and their reasons."""

from __future__ import annotations

import io
import logging
import re
import tracemalloc

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core import system
from hybridmf.core import validate as _validate
from hybridmf.core.system import available_memory
from hybridmf.errors import MemoryBudgetError, RatingsError
from hybridmf.formats import BalsMatrix
from hybridmf.native import _als
from hybridmf.plan import dispatch
from hybridmf.plan.als import for_fold_in
from hybridmf.plan.make import check_memory
from hybridmf.plan.types import Plan
from hybridmf.tools import config as _config
from support.ratings import planted

NO_CUPY = 'CuPy is not installed; pip install "hybridmf[cuda13]" (driver 580 or later) or "hybridmf[cuda12]"'


def says(*parts: str) -> str:
    """Regular expression: these parts, literally, in this order."""
    return "(?s)" + ".*".join(re.escape(part) for part in parts)


def plan_of(model=None, shape=(1000, 500), nnz=20_000, **options) -> Plan:
    options = {"device": "cpu", "num_threads": 2, "biases": False} | options
    return hmf.plan(shape=shape, nnz=nnz, model=model or hmf.ExplicitALS(**options))


@pytest.fixture
def machine(monkeypatch):
    """Pretend that this module, or None, is what ``import cupy`` finds."""
    return lambda module: monkeypatch.setitem(__import__("sys").modules, "cupy", module)


# ------------------------------------------------------------------------------------- devices (test_gpu_plan.py too)


def test_auto_takes_the_cpu_and_logs_why(machine, caplog):
    machine(None)
    with caplog.at_level(logging.INFO, "hybridmf"):
        model = hmf.ExplicitALS(biases=False, factors=2, iterations=1).fit(planted())
    assert model.device_ == model.plan_.device == "cpu"
    assert model.plan_.reason == f"no GPU: {NO_CUPY}"
    assert f"device='auto' chose the CPU: {NO_CUPY}" in caplog.text


# --------------------------------------------------------------------------------------------------------------- plans


def test_a_plan_of_data_is_the_plan_of_the_fit():
    for model in (
        hmf.ExplicitALS(factors=3, iterations=1, device="cpu", num_threads=1, biases=True),
        hmf.ImplicitALS(factors=3, iterations=1, device="cpu", num_threads=2, assembly="bals"),
    ):
        matrix = planted()
        planned = hmf.plan(matrix, model)
        assert not hasattr(model, "plan_")
        assert planned == hmf.plan(hmf.Ratings.from_matrix(matrix), model)
        assert planned == hmf.plan(shape=matrix.shape, nnz=matrix.nnz, model=model)
        assert planned == model.fit(matrix).plan_


def test_the_default_model_is_explicit():
    assert hmf.plan(shape=(3, 3), nnz=1).feedback == "explicit"


def test_sizes_and_choices():
    plan = plan_of(factors=10)
    assert (plan.n_users, plan.n_items, plan.nnz, plan.factors, plan.rank) == (1000, 500, 20_000, 10, 10)
    assert (plan.device, plan.reason, plan.num_threads, plan.dtype) == ("cpu", "asked for", 2, "float32")
    assert (plan.reorder, plan.tile_rows, plan.tile_cols) == ("none", 0, 0)
    assert plan.instruction_set == _als.instruction_set()
    assert plan_of(factors=10, biases=True).rank == 11
    assert plan_of(hmf.ImplicitALS(device="cpu")).feedback == "implicit"
    for choice in ("rank1", "blas3"):
        assert plan_of(assembly=choice).assembly == choice


@pytest.mark.parametrize(
    ("assembly", "reorder", "expected"),
    [
        ("auto", "auto", "none"), ("bals", "auto", "none"), ("bals", "both", "both"), ("bals", False, "none"),
        ("auto", True, "both"), ("auto", False, "none"), ("rank1", "rows", "rows"), ("auto", "columns", "columns"),
    ],
)  # fmt: skip
def test_reordering(assembly, reorder, expected):
    assert plan_of(assembly=assembly, reorder=reorder).reorder == expected


@pytest.mark.parametrize(
    ("shape", "nnz", "options", "expected"),
    [
        ((71_567, 65_133), 8_491_445, {"factors": 16}, "both"),  # what bench/layouts.py measures, and what won there
        ((71_567, 65_133), 8_491_445, {"factors": 128}, "both"),
        ((71_567, 65_133), 8_491_445, {"factors": 128, "assembly": "simd"}, "none"),
        ((6_040, 3_706), 825_918, {"factors": 64}, "none"),
        ((6_040, 3_706), 825_918, {"factors": 128}, "both"),
        ((49_290, 139_738), 660_303, {"factors": 16}, "none"),
        ((49_290, 139_738), 660_303, {"factors": 128}, "none"),
    ],
)
def test_tiles_are_reordered_where_it_pays(shape, nnz, options, expected):
    assert plan_of(shape=shape, nnz=nnz, **({"assembly": "bals"} | options)).reorder == expected


@pytest.mark.parametrize("factors", [1, 8, 64, 300, 2048])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bals_tiles_stay_within_their_bounds(factors, dtype):
    plan = plan_of(factors=factors, dtype=dtype, assembly="bals")
    assert 4 <= plan.tile_rows <= 256
    assert 32 <= plan.tile_cols <= 4096
    assert plan.bytes["tiles"] > 0


def test_combinations_that_make_no_sense():
    with pytest.raises(
        ValueError, match=says("precision='tf32' needs a GPU", 'on device="cpu" use precision="float32"')
    ):
        plan_of(precision="tf32")
    with pytest.raises(ValueError, match=says("assembly='bals'", "solver='cg'")):
        plan_of(assembly="bals", solver="cg")
    for options in ({"precision": "tf32"}, {"assembly": "bals", "solver": "cg"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            hmf.ExplicitALS(biases=False, factors=2, device="cpu", **options).fit(planted())


def test_gpu_precision_on_auto_is_a_note(machine):
    machine(None)
    plan = plan_of(device="auto", precision="bf16x3")
    assert plan.precision == "float32"
    assert any("precision 'bf16x3' is the GPU's; the CPU computes in float32" in note for note in plan.notes)
    assert "note      precision 'bf16x3'" in str(plan)


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        ({}, ValueError, ("plan needs user_items, or shape and nnz",)),
        ({"shape": (3, 3)}, ValueError, ("plan needs user_items, or shape and nnz",)),
        ({"nnz": 3}, ValueError, ("plan needs user_items, or shape and nnz",)),
        ({"user_items": planted(), "nnz": 3}, ValueError, ("give either user_items or shape and nnz, not both",)),
        ({"user_items": planted(), "shape": (60, 40)}, ValueError, ("give either user_items or shape and nnz",)),
        ({"user_items": sp.csr_array((3, 3))}, RatingsError, ("user_items of shape (3, 3) has no entries",)),
        ({"shape": (0, 3), "nnz": 1}, ValueError, ("1 <= shape[0] <= 2147483647, got 0",)),
        ({"shape": (3, 2.5), "nnz": 1}, TypeError, ("shape[1] must be an integer, got 2.5",)),
        ({"shape": (3, 3), "nnz": -1}, ValueError, ("nnz must satisfy nnz >= 0, got -1",)),
        ({"shape": (3, 3), "nnz": "1"}, TypeError, ("nnz must be an integer, got '1'",)),
        (
            {"shape": (3, 3), "nnz": 1, "model": hmf.ExplicitALS(biases=False, factors=0)},
            ValueError,
            ("1 <= factors <= 2048, got 0",),
        ),
    ],
)
def test_plan_refuses(arguments, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        hmf.plan(**arguments)


@pytest.mark.parametrize(
    ("arguments", "kind", "part"),
    [
        ({"shape": (3, 3, 3), "nnz": 1}, ValueError, "shape must be two integers (n_users, n_items), got (3, 3, 3)"),
        ({"shape": 5, "nnz": 1}, ValueError, "shape must be two integers (n_users, n_items), got 5"),
        ({"shape": (2, 2), "nnz": 5}, ValueError, "nnz=5 entries do not fit in the 4 places of shape (2, 2)"),
        ({"shape": (2**31, 2), "nnz": 5}, ValueError, "1 <= shape[0] <= 2147483647, got 2147483648"),
        ({"user_items": planted(), "model": hmf.ExplicitALS}, TypeError, "model must be an estimator such as"),
        ({"user_items": planted(), "model": hmf.ExplicitALS}, TypeError, "make one: ExplicitALS()"),
        ({"user_items": planted(), "model": "als"}, TypeError, "got 'als'"),
    ],
    ids=["three axes", "one number", "more entries than cells", "beyond int32", "a class", "a hint", "a name"],
)
def test_plan_refuses_by_name(arguments, kind, part):
    with pytest.raises(kind, match=says(part)):
        hmf.plan(**arguments)


def test_plan_takes_any_pair_for_a_shape():
    assert hmf.plan(shape=np.array([2, 3]), nnz=6) == hmf.plan(shape=[2, 3], nnz=6)


def test_a_printed_plan_is_complete(machine):
    machine(None)
    model = hmf.ImplicitALS(factors=16, assembly="bals", num_threads=3)
    text = str(plan_of(model, (480_189, 17_770), 99_072_112))
    for part in (
        f"device    cpu: no GPU: {NO_CUPY}",
        "480,189 users x 17,770 items, 99,072,112 entries, implicit",
        "factors   16 in float32", "cholesky, assembly bals with tiles of 256 x", "reorder both",
        f"kernels   {_als.instruction_set()} on 3 threads", "GFLOP per iteration", "memory    ",
        "ratings ", "workspace ", "tiles ",
    ):  # fmt: skip
        assert part in text, part
    assert "cg, 5 steps" in str(plan_of(solver="cg", cg_steps=5))


def test_flops():
    plan = plan_of(factors=10)
    assert plan.flops_per_iteration == pytest.approx(2 * 20_000 * 110 + 1500 * (1000 / 3 + 200))
    assert plan_of(factors=10, biases=True).flops_per_iteration > plan.flops_per_iteration
    steps = [plan_of(factors=10, solver="cg", cg_steps=k).flops_per_iteration for k in (1, 3)]
    assert steps[1] == 2 * steps[0]
    blocks = [plan_of(factors=10, solver="subspace", block_size=k).flops_per_iteration for k in (2, 5)]
    assert 0 < blocks[0] < blocks[1]
    implicit = plan_of(hmf.ImplicitALS(factors=10, solver="cg", cg_steps=3, device="cpu"))
    assert implicit.flops_per_iteration == pytest.approx(4 * (8 * 20_000 * 10 + 2 * 1500 * 100))


def test_plan_for_fold_in():
    plan = plan_of(solver="cg", reorder="both")
    folded = for_fold_in(plan)
    assert (folded.solver, folded.assembly, folded.reorder, folded.tile_rows) == ("cholesky", "simd", "none", 0)
    assert (folded.rank, folded.num_threads, folded.dtype) == (plan.rank, plan.num_threads, plan.dtype)


def test_an_unknown_instruction_set_is_noted_and_logged(monkeypatch, caplog):
    monkeypatch.setenv("HYBRIDMF_ISA", "mmx")
    assert any("HYBRIDMF_ISA='mmx' names no kernels" in note for note in plan_of().notes)
    assert "HYBRIDMF_ISA='mmx'" in caplog.text
    monkeypatch.setenv("HYBRIDMF_ISA", _als.instruction_set())
    assert not plan_of().notes


# -------------------------------------------------------------------------------------------------------------- memory


def test_bytes_grow_with_what_they_count(monkeypatch):
    small = plan_of(factors=8)
    assert small.total_bytes == sum(small.bytes.values())
    assert set(small.bytes) == {"ratings", "factors", "workspace"}
    assert all(type(size) is int and size > 0 for size in small.bytes.values())
    assert plan_of(factors=16).bytes["factors"] == 2 * small.bytes["factors"]
    assert plan_of(factors=8, dtype="float64").bytes["factors"] == 2 * small.bytes["factors"]
    assert plan_of(factors=8, nnz=40_000).bytes["ratings"] > 1.6 * small.bytes["ratings"]
    assert plan_of(factors=8, reorder="both").bytes["ratings"] > 1.6 * small.bytes["ratings"]
    assert plan_of(factors=8, num_threads=64).bytes["workspace"] > 10 * small.bytes["workspace"]
    monkeypatch.setattr(_validate, "INT32_LIMIT", 100)
    assert plan_of(factors=8).bytes["ratings"] == small.bytes["ratings"] + 4 * 1500


CASES = [
    (hmf.ExplicitALS, {"biases": False, "factors": 16}),
    (hmf.ExplicitALS, {"biases": False, "factors": 16, "assembly": "bals"}),
    (hmf.ExplicitALS, {"biases": False, "factors": 16, "reorder": "both", "dtype": "float64"}),
    (hmf.ImplicitALS, {"factors": 16}),
    (hmf.ImplicitALS, {"factors": 256}),
    (hmf.ExplicitALS, {"biases": False, "factors": 16, "solver": "subspace"}),
]


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_a_fit_stays_near_the_planned_bytes(cls, options):
    """Sizes at which the arrays dominate; tracemalloc sees what NumPy allocates."""
    rng, size = np.random.default_rng(0), 300 if options["factors"] > 100 else 2500
    matrix = sp.csr_array(sp.random_array((size, size), density=0.015, rng=rng, dtype=np.float32))
    model = cls(iterations=1, device="cpu", num_threads=2, random_state=0, **options)
    planned = hmf.plan(matrix, model).total_bytes
    tracemalloc.start()
    model.fit(matrix)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.5 * planned < peak < 1.35 * planned


def test_bytes_of_the_gram_matrix_are_those_of_implicit_feedback():
    def workspace(cls, rows, **options):
        options = {"factors": 100, "num_threads": 3} | options
        return plan_of(cls(device="cpu", **options), shape=(rows, 10), nnz=10).bytes["workspace"]

    width = _als.padded_rank(100)
    for rows, parts in ((1, 1), (512, 1), (513, 2), (131_072, 256), (10**6, 256)):
        expected = (parts + 3) * width * width * 8
        assert workspace(hmf.ImplicitALS, rows) == max(expected, workspace(hmf.ExplicitALS, rows))
    assert workspace(hmf.ExplicitALS, 1) == workspace(hmf.ExplicitALS, 10**6)


def test_bytes_of_subspaces_bound_the_longest_row():
    plans = [
        plan_of(factors=64, solver="subspace", block_size=8, shape=shape, nnz=nnz)
        for shape, nnz in (((1000, 500), 20_000), ((500, 1000), 20_000), ((1000, 500), 300))
    ]
    sizes = [plan.bytes["workspace"] // (2 * 4) for plan in plans]
    assert sizes == [_als.subspace_workspace_size(64, 8, 4, longest) for longest in (1000, 1000, 300)]


@pytest.mark.parametrize("limit", [2**31 - 1, 100])
def test_bytes_of_tiles_are_at_least_those_of_the_arrays(monkeypatch, limit):
    monkeypatch.setattr(_validate, "INT32_LIMIT", limit)
    matrix = planted(200, 300)
    plan = hmf.plan(matrix, hmf.ExplicitALS(biases=False, factors=64, assembly="bals", device="cpu"))
    built = [BalsMatrix.from_csr(half, plan.tile_rows, plan.tile_cols) for half in (matrix, matrix.T.tocsr())]
    copies = sum(8 * (len(bals.seg_ptr) + len(bals.tile_ptr)) for bals in built if bals.seg_ptr.dtype == np.int32)
    shared = 4 * sum(bals.redundancy for bals in built)  # tile_colidx, planned as if no column were
    assert plan.bytes["tiles"] == pytest.approx(sum(bals.nbytes for bals in built) + copies + shared, abs=100)


def test_check_memory(monkeypatch):
    plan = plan_of()
    monkeypatch.setattr(system, "available_memory", lambda: plan.total_bytes)
    check_memory(plan)
    monkeypatch.setattr(system, "available_memory", lambda: None)
    check_memory(plan)
    monkeypatch.setattr(system, "available_memory", lambda: plan.total_bytes - 1)
    parts = ("the fit needs about", "MiB are free", "ratings", "factors", "workspace", "use fewer factors, dtype=")
    with pytest.raises(MemoryBudgetError, match=says(*parts)):
        check_memory(plan)


def test_a_fit_that_cannot_fit_is_refused_before_the_work():
    """Real figures: 2048 factors of float64 in 4,096 threads need 128 GiB of workspace alone."""
    model = hmf.ExplicitALS(biases=False, factors=2048, dtype="float64", num_threads=4096, device="cpu")
    if (available_memory() or 0) > hmf.plan(planted(), model).total_bytes:
        pytest.skip("this machine has the memory")
    with pytest.raises(MemoryBudgetError, match="fewer threads"):
        model.fit(planted())


def test_available_memory(monkeypatch):
    def meminfo(text):
        return lambda *_: io.StringIO(text)

    def unreadable(*_):
        raise OSError

    assert available_memory() is None or available_memory() > 2**20
    monkeypatch.setattr("builtins.open", meminfo("MemTotal: 99 kB\nMemAvailable:  7 kB\n"))
    assert available_memory() == 7 * 1024
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_AVPHYS_PAGES": 11, "SC_PAGE_SIZE": 4096}[name])
    for other in (meminfo("MemTotal: 99 kB\n"), meminfo("MemAvailable: lots\n"), unreadable):
        monkeypatch.setattr("builtins.open", other)
        assert available_memory() == 11 * 4096
    for error in (AttributeError, ValueError, OSError):

        def no_answer(_, error=error):
            raise error

        monkeypatch.setattr("os.sysconf", no_answer)
        assert available_memory() is None


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, 9000),
        ({"memory.max": "max", "memory.current": "50"}, 9000),
        ({"memory.max": "3000", "memory.current": "500"}, 2500),
        ({"memory.max": "3000", "memory.current": "500", "memory.stat": "anon 7\ninactive_file 200\n"}, 2700),
        ({"memory.max": "3000", "memory.current": "3500"}, 0),
        ({"memory.max": "99999", "memory.current": "0"}, 9000),
        ({"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "1000"}, 2000),
        (
            {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "1000", "memory.stat": "total_inactive_file 9"},
            2009,
        ),
        ({"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "1000"}, 9000),
    ],
)
def test_available_memory_honours_control_groups(monkeypatch, tmp_path, files, left):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(system, "_free_memory", lambda: 9000)
    monkeypatch.setattr(system, "cgroup_folders", lambda controller: [str(tmp_path / "none"), str(tmp_path)])
    assert available_memory() == left


# ------------------------------------------------------------------------------------------------------- configuration


def test_config(machine):
    machine(None)
    config = hmf.config()
    assert set(config) == {
        "hybridmf", "python", "platform", "numpy", "scipy", "scikit-learn", "cores", "threads", "instruction_set",
        "memory_available", "blas", "cupy", "gpu", "gpu_reason",
    }  # fmt: skip
    assert config["hybridmf"] == hmf.__version__
    assert config["numpy"] == np.__version__
    assert config["threads"] >= 1
    assert config["instruction_set"] == _als.instruction_set()
    assert config["gpu"] is None
    assert config["gpu_reason"] == NO_CUPY


def test_config_with_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "gpu_status", lambda: (True, "cuda:0 (H200)"))
    config = hmf.config()
    assert (config["gpu"], config["gpu_reason"]) == ("cuda:0 (H200)", "")


def test_show_config(capsys, monkeypatch):
    stream = io.StringIO()
    hmf.show_config(stream)
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == list(hmf.config())
    assert not capsys.readouterr().out
    monkeypatch.setattr(_config, "available_memory", lambda: 3 * 2**30)
    hmf.show_config()
    assert "memory_available  3.0 GiB\n" in capsys.readouterr().out
    monkeypatch.setattr(_config, "available_memory", lambda: None)
    hmf.show_config()
    assert "memory_available  None\n" in capsys.readouterr().out


def test_versions_of_packages_that_are_not_there():
    assert _config._version("no-such-package-as-this") is None
    assert _config._version("numpy") == np.__version__
