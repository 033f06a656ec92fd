"""MSGD on several ranks (Li et al. 2017, MCUMSGD, Alg. 4 and 5.3): each rank owns users, and items rotate.

Users and items are split into as many ranges as there are ranks, with even numbers of entries. Rank q owns users q. In
step l of an epoch it holds items ``j = (q + l) mod p``, which it then sends to rank q - 1. There are two orders of
updates:

- "passes", ours, the default. Items rotate twice. In steps 0 ... p - 1 a rank updates the items that it holds from
  its own users' ratings; in steps p - 1 ... 2 p - 2 it updates its users, while items are sent.
- "blocks", Alg. 4 as printed. Items rotate once. In each of p steps a rank updates the items that it holds, sends them,
  and meanwhile updates its users.

Both process the same entries. With "passes" an epoch is one of MSGD on one device (Alg. 1) in which each row starts at
a different entry: users are updated from items that all ranks' users have updated. With "blocks" they are updated from
items that the same users have updated last, and an item with many entries keeps little of the others' updates: ranges
of users learn separate factors, and the loss falls less per epoch.

Popular items. The updates of an item are sequential, so a step takes at least as long as its longest item. With
"passes", items that take longer than the rest of a step rotate at a pace of their own (`popular_items`), in p ranges of
equally many: in leg l rank q updates range ``(q - l) mod p`` from its users' ratings and hands it to rank q + 1. After
p legs all ranks receive all of them, and users process them last. That takes as long as one walk over the longest item,
but beside the steps of the other items and of the users.

No two ranks hold the same row at a time, so factors depend only on the order and the number of ranks. A rank runs on
the CPU or on a GPU, over any communicator (`hybridmf.ranks.transport.communicator`).

Synchronization on GPUs of one process (`MultiSGD`); `peers` has the copies. A rank holds the items of each block in
memory of its own (`RankSGD._held`), which every epoch uses again. Rank q writes to that of block j at the start of an
epoch if j = q, when it receives the block, and when it updates it: on its main stream, where its users read it, too, or
on the stream of copies, in turn with the main stream. Rank q - 1 reads it once for each time that rank q sends it,
after an event behind the last update. Rank q writes to it again

- in the same epoch, when the block returns. It has come through rank q - 1, so that rank's copy is complete: the event
  of each copy is behind the copy before.
- in the next epoch, which starts after the host has waited for all ranks.

States are in other memory, so they do not change. Users are copied to new memory in each epoch: on the stream of
copies, after all launches before the epoch, which may use the memory, and before the first block of items arrives, for
which the main stream waits before it updates users. Passes over items come first and read the users of the state.
Each pass writes its losses to a place of its own, the same one in every epoch; the main stream adds them up behind all
passes, before the host has waited for it.

The stream `aside` of a GPU updates popular items; it starts after their copies at the start of the epoch and ends
before the last step, which alone reads the popular items on the main stream. In between, the two streams share only the
ratings and the users before the epoch, which neither writes: the main stream updates copies of the users. A rank has
memory for all popular items; in each leg its stream writes those of one range, which no other rank writes. Rank q + 1
copies them, aside, after an event behind the walk of rank q, which writes them again only when it copies, after its own
last leg, those that other ranks hold then: after an event behind the last walk over that range, hence behind all copies
of the legs before. It reads nothing else of other ranks. Over a communicator, leg l is in step l, before any of a
rank's users, and all ranks receive all popular items after each.
CUDA may run copies between the same two GPUs in turn, although their streams do not depend on each other. So popular
items go to the other neighbour than the rest, if there are two, and leg l, which takes longer than a step, is launched
in step 2 l.

Set-up on GPUs of one process. All GPUs at once upload the rows of their users, check and transpose them (`dealt`), and
then cut their blocks (`cut_dealt`). Launches of all threads are on the null stream of a GPU, hence in the order of the
host, in which a rank's thread starts after the end of the one that has uploaded. Released memory is used by later ones.

The launches, copies and events between the first copies of an epoch and its result are the same in every epoch, apart
from the addresses of the users and the learning rate, which launches read from structs: each launch copies them, so the
host may change them for the next epoch. They are recorded in the first epoch, or on another stream, and repeated in the
others (`hybridmf.device.recording`): Python's code for them takes longer than some passes. An event that is recorded
again has no effect on earlier waits for it. After any failure the ranks are closed, so no half of an epoch is repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Objective, Side, State
from ..core.sparse import csr_of, rows_of, transposed
from ..core.validate import csr_arrays
from ..cpu.sgd import CpuEpochs
from ..data.fingerprint import fingerprint
from ..device.arguments import Struct
from ..device.cuda import Device, open_device
from ..device.recording import Recording
from ..errors import CommunicatorError
from ..gpu.factors import DeviceFactors
from ..gpu.matrix import DeviceMatrix
from ..gpu.sgd import FactorRows, GpuEpochs
from ..plan.epochs import Epoch, EpochKernels, EpochSolver, GridBlock, Solved, Step, starting_state
from ..plan.grid import Grid, RankLayout
from ..plan.sgd import LONG_ROW, MOST_RANGES, SgdMethod, range_count, stored_width
from ..plan.solver import Unconnected
from ..plan.types import Plan
from .dealt import Dealt, deal
from .group import JoinedFactors, RankGroup
from .transport.communicator import Array, Communicator, check_agreement
from .transport.peers import PeerCopies

WALK = 230
"""Entries that the rest of a pass processes on a rank in the time of one entry of a walk. See `popular_items`. Chosen
on H200s, Netflix's shape: one of four ranks by itself takes 4.7 ms at f = 128 with 76 popular items, 4.9 to 5.0 with 44
and 4.8 with 114; two take 7.6 ms without, 7.8 and 7.9 with 11 and 28, and at f = 64 6.2 without and 6.9 with 11."""

MOST_WALKS = 32
"""Maximum entries of popular items, relative to the longest, divided by the ranks."""

MIN_POPULAR = LONG_ROW
"""Minimum entries of a popular item: on small problems another step takes longer than it saves."""

Result = TypeVar("Result")

# ---------------------------------------------------------------------------------------------- shares


def share_layout(degrees: dict[Side, np.ndarray], size: int, popular: np.ndarray) -> RankLayout:
    """Ranges of users and of items, one of each per rank, with about equal numbers of entries besides `popular`."""
    rest = degrees["item"].copy()
    rest[popular] = 0
    degrees = {"user": degrees["user"], "item": rest}
    return RankLayout.even(degrees, dict.fromkeys(SIDES, Grid(1, size)), 0.0)


def popular_items(degrees: np.ndarray, size: int, plan: Plan) -> np.ndarray:
    """Items whose walk takes longer than the rest of a pass on `size` ranks; int64, ascending.

    `degrees`, int (n_items,). None on one rank, and in the order "blocks".
    """
    order = np.argsort(-degrees, kind="stable")
    if size == 1 or cast(SgdMethod, plan.method).order == "blocks":
        return order[:0]
    walks = degrees[order].astype(np.float64)
    longer = walks > max(MIN_POPULAR, walks.sum() / (size * WALK))
    few = np.cumsum(walks) <= MOST_WALKS * size * walks[:1]
    return np.sort(order[longer & few])


def cut_share(
    user_items: sp.csr_array, layout: RankLayout, rank: int, popular: np.ndarray, num_threads: int
) -> list[GridBlock]:
    """The ratings of a rank's users: blocks of each range of items; of `popular` items, if any; of those by range."""
    whole, parts = transposed(rows_of(user_items, *layout.own("user", rank)), num_threads), []
    for indptr, spans in blocks_of(whole.indptr, layout, popular):
        indices, data = (np.concatenate([array[a:b] for a, b in spans]) for array in (whole.indices, whole.data))
        parts.append(csr_of(indptr, indices, data, whole.shape[1]))
    parts += [rows_of(parts[-1], *ends) for ends in popular_ranges(popular, layout.size)]
    return [{"user": transposed(items, num_threads), "item": items} for items in parts]


def cut_dealt(
    device: Device, user_items: Dealt, item_users: Dealt, layout: RankLayout, rank: int, popular: np.ndarray, plan: Plan
) -> list[GridBlock]:
    """The blocks of `cut_share` on a GPU, by copies there; uses up the parts of this rank."""
    whole, parts = item_users.parts[rank], []
    for dealt in (user_items, item_users):  # references to them must not keep memory of the GPU
        dealt.parts[rank] = replace(dealt.parts[rank], starts=None, indices=None, data=None)
    for indptr, spans in blocks_of(whole.indptr, layout, popular):
        indices, data = (device.empty(int(indptr[-1]), array.dtype) for array in (whole.indices, whole.data))
        at = 0
        for first, last in spans[spans[:, 0] < spans[:, 1]].tolist():
            device.receive(indices[at : at + last - first], whole.indices[first:last])
            device.receive(data[at : at + last - first], whole.data[first:last])
            at += last - first
        shape, starts = (len(indptr) - 1, whole.shape[1]), device.upload(indptr)
        parts.append(DeviceMatrix(shape, indptr, starts, indices, data, whole.dtype))
    del whole  # before as much memory is needed
    items = parts[-1]
    for first, last in popular_ranges(popular, layout.size):  # in the memory of all popular items
        indptr, entries = items.indptr[first : last + 1] - items.indptr[first], slice(*items.indptr[[first, last]])
        arrays = device.upload(indptr), items.indices[entries], items.data[entries]
        parts.append(DeviceMatrix((last - first, items.shape[1]), indptr, *arrays, items.dtype))
    blocks: list[Any] = [{"user": part.transposed(device), "item": part} for part in parts]
    width = stored_width(plan.factors, plan.dtype) * np.dtype(plan.dtype).itemsize
    for block, side in itertools.product(blocks, SIDES):
        part: Any = block[side]
        sizes = part.shape, part.nnz, width, device.spec.l2_bytes, max(1, MOST_RANGES // layout.size)
        if range_count(*sizes) > 1:  # whose bounds the host finds, without values
            indices = device.download(part.indices)
            block[side] = replace(part, host=csr_of(part.indptr, indices, indices.view(np.float32), part.shape[1]))
    return blocks


def popular_ranges(popular: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Bounds of the ranges of popular items, each of which a rank walks at a time; none if there are no such items."""
    ends = np.cumsum([0, *map(len, np.array_split(popular, size))]).tolist()
    return list(itertools.pairwise(ends)) if len(popular) else []


def blocks_of(indptr: np.ndarray, layout: RankLayout, popular: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """indptr of the items of each block, and begins and ends of their entries among all, int64 (n, 2)."""
    pairs, degrees = np.column_stack((popular, popular + 1)), np.diff(indptr)
    alone = degrees[popular]
    degrees[popular] = 0
    for first, last in (layout.own("item", rank) for rank in range(layout.size)):
        inside = pairs[(first <= popular) & (popular < last)].reshape(-1)
        yield np.r_[0, np.cumsum(degrees[first:last])], indptr[np.r_[first, inside, last]].reshape(-1, 2)
    if len(popular):
        yield np.r_[0, np.cumsum(alone)], indptr[pairs]


# ---------------------------------------------------------------------------------------------- one rank


class RankSGD(EpochSolver):
    """One rank of SGD on several; every rank makes one and calls the same methods.

    Its `state` has this rank's users and own items after the last complete epoch.

    `user_items`: the ratings, equal on all ranks; a rank keeps those of its users. Or dealt to the GPUs of `peers`.
    `plan`: its method is an `SgdMethod` of schedule "msgd" with the order; `num_threads` is the number of this rank.
    `state`: initial factors of all users and items, equal on all ranks.
    `item_users`: the ratings by items, if they are known. Dealt if `user_items` is.
    `completed`: completed epochs that led to `state`.
    `make_kernels`: maps ``(blocks, objective, plan)`` to this rank's device. Default: the CPU.
    `peers`: copies items in place of the communicator, for the ranks of one thread.
    `agreed`: skip the check that all ranks have the same arguments.
    """

    def __init__(
        self,
        communicator: Communicator,
        user_items: sp.csr_array | Dealt,
        objective: Objective,
        plan: Plan,
        state: State,
        completed: int = 0,
        *,
        make_kernels: Callable[[list[GridBlock], Objective, Plan], EpochKernels] = CpuEpochs,
        item_users: sp.csr_array | Dealt | None = None,
        peers: PeerCopies | None = None,
        agreed: bool = False,
    ) -> None:
        self.communicator, self.rank, self.size = communicator, communicator.rank, communicator.size
        self._peers = peers
        if not agreed:
            first = [state.side(side).part(slice(1)).matrix.tobytes() for side in SIDES]
            facts = {"data": fingerprint(user_items), "objective": objective, "method": plan.method, "state": first}
            check_agreement(communicator, facts | {"number of completed epochs": completed})
        if item_users is None:
            items = np.bincount(cast(Any, user_items).indices, minlength=user_items.shape[1])
        else:
            items = np.diff(item_users.indptr)
        degrees: dict[Side, np.ndarray] = {"user": np.diff(user_items.indptr), "item": items}
        self.popular = popular_items(items, self.size, plan)
        self.layout = share_layout(degrees, self.size, self.popular)
        own = {side: slice(*self.layout.own(side, self.rank)) for side in SIDES}
        share = self.layout, self.rank, self.popular
        if isinstance(user_items, Dealt):
            device = cast(PeerCopies, peers).devices[self.rank]
            blocks = cut_dealt(device, user_items, cast(Dealt, item_users), *share, plan)
        else:
            blocks = cut_share(user_items, *share, plan.num_threads)
        kernels = make_kernels(blocks, objective, plan)
        self._popular: Factors | None = None  # of the state
        self._next_popular: Factors | None = None
        self._moved: dict[Side, Any] = {}  # working copies for the updates of popular items
        self._ranges = [slice(*ends) for ends in popular_ranges(self.popular, self.size)]  # of these
        self._packed: dict[str, Struct] = {}  # of one thread: users in launches, which are elsewhere in each epoch
        self._begun: Any = None  # of one thread: a mark before the passes of an epoch
        self._before: Any = None  # of one thread: the users before the epoch, if its passes over items read these
        if len(self.popular):
            whole = starting_state(state, cast(SgdMethod, plan.method), plan.factors, completed)
            self._start_popular(kernels, whole.item)
        state = State(state.user.part(own["user"]), state.item.part(own["item"]), state.mean)
        own_degrees = {side: degrees[side][rows] for side, rows in own.items()}
        super().__init__(kernels, objective, plan, state, own_degrees, completed)
        # of one thread: the items of each block, last of popular ones, where they are in every epoch
        self._held: list[Any] = []
        self._held_state: State | None = None  # whose own and popular items are there
        if peers is not None:
            ends = [self.layout.own("item", other) for other in range(self.size)]
            counts = [last - first for first, last in ends] + [len(self.popular)] * bool(len(self.popular))
            with kernels.active():
                self._held = [cast(GpuEpochs, kernels).room(count) for count in counts]

    def stop(self) -> None:
        """Do nothing: there is no background work."""

    def _agreed(self, loss: float, is_finite: bool) -> tuple[float, bool]:
        # this rank's launches are complete: a failure of NCCL on any rank is raised here
        sums = self.communicator.allreduce(np.array([loss, not is_finite], dtype=np.float64))
        return float(sums[0]), not sums[1]

    def keep(self, step: None, solved: Solved) -> None:
        super().keep(step, solved)
        self._popular = self._next_popular

    # ------------------------------------------------------------------------------------------------ an epoch

    def begin(self) -> dict[Side, Any]:
        popular, users = self._popular, self.state.user
        work: dict[Side, Any]
        if self._peers is None:
            work = super().begin()
            self._moved = {} if popular is None else {"user": work["user"], "item": self.kernels.copies(popular)}
            return work
        kernels = cast(GpuEpochs, self.kernels)
        own, is_held = self._held[self.rank], self._held_state is self.state
        late = self.size > 1 and self.method.order == "passes" and (popular is not None or kernels.is_plain(users))
        self._moved, self._held_state, self._before = {}, None, kernels.fixed(users) if late else None
        if popular is not None:
            items = self._held[-1] if is_held else kernels.copies(popular, self._held[-1])
            self._moved = {"user": self._before, "item": items}
        work = {"item": own if is_held else kernels.copies(self.state.item, own)}
        if self._before is None:
            work["user"] = kernels.copies(users)
        return work

    def copy_users(self, work: dict[Side, Any]) -> None:
        """Copy the users that the passes over items, which come first, read as they were before the epoch.

        Beside the first pass, and before the first block arrives, which is copied on the same stream.
        """
        if self._before is not None:
            kernels = cast(GpuEpochs, self.kernels)
            work["user"] = kernels.like(self._before)
            self._share("work", work["user"])
            for target, source in zip(kernels.arrays(work["user"]), kernels.arrays(self._before), strict=True):
                kernels.device.fetch(target, source, (self._begun,))

    def end(self, work: dict[Side, Any]) -> Epoch:
        kernels, popular = self.kernels, self._moved
        if popular:
            work["item"] = kernels.merged(work["item"], popular["item"], self._places)
            self._next_popular = kernels.factors(self._copied(popular["item"]))
        else:
            work["item"] = self._copied(work["item"])
        self._moved, self._before = {}, None
        epoch = super().end(work)
        self._held_state = epoch[0]
        return epoch

    def _copied(self, items: Any) -> Any:
        """Items that the next epoch does not overwrite."""
        return items if self._peers is None else cast(GpuEpochs, self.kernels).copied(items)

    def renew(self, work: dict[Side, Any]) -> None:
        """Let launches of earlier epochs have the users and the terms of an epoch that `begin` returned."""
        cast(GpuEpochs, self.kernels).renew(self.terms())
        if self._before is None:
            self._share("work", work["user"])
        else:
            self._share("before", self._before)

    def _share(self, name: str, users: FactorRows) -> None:
        """Let all launches that have these users of an epoch have those of another one."""
        if name in self._packed:
            users.share(self._packed[name])
        else:
            self._packed[name] = users.packed(cast(GpuEpochs, self.kernels).device)

    def _passes(self, work: dict[Side, Any]) -> Iterator[Step]:
        own, last = work["item"], self._last_step()
        popular = self._moved
        pace = 1  # steps from one leg to the next: all legs before the users move, of which there are no copies
        if self._peers is not None:
            self._begun, pace = self._peers.devices[self.rank].record(), 2
            if popular:
                self._peers.fork(self.rank)
        legs = range(0, pace * self.size if popular else 0, pace)
        for step in range(last + 1):
            block = (self.rank + step) % self.size
            if step in legs:
                yield from self._walk_popular(popular, legs.index(step))
            if step == 0:
                yield None  # until all ranks have launched these walks, on which the rest waits last
            if step < self.size:
                yield block, "item", work if self._before is None else {"user": self._before, "item": work["item"]}
            arrives = None
            if step < last:
                arrives = self._send(work["item"], (block + 1) % self.size)
                yield None  # until all ranks have sent
            if step in self._user_steps():
                yield block, "user", work
            if arrives is not None:
                work["item"] = self.kernels.arrived(own, arrives())
                if step + 1 == self.size:  # this rank's own items have returned, updated by all ranks
                    own = work["item"]
        work["item"] = own
        if popular:
            if self._peers is not None:
                yield None  # until all ranks have launched the last leg
                for other in range(self.size):
                    if other != self.rank:
                        self._take_popular(popular, other, self.size - 1)
                self._peers.join(self.rank)
            yield self.size, "user", {"user": work["user"], "item": popular["item"]}

    # ------------------------------------------------------------------------------------------------ popular items

    def _start_popular(self, kernels: EpochKernels, items: Factors) -> None:
        """Keep the popular items of a state, and their places among those of this rank."""
        rows, (first, last) = self.popular, self.layout.own("item", self.rank)
        places, own = np.arange(last - first), np.flatnonzero((rows >= first) & (rows < last))
        places[rows[own] - first] = last - first + own
        host = items.reordered(rows).on_host()  # no others are drawn
        squares = None if items.squares is None else items.squares.take(rows)
        with kernels.active():
            self._places = kernels.places(places)
            self._popular = kernels.hold(replace(host, squares=squares))

    def _walk_popular(self, popular: dict[Side, Any], leg: int) -> Iterator[Step]:
        """A leg of an epoch: update the popular items of a range, and hand them on."""
        if self._peers is not None and leg:
            self._take_popular(popular, (self.rank - 1) % self.size, leg - 1)
        part = self.kernels.arrived(popular["item"], self._popular_at(popular, self.rank, leg))
        yield self.size + 1 + (self.rank - leg) % self.size, "item", {"user": popular["user"], "item": part}
        if self._peers is not None:
            self._peers.hand(self.rank, self.kernels.arrays(part))
            return
        given = [self._ranges[(rank - leg) % self.size] for rank in range(self.size)]
        counts = [rows.stop - rows.start for rows in given]
        received = [self.communicator.allgatherv(array, counts) for array in self.kernels.arrays(part)]
        arrays = [np.roll(array, given[0].start, axis=0) for array in received]  # which begin with those of rank 0
        popular["item"] = self.kernels.arrived(popular["item"], arrays)

    def _take_popular(self, popular: dict[Side, Any], other: int, leg: int) -> None:
        """Copy the popular items that another rank has updated in a leg."""
        cast(PeerCopies, self._peers).take(self.rank, other, leg, self._popular_at(popular, other, leg))

    def _popular_at(self, popular: dict[Side, Any], rank: int, leg: int) -> list[Array]:
        """Arrays here of the popular items that a rank updates in a leg."""
        return [array[self._ranges[(rank - leg) % self.size]] for array in self.kernels.arrays(popular["item"])]

    # ------------------------------------------------------------------------------------------------ steps

    def _user_steps(self) -> range:
        """Steps that update the users; steps 0 to p - 1 update the items."""
        first = self.size - 1 if self.method.order == "passes" else 0
        return range(first, first + self.size)

    def _last_step(self) -> int:
        """The step after which all updates are done; this rank's own items returned in step p."""
        return max(self._user_steps()[-1], self.size if self.size > 1 else 0)

    def _between(self) -> None:
        if self.communicator.cause:  # a pass may be long
            raise CommunicatorError(self.communicator.cause)

    def _send(self, items: Any, following: int) -> Callable[[], Sequence[Array]]:
        """Start to send items to rank q - 1 and to receive those of range `following` from rank q + 1."""
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        arrays = self.kernels.arrays(items)
        if self._peers is not None:
            return self._peers.start_sendrecv(self.rank, arrays, after, self.kernels.arrays(self._held[following]))
        first, last = self.layout.own("item", following)
        likes = [np.empty((last - first, *array.shape[1:]), array.dtype) for array in arrays]
        return self.communicator.start_sendrecv(arrays, before, after, likes)

    def objective_value(self) -> float:
        """The objective at the current factors of all ranks, in float64."""
        with self.kernels.active():
            own = self.own_objective(self._all_items())
        return float(self.communicator.allreduce(np.array([own]))[0])

    def own_objective(self, items: Sequence[Factors]) -> float:
        """Part of the objective of this rank's users and own items; `items` has all ranges of items, here."""
        users, mean = self.state.user, self.state.mean
        if self._popular is not None:
            items = [*items, self._popular]
        return self._with_penalty(sum(self.kernels.loss(block, users, part, mean) for block, part in enumerate(items)))

    def _all_items(self) -> list[Factors]:
        """Gather all ranges of items."""
        own = self.state.item
        if self.size == 1:  # this communicator may not support arrays of a device
            return [own]
        counts = self.layout.counts("item", range(self.size))
        whole = [self.communicator.allgatherv(array, counts) for array in own.arrays]
        ranges = [slice(*self.layout.own("item", rank)) for rank in range(self.size)]
        return [own.with_arrays([array[rows] for array in whole]) for rows in ranges]


# ---------------------------------------------------------------------------------------------- all ranks


class MultiSGD(Unconnected):
    """SGD on several devices of this machine; a `hybridmf.plan.solver.Solver`.

    ``plan.devices`` has one device per rank; CPU ranks share ``plan.num_threads``. `long_row` and `beside` are those of
    `GpuEpochs`.

    CPU ranks run on a thread each. For GPUs one thread launches the steps of all ranks in turn (see `group`), and items
    are copied from GPU to GPU, without NCCL: no kernel of a GPU waits for another GPU.
    """

    def __init__(
        self,
        user_items: sp.csr_array | Dealt,
        item_users: sp.csr_array | Dealt,
        objective: Objective,
        plan: Plan,
        state: State,
        completed: int,
        *,
        long_row: int | None = None,
        beside: bool = True,
    ) -> None:
        self.mean, self.size = state.mean, len(plan.devices)
        self.peers: PeerCopies | None = None
        if plan.devices[0] != "cpu":
            self.peers = PeerCopies([open_device(name) for name in plan.devices])
            if not isinstance(user_items, Dealt):
                arrays = csr_arrays(user_items)  # which the host has checked
                user_items, item_users = cast(Any, deal(self.peers.devices, user_items.shape, *arrays, plan.row_cost))
        self.group = RankGroup(self.size)
        own_plan = plan.changed(num_threads=max(1, plan.num_threads // self.size))

        def make(control: Communicator, opened: Callable[[Communicator], None]) -> RankSGD:
            opened(control)
            # all ranks get the same objects
            make_rank = partial(
                RankSGD, control, user_items, objective, own_plan, state, completed, item_users=item_users, agreed=True
            )
            if self.peers is None:
                return make_rank()
            device = self.peers.devices[control.rank]
            kernels = partial(GpuEpochs, device, long_row=long_row, beside=beside, ranks=self.size)
            return make_rank(make_kernels=kernels, peers=self.peers)

        self.ranks: list[RankSGD] = self.group.open(make)
        self._recording: Recording | None = None
        self.state = state

    def solve(self, step: None) -> list[Solved]:
        """Run one epoch on all ranks."""
        if self.peers is None:
            return self.group.run(lambda control: self.ranks[control.rank].solve())
        with self.group.in_one_thread(), self.peers.complete():
            return self._solve_in_one_thread()

    def _solve_in_one_thread(self) -> list[Solved]:
        """Run one epoch on all ranks: each step of all ranks before the next one of any."""
        works = self._repeat() if self._recording is not None and self._recording.is_current() else self._launch()
        epochs = self._each(lambda rank: rank.end(works[rank.rank]))
        results = self._each(lambda rank: epochs[rank.rank][1]())
        losses, finite = zip(*results, strict=True)
        loss, is_finite = float(sum(losses[1:], losses[0])), all(finite)
        return [rank.checked(state, loss, is_finite) for rank, (state, _) in zip(self.ranks, epochs, strict=True)]

    def _launch(self) -> list[dict[Side, Any]]:
        """Launch the passes of an epoch; returns the working copies."""
        recording = Recording(cast(GpuEpochs, rank.kernels).device for rank in self.ranks)
        works: list[dict[Side, Any]] = []
        launches = []

        def first_step(rank: RankSGD) -> None:
            works.append(rank.begin())
            rank.renew(works[-1])
            launches.append(rank.launch_passes(works[-1]))
            with recording.made():
                next(launches[-1])
            recording.pause()

        def next_step() -> list[bool | None]:
            with recording.made():
                return self._each(lambda rank: next(launches[rank.rank], False))

        self._each(first_step)
        next_step()
        recording.pause()
        self._each(lambda rank: rank.copy_users(works[rank.rank]))
        while None in next_step():  # all ranks have equally many steps
            pass
        if all(cast(GpuEpochs, rank.kernels).is_repeatable for rank in self.ranks):
            self._recording = recording
        return works

    def _repeat(self) -> list[dict[Side, Any]]:
        """Launch the passes of another epoch."""
        assert self._recording is not None
        works: list[dict[Side, Any]] = []
        launches = self._recording.repeat()
        for rank in self.ranks:
            with rank.kernels.active():
                works.append(rank.begin())
                rank.renew(works[-1])
            next(launches)
        next(launches)
        self._each(lambda rank: rank.copy_users(works[rank.rank]))
        for _ in launches:
            pass
        return works

    def _each(self, call: Callable[[RankSGD], Result]) -> list[Result]:
        """The results of a call for each rank, with its GPU active."""
        results = []
        for rank in self.ranks:
            with rank.kernels.active():
                results.append(call(rank))
        return results

    def keep(self, step: None, solved: list[Solved]) -> None:
        for rank, epoch in zip(self.ranks, solved, strict=True):
            rank.keep(step, epoch)
        users, items = (JoinedFactors([rank.state.side(side) for rank in self.ranks]) for side in SIDES)
        self.state = State(users, items, self.mean)

    def objective_value(self) -> float:
        """The objective at the current factors, in float64."""
        if self.peers is None:
            return self.group.run(lambda control: self.ranks[control.rank].objective_value())[0]
        with self.group.in_one_thread(), self.peers.complete():
            parts = self._each(lambda rank: rank.own_objective([self._items_on(rank, each) for each in self.ranks]))
        return sum(parts[1:], parts[0])

    def _items_on(self, rank: RankSGD, other: RankSGD) -> Factors:
        """Items of another rank on the GPU of a rank."""
        own, items = rank.state.item, other.state.item
        if other is rank:
            return own
        assert self.peers is not None and isinstance(own, DeviceFactors) and isinstance(items, DeviceFactors)
        return own.with_arrays(self.peers.copies(items.arrays, other.rank, rank.rank))

    def close(self) -> None:
        """End the threads and connections. A second call does nothing."""
        self.group.close()
