"""Small ratings to fit and to solve rows of."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp


def planted(m: int = 60, n: int = 40, density: float = 0.2, rank: int = 3, seed: int = 0) -> sp.csr_array:
    """Positive ratings of about 1..5 from planted low rank plus noise, with an empty row and an empty column."""
    rng = np.random.default_rng(seed)
    mask = rng.random((m, n)) < density
    mask[m // 2] = False
    mask[:, n // 3] = False
    scores = 3 + rng.normal(size=(m, rank)) @ rng.normal(size=(n, rank)).T + rng.normal(scale=0.2, size=(m, n))
    rows, columns = np.nonzero(mask)
    values = np.clip(scores, 0.5, None)[rows, columns].astype(np.float32)
    return sp.csr_array((values, (rows, columns)), shape=(m, n))


def rows_of(lengths, n_columns: int, seed: int = 0) -> sp.csr_array:
    """Rows with as many entries as `lengths` says, 1 to 5, a fifth of them negative."""
    rng = np.random.default_rng(seed)
    columns = [np.sort(rng.choice(n_columns, length, replace=False)) for length in lengths]
    values = rng.integers(1, 6, sum(lengths)) * rng.choice([1, 1, 1, 1, -1], sum(lengths))
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    return sp.csr_array((values.astype(float), np.concatenate(columns), indptr), shape=(len(lengths), n_columns))
