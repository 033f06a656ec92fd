"""Reductions of partial systems over a group of ranks (cuMF 4.2): parallel, in two phases, or to one rank."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.validate import check_choice
from .transport.communicator import Array, Communicator

REDUCTIONS = ("parallel", "two_phase", "root")


class Reduction:
    """Reduction in one phase: each member gets the sums of its own rows (cuMF fig. 5a), or member 0 those of all.

    `members` have partial sums of the same rows. With `to_root`, member 0 solves all rows: cuMF's baseline.
    """

    order: list[int]  # the members in the order of their rows in the arrays to reduce
    everything_here: bool | None  # whether this rank solves the rows of all members; None: each solves its own

    def __init__(self, members: Communicator, *, to_root: bool = False) -> None:
        self.members, self.order = members, list(range(members.size))
        self.everything_here = members.rank == 0 if to_root else None

    def reduce(self, array: Array, counts: Sequence[int]) -> Array:
        """The sums of the rows that this rank solves; `array` has ``counts[k]`` rows of the k-th member in `order`."""
        if self.everything_here is not None:
            counts = [sum(counts)] + [0] * (self.members.size - 1)
        return self.members.reduce_scatter(array, counts)

    def close(self) -> None:
        """Do nothing."""


class TwoPhaseReduction(Reduction):
    """Reduce within each socket, then across sockets of equally many members (cuMF fig. 5b): one sum each crosses."""

    def __init__(self, members: Communicator, sockets: Sequence[int]) -> None:
        super().__init__(members)
        names = sorted(set(sockets))
        groups = [[k for k, socket in enumerate(sockets) if socket == name] for name in names]
        if len({len(group) for group in groups}) != 1:
            raise ValueError(f"two-phase reduction needs as many ranks on each socket; got sockets {list(sockets)}")
        self.across_size, self.inside_size = len(groups), len(groups[0])
        place = next((s, group.index(members.rank)) for s, group in enumerate(groups) if members.rank in group)
        self.inside, self.across = members.split(place[0]), members.split(len(names) + place[1])
        # the rows of members with the same position in their sockets are adjacent: one rank per socket adds them
        self.order = [group[t] for t in range(self.inside_size) for group in groups]
        self.place = place[1]

    def reduce(self, array: Array, counts: Sequence[int]) -> Array:
        n = self.across_size
        portions = [sum(counts[t * n : (t + 1) * n]) for t in range(self.inside_size)]
        portion = self.inside.reduce_scatter(array, portions)
        return self.across.reduce_scatter(portion, counts[self.place * n : (self.place + 1) * n])

    def close(self) -> None:
        self.inside.close()
        self.across.close()


def make_reduction(name: str, members: Communicator, sockets: Sequence[int] | None) -> Reduction:
    """Make a reduction by name; "two_phase" takes one phase unless several sockets have several ranks each."""
    check_choice("reduction", name, REDUCTIONS)
    if name == "root":
        return Reduction(members, to_root=True)
    if name == "two_phase":
        if sockets is None:
            raise ValueError(
                "reduction='two_phase' needs the socket of each GPU, which a fit by several processes does not know; "
                "use 'parallel'"
            )
        if 1 < len(set(sockets)) < members.size:
            return TwoPhaseReduction(members, sockets)
    return Reduction(members)
