"""The rollout loop and the rubrics, with the real ones' habits: signal handlers, and a raising function scores 0."""

import asyncio
import inspect
import signal

from ..errors import Error, OverlongPromptError
from ..types import AssistantMessage


class Rubric:
    def __init__(self, funcs=(), weights=None):
        self.funcs = list(funcs)
        self.weights = list(weights or [1.0] * len(self.funcs))

    @property
    def has_group_rewards(self):
        return any("completions" in inspect.signature(function).parameters for function in self.funcs)

    async def score_rollout(self, state):
        metrics = {}
        for function in self.funcs:
            given = {name: state.get(name) for name in inspect.signature(function).parameters}
            try:
                score = function(**given)
                metrics[function.__name__] = float(await score if inspect.isawaitable(score) else score)
            except Exception:
                metrics[function.__name__] = 0.0
        state["metrics"] = metrics
        state["reward"] = sum(w * metrics[f.__name__] for f, w in zip(self.funcs, self.weights, strict=True))


class RubricGroup(Rubric):
    def __init__(self, rubrics):
        super().__init__()
        self.rubrics = rubrics

    @property
    def has_group_rewards(self):
        return any(rubric.has_group_rewards for rubric in self.rubrics)

    async def score_rollout(self, state):
        reward, metrics = 0.0, {}
        for rubric in self.rubrics:
            await rubric.score_rollout(state)
            reward, metrics = reward + state["reward"], {**metrics, **state["metrics"]}
        state["reward"], state["metrics"] = reward, metrics


class MultiTurnEnv:
    def __init__(
        self, dataset=None, eval_dataset=None, rubric=None, max_turns=-1, timeout_seconds=None, tool_defs=None
    ):
        self.dataset, self.eval_dataset, self.rubric = dataset, eval_dataset, rubric or Rubric()
        self.max_turns, self.timeout_seconds, self.tool_defs = max_turns, timeout_seconds, tool_defs
        self.score_rollouts = True
        self.provides_advantages = False
        self.cleaned_up = []
        signal.signal(signal.SIGTERM, lambda *_: None)  # a ValueError outside the main thread

    @property
    def requires_group_rollouts(self):
        return self.rubric.has_group_rewards

    def build_eval_dataset(self):
        return self.eval_dataset

    def get_dataset(self):
        if self.dataset is None:
            raise ValueError("dataset is not set")
        return self.dataset

    def get_eval_dataset(self):
        return self.dataset if self.eval_dataset is None else self.eval_dataset

    async def env_response(self, messages, state):
        raise NotImplementedError

    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        last = state["trajectory"][-1]
        messages = [*last["prompt"], *last["completion"]]
        return [*messages, *await self.env_response(messages, state)]

    async def run_rollout(self, row, client, model, sampling_args):
        state = {**row, "trajectory": [], "final": None, "error": None, "stop_condition": None, "tools": self.tool_defs}
        try:
            await asyncio.wait_for(self._loop(state, client, model, sampling_args), self.timeout_seconds)
        except TimeoutError:
            state["stop_condition"] = "timeout_reached"
        finally:
            self.cleaned_up.append(row)
        last = state["trajectory"][-1] if state["trajectory"] else {"prompt": state["prompt"], "completion": []}
        said = [*last["prompt"], *last["completion"], *(state["final"] or [])]
        state["completion"] = said[len(state["prompt"]) :]
        if self.score_rollouts:
            await self.rubric.score_rollout(state)
        names = ("example_id", "completion", "reward", "metrics", "error", "stop_condition")
        return {name: state.get(name) for name in names}

    async def _loop(self, state, client, model, sampling_args):
        while state["stop_condition"] is None:
            if state["error"] is not None:
                state["stop_condition"] = "has_error"
            elif state["final"] is not None:
                state["stop_condition"] = "has_final_env_response"
            elif 0 < self.max_turns <= len(state["trajectory"]):
                state["stop_condition"] = "max_turns_reached"
            else:
                await self._turn(state, client, model, sampling_args)

    async def _turn(self, state, client, model, sampling_args):
        try:
            prompt = await self.get_prompt_messages(state)
            if state["final"] is not None:
                return
            response = await client.get_response(
                prompt=prompt, model=model, sampling_args=sampling_args, tools=state["tools"], state=state
            )
            said = response.message
            tokens = getattr(said, "tokens", None)
            if tokens is not None:
                tokens = {**vars(tokens), "is_truncated": False}
            answer = AssistantMessage(
                content=said.content, reasoning_content=said.reasoning_content, tool_calls=said.tool_calls
            )
            state["trajectory"].append({"prompt": prompt, "completion": [answer], "tokens": tokens})
        except OverlongPromptError:
            state["stop_condition"] = "prompt_too_long"
        except Error as error:
            state["error"] = error
