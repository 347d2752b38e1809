"""Functions of the caller that a training calls after each step, and with which it can be stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gspo_gym.run.sinks import Sink

STOPPED_BY = "a callback"


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a callback is given.

    Attributes:
        step: number of the training step that has ended; 0 before the first.
        metrics: its finite numbers by name, such as "rollout/reward_mean"; after an evaluation those of it, such as
            "evaluation/success_rate". docs/tutorials/reading_a_run.md says which to look at.
        stop: asks the training to save a checkpoint and end.
    """

    step: int
    metrics: Mapping[str, float]
    stop: Callable[[], None]


Callback = Callable[[StepReport], object]


class CallbackSink(Sink):
    """The sink (`run/sinks.py`) that calls them. The first that raises ends the training, and its error is kept.

    Attributes:
        request_stop: of the training; it takes the origin of the request. Set before the first number comes.
        error: that a callback raised; None: none did.
    """

    name = "callbacks"

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self.request_stop: Callable[[str], object] = lambda _: None
        self.error: Exception | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self.error is not None:
            return
        report = StepReport(step, values, self._stop)
        try:
            for callback in self._callbacks:
                callback(report)
        except Exception as error:
            self.error = error
            self._stop()

    def _stop(self) -> None:
        self.request_stop(STOPPED_BY)
