"""What the compiler of kernels costs a process: first recommendation, evaluation, explicit fit, search over six ranks.

    python bench/cold.py
    python bench/cold.py --tree FOLDER       beside another checkout, in turn

Each case runs in a process of its own with empty caches on disk: with the kernels that the package brings ("cold"), and
without them ("compiled"), after which it runs once more, with the kernels that this has left on disk ("warm"). Times
are of the process's own clock. `python .ci/ready_kernels.py` makes the kernels of a checkout. Python's bytecode is
there, as pip leaves it.
"""

from __future__ import annotations

import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from checkpoints import gpu_stamp_of
from common import ROOT, record

from hybridmf import datasets

WORKER = """
import json, sys, time
started = last = time.perf_counter()
laps = {}
def lap(name):
    global last
    now = time.perf_counter()
    laps[name], last = laps.get(name, 0.0) + now - last, now
case, folder, factors = sys.argv[1], sys.argv[2], int(sys.argv[3])
import numpy as np, scipy.sparse as sp
def read(name):
    parts = [np.load(f"{folder}/{name}-{part}.npy", mmap_mode=None) for part in ("data", "indices", "indptr", "shape")]
    return sp.csr_array((parts[0], parts[1], parts[2]), shape=tuple(parts[3]))
train, held = read("train"), read("held")
lap("read")
import hybridmf as hmf
lap("import")
als = dict(iterations=3, device="cuda", random_state=0)
if case == "search":
    import importlib
    importlib.import_module("hybridmf.search").GAIN = -1.0  # reaches all ranks
    space = {"factors": [16, 32, 48, 64, 96, 128]}
    found = hmf.search(train, held, space=space, trials=30, device="cuda", random_state=0)
    lap("search")
    laps["ranks"] = sorted({trial.params["factors"] for trial in found.trials})
    laps["value"] = found.best_value
else:
    model = hmf.ImplicitALS(factors, **als).fit(train)
    lap("fit")
    ids, _ = model.recommend(np.arange(train.shape[0]), N=10)
    lap("recommend")
    laps["first recommendation"] = time.perf_counter() - started - laps["read"]
    hmf.evaluate(model, held)
    lap("evaluate")
    hmf.evaluate(model, held)
    lap("evaluate again")
    hmf.ExplicitALS(factors, **als).fit(train)
    lap("explicit")
    hmf.ExplicitALS(factors, **als).fit(train)
    lap("explicit again")
    laps["checksum"] = int(ids.sum())
print(json.dumps(laps))
"""

CASES = ("first use", "search")


RUNS = {"cold": "1", "compiled": "0", "warm": "0"}
"""HYBRIDMF_READY_KERNELS of each run; one without the kernels of the package continues with the caches before it."""


def run(case: str, folder: Path, factors: int, tree: Path, cache: str, ready: str) -> dict[str, Any]:
    """Seconds of the steps of a case in a process with the caches of a folder."""
    environment = os.environ | {"CUPY_CACHE_DIR": f"{cache}/cupy", "HYBRIDMF_CACHE_DIR": f"{cache}/hybridmf"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment |= {"PYTHONPATH": str(tree), "CUDA_CACHE_PATH": f"{cache}/cuda", "HYBRIDMF_READY_KERNELS": ready}
    command = [sys.executable, "-c", WORKER, case, str(folder), str(factors)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    if done.returncode:
        raise click.ClickException(f"the process of {case!r} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def median(laps: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the seconds; the last of everything else."""
    times = {name: [each[name] for each in laps] for name in laps[-1]}
    return {
        name: round(statistics.median(values), 3) if isinstance(values[0], float) else values[-1]
        for name, values in times.items()
    }


def write(folder: Path, name: str, matrix: sp.csr_array) -> None:
    """A matrix as arrays, which are read faster than an archive."""
    parts = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr, "shape": np.array(matrix.shape)}
    for part, array in parts.items():
        np.save(folder / f"{name}-{part}.npy", array)


@click.command(help=__doc__)
@click.option("--shape", default="ml-20m", show_default=True)
@click.option("--scale", default=1.0, show_default=True)
@click.option("--factors", default=64, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--case", "wanted", type=click.Choice(CASES), multiple=True, default=CASES)
@click.option("--tree", type=click.Path(path_type=Path), help="Another checkout, measured in turn.")
def main(shape: str, scale: float, factors: int, repeats: int, wanted: tuple[str, ...], tree: Path | None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        counts = datasets.synthetic(shape, feedback="implicit", scale=scale, seed=0).user_items
        chosen = np.random.default_rng(0).random(counts.nnz) < 0.1
        for name, part in (("train", ~chosen), ("held", chosen)):
            coo = counts.tocoo()
            where = (coo.row[part], coo.col[part])
            write(folder, name, sp.csr_array((coo.data[part].astype(np.float32), where), shape=counts.shape))
        trees = [ROOT] if tree is None else [ROOT, tree.resolve()]
        for each in trees:
            compileall.compile_dir(each / "hybridmf", quiet=2)
        for case in wanted:
            runs: dict[Path, dict[str, list[dict[str, Any]]]] = {each: {name: [] for name in RUNS} for each in trees}
            for each in trees * repeats:
                with tempfile.TemporaryDirectory() as cache:
                    for name, laps in runs[each].items():
                        laps.append(run(case, folder, factors, each, f"{cache}/{RUNS[name]}", RUNS[name]))
            for each in trees:
                found = {kernels: median(laps) for kernels, laps in runs[each].items()}
                for kernels, laps in found.items():
                    click.echo(f"{each}, {case}, {kernels}: {json.dumps(laps)}")
                if each == ROOT:
                    line = {"benchmark": "cold", "case": case, "shape": shape, "scale": scale, "factors": factors}
                    record("cold", line | {"repeats": repeats} | found | gpu_stamp_of("cuda"))


if __name__ == "__main__":
    main()
