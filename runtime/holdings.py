"""What a worker keeps between runs, made and changed on request: trainers and programs.

Methods do one request each, synchronously, on the compute thread while no run is under way.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from myelin.models.building import describe
from myelin.runtime import messages as m
from myelin.runtime.blackbox import BlackBox
from myelin.runtime.executor import CallExecutor, Executor
from myelin.runtime.run import Installed
from myelin.runtime.scheduler import Schedule
from myelin.runtime.training import StepExecutor

Request = m.Describe | m.Build | m.Install | m.Discard | m.Collect | m.Assign


class Holdings:
    """Trainers and programs of one worker, by the coordinator's numbers.

    Args:
        run_ahead: of the device on which programs will run.
        local_calls: callables of the same process, by name.
        black_box: told which block is running.
    """

    def __init__(
        self,
        *,
        run_ahead: int,
        local_calls: Mapping[str, Callable[..., Any]],
        black_box: BlackBox | None,
    ) -> None:
        self.programs: dict[int, Installed] = {}
        self._trainers: dict[int, StepExecutor] = {}
        self._run_ahead, self._local_calls = run_ahead, local_calls
        self._black_box = black_box

    def carry_out(self, request: Request, value: Any) -> msgspec.Struct | dict[str, Any]:
        """Do what a request says.

        Args:
            request: what to do.
            value: the value that came with it over the data path, or None.

        Returns:
            The answer: a message, or named tensors that must be sent before anything changes them.
        """
        match request:
            case m.Describe():
                return self._describe(request)
            case m.Build():
                executor = StepExecutor(request, self._black_box)
                self._trainers[request.trainer] = executor
                return m.Built(request.request, executor.elements())
            case m.Install():
                self._install(request)
            case m.Discard():
                self._discard(request)
            case m.Collect():
                return self._collect(request)
            case m.Assign():
                self._trainers[request.trainer].assign(value)
        return m.Done(request.request)

    def _describe(self, request: m.Describe) -> m.Described:
        sketch = describe(request)
        ties = ((t.owner_block, t.owner_name, t.user_block, t.user_name) for t in sketch.ties)
        return m.Described(request.request, sketch.blocks, tuple(ties))

    def _install(self, request: m.Install) -> None:
        executor: Executor
        if request.trainer is None:
            executor = CallExecutor(request.calls, self._local_calls)
        else:
            executor = self._trainers[request.trainer]
        schedule = Schedule(request.body, run_ahead=self._run_ahead)
        self.programs[request.program] = Installed.of(schedule, executor, request.trainer)

    def _discard(self, request: m.Discard) -> None:
        if request.program is not None:
            self.programs.pop(request.program, None)
        if request.trainer is not None:
            self._trainers.pop(request.trainer, None)
            self.programs = {
                number: installed
                for number, installed in self.programs.items()
                if installed.trainer != request.trainer
            }

    def _collect(self, request: m.Collect) -> dict[str, Any]:
        trainer = self._trainers[request.trainer]
        match request.state:
            case m.State.WEIGHTS:
                return trainer.weights()
            case m.State.GRADIENTS:
                return trainer.take_gradients()
            case m.State.SHAPES:
                return {
                    name: [str(tensor.dtype), list(tensor.shape)]
                    for name, tensor in trainer.weights().items()
                }
