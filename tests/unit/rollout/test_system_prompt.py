"""A system prompt stands before what the environment says first, once."""

import pytest

from gspo_gym.env.core import TextEnv
from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.rollout.adapter import TokenObservationWrapper
from gspo_gym.types import Message


class Speaker(TextEnv):
    """Begins with the messages that it is given."""

    def __init__(self, messages):
        super().__init__()
        self._messages = messages

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._messages, {}

    def step(self, action):
        return "end", 0.0, True, False, {}


@pytest.mark.parametrize(
    ("said", "prompt", "expected"),
    [
        ([Message("user", "hi")], None, [("user", "hi")]),
        ([Message("user", "hi")], "Be brief.", [("system", "Be brief."), ("user", "hi")]),
        (
            [Message("system", "Rules."), Message("user", "hi")],
            "Be brief.",
            [("system", "Be brief.\n\nRules."), ("user", "hi")],
        ),
    ],
)
def test_the_prompt_is_the_first_message_or_the_beginning_of_the_environments_own(said, prompt, expected):
    wrapper = TokenObservationWrapper(Speaker(said), tiny_tokenizer(), 1, 0, 512, 8, system_prompt=prompt)
    with wrapper:
        ids, info = wrapper.reset(0)
        assert [(m.role, m.content) for m in wrapper.messages] == expected
        assert tuple(info["new_messages"]) == wrapper.messages
        assert ids.tolist() == wrapper.renderer.start([Message(role, text) for role, text in expected])
