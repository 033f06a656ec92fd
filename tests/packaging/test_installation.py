"""What an installation holds, and what importing it does. Runs on a checkout, an editable install and a wheel."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import hybridmf

PACKAGE = Path(hybridmf.__file__).parent
GPU_LIBRARIES = ("cuda", "cupy", "cupyx", "jax", "numba", "pycuda", "torch")


def compiled_modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*") if path.name.endswith(tuple(EXTENSION_SUFFIXES))]


def run_python(*arguments: str, path: Path | None = None, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A new interpreter that finds what is in `path` first, then this hybridmf."""
    folders = [str(folder) for folder in (path, PACKAGE.parent) if folder is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    environment.pop("PYTHONWARNINGS", None)
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)


def test_version_is_the_one_installed():
    try:
        installed = metadata.version("hybridmf")
    except metadata.PackageNotFoundError:
        pytest.skip("hybridmf is not installed, only built in place")
    assert hybridmf.__version__ == installed


def test_types_are_installed():
    assert (PACKAGE / "py.typed").is_file()
    modules = compiled_modules()
    assert {path.name.split(".")[0] for path in modules} >= {"_formats", "_als", "_ccd", "_sgd", "_topk"}
    for path in modules:
        assert path.with_name(path.name.split(".")[0] + ".pyi").is_file(), f"{path.name} has no stub beside it"


def test_modules_of_the_gpu_are_installed():
    names = {"assembly", "bals", "cholesky_any", "engine", "fused", "launch", "losses", "topk", "tune"}
    assert names <= {path.stem for path in (PACKAGE / "gpu").rglob("*.py")}
    assert list((PACKAGE / "plan" / "tuned").glob("*.json"))


def test_cuda_sources_are_found_and_are_no_package():
    folder = PACKAGE / "cuda"  # in a wheel
    if not folder.is_dir():
        folder = PACKAGE.parent / "cuda"  # in a checkout, which an editable install reads in place
    assert (folder / "README.md").is_file()
    shipped = {path.name for path in folder.iterdir()}
    assert {"ccd.cu", "common.cuh", "fused_als.cu", "msgd.cu", "system.cuh", "top_k.cu"} <= shipped
    # with one, Python started in the checkout would import it in place of NVIDIA's cuda
    assert not list(folder.rglob("__init__.py*"))


def test_import_is_silent_and_takes_no_gpu_library(tmp_path):
    for (
        name
    ) in GPU_LIBRARIES:  # stand-ins, because errors of missing packages may be caught; these pass every except clause
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    result = run_python("-W", "error", "-c", "import hybridmf", path=tmp_path, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "code", ["import hybridmf", "import hybridmf.cli as cli; cli.main(['--help'], standalone_mode=False)"]
)
def test_import_and_help_take_no_heavy_library(code, tmp_path):
    heavy = ("numpy", "scipy", "sklearn", "pandas", "pyarrow", "narwhals", "dask", "distributed", "tqdm")
    result = run_python("-c", f"{code}\nimport sys; print(sorted(sys.modules.keys() & set({heavy})))", cwd=tmp_path)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


ML_100K = (
    "import numpy as np, scipy.sparse as sp, sys; rng = np.random.default_rng(0); "
    "matrix = sp.csr_array((rng.random((943, 1682)) < 0.06).astype(np.float32))\n"
    "import hybridmf\n"
    "model = hybridmf.ImplicitALS(factors=8, iterations=1, random_state=0)\n"
)
"""A matrix of the size of ML-100K, and a model for it."""


def test_reading_and_a_fit_take_no_heavy_library(tmp_path):
    """Nor does the program have to import pandas for containers of that library."""
    (tmp_path / "ratings.csv").write_text("user,item,rating\na,x,1\nb,y,2\n")
    heavy = ("sklearn", "pandas", "joblib", "pyarrow", "narwhals", "dask", "cupy")
    heavy += ("scipy.io", "scipy.stats", "scipy.optimize")
    code = (
        f"{ML_100K}hybridmf.Ratings.from_file('ratings.csv')\n"
        f"model.fit(matrix).recommend(0); hybridmf.evaluate(model, matrix[::-1], metrics='ndcg@10')\n"
        f"repr(model), model.transform(matrix), model.predict(0, 1), model.save('m.safetensors')\n"
        f"print(sorted(sys.modules.keys() & set({heavy})), len(sys.modules) < 750)\n"
        "container = hybridmf.ImplicitALS(factors=8, iterations=1).set_output(transform=sys.argv[1])\n"
        "print(type(container.fit_transform(matrix)).__name__)\n"
        "import sklearn; print(sklearn.clone(model), model.get_metadata_routing(), hasattr(model, '_repr_html_'))"
    )
    container = "pandas" if importlib.util.find_spec("pandas") else "default"
    result = run_python("-c", code, container, cwd=tmp_path)
    assert result.stdout.splitlines()[0] == "[] True", result.stderr
    assert result.stdout.splitlines()[1] == ("DataFrame" if container == "pandas" else "ndarray")
    assert result.stdout.splitlines()[2].startswith("ImplicitALS(factors=8, iterations=1, random_state=0) {")


def test_a_short_fit_by_auto_starts_no_gpu(tmp_path):
    (tmp_path / "cupy.py").write_text("raise SystemExit('cupy was imported')")
    said = "import logging; logging.basicConfig(level='INFO', format='%(message)s', stream=sys.stdout)\n"
    short = f"{ML_100K}{said}print(model.fit(matrix).plan_, flush=True)\nprint('-- then --')\n"
    needs_gpu = (
        "hybridmf.plan(shape=(10**6, 10**6), nnz=10**9, model=model)",
        "model.set_params(precision='tf32').fit(matrix)",
        "model.set_params(device='cuda', precision='float32').fit(matrix)",
    )
    tried = "".join(f"try:\n    {code}\nexcept SystemExit as error:\n    print(error)\n" for code in needs_gpu)
    result = run_python("-c", short + tried, path=tmp_path, cwd=tmp_path)
    of_short_fit, _, then = result.stdout.partition("-- then --\n")
    assert "device='auto' chose the CPU: in about" in of_short_fit, result.stderr
    assert "on the CPU, before a GPU is started (500 ms)" in of_short_fit
    assert then.split("\n") == ["cupy was imported"] * len(needs_gpu) + [""], result.stderr


def test_public_modules_and_names_are_those_of_the_stub(tmp_path):
    """Modules first, in an interpreter that has imported none of them.

    Functions named like modules stay functions: the import system binds a module's name in its package.
    """
    code = """
import hybridmf as hmf
print(hmf.ratings.__name__, hmf.ccd.__name__, hmf.sgd.__name__, hmf.als.__name__)
import hybridmf.compare, hybridmf.plan.types
print(type(hmf.compare).__name__, type(hmf.plan).__name__)
print(all(hasattr(hmf, name) for name in dir(hmf)), sorted(hmf.__all__) == dir(hmf))
"""
    modules, functions, names = run_python("-c", code, cwd=tmp_path).stdout.splitlines()
    assert modules.split() == ["hybridmf.ratings", "hybridmf.ccd", "hybridmf.sgd", "hybridmf.als"]
    assert functions.split() == ["function", "function"]
    assert names.split() == ["True", "True"]
    assert {"ExplicitALS", "__version__", "Ratings", "compare", "load", "metrics", "plan", "scale"} <= set(
        hybridmf.__all__
    )


def test_the_package_is_pickled_by_name():
    """So functions that use it reach other processes, through cloudpickle (joblib, Dask, Ray, Spark)."""
    assert pickle.loads(pickle.dumps(hybridmf)) is hybridmf
    cloudpickle = pytest.importorskip("cloudpickle")
    namespace = {"hmf": hybridmf}
    exec("def make():\n    return hmf.ImplicitALS()", namespace)  # as in a notebook: pickled by value
    assert type(cloudpickle.loads(cloudpickle.dumps(namespace["make"]))()) is hybridmf.ImplicitALS


def test_gpu_stand_ins_are_detected(tmp_path):
    (tmp_path / "cupy.py").write_text("raise SystemExit('cupy was imported')")
    code = "try:\n    import cupy\nexcept Exception:\n    pass\nimport hybridmf"
    result = run_python("-c", code, path=tmp_path, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.strip() == "cupy was imported"
