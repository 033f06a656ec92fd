"""Controls: an earlier commit and this tree in turn on one machine, so that lines of that commit count as fresh.

    python bench/controls.py --tree FOLDER                    FOLDER: a checkout of the commit that the lines name
    python bench/controls.py --tree FOLDER --part multi       on two GPUs; also mcumsgd
    python bench/controls.py --tree FOLDER --part als-cpu     on the CPU; also planner
    python bench/controls.py --tree FOLDER --part search --part als-cpu      lines of searches on the CPU

Every part of the code (`PARTS`) has cases. Each tree has a process, and a case runs in both in the order old, new, new,
old, so that a change of the machine's speed meets both. A case passes if the results of both trees have the same bytes
and the least seconds differ by at most 3 % (where they are a figure: not of drawn data and plans, which each tree makes
once). Schedules whose threads race have no fixed bytes; their RMSE must agree to 1 %. Cases that fail by their seconds
alone run again in that order, in new processes. Lines whose seconds are those of CUDA events (`freshness.BY_EVENTS`)
need the parts that measure by events, all others those that measure by the clock. One line of
bench/results/controls.jsonl then names the pairs of hashes of the code paths (`freshness.py`) whose differing files
belong to parts that passed. Compiled modules are those of this tree, if the sources of both are the same; otherwise the
other tree needs its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import common
import freshness
import numpy as np
import scipy.sparse as sp

import hybridmf as hmf

Result = dict[str, Any]
Patterns = tuple[str, ...]

TOLERANCE = 0.03
"""By which the seconds of the two trees may differ."""

STEADY_MS = 300.0
"""For how long iterations are measured by events: the least of 20 short ones varied by up to 48 % between processes."""

RACE_TOLERANCE = 0.01
"""By which RMSEs of a schedule whose threads race may differ."""


@dataclass(frozen=True)
class Case:
    """A model on a shape; `run` other than "sweeps" names how it is measured (`MEASURES`).

    Attributes
    ----------
    shape, model : str
    options : dict
        Of the model.
    iterations : int
        Or repeats.
    run : str
    races : bool
        Threads race, so results have no fixed bytes.
    timed : bool
        Seconds must agree, too.
    """

    shape: str
    model: str
    options: Result
    iterations: int = 8
    run: str = "sweeps"
    races: bool = False
    timed: bool = True

    @property
    def name(self) -> str:
        """For people and for lines."""
        options = (f" {key}={value}" for key, value in self.options.items() if key != "device")
        how = "" if self.run in ("sweeps", self.model) else f", {self.run}"
        return f"{self.model}{''.join(options)}, {self.shape}{how}"


def _als(shape: str, factors: int, model: str = "ExplicitALS", **options: Any) -> Case:
    plain = {"biases": False} if model == "ExplicitALS" else {}
    return Case(shape, model, {"factors": factors, "device": "cuda", **plain, **options}, iterations=24)


def _events(factors: int, feedback: str = "explicit", rounds: int = 20, **options: Any) -> Case:
    return Case("ml-20m", f"ALS, {feedback}", {"factors": factors, **options}, rounds, "events")


def _cpu(model: str, factors: int, **options: Any) -> Case:
    return Case("ml-10m", model, {"factors": factors, "device": "cpu", **options}, iterations=10)


MSGD = {"device": "cuda", "biases": False}


EVENTS = " by events"
"""End of the names of parts that measure by CUDA events."""

ON_HOST = {"tiles"}
"""Parts whose seconds are not in those of CUDA events: equal results are enough."""

ON_REQUEST = ("multi", "mcumsgd", "planner", "search")
"""Parts that do not run by default."""

CASES: dict[str, list[Case]] = {
    "als": [
        *(_als("ml-20m", factors) for factors in (32, 64, 100)),
        *(_als("ml-20m", factors, "ImplicitALS") for factors in (64, 128)),
        _als("ml-20m", 64, "ImplicitALS", solver="cg"),
    ],
    "assemblies": [
        _als("ml-20m", 32, assembly=assembly)
        for assembly in ("sparse_syrk", "sparse_syrk_published", "mo_als", "bals", "bals_local")
    ],
    "als by events": [
        *(_events(factors) for factors in (16, 32, 64, 100)),
        *(_events(factors, "implicit") for factors in (32, 64, 128)),
        _events(64, "implicit", solver="cg"),
    ],
    "assemblies by events": [
        *(_events(factors, assembly="sparse_syrk") for factors in (16, 64)),
        _events(32, "implicit", assembly="sparse_syrk"),
        _events(32, rounds=8, assembly="sparse_syrk_published"),
        *(_events(factors, assembly="mo_als") for factors in (32, 100)),
        *(_events(32, rounds=8, assembly=assembly) for assembly in ("bals", "bals_local")),
    ],
    "systems": [_als("ml-20m", 100, assembly="sparse_syrk"), _als("ml-10m", 256)],
    "sgd": [
        *(Case("ml-20m", "SGD", {"factors": 128, **MSGD, "ordering": ordering}, 16) for ordering in ("user", "mixed")),
        Case("ml-20m", "SGD", {"factors": 64, **MSGD, "schedule": "batch_hogwild"}, 16, races=True),
    ],
    "ccd": [Case("ml-20m", "CCD", {"factors": 32, "device": "cuda"}, 16)],
    "top-k": [Case("ml-20m", "ExplicitALS", {"factors": 64, "device": "cuda", "biases": False}, 5, "top_k")],
    "set-up": [Case("ml-20m", "ExplicitALS", {"factors": 32, "device": "cuda", "biases": False}, 4, "set_up")],
    "fits": [Case("ml-20m", "ExplicitALS", {"factors": 64, "device": "cuda", "biases": False}, 4, "fits")],
    "als-cpu": [_cpu("ExplicitALS", 32, biases=False), _cpu("ImplicitALS", 64)],
    "sgd-cpu": [
        _cpu("SGD", 64, biases=False, schedule="msgd"),
        _cpu("SGD", 64, biases=False, schedule="blocks"),
        Case("ml-10m", "SGD", {"factors": 64, "device": "cpu", "biases": False, "schedule": "hogwild"}, 10, races=True),
    ],
    "ccd-cpu": [_cpu("CCD", 32)],
    "top-k-cpu": [Case("ml-10m", "ExplicitALS", {"factors": 64, "device": "cpu", "biases": False}, 5, "top_k")],
    "multi": [Case("ml-20m", "ExplicitALS", {"factors": 100}, 6, "multi_als")],
    "mcumsgd": [Case("ml-20m", "SGD", {"factors": 128}, 6, "mcumsgd")],
    "planner": [Case("ml-1m", "plans", {}, 2, "plans", timed=False)],
    "data": [Case("ml-1m", "synthetic", {}, 1, "synthetic", timed=False)],
    "published": [Case("ml-1m", "draws", {}, 1, "draws", timed=False)],
    "tiles": [Case("ml-10m", "tiles", {}, 6, "tiles")],
    "search": [Case("ml-1m", "search", {"trials": trials}, 3, "searches") for trials in (12, 24)],
}
"""By part of the code."""


PARTS = {
    "als": "ALS_GPU", "assemblies": "ASSEMBLIES_GPU", "als by events": "ALS_GPU",
    "assemblies by events": "ASSEMBLIES_GPU", "systems": "SYSTEMS_GPU", "sgd": "SGD_GPU", "ccd": "CCD_GPU",
    "top-k": "TOP_K_GPU", "set-up": "SET_UP_GPU", "fits": "FITS", "als-cpu": "ALS_CPU", "sgd-cpu": "SGD_CPU",
    "ccd-cpu": "CCD_CPU", "top-k-cpu": "TOP_K_CPU", "multi": "RANKS", "mcumsgd": "MCUMSGD", "planner": "PLANNER",
    "data": "SHAPES", "published": "PUBLISHED", "tiles": "TILES", "search": "SEARCH",
}  # fmt: skip
"""By part: the declaration in `freshness.py` of the files whose speed its cases show."""


def files_of(part: str, declared: ModuleType, root: Path | None = None) -> set[str]:
    """Files of a part in a tree with these declarations; none if it does not declare them."""
    return set(freshness.files(getattr(declared, PARTS[part], ()), root))


# ------------------------------------------------------------------------------------------ one process of one tree


def measure(case: Case, matrix: sp.csr_array, item_users: sp.csr_array) -> Result:
    """Seconds of repeats and the hash (with `races`, the RMSE) of the results, by the library on the path."""
    seconds, results = MEASURES[case.run](case, matrix, item_users)
    if case.races:
        return {"seconds": seconds, "rmse": _rmse(matrix, *results)}
    digest = hashlib.sha256()
    for array in results:
        digest.update(np.ascontiguousarray(array).tobytes())
    return {"seconds": seconds, "sha256": digest.hexdigest()}


def _model(case: Case, **options: Any) -> Any:
    return getattr(hmf, case.model)(random_state=0, **{**case.options, **options})


def _solver(case: Case, matrix: sp.csr_array, item_users: sp.csr_array) -> tuple[Any, Any]:
    import paper_race

    split = paper_race.Split(case.shape, 1.0, matrix, item_users, sp.coo_array((1, 1)))
    return paper_race.make_solver(_model(case), split), paper_race


def _sweeps(case: Case, matrix: sp.csr_array, item_users: sp.csr_array) -> Any:
    solver, race = _solver(case, matrix, item_users)
    race.iterate(solver)  # compiles
    seconds = [_timed(lambda: (race.iterate(solver), race.synchronize(solver))) for _ in range(case.iterations)]
    return seconds, _factors(solver.state)


def _events_of(case: Case, matrix: sp.csr_array, item_users: sp.csr_array) -> Any:
    import gpu

    from hybridmf.device.cuda import open_device

    device = open_device()
    data = gpu.Data(case.shape, matrix, item_users)
    sweeps = gpu.Sweeps.start(device, data, case.model.partition(", ")[2], **case.options)
    steps = [partial(sweeps.solve, side) for side in ("item", "user")]
    rounds = gpu.timed(device, steps, case.iterations)
    factors = [sweeps.factors[side].matrix.copy() for side in ("user", "item")]
    rounds += gpu.timed(device, steps, int(STEADY_MS / min(map(sum, rounds))))
    return [sum(times) / 1e3 for times in rounds], factors


def _set_up(case: Case, matrix: sp.csr_array, item_users: sp.csr_array) -> Any:
    seconds = []
    for _ in range(case.iterations):
        started = time.perf_counter()
        solver, race = _solver(case, matrix, item_users)
        race.synchronize(solver)
        seconds.append(time.perf_counter() - started)
    return seconds[1:], _factors(solver.state)


def _fits(case: Case, matrix: sp.csr_array, _: sp.csr_array) -> Any:
    fits: list[Any] = []
    run = lambda: fits.append(_model(case, iterations=5).fit(matrix))  # noqa: E731
    seconds = [_timed(run) for _ in range(case.iterations)]
    return seconds[1:], (fits[-1].user_factors, fits[-1].item_factors)


def _top_k(case: Case, matrix: sp.csr_array, _: sp.csr_array) -> Any:
    model = _model(case, iterations=1).fit(matrix)
    users, found = np.arange(min(20_000, matrix.shape[0])), []
    run = lambda: found.append(model.recommend(users, user_items=matrix[users], N=10))  # noqa: E731
    seconds = [_timed(run) for _ in range(case.iterations + 1)]
    return seconds[1:], found[-1]


def _multi_als(case: Case, matrix: sp.csr_array, _: sp.csr_array) -> Any:
    import scale

    problem = scale.Case(case.shape, matrix, case.options["factors"])
    runs = [problem.run(2, case.iterations) for _ in range(2)]
    return [run["spread_iteration"][0] for run in runs], [np.float64(runs[-1]["objective"])]


def _mcumsgd(case: Case, matrix: sp.csr_array, item_users: sp.csr_array) -> Any:
    import mcumsgd

    start = mcumsgd.Start(mcumsgd.Data(case.shape, matrix, item_users, (np.zeros(0),) * 3), case.options["factors"])
    solver = start.solver(["cuda:0", "cuda:1"], mcumsgd.Variant(2))
    mcumsgd.epochs(solver, 2)
    seconds = mcumsgd.epochs(solver, case.iterations)
    results = _factors(solver.state)
    solver.close()
    return seconds, results


def _plans(case: Case, _: sp.csr_array, __: sp.csr_array) -> Any:
    import paper_scale

    plans: list[Any] = []
    seconds = [_timed(lambda: plans.append(paper_scale.planned())) for _ in range(case.iterations)]
    return seconds[1:], [np.frombuffer(json.dumps(plans[-1], default=str).encode(), np.uint8)]


DRAWS = {"ml-10m": 0.1, "netflix": 0.05, "yahoo-r1": 0.05, "sls": 0.1, "rucci": 0.1, "msd": 0.1, "yahoo-songs": 0.1,
         "eachmovie": 0.2}  # fmt: skip
"""Shapes with their scales."""


def _draws(_: Case, __: sp.csr_array, ___: sp.csr_array) -> Any:
    import published

    started = time.perf_counter()
    drawn = [published.published(shape, scale=scale, implicit=implicit) for shape, scale in DRAWS.items()
             for implicit in (False, True)]  # fmt: skip
    return [time.perf_counter() - started], _arrays(drawn)


def _synthetic(case: Case, _: sp.csr_array, __: sp.csr_array) -> Any:
    from hybridmf import datasets

    started = time.perf_counter()
    drawn = [datasets.synthetic(case.shape, feedback=feedback).user_items for feedback in ("explicit", "implicit")]
    return [time.perf_counter() - started], _arrays(drawn)


def _arrays(matrices: Sequence[sp.csr_array]) -> list[np.ndarray]:
    return [array for matrix in matrices for array in (matrix.indptr, matrix.indices, matrix.data)]


def _tiles(case: Case, matrix: sp.csr_array, _: sp.csr_array) -> Any:
    from hybridmf.formats import BalsMatrix, reorder

    built: list[Any] = []
    seconds = [_timed(lambda: built.append(BalsMatrix.from_csr(matrix, 256, 192))) for _ in range(case.iterations)]
    tiles, order = built[-1], reorder(matrix)
    arrays = tiles.values, tiles.tile_colidx, tiles.tile_ptr, tiles.seg_colidx, tiles.seg_ptr
    return seconds[1:], [*arrays, order.row_order, order.col_order, np.array(list(tiles.statistics().values()))]


def _searches(case: Case, matrix: sp.csr_array, _: sp.csr_array) -> Any:
    ratings = hmf.Ratings.from_matrix(matrix).binarize()
    train, held_out = (part.user_items for part in hmf.split(ratings, 0.2, random_state=0))
    found: list[Any] = []
    run = lambda: found.append(hmf.search(train, held_out, device="cpu", random_state=0, **case.options))  # noqa: E731
    seconds = [_timed(run) for _ in range(case.iterations)]
    clock = ("seconds", "finished")
    tables = [[{name: value for name, value in trial.as_dict().items() if name not in clock} for trial in each.trials]
              for each in found]  # fmt: skip
    return seconds, [np.frombuffer(json.dumps([tables, found[-1].best_params]).encode(), np.uint8)]


MEASURES: dict[str, Callable[[Case, sp.csr_array, sp.csr_array], Any]] = {
    "sweeps": _sweeps,
    "events": _events_of,
    "set_up": _set_up,
    "fits": _fits,
    "top_k": _top_k,
    "multi_als": _multi_als,
    "mcumsgd": _mcumsgd,
    "plans": _plans,
    "draws": _draws,
    "synthetic": _synthetic,
    "tiles": _tiles,
    "searches": _searches,
}


def _timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _factors(state: Any) -> tuple[np.ndarray, np.ndarray]:
    state = state.on_host() if hasattr(state, "on_host") else state
    return state.user.matrix, state.item.matrix


def _rmse(matrix: sp.csr_array, users: np.ndarray, items: np.ndarray) -> float:
    places = np.random.default_rng(0).choice(matrix.nnz, min(matrix.nnz, 200_000), replace=False)
    rows = np.searchsorted(matrix.indptr, places, side="right") - 1
    scores = np.einsum("ij,ij->i", users[rows], items[matrix.indices[places]], dtype=np.float64)
    return float(np.sqrt(np.mean((matrix.data[places] - scores) ** 2)))


def serve(folder: Path) -> None:
    """Measure the cases ("PART:NUMBER") that standard input names, by the library on the path; a JSON line for each."""
    loaded: dict[str, tuple[sp.csr_array, sp.csr_array]] = {}
    for name in map(str.strip, sys.stdin):
        part, _, number = name.partition(":")
        case = CASES[part][int(number)]
        try:
            if case.shape not in loaded:
                loaded[case.shape] = _load(folder / f"{case.shape}-user"), _load(folder / f"{case.shape}-item")
            result = measure(case, *loaded[case.shape])
        except Exception as error:  # the other cases go on; the parent reports it
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)


def _draw(shape: str, folder: Path) -> None:
    """Ratings of a shape to a folder, unless they are there."""
    import paper_common

    if not _is_drawn(shape, folder):
        save(paper_common.draw(shape), folder / shape)


def _is_drawn(shape: str, folder: Path) -> bool:
    return Path(f"{folder / shape}-item-shape.npy").exists()  # written last


def save(matrix: sp.csr_array, prefix: Path) -> None:
    """Ratings to files of arrays, in both orientations."""
    from hybridmf.formats import transpose

    for side, rows in (("user", matrix), ("item", transpose(matrix))):
        for name in ("data", "indices", "indptr", "shape"):
            np.save(f"{prefix}-{side}-{name}.npy", getattr(rows, name))


def _load(prefix: Path) -> sp.csr_array:
    from hybridmf.core.validate import make_csr  # SciPy's constructor would widen the indices to the type of indptr

    data, indices, indptr, shape = (np.load(f"{prefix}-{name}.npy") for name in ("data", "indices", "indptr", "shape"))
    return make_csr(indptr.astype(np.int64), indices, data, tuple(int(n) for n in shape))


# ------------------------------------------------------------------------------------------ both trees


class Process:
    """Measures cases with the library and the scripts of a tree (`serve`)."""

    def __init__(self, tree: Path, *arguments: str) -> None:
        path = os.pathsep.join([str(tree), str(tree / "bench"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, *arguments],
            env=os.environ | {"PYTHONPATH": path}, cwd=tree, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def measure(self, name: str) -> Result:
        """Of a case "PART:NUMBER"."""
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):
            print(name, file=self._process.stdin, flush=True)
        printed = next((text for text in self._process.stdout if text.startswith("{")), "")
        result: Result = json.loads(printed) if printed else {"error": "its process ended"}
        return result

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def compare(case: Case, old: Sequence[Result], new: Sequence[Result]) -> Result:
    """One case of a line, from its results in both trees."""
    line: Result = {"case": case.name}
    errors = [run["error"] for run in (*old, *new) if "error" in run]
    if errors or not old or not new:
        return line | {"passed": False, "equal": False, "error": (errors or ["not run"])[0]}
    least = [[min(run["seconds"]) for run in runs] for runs in (old, new)]
    ratio = min(least[1]) / min(least[0])
    if case.races:
        scores = [run["rmse"] for run in (*old, *new)]
        equal = max(scores) <= (1 + RACE_TOLERANCE) * min(scores)
        line |= {"rmse": [min(scores), max(scores)]}
    else:
        equal = len({run["sha256"] for run in (*old, *new)}) == 1
    spread = max(max(each) / min(each) for each in least)
    return line | {
        "ms": [1e3 * min(each) for each in least], "ratio": ratio, "spread": spread, "equal": equal,
        "passed": equal and (abs(ratio - 1) <= TOLERANCE or not case.timed),
    }  # fmt: skip


def covers(old: Path, passed: set[str], equal: set[str] | None = None) -> dict[str, list[str]]:
    """By "FILE PATH": the hashes of a code path in both trees, if the files that differ are of parts that passed.

    `equal`: parts with equal results, which count where figures are no times (`freshness.BY_RESULTS`, `ON_HOST`).
    """
    before = _freshness_of(old)
    found = {}
    for file in freshness.CODE:
        for key, patterns in freshness.code_paths(file).items():
            with suppress(KeyError, ValueError):  # not declared there, or other files
                declared = before.CODE[file]
                earlier = declared[key] if isinstance(declared, dict) else {"": declared}[key]
                by_events, by_results = (
                    f"{file} {key}" in each for each in (freshness.BY_EVENTS, freshness.BY_RESULTS)
                )
                counted = of_clock(passed, by_events=by_events)
                same = equal or set()
                counted |= same if by_results else same & ON_HOST if by_events else set()
                if is_covered(earlier, patterns, old, counted, before):
                    found[f"{file} {key}"] = [freshness.code_hash(earlier, old), freshness.code_hash(patterns)]
    return found


def of_clock(passed: set[str], *, by_events: bool) -> set[str]:
    """The parts that count for a code path, by the names of those that measure by the clock."""
    measured = {name.removesuffix(EVENTS) for name in CASES if name.endswith(EVENTS)}
    other = {name.removesuffix(EVENTS) for name in passed if name.endswith(EVENTS)}
    clock = {name for name in passed if not name.endswith(EVENTS)}
    return (clock - measured) | other if by_events else clock


def is_covered(
    earlier: Patterns, patterns: Patterns, old: Path, passed: set[str], before: ModuleType = freshness
) -> bool:
    """Whether a code path changed, and in files of parts that passed alone; it contains a part with all its files.

    `before`: the declarations of the other tree, which may have files that are gone.
    """
    forms = freshness.forms_of(earlier, old), freshness.forms_of(patterns)
    differ = {name for name in forms[0].keys() | forms[1].keys() if forms[0].get(name) != forms[1].get(name)}
    inside = set(freshness.files(patterns))
    known: set[str] = set()
    for part in PARTS:
        of_part = files_of(part, freshness)
        if part.endswith(EVENTS) or not of_part <= inside:  # `of_clock`
            continue
        of_part |= files_of(part, before, old)
        if of_part & differ:
            if part not in passed:
                return False
            known |= of_part
    return bool(differ) and differ <= known


def _freshness_of(tree: Path) -> ModuleType:
    """The declarations of another tree."""
    spec = importlib.util.spec_from_file_location("freshness_of_old", tree / "bench" / "freshness.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def borrow_modules(tree: Path) -> None:
    """Copy this tree's compiled modules to another with the same sources of them.

    Raises
    ------
    click.ClickException
        The sources differ, and the tree has no compiled modules.
    """
    if next(tree.glob("hybridmf/**/*.so"), None):
        return
    compiled = (
        "hybridmf/**/*.pyx",
        "hybridmf/**/*.pxd",
        "hybridmf/native/*.h",
        "hybridmf/native/[ck]*_*.c",
        "setup.py",
    )
    if freshness.forms_of(compiled, tree) != freshness.forms_of(compiled):
        raise click.ClickException(f"--tree {tree}: its modules are not built, and their sources are not this tree's")
    for module in freshness.ROOT.glob("hybridmf/**/*.so"):
        shutil.copy(module, tree / module.relative_to(freshness.ROOT))


TURNS = ("old", "new", "new", "old")


class Terminated(Exception):
    """SIGTERM, after which the turns so far count."""


def _terminate(*_: object) -> None:
    raise Terminated


ROUNDS = 3
"""How often a case runs in both trees, if its seconds alone differ."""


def run_parts(tree: Path, parts: Sequence[str], folder: Path, budget: float) -> dict[str, list[Result]]:
    """All cases of these parts in both trees; what a line says of each.

    `budget`: seconds after which no case begins. SIGTERM ends the case that runs, and counts those before it.
    """
    end = time.perf_counter() + budget
    chosen = [(part, number) for part in parts for number in range(len(CASES[part]))]
    runs: dict[tuple[str, int], dict[str, list[Result]]] = {each: {"old": [], "new": []} for each in chosen}
    again = chosen
    with suppress(Terminated):
        for _ in range(ROUNDS):
            if not again or time.perf_counter() > end:
                break
            processes = {name: Process(root, "--serve", "--folder", str(folder))
                         for name, root in (("old", tree), ("new", freshness.ROOT))}  # fmt: skip
            try:
                for part, number in again:
                    turns = TURNS if CASES[part][number].timed else TURNS[:2]
                    for turn in turns if time.perf_counter() <= end else ():
                        runs[part, number][turn].append(processes[turn].measure(f"{part}:{number}"))
            finally:
                for process in processes.values():
                    process.close()
            again = [each for each in chosen if _may_pass(_case(runs, each))]
    return {part: [_case(runs, each) for each in chosen if each[0] == part] for part in parts}


def draw(shapes: Iterable[str], folder: Path) -> None:
    """Ratings of shapes to a folder, in a process that ends and gives back the memory of the GPU."""
    missing = [shape for shape in dict.fromkeys(shapes) if not _is_drawn(shape, folder)]
    options = [f"--draw={shape}" for shape in missing]
    if missing:
        subprocess.run([sys.executable, __file__, *options, "--folder", str(folder)], check=True)


def _case(runs: dict[tuple[str, int], dict[str, list[Result]]], each: tuple[str, int]) -> Result:
    return compare(CASES[each[0]][each[1]], runs[each]["old"], runs[each]["new"])


def _may_pass(line: Result) -> bool:
    """Whether only the seconds of a case differ."""
    return not line["passed"] and line["equal"]


def summary(results: dict[str, list[Result]]) -> Iterator[str]:
    """A row a case."""
    for part, lines in results.items():
        for line in lines:
            figures = (
                f"{line['ms'][0]:9.3f} {line['ms'][1]:9.3f} ms  {line['ratio']:.3f}  {line['spread']:.3f}"
                if "ms" in line
                else line["error"]
            )
            word = "passed" if line["passed"] else "FAILED" if line["equal"] else "" if "error" in line else "DIFFERS"
            yield f"{part:10} {line['case']:60} {figures}  {word}"


@click.command(help=__doc__)
@click.option("--tree", type=click.Path(path_type=Path), help="A checkout of the commit that the lines name.")
@click.option("--commit", default="", help="That commit, if the folder is no repository.")
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(list(CASES)), help="default: those of one GPU and of the CPU"
)
@click.option("--budget", default=600.0, help="Seconds after which no case begins.")
@click.option("--draw", "shapes", multiple=True, hidden=True)
@click.option("--serve", "serves", is_flag=True, hidden=True)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True),
    help="For the data, which are kept; default: a temporary one.",
)
def main(
    tree: Path | None, commit: str, parts: tuple[str, ...], budget: float, shapes: tuple[str, ...], serves: bool,
    folder: Path | None,
) -> None:  # fmt: skip
    if folder is not None and shapes:
        for shape in shapes:
            _draw(shape, folder)
        return None
    if folder is not None and serves:
        return serve(folder)
    if tree is None:
        raise click.UsageError("--tree: the checkout of the lines' commit")
    tree, parts = tree.resolve(), parts or tuple(part for part in CASES if part not in ON_REQUEST)
    borrow_modules(tree)
    signal.signal(signal.SIGTERM, _terminate)
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        draw((case.shape for part in parts for case in CASES[part]), folder)
        results = run_parts(tree, parts, folder, budget)
    print(*summary(results), sep="\n")
    passed = {part for part, lines in results.items() if all(line["passed"] for line in lines)}
    record(tree, commit, results, passed)


def record(tree: Path, commit: str, results: dict[str, list[Result]], passed: set[str]) -> None:
    """Append the line."""
    timed = ((line, case) for part in passed for line, case in zip(results[part], CASES[part], strict=True))
    ratios = [line["ratio"] for line, case in timed if case.timed]
    covered = covers(tree, passed, {part for part, lines in results.items() if all(line["equal"] for line in lines)})
    print(f"passed: {', '.join(sorted(passed)) or 'none'}; code paths: {', '.join(sorted(covered)) or 'none'}")
    line = {
        "bench": "controls", "kind": "control", "gpu": gpu_name(), "from": {"commit": commit or _commit_of(tree)},
        "to": {"commit": common.commit()}, "ratios": [min(ratios), max(ratios)] if ratios else [1.0, 1.0],
        "passed": sorted(passed), "cases": results, "covers": covered,
    }  # fmt: skip
    common.record("controls", line)


def gpu_name() -> str:
    """Of the first GPU; "CPU" where there is none."""
    from hybridmf.device.cuda import open_device
    from hybridmf.errors import DeviceError

    try:
        return str(open_device("cuda").spec.name).removeprefix("NVIDIA ")
    except DeviceError:
        return "CPU"


def _commit_of(tree: Path) -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
