"""Every exception that Myelin raises on purpose, under one base and named by who can mend it.

This file imports nothing, so that every room of the project may import it.
"""


class MyelinError(Exception):
    """Base of all errors that Myelin raises on purpose."""


class PlanError(MyelinError, ValueError):
    """The plan cannot be carried out on this model or this cluster; change the plan."""


class ModelError(MyelinError, ValueError):
    """The model description or what its factory returned is not usable; change the model."""


class DataError(MyelinError, ValueError):
    """The data cannot be read or is too small; change the data or how it is asked for."""


class BatchError(MyelinError, ValueError):
    """One batch does not fit the model or holds nothing to learn from; change the batch."""


class GraphError(MyelinError, ValueError):
    """A graph of a user's own ops is not valid; change the graph."""


USER_ERRORS: tuple[type[MyelinError], ...] = (PlanError, ModelError, BatchError, GraphError)
"""What a worker may refuse and only the user can mend: raised where it was asked for as it is."""


class ScheduleError(MyelinError, AssertionError):
    """The scheduler was told something impossible: a bug of Myelin, with the op's story."""


class ClusterError(MyelinError, RuntimeError):
    """The cluster could not be started, or is used when it is not running."""


class HandshakeError(ClusterError):
    """A worker did not say hello in time, or runs another version; the message says which."""


class RunError(MyelinError, RuntimeError):
    """Base of what ends one run (a training step, an evaluation, a graph) on all workers."""


class RunCancelled(RunError):
    """The run was cancelled before it was done; nothing was updated."""


class ValueReleased(RunError):
    """An op's value was asked for after its last reader was done with it."""


class OpError(RunError):
    """An op raised on a worker.

    Attributes:
        worker: index of the worker on which it ran.
        kind: the op's kind, for example ``"forward"``.
        stage: the pipeline stage, or None for an op that belongs to no stage.
        microbatch: the microbatch, or None.
        block: index of the block in the model, or None where no block was running.
        remote_traceback: the traceback as text, as the worker saw it.
    """

    def __init__(
        self,
        text: str,
        *,
        worker: int,
        kind: str,
        stage: int | None,
        microbatch: int | None,
        block: int | None,
        remote_traceback: str,
    ) -> None:
        super().__init__(f"{text}\n\n{remote_traceback}" if remote_traceback else text)
        self.worker = worker
        self.kind = kind
        self.stage = stage
        self.microbatch = microbatch
        self.block = block
        self.remote_traceback = remote_traceback


class WorkerLost(RunError):
    """A worker process ended, or has not been heard of for too long.

    Attributes:
        worker: index of the worker.
        doing: what the worker was last known to be doing, or "".
    """

    def __init__(self, text: str, *, worker: int, doing: str = "") -> None:
        super().__init__(text)
        self.worker = worker
        self.doing = doing


class TransportError(MyelinError, RuntimeError):
    """Base of what goes wrong between two nodes."""


class FrameError(TransportError):
    """A frame of the control bus is malformed, oversized, unknown, replayed or out of order.

    Attributes:
        peer: the node that sent it, or None where it cannot be told.
        reason: one word for the counter: "malformed", "oversized", "unknown", "replayed",
            "gap", "version" or "stranger".
    """

    def __init__(self, text: str, *, peer: int | None, reason: str) -> None:
        super().__init__(text)
        self.peer = peer
        self.reason = reason


class BackpressureError(TransportError):
    """A peer takes no more control messages: it is stopped, or far too slow."""


class ChannelError(TransportError):
    """A tensor did not get across a channel; the message names the peer and the op.

    Attributes:
        peer: the node at the other end.
    """

    def __init__(self, text: str, *, peer: int) -> None:
        super().__init__(text)
        self.peer = peer


class ChannelTimeout(ChannelError):
    """The other end did not take or deliver a tensor in time."""


class ChannelClosed(ChannelError):
    """The channel was closed, at this end or at the other, with a tensor under way."""
