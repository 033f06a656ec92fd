"""Building layouts against SciPy: transposition and the BALS builder, on one sorted CSR matrix.

python bench/layouts.py                 ML-20M shape, about 20M entries, 2 threads (under 2 minutes)
python bench/layouts.py --shape ml-1m
"""

from __future__ import annotations

import click
import numpy as np
from common import SHAPES, alternate, median, record, synthetic

from hybridmf import formats


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="ml-20m", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--repeats", default=7, show_default=True)
def main(shape: str, threads: int, repeats: int) -> None:
    matrix = synthetic(shape)
    bals = formats.BalsMatrix.from_csr(matrix, num_threads=threads)
    back, transposed, columns = bals.to_csr(), formats.transpose(matrix, num_threads=threads), matrix.tocsc()
    assert np.array_equal(back.indices, matrix.indices) and np.array_equal(back.data, matrix.data)
    assert np.array_equal(transposed.indices, columns.indices) and np.array_equal(transposed.data, columns.data)
    seconds = alternate(
        {
            "scipy tocsc (1 thread)": matrix.tocsc,
            "transpose": lambda: formats.transpose(matrix, num_threads=threads),
            "BALS build 256 x 192": lambda: formats.BalsMatrix.from_csr(matrix, num_threads=threads),
            "reorder rows and columns": lambda: formats.reorder(matrix, num_threads=threads),
        },
        repeats,
    )
    base = median(seconds["scipy tocsc (1 thread)"])
    click.echo(f"{shape}: {matrix.shape[0]:,} x {matrix.shape[1]:,}, {matrix.nnz:,} entries; {threads} threads")
    for name, values in seconds.items():
        click.echo(f"{name:26s} {median(values):8.3f} s   {median(values) / base:6.2f} of tocsc")
    record(
        "layouts",
        {
            "bench": "layouts",
            "shape": shape,
            "nnz": int(matrix.nnz),
            "threads": threads,
            "seconds": {name: median(values) for name, values in seconds.items()},
            "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
            "ratio_to_tocsc": {name: median(values) / base for name, values in seconds.items()},
            "bals": {key: float(value) for key, value in bals.statistics().items()},
        },
    )


if __name__ == "__main__":
    main()
