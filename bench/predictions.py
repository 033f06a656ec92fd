"""Recorded iterations on GPUs that the cost model predicts by more than 15 % too fast or too slow.

    python bench/predictions.py                 needs no GPU; --all lists every line

It reads the lines of scale.jsonl (several GPUs, streamed ratings, reductions) and out_of_core.jsonl (streamed ratings
and offloaded factors of one GPU); those of gpu.jsonl and cpu.jsonl are tests (`plan/test_cost.py`). Of each case the
newest line counts. Predictions are of built-in constants, with the rates of the kernels that ran (paper_scale.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import click
import numpy as np
import paper_common as paper
from paper_scale import CASE, EARLIER_KERNELS, FASTER_FROM, kernels, prediction, scale_task

from hybridmf.core.objective import SIDES
from hybridmf.datasets import SHAPES
from hybridmf.plan.half_sweep import HalfPlan, priced
from hybridmf.plan.machine import H200

WITHIN = 0.15

Found = tuple[str, float, float]
"""What was measured, and its measured and predicted seconds."""


def of_scale() -> Iterator[Found]:
    """Half sweeps and iterations on one GPU and on several."""
    newest = {repr([line.get(name) for name in CASE]): line for line in paper.read_lines("scale")}
    for line in newest.values():
        found = prediction(line)
        grids = ", ".join(f"{side}s {p} x {q}" for side, (p, q) in line["grids"].items())
        name = f"{scale_task(line)}: {line['shape']}, f = {line['factors']}, {line['gpus']} GPUs ({grids})"
        name += (
            f", {line['reduction']}" if "reduction" in line else f", {line['limit']} GB" if line.get("limit") else ""
        )
        yield name, line["seconds"], found["predicted"]
        for side in SIDES:
            yield f"{name}, {side}s", line["halves"][side], found["predicted_halves"][side]


def of_out_of_core() -> Iterator[Found]:
    """Iterations on one GPU whose ratings or factors come from the host or from files."""
    lines = [line for line in paper.read_lines("out_of_core") if line["device"] != "cpu"]
    newest = {repr([line.get(name) for name in ("task", "shape", "from", "slab", "limit")]): line for line in lines}
    for line in newest.values():
        machine = EARLIER_KERNELS if line["date"] < FASTER_FROM else H200
        plan = kernels(SHAPES[line["shape"]][:2], line["nnz"], line["factors"], line["feedback"] == "implicit")
        halves = [HalfPlan(side, 1, 1, 1) for side in SIDES]
        if line.get("partition"):
            made = line["partition"]
            places, cut = (made["ratings"], made["factors_on"]), made["halves"]
            halves = [HalfPlan(side, cut[side]["p"], cut[side]["q"], 1, *places, split=False) for side in SIDES]
        elif line.get("slab"):
            halves = [replace(half, ratings=line["from"], batches=-(-line["nnz"] // line["slab"])) for half in halves]
        predicted = sum(priced(plan, half, machine).total for half in halves)
        yield f"{line['task']}: {line['shape']}, from {line['from']}", float(np.median(line["ms"])) / 1e3, predicted


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--all", "everything", is_flag=True, help="List predictions within 15 %, too.")
def main(everything: bool) -> None:
    """Print a table."""
    found = [*of_scale(), *of_out_of_core()]
    wrong = [one for one in found if abs(one[2] / one[1] - 1) > WITHIN]
    print("| measured | ms | predicted / measured |\n| --- | --- | --- |")
    for name, seconds, predicted in found if everything else wrong:
        print(f"| {name} | {1e3 * seconds:.1f} | {predicted / seconds:.2f} |")
    print(f"\n{len(found) - len(wrong)} of {len(found)} predictions within {WITHIN:.0%}")


if __name__ == "__main__":
    main()
