"""Myelin: train transformers too large for one accelerator; an op runs when its messages are in."""

from myelin import data, errors
from myelin.cluster import Cluster
from myelin.entry import run
from myelin.errors import MyelinError
from myelin.graph import CallGraph as Graph
from myelin.models.model import Model
from myelin.plan import Plan
from myelin.run import RunReport
from myelin.runtime.jitter import Jitter
from myelin.runtime.optimizer import SGD, AdamW, Group, Schedule
from myelin.trainer import StepResult, Trainer

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdamW",
    "Cluster",
    "Graph",
    "Group",
    "Jitter",
    "Model",
    "MyelinError",
    "Plan",
    "RunReport",
    "Schedule",
    "StepResult",
    "Trainer",
    "data",
    "errors",
    "run",
]
