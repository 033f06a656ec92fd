"""Plain float64 versions of all kernels, as short as the formulas, for comparison in tests.

The code is slow and imports no compiled module.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from hybridmf.core.objective import SIDES, Factors, Objective, PerSide, Side, State, Terms


def _weights(objective: Objective, ratings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(confidence, preference) of observed entries."""
    if objective.is_implicit:
        return 1 + objective.alpha * np.abs(ratings), (ratings > 0).astype(np.float64)
    return np.ones_like(ratings), ratings


def solve_row(
    columns: np.ndarray,
    ratings: np.ndarray,
    fixed: Factors,
    mean: float,
    objective: Objective,
    side: Side = "user",
    centre: np.ndarray | None = None,
) -> tuple[np.ndarray, float]:
    """Minimizer (x, b) of the objective over the factors and the bias of one row of a side, given by its entries.

    `centre`: what the penalty is about, in place of zero.
    """
    Y = fixed.matrix.astype(np.float64)
    rank = Y.shape[1]
    if len(columns) == 0:
        return np.zeros(rank), 0.0
    confidence, preference = _weights(objective, np.asarray(ratings, dtype=np.float64))
    scale = (len(columns) + objective.added.of(side)) ** objective.scaling.of(side)
    ridge = np.full(rank, objective.regularization.of(side) * scale)
    if objective.biases:
        assert fixed.bias is not None
        preference = preference - mean - fixed.bias[columns].astype(np.float64)
        Y = np.column_stack([Y, np.ones(len(Y))])
        ridge = np.append(ridge, objective.bias_regularization.of(side) * scale)
    observed = Y[columns]
    if objective.is_implicit:  # unobserved pairs: c = w0, p = 0
        weight = np.full(len(Y), objective.unobserved_weight)
        weight[columns] = confidence
        A = Y.T @ (weight[:, None] * Y)
    else:
        A = observed.T @ (confidence[:, None] * observed)
    about = 0 if centre is None else ridge * centre
    solution = np.linalg.solve(A + np.diag(ridge), observed.T @ (confidence * preference) + about)
    return (solution[:-1], float(solution[-1])) if objective.biases else (solution, 0.0)


def solve_row_dual(
    columns: np.ndarray,
    ratings: np.ndarray,
    fixed: Factors,
    mean: float,
    objective: Objective,
    side: Side = "user",
) -> tuple[np.ndarray, float]:
    """`solve_row` by one equation for each entry (docs/methods.md)."""
    Y = fixed.matrix.astype(np.float64)
    if len(columns) == 0:
        return np.zeros(Y.shape[1]), 0.0
    observed = Y[columns]
    confidence, preference = _weights(objective, np.asarray(ratings, dtype=np.float64))
    if objective.is_implicit:
        M = objective.unobserved_weight * Y.T @ Y + objective.regularization.of(side) * np.eye(Y.shape[1])
        G = observed @ np.linalg.solve(M, observed.T)
        S, t = np.diag(np.sqrt(confidence - objective.unobserved_weight)), preference * confidence
        v = t - S @ np.linalg.solve(np.eye(len(t)) + S @ G @ S, S @ G @ t)
        return np.linalg.solve(M, observed.T @ v), 0.0
    lambda_ = objective.regularization.of(side)
    ridge = lambda_ * len(columns) ** objective.scaling.of(side)
    G, shared = observed @ observed.T, 0.0
    if objective.biases:
        assert fixed.bias is not None
        preference = preference - mean - fixed.bias[columns].astype(np.float64)
        shared = lambda_ / objective.bias_regularization.of(side)
    v = np.linalg.solve(G + shared + ridge * np.eye(len(columns)), preference)
    return observed.T @ v, shared * float(v.sum())


def half_sweep(
    matrix: Any, fixed: Factors, mean: float, objective: Objective, side: Side = "user", centre: Any = None
) -> Factors:
    """New factors of all rows of a side, those of `matrix` (n_rows, n_fixed), row by row.

    `centre`, (n_rows, rank) with biases last: what the penalty is about, in place of zero.
    """
    matrix = sp.csr_array(matrix)
    bounds = zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True)
    centres = [None] * matrix.shape[0] if centre is None else centre
    rows = [
        solve_row(matrix.indices[a:b], matrix.data[a:b], fixed, mean, objective, side, centre)
        for (a, b), centre in zip(bounds, centres, strict=True)
    ]
    return Factors(np.array([x for x, _ in rows]), np.array([b for _, b in rows]) if objective.biases else None)


def fit(
    matrix: Any,
    state: State,
    objective: Objective,
    iterations: int,
    features: dict[Side, tuple[np.ndarray, float]] | None = None,
) -> State:
    """Full sweeps, items first, from a given state; items start without a centre.

    `features`: of each row of a side, dense, and the weight of their vectors.
    """
    matrix, known = sp.csr_array(matrix), features or {}
    for iteration in range(iterations):
        for side, rows in (("item", matrix.T.tocsr()), ("user", matrix)):
            fixed, centre = state.user if side == "item" else state.item, None
            if side in known and iteration:
                centre = known[side][0] @ vectors_of(rows, state.side(side), objective, side, *known[side])
            state = state.with_side(side, half_sweep(rows, fixed, state.mean, objective, side, centre))
    return state


def vectors_of(
    matrix: Any, factors: Factors, objective: Objective, side: Side, features: np.ndarray, weight: float
) -> np.ndarray:
    """Vectors of features, biases last: the ridge regression of the rows with entries, each weighted by its s."""
    degrees = np.diff(sp.csr_array(matrix).indptr)
    Y = factors.matrix.astype(np.float64)
    Y = Y if factors.bias is None else np.column_stack([Y, factors.bias])
    s = np.where(degrees, (np.maximum(degrees, 1) + objective.added.of(side)) ** objective.scaling.of(side), 0)
    F = np.asarray(features, dtype=np.float64)
    return np.linalg.solve(F.T @ (s[:, None] * F) + np.eye(F.shape[1]) / weight, F.T @ (s[:, None] * Y))


def objective_value(
    matrix: Any,
    state: State,
    objective: Objective,
    features: dict[Side, tuple[np.ndarray, float]] | None = None,
) -> float:
    """The objective summed over every cell of the dense matrix; with the best vectors of features."""
    coo = sp.coo_array(matrix)
    X, Y = state.user.matrix.astype(np.float64), state.item.matrix.astype(np.float64)
    predicted = X @ Y.T
    if state.user.bias is not None and state.item.bias is not None:
        predicted = predicted + state.mean + state.user.bias[:, None] + state.item.bias[None, :]
    confidence, preference = _weights(objective, coo.data.astype(np.float64))
    outside = objective.unobserved_weight if objective.is_implicit else 0.0
    C, P = np.full(predicted.shape, outside), np.zeros(predicted.shape)
    C[coo.row, coo.col], P[coo.row, coo.col] = confidence, preference
    degrees = [
        np.bincount(index, minlength=size) for index, size in zip((coo.row, coo.col), predicted.shape, strict=True)
    ]
    penalty = 0.0
    for degree, side in zip(degrees, SIDES, strict=True):
        factors, lambda_b = state.side(side), objective.bias_regularization.of(side)
        squares = objective.regularization.of(side) * (factors.matrix.astype(np.float64) ** 2).sum(axis=1)
        if factors.bias is not None:
            squares = squares + lambda_b * factors.bias.astype(np.float64) ** 2
        scale = (np.maximum(degree, 1.0) + objective.added.of(side)) ** objective.scaling.of(side)
        if features is not None and side in features:
            penalty += _penalty_with_features(matrix, state, objective, side, scale, degree, *features[side])
        else:
            penalty += (scale * squares).sum()
    return float((C * (P - predicted) ** 2).sum() + penalty)


def _penalty_with_features(
    matrix: Any,
    state: State,
    objective: Objective,
    side: Side,
    scale: np.ndarray,
    degree: np.ndarray,
    features: np.ndarray,
    weight: float,
) -> float:
    rows = sp.csr_array(matrix) if side == "user" else sp.csr_array(matrix).T.tocsr()
    factors = state.side(side)
    W = vectors_of(rows, factors, objective, side, features, weight)
    Y = factors.matrix.astype(np.float64)
    Y = Y if factors.bias is None else np.column_stack([Y, factors.bias])
    ridge = np.full(Y.shape[1], objective.regularization.of(side))
    ridge[factors.matrix.shape[1] :] = objective.bias_regularization.of(side)
    residual = np.where(degree[:, None] > 0, Y - features @ W, 0.0)
    return float((scale @ residual**2 + (W**2).sum(axis=0) / weight) @ ridge)


def conjugate_gradient(A: np.ndarray, b: np.ndarray, x: np.ndarray, steps: int) -> np.ndarray:
    """`steps` textbook conjugate gradient steps on A x = b from `x`."""
    r = b - A @ x
    p = r.copy()
    for _ in range(steps):
        if r @ r == 0:
            break
        Ap = A @ p
        length = (r @ r) / (p @ Ap)
        x, new = x + length * p, r - length * Ap
        p, r = new + (new @ new) / (r @ r) * p, new
    return x


def top_k(scores: np.ndarray, n: int, left_out: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Best `n` columns of each row of a dense score matrix, ties to the lower column; entries of `left_out` not."""
    scores = np.array(scores, dtype=np.float64)
    if left_out is not None:
        coo = sp.coo_array(left_out)
        scores[coo.row, coo.col] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :n]
    best = np.take_along_axis(scores, order, axis=1)
    pad = n - order.shape[1]
    if pad > 0:
        order = np.pad(order, ((0, 0), (0, pad)), constant_values=-1)
        best = np.pad(best, ((0, 0), (0, pad)), constant_values=-np.inf)
    return np.where(np.isneginf(best), -1, order), best


def bals(matrix: Any, tile_rows: int, tile_cols: int) -> dict[str, np.ndarray]:
    """The five BALS arrays by the words of section 4.1, entry by entry."""
    csr = sp.csr_array(matrix)
    n_rows, n_cols = csr.shape
    values, tile_colidx, tile_ptr, seg_colidx, seg_ptr = [], [], [0], [], [0]
    for top in range(0, n_rows, tile_rows):
        for left in range(0, n_cols, tile_cols):
            loaded: list[int] = []
            for row in range(top, min(top + tile_rows, n_rows)):
                for k in range(csr.indptr[row], csr.indptr[row + 1]):
                    column = int(csr.indices[k])
                    if left <= column < left + tile_cols:
                        if column not in loaded:
                            loaded.append(column)
                        values.append(csr.data[k])
                        seg_colidx.append(loaded.index(column))
                seg_ptr.append(len(values))
            tile_colidx.extend(loaded)
            tile_ptr.append(len(tile_colidx))
    return {
        "values": np.array(values, dtype=csr.dtype),
        "tile_colidx": np.array(tile_colidx, dtype=np.int64),
        "tile_ptr": np.array(tile_ptr),
        "seg_colidx": np.array(seg_colidx, dtype=np.int64),
        "seg_ptr": np.array(seg_ptr),
    }


def degree_order(lengths: np.ndarray) -> np.ndarray:
    """BALS Alg. 3 as printed: find the longest row, take it, mark it taken, repeat; O(n^2)."""
    lengths = np.array(lengths, dtype=np.int64)
    order = []
    for _ in range(len(lengths)):
        longest = int(np.argmax(lengths))
        order.append(longest)
        lengths[longest] = -1
    return np.array(order, dtype=np.int64)


def ccd(
    matrix: Any,
    state: State,
    objective: Objective,
    iterations: int,
    inner_iterations: int = 1,
    nonnegative: bool = False,
) -> State:
    """CCD++ from a given state: biases, then factor by factor, items first (Yu, Hsieh, Si and Dhillon 2012, Alg. 2)."""
    coo = sp.csr_array(matrix).tocoo()
    index: dict[Side, np.ndarray] = {"user": coo.row, "item": coo.col}
    factors = {side: getattr(state, side).matrix.astype(np.float64) for side in index}
    degrees = {side: np.bincount(index[side], minlength=len(factors[side])) for side in index}
    scale = {side: objective.row_scale(side, degrees[side]) for side in index}
    bias = {side: getattr(state, side).bias for side in index}
    bias = {side: np.zeros(len(scale[side])) if b is None else b.astype(np.float64) for side, b in bias.items()}

    def product(t: int) -> np.ndarray:
        return factors["user"][coo.row, t] * factors["item"][coo.col, t]

    def minimizer(side: Side, y: Any, residual: np.ndarray, ridge: PerSide) -> np.ndarray:
        size = len(degrees[side])
        numerator = np.bincount(index[side], residual * y, minlength=size)
        squares = np.bincount(index[side], np.broadcast_to(y * y, coo.nnz), minlength=size)
        denominator = squares + ridge.of(side) * scale[side]
        return np.divide(numerator, denominator, out=np.zeros(size), where=denominator > 0)

    def solve(side: Side, fixed: Side, t: int, residual: np.ndarray) -> None:
        x = minimizer(side, factors[fixed][index[fixed], t], residual, objective.regularization)
        factors[side][:, t] = np.maximum(x, 0) if nonnegative else x

    for _ in range(iterations):
        residual = coo.data.astype(np.float64) - (factors["user"][coo.row] * factors["item"][coo.col]).sum(axis=1)
        residual -= state.mean + bias["user"][coo.row] + bias["item"][coo.col]
        for side in ("item", "user") if objective.biases else ():
            residual += bias[side][index[side]]
            bias[side] = minimizer(side, 1.0, residual, objective.bias_regularization)
            residual -= bias[side][index[side]]
        for t in range(factors["user"].shape[1]):
            residual += product(t)
            for _ in range(inner_iterations):
                solve("item", "user", t, residual)
                solve("user", "item", t, residual)
            residual -= product(t)
    users, items = (Factors(factors[side], bias[side] if objective.biases else None) for side in ("user", "item"))
    return State(users, items, state.mean)


HEAD = 8
"""Coordinates of a row that share the first sum of RPCS."""


def _copied(state: State, sums_width: int) -> State:
    """A float64 copy to update in place; with zeros as sums of squares, so many a row, where it has none."""

    def copy(factors: Factors, squares: Factors | None) -> Factors:
        bias = None if factors.bias is None else factors.bias.astype(np.float64)
        return Factors(factors.matrix.astype(np.float64), bias, squares)

    def with_squares(factors: Factors) -> Factors:
        bias = None if factors.bias is None else np.zeros(len(factors))
        zeros = Factors(np.zeros((len(factors), sums_width)), bias)
        return copy(factors, copy(factors.squares or zeros, None) if sums_width else None)

    return State(with_squares(state.user), with_squares(state.item), state.mean)


def _step(values: np.ndarray, row: int, step: Any, rate: float, squares: np.ndarray | None, root: float) -> None:
    """values[row] += rate * step; with AdaGrad over the square root of `root` + squared steps, this one included."""
    if squares is not None:
        squares[row] += step**2
        rate = rate / np.sqrt(root + squares[row])
    values[row] += rate * step


def _rpcs_step(values: np.ndarray, row: int, step: np.ndarray, terms: Terms, sums: np.ndarray) -> None:
    """Head and tail of a row by one sum each, which count the step afterwards (Chin et al. 2015)."""
    for group, part in enumerate((slice(0, HEAD), slice(HEAD, None))):
        if len(step[part]) and not (group and terms.head_only):
            values[row, part] += terms.rate / np.sqrt(terms.root + sums[row, group]) * step[part]
            sums[row, group] += np.mean(step[part] ** 2)


def _move(factors: Factors, row: int, error: float, other: np.ndarray, terms: Terms) -> None:
    squares = factors.squares
    step = error * other - terms.regularization * factors.matrix[row]
    if squares is not None and squares.matrix.shape != factors.matrix.shape:
        _rpcs_step(factors.matrix, row, step, terms, squares.matrix)
    else:
        _step(factors.matrix, row, step, terms.rate, None if squares is None else squares.matrix, terms.root)
    if factors.bias is not None:
        bias_step = error - terms.bias_regularization * factors.bias[row]
        _step(factors.bias, row, bias_step, terms.bias_rate, None if squares is None else squares.bias, terms.bias_root)


def _error(state: State, user: int, item: int, rating: float) -> float:
    error = rating - state.mean - state.user.matrix[user] @ state.item.matrix[item]
    if state.user.bias is not None and state.item.bias is not None:
        error -= state.user.bias[user] + state.item.bias[item]
    return float(error)


def sgd_entries(
    users: np.ndarray, items: np.ndarray, ratings: np.ndarray, state: State, terms: Terms, sums_width: int = 0
) -> State:
    """Update entry by entry in the order given, both rows from their old values (MSGD eq. 3).

    The state has sums of squares where AdaGrad or RPCS goes on; its mean replaces that of `terms`. `sums_width` is the
    number of sums of squares of a row: as many as factors (AdaGrad), 2 (RPCS) or 0.
    """
    state = _copied(state, sums_width)
    for user, item, rating in zip(users, items, np.asarray(ratings, dtype=np.float64), strict=True):
        error = _error(state, user, item, rating)
        old = state.user.matrix[user].copy()
        _move(state.user, user, error, state.item.matrix[item], terms)
        _move(state.item, item, error, old, terms)
    return state


def msgd(matrix: Any, state: State, terms: Terms, sums_width: int = 0) -> State:
    """One epoch of MSGD (Alg. 1): each item walks its users in ascending order, then each user its items."""
    m, n = sp.coo_array(matrix).shape
    return mcumsgd(matrix, state, terms, [0, m], [0, n], sums_width)


def mcumsgd(
    matrix: Any,
    state: State,
    terms: Terms | dict[Side, Terms],
    user_bounds: Any,
    item_bounds: Any,
    sums_width: int = 0,
    order: str = "passes",
    popular: Any = (),
) -> State:
    """One epoch of MCUMSGD: in step l each range q of users meets range (q + l) mod p of items (Alg. 4).

    By the order "passes" the items move in steps 0 ... p - 1 and the users in steps p - 1 ... 2 p - 2, so that an epoch
    is one of Alg. 1; by "blocks" both move in each of p steps, as Alg. 4 has it. Popular items rotate the other way
    round: part j of them meets users j, j + 1, ..., as these were before the epoch, and the users meet them last.
    """
    sides: tuple[Side, Side] = ("item", "user")
    state, size = _copied(state, sums_width), len(user_bounds) - 1
    cycle = range(size)
    if order == "passes":
        moves: list[tuple[int, Side]] = [(step, "item") for step in cycle]
        moves += [(size - 1 + step, "user") for step in cycle]
    else:
        moves = [(step, side) for step in cycle for side in sides]
    ranges = [np.setdiff1d(np.arange(item_bounds[part], item_bounds[part + 1]), popular) for part in cycle]
    meetings = [(side, part, ranges[(part + step) % size]) for step, side in moves for part in cycle]
    kept = np.array_split(np.asarray(popular, dtype=np.int64), size)
    meetings[size * size : size * size] = [("item", part, kept[(part - leg) % size]) for leg in cycle for part in cycle]
    meetings += [("user", part, popular) for part in cycle if len(popular)]
    for side, part, items in meetings:
        users = np.arange(user_bounds[part], user_bounds[part + 1])
        _walk_block(matrix, state, side, (users, items), terms[side] if isinstance(terms, dict) else terms)
    return state


def _walk_block(matrix: Any, state: State, side: Side, block: tuple[Any, Any], terms: Terms) -> None:
    """Each row of a side walks its entries of a block in ascending order, the other side fixed."""
    coo, (users, items) = sp.coo_array(matrix), block
    rows, columns, ratings = coo.row, coo.col, coo.data.astype(np.float64)
    within = np.isin(rows, users) & np.isin(columns, items)
    inside = np.flatnonzero(within)
    keys = (rows[inside], columns[inside]) if side == "item" else (columns[inside], rows[inside])
    for k in inside[np.lexsort(keys)]:
        user, item = rows[k], columns[k]
        error = _error(state, user, item, ratings[k])
        if side == "item":
            _move(state.item, item, error, state.user.matrix[user], terms)
        else:
            _move(state.user, user, error, state.item.matrix[item], terms)


def philox(counter: Any, key: int) -> list[np.ndarray]:
    """The four words of Philox4x32-10 for counters of four words each (Salmon et al. 2011, section 3.3), broadcast."""
    low = np.uint64(0xFFFFFFFF)
    words: Any = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * words[0], np.uint64(0xCD9E8D57) * words[2]
        one, three = (np.uint64(each) for each in keys)
        words = [(b >> np.uint64(32)) ^ words[1] ^ one, b & low, (a >> np.uint64(32)) ^ words[3] ^ three, a & low]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words


def drawn(rows: np.ndarray, scales: np.ndarray, rank: int, key: int, side: int, signed: bool) -> np.ndarray:
    """Initial factors of some rows, float32, shape (n, rank): uniform up to the scale of a row; 0 where that is 0."""
    columns, rows = np.arange(rank)[None], np.asarray(rows)[:, None]
    words = philox((columns // 4, rows & 0xFFFFFFFF, rows >> 32, side), key)
    odd = (np.choose(columns % 4, words) >> np.uint64(8) | np.uint64(1)).astype(np.float32)
    unit = scales.astype(np.float32)[:, None] * np.float32(2**-23 if signed else 2**-24)
    return np.where(scales[:, None] == 0, np.float32(0), (odd - np.float32(2**23 if signed else 0)) * unit)
