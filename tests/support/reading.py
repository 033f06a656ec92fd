"""Rating files to write and read."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from hypothesis import settings

from hybridmf.ratings import Ratings

QUICK = settings(max_examples=40)


def triplets(ratings):
    """{(user label, item label): value}, labels being positions where there are none."""
    coo = ratings.user_items.tocoo()
    users = coo.row if ratings.user_ids is None else ratings.user_ids[coo.row]
    items = coo.col if ratings.item_ids is None else ratings.item_ids[coo.col]
    return dict(zip(zip(users.tolist(), items.tolist(), strict=True), coo.data.tolist(), strict=True))


def write(folder, text, name="ratings.csv", encoding="utf-8"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return path


def read(folder, text, name="ratings.csv", **options):
    return Ratings.from_file(write(folder, text, name), **options)


def assert_canonical(matrix, dtype=np.float32):
    assert isinstance(matrix, sp.csr_array)
    assert matrix.dtype == dtype and matrix.indices.dtype == np.int32
    fresh = sp.csr_array((matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)  # forgets cached flags
    assert fresh.has_sorted_indices and fresh.has_canonical_format
