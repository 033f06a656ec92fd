"""The large problems of cuMF (table 5, fig. 11) on paper: what the planner does with them on H200s.

    python bench/paper_scale.py --planner              a table, and bench/results/scale_planner.jsonl

cuMF reports seconds per iteration on four GK210 (two K80 boards) in one machine; the planner's are predictions, not
measurements. A machine's host memory decides between host and disk; both are given where it matters.
"""

from __future__ import annotations

from typing import Any

import click
from common import record

from hybridmf.scale.planner import Problem, ScalePlan, as_record, plan_scale

PROBLEMS: dict[str, tuple[Problem, str, float]] = {
    "SparkALS": (Problem((660_000_000, 2_400_000), 3_500_000_000, 10), "24 s", 24.0),
    "Factorbird": (Problem((229_000_000, 195_000_000), 38_500_000_000, 5), "92 s", 92.0),
    "Facebook": (Problem((1_056_000_000, 48_000_000), 112_000_000_000, 16), "746 s", 746.0),
    "Facebook, f = 100": (Problem((1_056_000_000, 48_000_000), 112_000_000_000, 100), "3.8 h", 3.8 * 3600),
}
GPUS = (1, 4, 8)
HOSTS = {"2 TB": 2 * 10**12, "4 TB": 4 * 10**12}


def places(plan: ScalePlan) -> str:
    """Where things are, in words."""
    halves = [f"{side}s p = {half.parts}, q = {half.batches} ({half.fixed})" for side, half in plan.halves.items()]
    return f"ratings on {plan.ratings}, factors on {plan.factors}; {', '.join(halves)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def lines() -> list[dict[str, Any]]:
    """One for each problem, number of GPUs and host memory that makes a difference."""
    found = []
    for name, (problem, words, seconds) in PROBLEMS.items():
        for gpus in GPUS:
            plans = {host: plan_scale(problem, gpus, host_bytes=size) for host, size in HOSTS.items()}
            if len({(plan.ratings, plan.seconds) for plan in plans.values()}) == 1:
                plans = {"2 TB": plans["2 TB"]}
            for host, plan in plans.items():
                line = {"bench": "planner", "problem": name, "host_memory": host, "places": places(plan)}
                found.append(line | as_record(plan) | {"cumf": words, "cumf_seconds": seconds})
    return found


@click.command()
@click.option("--planner", is_flag=True, required=True, help="Predictions of the planner; needs no GPU.")
@click.option("--table", is_flag=True, help="Print the table of docs/scale.md and record nothing.")
def main(planner: bool, table: bool) -> None:
    """The large problems of cuMF on H200s, by the planner."""
    click.echo("| problem | cuMF, 4 GK210 | GPUs | host memory | predicted | plan |\n|---|---|---|---|---|---|")
    for line in lines():
        cells = (line["problem"], line["cumf"], line["gpus"], line["host_memory"], _seconds(line["seconds"]))
        click.echo(f"| {' | '.join(map(str, cells))} | {line['places']} |")
        if not table:
            record("scale_planner", line)


if __name__ == "__main__":
    main()
