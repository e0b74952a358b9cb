"""Turns what workers report of failures into the exceptions that a user sees."""

from myelin.errors import USER_ERRORS, MyelinError, OpError, RunCancelled, WorkerLost
from myelin.runtime.graph import Op
from myelin.runtime.messages import Cause, Failure

_USER_ERRORS = {error.__name__: error for error in USER_ERRORS}


def of_op(worker: int, failure: Failure, called: str | None = None) -> MyelinError:
    """Return the exception for a run that an op ended, or for a request that `worker` refused.

    Args:
        worker: who reports.
        failure: its report.
        called: the name of the user's function that is concerned, where there is one.
    """
    if failure.cause is Cause.CANCELLED:
        return RunCancelled("the run was cancelled; no weight was changed")
    if failure.cause is Cause.USER:
        return _USER_ERRORS[failure.error](failure.text)
    kind = _kind(failure.kind, called)
    where = _place(worker, kind, failure.stage, failure.microbatch, failure.block)
    return OpError(
        f"{where} raised {failure.error}: {failure.text}",
        worker=worker,
        kind=failure.kind,
        stage=failure.stage,
        microbatch=failure.microbatch,
        block=failure.block,
        remote_traceback=failure.traceback,
    )


def of_worker(
    worker: int, how: str, op: Op | None, *, block: int | None = None, called: str | None = None
) -> WorkerLost:
    """Return the exception for a worker that is gone, with what it was last doing."""
    if op is None:
        return WorkerLost(f"worker {worker} {how}; it was running no op", worker=worker)
    doing = _place(worker, _kind(op.kind.value, called), op.stage, op.microbatch, block)
    return WorkerLost(f"worker {worker} {how}, while it ran: {doing}", worker=worker, doing=doing)


def _kind(kind: str, called: str | None) -> str:
    return kind if called is None else f"{kind} of {called}"


def _place(
    worker: int, kind: str, stage: int | None, microbatch: int | None, block: int | None
) -> str:
    marks = {"stage": stage, "microbatch": microbatch, "block": block}
    known = [f"{name} {value}" for name, value in marks.items() if value is not None]
    return ", ".join([f"{kind} on worker {worker}", *known])
