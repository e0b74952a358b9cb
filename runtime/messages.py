"""The closed set of messages between coordinator and workers, beyond the bus's own.

A request carries a number, and is answered with the same number: by `Done`, `Described`, `Built`,
`Refused` or, where tensors are the answer, an `Announce` with the purpose REPLY. Tensors never
travel here: `Announce` says what comes next on the data path's channel from its sender.
"""

import enum
from typing import Any

import msgspec

from myelin.models.building import BlockInfo
from myelin.runtime.graph import Program
from myelin.runtime.optimizer import Optimizer
from myelin.runtime.strides import Form
from myelin.transports.datapath import TensorSpec
from myelin.transports.packing import Layout


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach a node: where its inbox is, and which incarnation of it is the right one."""

    node: int
    incarnation: str
    inbox: str


class TieSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A weight that two stages share: the owner updates it, the user is refreshed."""

    owner_stage: int
    owner_block: int
    owner_name: str
    user_stage: int
    user_block: int
    user_name: str

    @property
    def crosses(self) -> bool:
        """Whether the two stages are different ones, so that there is a copy."""
        return self.owner_stage != self.user_stage


class StageSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks `first` to `last`, both included, of one stage.

    Of every `every` blocks only the last one's output is kept for the backward; None: everything.
    """

    stage: int
    first: int
    last: int
    every: int | None = None


class Cause(enum.Enum):
    """Whose failure it is."""

    OP = "op"  # what ran raised it
    CHANNEL = "channel"  # a tensor did not get across; the reporting worker may be quite well
    CANCELLED = "cancelled"  # the caller asked for it
    USER = "user"  # we refused what the user gave; `error` is one of our own types


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why an op or a request failed, and where.

    Attributes:
        cause: whose failure it is.
        error: name of the exception's type.
        text: its message.
        traceback: formatted, as the worker saw it.
        kind: kind of the op, or of the request.
        op: index of the op in the worker's program.
        stage: pipeline stage of the op.
        microbatch: microbatch of the op.
        block: model block that was running.
    """

    cause: Cause
    error: str
    text: str
    traceback: str
    kind: str
    op: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    block: int | None = None


class Purpose(enum.Enum):
    """What an announced message is for; says how to read `Announce.key`."""

    EDGE = "edge"  # key: run, index of the RECEIVE or LOAD in the receiver's program
    VALUE = "value"  # key: run, index in the sender's program of an op whose value was asked for
    REPLY = "reply"  # key: request, 0


class State(enum.Enum):
    """What of a trainer can be collected or assigned."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    SHAPES = "shapes"


# Coordinator to worker


class Peers(_Message, frozen=True):
    """All workers, so that they can talk to each other."""

    request: int
    peers: tuple[Peer, ...]


class Describe(_Message, frozen=True):
    """Ask for the costs of a model's blocks, and its ties.

    Nothing is allocated, except of what cannot be built on the meta device.
    """

    request: int
    factory: str
    arguments: dict[str, Any]


class Build(_Message, frozen=True):
    """Build the blocks of some stages of a trainer's model, and their optimizer."""

    request: int
    trainer: int
    factory: str
    arguments: dict[str, Any]
    stages: tuple[StageSpec, ...]
    last_stage: int
    ties: tuple[TieSpec, ...]
    optimizer: Optimizer
    seed: int
    replica: int = 0
    replicas: int = 1
    chunk: int = 1 << 24  # elements of a stage's gradients that are summed together


class Install(_Message, frozen=True):
    """Keep a program; its ops act on a trainer's stages, or call what `calls` names."""

    request: int
    program: int
    body: Program
    trainer: int | None = None
    calls: tuple[str, ...] = ()


class Discard(_Message, frozen=True):
    """Forget a trainer or a program and free what it held."""

    request: int
    trainer: int | None = None
    program: int | None = None


class Start(_Message, frozen=True):
    """Queue a run of a program; `watch` are ops whose values the coordinator wants."""

    run: int
    program: int
    step: int
    watch: tuple[int, ...] = ()


class Watch(_Message, frozen=True):
    """Ask for the value of one op of a run that was started already."""

    run: int
    op: int


class Abort(_Message, frozen=True):
    """End a run now; the answer is `RunDrained`."""

    run: int


class Cancel(_Message, frozen=True):
    """To the worker that commits a run: abort it unless it is committed already."""

    run: int


class Collect(_Message, frozen=True):
    """Ask for weights, gradients or shapes of weights by name; gradients are given away."""

    request: int
    trainer: int
    state: State


class Assign(_Message, frozen=True):
    """Overwrite weights by name with the tensors announced as a REPLY to the same request."""

    request: int
    trainer: int


class Shutdown(_Message, frozen=True):
    """End the worker."""


# Worker to coordinator


class Done(_Message, frozen=True):
    """A request was carried out."""

    request: int


class Built(_Message, frozen=True):
    """The answer to `Build`: for each stage how many elements its optimizer updates."""

    request: int
    elements: dict[str, int]


class Described(_Message, frozen=True):
    """Answer to `Describe`."""

    request: int
    blocks: tuple[BlockInfo, ...]
    ties: tuple[tuple[int, str, int, str], ...]


class Refused(_Message, frozen=True):
    """A request failed."""

    request: int
    failure: Failure


class RunDone(_Message, frozen=True):
    """This worker's part of a run is over.

    Attributes:
        run: the run.
        outputs: small results, for example the loss.
        busy_s: seconds that the compute stream was busy.
    """

    run: int
    outputs: dict[str, float]
    busy_s: float


class RunFailed(_Message, frozen=True):
    """An op of this worker's part failed."""

    run: int
    failure: Failure


class RunDrained(_Message, frozen=True):
    """Nothing of an ended run is under way here; `updated` tells if weights changed."""

    run: int
    updated: bool


class ValueGone(_Message, frozen=True):
    """A watched op's value was released before it was asked for."""

    run: int
    op: int


class PeerFault(_Message, frozen=True):
    """A node sent this worker a bad frame, or has fallen silent."""

    peer: int | None
    reason: str
    text: str


# Between any two nodes


class Announce(_Message, frozen=True):
    """What the sender's next message on its channel is, and what it looks like.

    Attributes:
        purpose: what it is for.
        key: which one it is; see `Purpose`.
        label: names the op in errors.
        layout: how to put the value together.
        specs: of the tensors as they travel.
        forms: for each of these its size and stride in every dimension, () if it stays as it came.
        places: for each tensor of the value which of these it is, () if they are the same in order.
        aheads: how many elements behind a multiple of 64 bytes each of these began, () for none.
    """

    purpose: Purpose
    key: tuple[int, int]
    label: str
    layout: Layout
    specs: tuple[TensorSpec, ...]
    forms: tuple[Form, ...]
    places: tuple[int, ...] = ()
    aheads: tuple[int, ...] = ()


MESSAGES: tuple[type[msgspec.Struct], ...] = (
    Peers,
    Describe,
    Build,
    Install,
    Discard,
    Start,
    Watch,
    Abort,
    Cancel,
    Collect,
    Assign,
    Shutdown,
    Done,
    Described,
    Built,
    Refused,
    RunDone,
    RunFailed,
    RunDrained,
    ValueGone,
    PeerFault,
    Announce,
)
