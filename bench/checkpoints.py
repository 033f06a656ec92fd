"""Cost of a checkpoint after every iteration, on the CPU or on a GPU.

    python bench/checkpoints.py                                      CPU, ML-10M shape, under 2 minutes on 2 cores
    python bench/checkpoints.py --device cuda --shape netflix --factors 100 --iterations 30
    python bench/checkpoints.py --folder SCRATCH                     on the disk to measure

Fits with and without checkpoints run in turn in one process, from the same data and initial factors; their factors must
be the same bits, and so must those of the last file. Seconds of an iteration are the median over rounds of a fit's mean
without its first iteration; they include the checkpoint's work in the thread of the fit. "written": files written (a
newer checkpoint replaces one that waits for the disk). Once a fit, for any number of iterations: "last", the wait for
the last file, and "fingerprint" of the ratings.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from common import median, record, synthetic, synthetic_counts

import hybridmf as hmf
from hybridmf.data import fingerprint as data_fingerprint
from hybridmf.model import checkpoint as checkpoints

CLASSES = {"explicit": hmf.ExplicitALS, "implicit": hmf.ImplicitALS}


class TimedWriter(checkpoints.Writer):
    """Times the work of the fit's thread for checkpoints and counts the files."""

    newest: TimedWriter

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        TimedWriter.newest, self.files, self.offering, self.last = self, 0, [], 0.0

    def offer(self, model: Any) -> None:
        """Time it."""
        started = time.perf_counter()
        super().offer(model)
        self.offering.append(time.perf_counter() - started)

    def _write(self, snapshot: Any) -> None:
        super()._write(snapshot)
        self.files += 1

    def __exit__(self, *exception: Any) -> None:
        started = time.perf_counter()
        super().__exit__(*exception)
        self.last = time.perf_counter() - started


def draw(shape: str, feedback: str, device: str) -> sp.csr_array:
    """Ratings of a published shape, drawn on the device of the fit."""
    if device == "cpu":
        return synthetic(shape) if feedback == "explicit" else synthetic_counts(shape)
    from gpu_data import synthetic_gpu

    return synthetic_gpu(shape, implicit=feedback == "implicit")


def seconds_an_iteration(model: Any, offering: list[float]) -> float:
    """Mean of a fit without its first iteration, which compiles kernels and encodes labels."""
    sweeps = [each["seconds"] for each in model.history_]
    return (sum(sweeps[1:]) + sum(offering[1:])) / (len(sweeps) - 1)


def gpu_stamp_of(device: str) -> dict[str, Any]:
    """GPU, driver and CUDA where there is one."""
    if device == "cpu":
        return {}
    from gpu import gpu_stamp

    from hybridmf.device.cuda import open_device

    return gpu_stamp(open_device(device))


@click.command(help=__doc__)
@click.option("--device", default="cpu", show_default=True)
@click.option("--shape", default="ml-10m", show_default=True)
@click.option("--feedback", type=click.Choice(list(CLASSES)), default="explicit", show_default=True)
@click.option("--factors", default=64, show_default=True)
@click.option("--iterations", default=10, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", type=int, help="[default: all cores]")
@click.option("--folder", type=click.Path(file_okay=False, exists=True), help="[default: that of temporary files]")
def main(
    device: str,
    shape: str,
    feedback: str,
    factors: int,
    iterations: int,
    rounds: int,
    threads: int | None,
    folder: str | None,
) -> None:
    matrix = draw(shape, feedback, device)
    options = {"factors": factors, "iterations": iterations, "device": device, "random_state": 0}
    model = CLASSES[feedback](**options, num_threads=threads)
    checkpoints.Writer = TimedWriter  # type: ignore[misc]
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    once: dict[str, list[float]] = {"written": [], "last": [], "megabytes": []}
    reference: np.ndarray | None = None
    for each in range(rounds + 1):  # the first warms up
        plain = seconds_an_iteration(model.fit(matrix), [])
        reference = model.user_factors_ if reference is None else reference
        with tempfile.TemporaryDirectory(dir=folder, prefix="checkpoints-") as place:
            model.fit(matrix, checkpoint=place)
            newest = Path(place) / f"checkpoint-{iterations:06d}.safetensors"
            if not np.array_equal(model.user_factors_, reference):
                raise click.ClickException("the factors with checkpoints are not those without")
            if not np.array_equal(hmf.load(newest).user_factors_, reference):
                raise click.ClickException("the last checkpoint does not hold the factors of the fit")
            writer = TimedWriter.newest
            if each:
                seconds["without"].append(plain)
                seconds["with"].append(seconds_an_iteration(model, writer.offering))
                once["written"].append(writer.files)
                once["last"].append(writer.last)
                once["megabytes"].append(newest.stat().st_size / 1e6)
    started = time.perf_counter()
    data_fingerprint.fingerprint(matrix)
    fingerprint = time.perf_counter() - started
    without, with_them = median(seconds["without"]), median(seconds["with"])
    line = {
        "bench": "checkpoints",
        "device": device,
        "shape": shape,
        "nnz": int(matrix.nnz),
        "feedback": feedback,
        "factors": factors,
        "iterations": iterations,
        "rounds": rounds,
        "threads": model.plan_.num_threads,
        "seconds": seconds,
        "overhead": with_them / without - 1,
        "fingerprint_s": fingerprint,
    }
    line |= {name: median(values) for name, values in once.items()}
    click.echo(
        f"{device}, {shape}, {feedback}, f={factors}: {1e3 * without:.1f} ms an iteration, {1e3 * with_them:.1f} ms "
        f"with a checkpoint each: {100 * line['overhead']:+.1f} %\n{line['written']:.0f} of {iterations} written, "
        f"{line['megabytes']:.1f} MB each; wait for the last {1e3 * line['last']:.0f} ms, "
        f"fingerprint {1e3 * fingerprint:.0f} ms"
    )
    record("checkpoints", line | gpu_stamp_of(device))


if __name__ == "__main__":
    main()
