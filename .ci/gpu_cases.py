"""Fits at real shapes on a GPU: part of .ci/gpu, and the record of what ran.

    python3 .ci/gpu_cases.py run matrix --part 1/2 --folder PARTS    a part of the cases, in eight processes
    python3 .ci/gpu_cases.py run matrix --delays 1 --folder PARTS    the same with random delays in all kernels
    python3 .ci/gpu_cases.py note tests --folder PARTS pytest="..."  the result of another part
    python3 .ci/gpu_cases.py assemble RECORD PARTS/*.json            the record; needs no GPU
    python3 .ci/gpu_cases.py list matrix                             names of the cases

A part writes a fragment, `PARTS/<part>.json`, now and then and at its end. Fits with delays must have the bits of the
same fits without: these are taken from the fragments in the folder, if they ran with the same kernels and data on such
a GPU, else the fits without delays run first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # of the processes that the data are drawn in, too

from gpu_matrix import records
from gpu_matrix.cases import SETS, Case, groups_of, part_of
from gpu_matrix.data import open_matrix, prepare
from gpu_matrix.pool import Pool
from gpu_matrix.worker import serve

DELAYS = "HYBRIDMF_KERNEL_DELAYS"
"""Seed of random delays around every synchronization, which hybridmf/gpu/launch.py compiles into all kernels."""

DRAW_SECONDS = 240
THREADS = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("set", choices=sorted(SETS))
    run.add_argument("--part", default="1/1", type=part_numbers, help="k/n: the k-th of n parts")
    run.add_argument("--delays", default=0, type=int, help="seed of delays; 0: none")
    run.add_argument("--folder", required=True, type=Path, help="of the fragments")
    run.add_argument("--processes", default=8, type=int)
    run.add_argument("--memory", default="9GB", help="GPU memory of each process")
    run.add_argument("--limit-seconds", default=0.0, type=float, help="no case starts later; 0: no limit")
    run.add_argument("--patience", default=0.0, type=float, help="factor of the time of a case; default: 1, delays 2")
    run.add_argument("--fits", default=0, type=int, help="of each case; 0: as many as the case says")
    run.add_argument("--only", default="", help="regular expression of names")
    run.add_argument("--resume", action="store_true", help="keep what passed in the fragment that is there")
    run.add_argument("--device", default="cuda")
    run.add_argument("--scale", default=1.0, type=float, help="of both sides of all data sets")
    worker = commands.add_parser("worker")
    worker.add_argument("data")
    worker.add_argument("device")
    note = commands.add_parser("note")
    note.add_argument("part")
    note.add_argument("--folder", required=True, type=Path)
    note.add_argument("fields", nargs="+", help="name=text")
    joined = commands.add_parser("assemble")
    joined.add_argument("record", type=Path)
    joined.add_argument("fragments", nargs="+", type=Path)
    prune = commands.add_parser("prune")
    prune.add_argument("folder", type=Path)
    commands.add_parser("list").add_argument("set", choices=sorted(SETS))
    options = parser.parse_args()
    return COMMANDS[options.command](options)


def part_numbers(text: str) -> tuple[int, int]:
    """``k/n``."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"expected k/n with 1 <= k <= n, got {text!r}")
    return int(match[1]), int(match[2])


def run_part(options: argparse.Namespace) -> int:
    """Run a part; the failures come last."""
    started = time.monotonic()
    number, parts = options.part
    cases = [case for case in part_of(SETS[options.set](), number, parts) if re.search(options.only, case.name)]
    kind = records.PARTS[options.set, options.delays > 0]
    fragment: dict[str, Any] = stamp(options) | {
        "part": kind if parts == 1 else f"{kind}:{number}/{parts}",
        "set": kind,
        "parts": parts,
        "delays": options.delays,
        "processes": options.processes,
        "fits": options.fits or "as listed",
    }
    path = options.folder / f"{fragment['part'].replace(':', '-').replace('/', '-of-')}.json"
    kept = passed_before(path, fragment) if options.resume else {}
    with tempfile.TemporaryDirectory(prefix="gpu-cases-") as folder:
        fragment["data"] = draw_data(folder, sorted({case.data for case in cases}), options)
        print(f"{len(cases)} cases; data drawn after {time.monotonic() - started:.0f} s", flush=True)

        def save(results: dict[str, Any]) -> None:
            found = kept | results
            missing = {case.name: {"status": records.NOT_RUN} for case in cases if case.name not in found}
            seconds = round(time.monotonic() - started, 1)
            records.write_json(path, fragment | {"seconds": seconds, "cases": found | missing})

        todo = [case for case in cases if case.name not in kept]
        expected, unknown = {}, {}
        if options.delays:
            expected = bits_without_delays(options.folder, fragment)
            first = [case for case in todo if case.reproducible and case.name not in expected]
            found = run_cases(first, folder, options, started) if first else {}
            expected |= {name: result["sha256"] for name, result in found.items() if "sha256" in result}
            unknown = {name: result for name, result in found.items() if result["status"] != "ok"}
            for result in unknown.values():
                result["detail"] = f"without delays: {result.get('detail', records.NOT_RUN)}"
        todo = [case for case in todo if case.name not in unknown]
        results = run_cases(todo, folder, options, started, expected, save, options.delays) | unknown
        save(results)
    return report(kept | results, path, time.monotonic() - started)


def stamp(options: argparse.Namespace) -> dict[str, Any]:
    """See `records.stamp`; on the CPU, for trials, without a GPU. In a process of its own: this one opens no GPU."""
    if options.device == "cpu":
        blank = dict.fromkeys(("date", "device", "cuda", "cupy"), "cpu")
        return blank | {"cuda_sha256": records.cuda_sha256()}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(records.stamp)


def draw_data(folder: str, names: list[str], options: argparse.Namespace) -> dict[str, str]:
    """Draw the data sets in a process that ends, and gives back the memory of the GPU; their hashes."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply_async(prepare, (folder, names, options.device, options.scale)).get(DRAW_SECONDS)
    return {name: open_matrix(Path(folder), name).digest() for name in names}


def run_cases(
    cases: list[Case],
    folder: str,
    options: argparse.Namespace,
    started: float,
    expected: dict[str, str] | None = None,
    save: Any = lambda results: None,
    delays: int = 0,
) -> dict[str, Any]:
    """Run cases in processes until the time of the part is over."""
    left = options.limit_seconds and max(1.0, options.limit_seconds - (time.monotonic() - started))
    os.environ.pop(DELAYS, None)
    environment = {name: os.environ.get(name, value) for name, value in THREADS.items()}
    environment |= {"HYBRIDMF_GPU_MEMORY_LIMIT": options.memory} | ({DELAYS: str(delays)} if delays else {})
    pool = Pool(
        [sys.executable, str(Path(__file__).resolve()), "worker", folder, options.device],
        options.processes,
        expected=expected,
        limit_seconds=left,
        environment=environment,
        saved=save,
    )
    patience = options.patience or (2.0 if delays else 1.0)
    cases = [replace(case, seconds=case.seconds * patience, fits=options.fits or case.fits) for case in cases]
    return pool.run(groups_of(cases))


def passed_before(path: Path, fragment: dict[str, Any]) -> dict[str, Any]:
    """Cases that an earlier run of the part, with the same kernels and GPU, has passed."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    if any(found[key] != fragment[key] for key in ("cuda_sha256", "device", "delays", "set")):
        return {}
    return {name: case for name, case in found["cases"].items() if case["status"] == "ok"}


def bits_without_delays(folder: Path, fragment: dict[str, Any]) -> dict[str, str]:
    """Bits of cases that ran without delays, with the same kernels and data on such a GPU."""
    bits: dict[str, str] = {}
    for path in folder.glob("*.json"):
        found = json.loads(path.read_text())
        same = all(found.get(key) == fragment[key] for key in ("cuda_sha256", "device", "cuda", "cupy"))
        if not same or found.get("delays", 1) or not fragment["data"].items() <= found["data"].items():
            continue
        good = {name: case for name, case in found["cases"].items() if case["status"] == "ok"}
        bits |= {name: case["sha256"] for name, case in good.items() if "sha256" in case}
    return bits


def report(results: dict[str, Any], path: Path, seconds: float) -> int:
    """Print what failed or did not run; 1 for failures, 2 if some did not run, else 0."""
    missing = [name for name, result in results.items() if result["status"] == records.NOT_RUN]
    bad = {name: result for name, result in results.items() if result["status"] not in ("ok", records.NOT_RUN)}
    print(f"{len(results) - len(missing)} of {len(results)} cases ran in {seconds:.0f} s, {len(bad)} failed: {path}")
    for name in missing:
        print(f"NOT RUN {name} {results[name].get('detail', '')}".rstrip())
    for name, result in bad.items():
        beside = f" | beside: {'; '.join(result['beside'])}" if result.get("beside") else ""
        print(f"{result['status'].upper()} {name}: {result.get('detail', '')}{beside}")
    return 1 if bad else 2 if missing else 0


def note_part(options: argparse.Namespace) -> int:
    """Write the fragment of a part that this script does not run; ``a.b=text`` is the field b of a."""
    fragment = records.stamp() | {"part": options.part}
    for text in options.fields:
        name, value = text.split("=", 1)
        outer, _, inner = name.partition(".")
        fragment[outer] = fragment.get(outer, {}) | {inner: value} if inner else value
    records.write_json(options.folder / f"{options.part}.json", fragment)
    return 0


def assemble_record(options: argparse.Namespace) -> int:
    """Write the record of fragments, all of the present kernels."""
    try:
        record = records.assemble(records.read_fragments(options.fragments, records.cuda_sha256()))
    except records.Stale as error:
        print(error, file=sys.stderr)
        return 1
    options.record.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{options.record}: {', '.join(str(path) for path in options.fragments)}")
    return 0


def prune_folder(options: argparse.Namespace) -> int:
    """Delete fragments of other kernels."""
    for path in records.drop_stale(options.folder, records.cuda_sha256()):
        print(f"dropped {path}: the kernels have changed")
    return 0


def list_cases(options: argparse.Namespace) -> int:
    """Print the names of the cases."""
    print(*(case.name for case in SETS[options.set]()), sep="\n")
    return 0


COMMANDS = {
    "run": run_part,
    "worker": lambda options: serve(options.data, options.device),
    "note": note_part,
    "assemble": assemble_record,
    "prune": prune_folder,
    "list": list_cases,
}

if __name__ == "__main__":
    sys.exit(main())
