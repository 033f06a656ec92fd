"""Initial factors: the generator against published vectors, and what their numbers may not depend on."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.core.objective import Objective
from hybridmf.core.validate import seed_of
from hybridmf.native import _draw
from hybridmf.plan.start import DrawnFactors, Start, initial_state
from support import reference

DEGREES = np.array([3, 0, 1, 7, 2, 0, 5])
KEY = 0x299F31D0_A4093822


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], KEY, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_vectors_published_with_random123(counter: list[int], key: int, words: str) -> None:
    assert [f"{int(word):08x}" for word in reference.philox(counter, key)] == words.split()


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "neon"])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("rank", [1, 4, 5, 63, 64, 65, 130])
def test_the_kernel_draws_the_bits_of_its_twin(isa: str, signed: bool, rank: int) -> None:
    rows, scales = np.array([0, 2**33 + 5, 7]), np.array([1.5, 0.25, 0], np.float32)
    out = np.full((3, rank), np.nan, np.float32)
    try:
        _draw.draw_rows(out, scales, rows, KEY, 1, signed, 2, isa)
    except ValueError:
        pytest.skip(f"this processor has no {isa}")
    np.testing.assert_array_equal(out, reference.drawn(rows, scales, rank, KEY, 1, signed))
    assert out[:2].all() and not out[2].any()


def start(threads: int = 1, signed: bool = False, dtype: type = np.float32) -> DrawnFactors:
    objective = Objective.explicit(0.1, "count", True)
    state = initial_state(DEGREES, DEGREES, 33, dtype, objective, 3.0, KEY, Start(0.7, signed, num_threads=threads))
    assert state.mean == 3.0 and isinstance(state.user, DrawnFactors)
    assert not np.array_equal(state.user.matrix, state.item.matrix)
    return state.user


def test_numbers_depend_on_seed_side_row_and_column_only() -> None:
    whole = start()
    np.testing.assert_array_equal(whole.matrix, start(threads=3).matrix)
    np.testing.assert_array_equal(whole.matrix[2:6], start().part(slice(2, 6)).matrix)
    np.testing.assert_array_equal(whole.matrix[3:5], start().part(slice(2, 6)).part(slice(1, 3)).matrix)
    order = np.array([4, 0, 6, 1, 2, 5, 3])
    np.testing.assert_array_equal(whole.matrix[order], start().reordered(order).matrix)
    np.testing.assert_array_equal(whole.matrix[order][2:5], start().reordered(order).part(slice(2, 5)).matrix)
    np.testing.assert_array_equal(
        whole.matrix[1:][order[order < 6]], start().part(slice(1, 7)).reordered(order[order < 6]).matrix
    )
    np.testing.assert_array_equal(whole.matrix, start(dtype=np.float64).matrix)
    padded = np.zeros((7, 40), np.float32)
    _draw.draw_rows(padded[:, :33], *whole.arguments)
    np.testing.assert_array_equal(padded, np.pad(whole.matrix, ((0, 0), (0, 7))))


def test_their_distribution() -> None:
    big = initial_state(np.ones(4000, int), np.ones(3, int), 50, np.float32, Objective.explicit(0, 0, False), 0.0, 1)
    lengths = np.sqrt((big.user.matrix.astype(float) ** 2).sum(axis=1))
    assert np.sqrt(np.mean(lengths**2)) == pytest.approx(1, rel=0.01)
    assert big.user.matrix.min() > 0 and big.user.matrix.max() <= np.sqrt(3 / 50)
    assert big.user.bias is None and big.mean == 0
    assert np.abs(np.corrcoef(big.user.matrix.T) - np.eye(50)).max() < 0.1
    signed = start(signed=True).matrix
    assert signed.min() < 0 < signed.max() and abs(signed[DEGREES > 0].mean()) < 0.01


def test_rows_without_entries_are_zero_and_biases_too() -> None:
    drawn = start()
    np.testing.assert_array_equal(drawn.matrix.any(axis=1), DEGREES > 0)
    assert drawn.bias is not None and drawn.bias.shape == (7,) and not drawn.bias.any()
    copy = pickle.loads(pickle.dumps(drawn))
    np.testing.assert_array_equal(copy.matrix, drawn.matrix)


def test_a_side_that_is_not_drawn() -> None:
    only = Start(sides=("user",))
    state = initial_state(DEGREES, DEGREES, 3, np.float32, Objective.implicit(0.1, 0, 1, 1), 0.0, 1, only)
    assert not state.item.matrix.any() and state.user.matrix.any()


@pytest.mark.parametrize("solver", ["cholesky", "cg", "subspace"])
def test_als_draws_the_users_alone(monkeypatch: pytest.MonkeyPatch, solver: str) -> None:
    """Items are solved first: what the first half sweep overwrites is not drawn."""
    drawn: list[str] = []
    original = DrawnFactors.arguments.fget

    def arguments(factors: DrawnFactors) -> Any:
        drawn.append(factors.drawing.side)
        return original(factors)

    monkeypatch.setattr(DrawnFactors, "arguments", property(arguments))
    matrix = hmf.datasets.synthetic("ml-1m", scale=0.01).user_items
    hmf.ImplicitALS(4, iterations=2, solver=solver, device="cpu", random_state=0).fit(matrix)
    assert drawn == ["user"]
    hmf.ExplicitALS(4, iterations=2, solver=solver, device="cpu", random_state=0).fit(matrix)
    assert sorted(drawn[1:]) == (["item", "user"] if solver == "subspace" else ["user"])


def test_seeds() -> None:
    assert seed_of(3) == seed_of(np.int64(3)) != seed_of(4)
    generator = np.random.default_rng(3)
    assert seed_of(generator) == seed_of(3) != seed_of(generator)
    assert seed_of(None) != seed_of(None)


def test_bad_arguments_of_the_kernel() -> None:
    with pytest.raises(ValueError, match="have shapes"):
        _draw.draw_rows(np.empty((3, 2), np.float32), np.ones(2, np.float32), 0, 0, 0, False, 1)
    with pytest.raises(ValueError, match="no kernels for 'nonsense'"):
        _draw.draw_rows(np.empty((3, 2), np.float32), np.ones(3, np.float32), 0, 0, 0, False, 1, "nonsense")
    _draw.draw_rows(np.empty((0, 2), np.float32), np.ones(0, np.float32), 0, 0, 0, False, 1)
