"""Environments for the tests, over the stand-in and the real package's common part: count up from a number."""

import asyncio

import verifiers as vf
from verifiers.types import SystemMessage, Tool, ToolMessage, UserMessage


def right(completion, answer):
    return float([m.content for m in completion if m.role == "assistant"][-1] == answer)


async def num_answers(completion):
    return float(sum(m.role == "assistant" for m in completion))


def raising(completion):
    raise ZeroDivisionError("division by zero")


def best_of(completions):
    return [1.0 for _ in completions]


class Counting(vf.MultiTurnEnv):
    """Answers each number by "next" until it is the row's answer; `kind` is what goes wrong."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind

    async def env_response(self, messages, state):
        said = messages[-1].content
        if self.kind == "raises":
            raise ZeroDivisionError("division by zero")
        if self.kind == "fails":
            raise vf.Error("the sandbox is gone")
        if self.kind == "impostor":
            return [messages[-1]]
        if self.kind == "picture":
            return [UserMessage(content=[{"type": "image_url"}])]
        if self.kind == "parts":
            return [UserMessage(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
        if self.kind == "slow":
            await asyncio.Event().wait()
        if messages[-1].tool_calls:
            return [ToolMessage(content=call.arguments, tool_call_id=call.id) for call in messages[-1].tool_calls]
        if said == state["answer"]:
            state["final"] = [UserMessage(content="That is it.")]
            return state["final"]
        return [UserMessage(content="next")]

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        if self.kind == "rewrites" and state["trajectory"]:
            return [UserMessage(content="Summary: you counted."), *messages[1:]]
        if self.kind == "other tools":
            state["tools"] = [Tool(name="other", description="", parameters={})]
        return messages


def rows(numbers):
    return [
        {
            "prompt": [SystemMessage(content="Count."), UserMessage(content=f"From {number}.")],
            "answer": str(number + 2),
            "example_id": number,
        }
        for number in numbers
    ]


def load_environment(kind="", functions=("right", "num_answers"), weights=(1.0, 0.0), has_eval=True, **kwargs):
    if kind == "unloadable":
        raise ValueError("no such level")
    known = {"right": right, "num_answers": num_answers, "raising": raising, "best_of": best_of}
    rubric = vf.RubricGroup(
        [vf.Rubric([known[name] for name in functions], list(weights)), vf.Rubric([num_answers], [0.0])]
    )
    if kind == "tools":
        kwargs["tool_defs"] = [Tool(name="add", description="Adds.", parameters={"type": "object", "properties": {}})]
    env = Counting(
        kind,
        dataset=rows(range(4)) if kind != "no training" else None,
        eval_dataset=rows(range(100, 103)) if has_eval else None,
        rubric=rubric,
        **kwargs,
    )
    if kind == "unscored":
        env.score_rollouts = False
    if kind == "other sum":
        env.rubric.score_rollout = _other_sum
    return env


async def _other_sum(state):
    state["reward"], state["metrics"] = 0.25, {"right": 1.0}
