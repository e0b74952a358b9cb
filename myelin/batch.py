"""Checks batches before anything is started, and joins what microbatches return."""

from typing import Any

import torch

from myelin.errors import BatchError
from myelin.models.model import Description
from myelin.transports.datapath import spec_of
from myelin.transports.packing import map_tensors, pack, tensors_of


def checked_batch(model: Description, batch: Any) -> tuple[Any, Any]:
    """Return (inputs, targets) of a batch that the model can be trained on.

    Raises:
        BatchError: it is not a pair, has no rows or unequal numbers of them, or the model says no.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise BatchError(
            f"a batch is a pair (inputs, targets), not {_named(batch)}; each part is a tensor, or "
            f"a tuple, list or dict of tensors"
        )
    inputs, targets = batch
    rows, rows_of_targets = rows_of(inputs, "inputs"), rows_of(targets, "targets")
    if rows != rows_of_targets:
        raise BatchError(f"inputs have {rows} rows and targets {rows_of_targets}: they must agree")
    checked_inputs(model, inputs)
    check = getattr(model, "check_targets", None)
    if check is not None:
        check(inputs, targets)
    return inputs, targets


def checked_inputs(model: Description, inputs: Any) -> Any:
    """Return `inputs` if the model can take them.

    Raises:
        BatchError: they have no rows or unequal numbers of them, or the model says no.
    """
    rows_of(inputs)
    check = getattr(model, "check_inputs", None)
    if check is not None:
        check(inputs)
    return inputs


def rows_of(value: Any, name: str = "inputs") -> int:
    """Return the size of dimension 0 of every tensor in `value`.

    Raises:
        BatchError: there is no tensor, no row, or the sizes differ; or something cannot travel.
    """
    try:
        _, tensors = pack(value)
        for tensor in tensors:
            spec_of(tensor)
    except (TypeError, ValueError) as error:
        raise BatchError(f"{name} cannot be sent to a worker: {error}") from error
    rows = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
    if len(rows) != 1 or 0 in rows:
        raise BatchError(
            f"{name} ({_named(value)}) must hold tensors with one and the same number of rows in "
            f"dimension 0, at least 1; found {sorted(rows)}"
        )
    return rows.pop()


def joined(parts: list[Any]) -> Any:
    """Join the values of all microbatches along dimension 0, tensor by tensor.

    Raises:
        BatchError: the values of two microbatches do not fit together.
    """
    if len(parts) == 1:
        return parts[0]
    try:
        columns = iter(list(zip(*(tensors_of(part) for part in parts), strict=True)))
        return map_tensors(lambda _: torch.cat(next(columns)), parts[0])
    except (RuntimeError, ValueError) as error:
        raise BatchError(
            f"the outputs of the microbatches cannot be joined along dimension 0 ({error}): have "
            f"the model keep the rows there, or use a plan with microbatches=1"
        ) from error


def _named(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    size = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    return f"a {type(value).__name__}{size}"
