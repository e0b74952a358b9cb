"""Requests to workers and their answers: one question, one worker, one answer.

What is asked for is done in the order in which it was asked for, behind the runs that were started
before. Runs are not requests; see `myelin.coordinator`.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from myelin.errors import MyelinError
from myelin.run import look_at, resolve


class Requests:
    """The questions that are under way.

    Args:
        send: sends a control message to a worker; raises if the cluster is broken.
        number: gives a number that was not given out before.
    """

    def __init__(
        self, *, send: Callable[[int, msgspec.Struct], None], number: Callable[[], int]
    ) -> None:
        self._send, self._number = send, number
        self._waiting: dict[tuple[int, int], asyncio.Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, worker: int, message: Any) -> Any:
        """Send one request and return its answer: a message, or the value that came back.

        Cancelled, it is carried out nevertheless, and the answer is ignored.

        Args:
            worker: whom to ask.
            message: the request; has a `request` number of its own.

        Raises:
            MyelinError: the worker refused, or the cluster is broken.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send(worker, message)
        self._waiting[worker, message.request] = answer
        return await answer

    async def ask_all(self, make: Callable[[int, int], Any], workers: Iterable[int]) -> list[Any]:
        """Send each worker the request `make(worker, number)` and return the answers in order.

        Raises:
            MyelinError: see `ask`; the first refusal, once all have answered.
        """
        jobs = [self.ask(worker, make(worker, self._number())) for worker in workers]
        answers = await asyncio.gather(*jobs, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def answer(
        self, worker: int, number: int, value: Any, error: BaseException | None = None
    ) -> bool:
        """Take an answer; return whether there was such a question."""
        waiting = self._waiting.pop((worker, number), None)
        resolve(waiting, value, error)
        return waiting is not None

    def fail(self, error: MyelinError) -> None:
        """Answer every question with `error`."""
        for waiting in self._waiting.values():
            resolve(waiting, None, error)
            look_at(waiting)  # whoever awaits it has it; nobody else needs a warning
        self._waiting.clear()
