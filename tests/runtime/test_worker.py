"""A worker, with the test as its coordinator."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import torch

from myelin.errors import ChannelClosed
from myelin.runtime import messages as m
from myelin.runtime.devices.cpu import CpuDevice
from myelin.runtime.graph import COORDINATOR, Graph, Kind, Op, Phase, split
from myelin.runtime.jitter import Delays
from myelin.runtime.optimizer import SGD
from myelin.runtime.worker import Worker
from myelin.transports.datapath import TensorSpec


class Bus:
    """Keeps what the worker tells."""

    def __init__(self) -> None:
        self.told: list[msgspec.Struct] = []
        self._more = asyncio.Event()

    def admit(self, peer: int, incarnation: str) -> None: ...

    def connect(self, peer: int, address: str) -> None: ...

    def send(self, peer: int, message: msgspec.Struct) -> None:
        assert peer == COORDINATOR
        self.told.append(message)
        self._more.set()

    async def until(self, *last: msgspec.Struct) -> None:
        """Wait until these are the latest messages."""
        async with asyncio.timeout(60):
            while tuple(self.told[-len(last) :]) != last:
                self._more.clear()
                await self._more.wait()


class BrokenPath:
    """A data path across which nothing gets."""

    def send(
        self, peer: int, tensors: Sequence[torch.Tensor], *, label: str
    ) -> asyncio.Future[None]:
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sent.set_exception(ChannelClosed("planted", peer=peer))
        return sent

    def receive(
        self, peer: int, specs: Sequence[TensorSpec], *, label: str
    ) -> asyncio.Future[list[torch.Tensor]]:
        raise AssertionError("nobody sends")

    def drop(self, peer: int, reason: str) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def working(calls: dict[str, Callable[..., Any]]) -> AsyncIterator[tuple[Worker, Bus]]:
    """A worker that has one program for each call, numbered from 1."""
    bus, device = Bus(), CpuDevice("test", threads=None)
    worker = Worker(
        0,
        bus=bus,
        path=BrokenPath(),
        device=device,
        delays=Delays(None, 0),
        local_calls=calls,
        on_shutdown=lambda: None,
    )
    for number, path in enumerate(calls, 1):
        graph = Graph(Phase.CALLS)
        graph.add(Op(Kind.CALL, 0))
        body = split(graph, 1).programs[0]
        worker.receive(COORDINATOR, m.Install(number, number, body, None, (path,)))
        await bus.until(m.Done(number))
    try:
        yield worker, bus
    finally:
        worker.close()
        await device.close()


async def test_a_queued_run_that_is_cancelled_never_begins() -> None:
    """The order to abort it comes only when the coordinator has heard of it."""
    gate, begun = threading.Event(), list[str]()
    calls: dict[str, Callable[..., Any]]
    calls = {"first": gate.wait, "second": lambda: begun.append("second")}
    async with working(calls) as (worker, bus):
        for run, program in ((11, 1), (12, 2)):
            worker.receive(COORDINATOR, m.Start(run, program, 0))
        worker.receive(COORDINATOR, m.Cancel(12))
        (failed,) = [message for message in bus.told if isinstance(message, m.RunFailed)]
        assert (failed.run, failed.failure.cause) == (12, m.Cause.CANCELLED)
        gate.set()
        worker.receive(COORDINATOR, m.Install(9, 9, split(Graph(Phase.CALLS), 1).programs[0], None))
        await bus.until(m.Done(9))  # it stands in the queue behind both
        assert begun == []
        worker.receive(COORDINATOR, m.Abort(12))
        assert bus.told[-1] == m.RunDrained(12, False)


async def test_an_answer_that_does_not_get_across_does_not_hold_up_the_rest() -> None:
    async with working({"only": lambda: None}) as (worker, bus):
        build = m.Build(
            request=3,
            trainer=7,
            factory="myelin.testing.models:mlp",
            arguments={},
            stages=(m.StageSpec(0, 0, 2),),
            last_stage=0,
            ties=(),
            optimizer=SGD(),
            seed=0,
        )
        worker.receive(COORDINATOR, build)
        worker.receive(COORDINATOR, m.Collect(4, 7, m.State.WEIGHTS))
        worker.receive(COORDINATOR, m.Discard(5, trainer=7))
        await bus.until(m.Done(5))
        assert [type(message) for message in bus.told[-3:]] == [m.Built, m.Announce, m.Done]
