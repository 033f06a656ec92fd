"""How a group of ranks adds up partial systems (cuMF 4.2): in parallel, in two phases by topology, or on one rank."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.validate import check_choice
from .transport.communicator import Array, Communicator

REDUCTIONS = ("parallel", "two_phase", "root")


class Reduction:
    """Parallel reduction in one phase (cuMF fig. 5a): member k gets the sums of its own rows.

    Parameters
    ----------
    members : Communicator
        The ranks that sum the same rows.

    Attributes
    ----------
    order : list of int
        The members in the order in which their rows lie in the arrays to add up.
    everything_here : bool or None
        Whether this rank solves the rows of all members; None: each solves its own.
    """

    everything_here: bool | None = None

    def __init__(self, members: Communicator) -> None:
        self.members = members
        self.order = list(range(members.size))

    def reduce(self, array: Array, counts: Sequence[int]) -> Array:
        """Sums of the rows that are solved here.

        Parameters
        ----------
        array : array, shape (sum(counts), ...)
        counts : sequence of int
            Rows of each member, in `order`.
        """
        return self.members.reduce_scatter(array, counts)

    def close(self) -> None:
        """Nothing is held."""


class RootReduction(Reduction):
    """All sums go to member 0, which solves all rows: what cuMF compares the parallel reduction with."""

    def __init__(self, members: Communicator) -> None:
        super().__init__(members)
        self.everything_here = members.rank == 0

    def reduce(self, array: Array, counts: Sequence[int]) -> Array:
        """All sums on member 0, none elsewhere."""
        return self.members.reduce_scatter(array, [sum(counts)] + [0] * (self.members.size - 1))


class TwoPhaseReduction(Reduction):
    """First within a socket, then across (cuMF fig. 5b): of what crosses sockets, one sum for all ranks of a socket.

    Parameters
    ----------
    members : Communicator
    sockets : sequence of int
        Socket of each member; all sockets have the same number of members.

    Raises
    ------
    ValueError
    """

    def __init__(self, members: Communicator, sockets: Sequence[int]) -> None:
        super().__init__(members)
        names = sorted(set(sockets))
        groups = [[k for k, socket in enumerate(sockets) if socket == name] for name in names]
        if len({len(group) for group in groups}) != 1:
            raise ValueError(f"two-phase reduction needs as many ranks on each socket; got sockets {list(sockets)}")
        self.across_size, self.inside_size = len(groups), len(groups[0])
        place = next((s, group.index(members.rank)) for s, group in enumerate(groups) if members.rank in group)
        self.inside, self.across = members.split(place[0]), members.split(len(names) + place[1])
        # rows of the members with the same place in their sockets lie together: one rank of each socket adds them up
        self.order = [group[t] for t in range(self.inside_size) for group in groups]
        self.place = place[1]

    def reduce(self, array: Array, counts: Sequence[int]) -> Array:
        """Sums of own rows."""
        n = self.across_size
        portions = [sum(counts[t * n : (t + 1) * n]) for t in range(self.inside_size)]
        portion = self.inside.reduce_scatter(array, portions)
        return self.across.reduce_scatter(portion, counts[self.place * n : (self.place + 1) * n])

    def close(self) -> None:
        """Close the communicators made here."""
        self.inside.close()
        self.across.close()


def make_reduction(name: str, members: Communicator, sockets: Sequence[int] | None) -> Reduction:
    """The reduction of that name; two phases where there are several sockets of several ranks.

    Raises
    ------
    ValueError
    """
    check_choice("reduction", name, REDUCTIONS)
    if name == "root":
        return RootReduction(members)
    if name == "two_phase":
        if sockets is None:
            raise ValueError(
                "reduction='two_phase' needs the socket of each GPU, which a fit by several processes does not know; "
                "use 'parallel'"
            )
        if 1 < len(set(sockets)) < members.size:
            return TwoPhaseReduction(members, sockets)
    return Reduction(members)
