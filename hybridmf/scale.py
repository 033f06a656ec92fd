"""Fits by several processes: `fit`, the communicators that connect ranks, and the planner."""

from .model.checkpoint import has_checkpoints
from .plan.half_sweep import Problem
from .plan.partitions import plan_scale
from .plan.ranks import ScalePlan
from .ranks.transport.communicator import Communicator
from .ranks.transport.mpi import MpiCommunicator
from .ranks.transport.nccl import NcclCommunicator
from .ranks.transport.threads import run_ranks
from .tools.launch import fit

__all__ = [
    "Communicator",
    "MpiCommunicator",
    "NcclCommunicator",
    "Problem",
    "ScalePlan",
    "fit",
    "has_checkpoints",
    "plan_scale",
    "run_ranks",
]
