"""Tests that every estimator and every transport passes, for those who write another one.

Derive from a contract in a test module, or call `check_communicator` in each process of a job; nothing here is imported
by the rest of the package.
"""

from .communicators import CommunicatorContract, check_communicator
from .estimators import EstimatorContract

__all__ = ["CommunicatorContract", "EstimatorContract", "check_communicator"]
