"""Changes of learned states."""

from __future__ import annotations

from hybridmf.core.objective import Factors, State


def grown(state: State, root: float) -> State:
    """The state that predicts root^2 times as much: factors times root, biases and mean times root^2."""

    def side(factors: Factors) -> Factors:
        real = factors.matrix.dtype.type
        bias = None if factors.bias is None else factors.bias * real(root**2)
        return Factors(factors.matrix * real(root), bias)

    return State(side(state.user), side(state.item), state.mean * root**2)
