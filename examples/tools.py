"""Tools: typed Python functions that the model calls; their schemas go into its chat template.

Run: python examples/tools.py
"""

from gspo_gym import Message, Reward, TokenObservationWrapper, ToolCall, ToolEnv, check_env, load_policy, tool


class Safe(ToolEnv):
    """Open a safe whose dial is too far left or too far right."""

    reward_range = (-1.0, 1.0)

    def start(self, options):
        self.combination, self.position = (int(n) for n in self.np_random.integers(0, 10, size=2))
        return "Open the safe."

    @tool
    def read_dial(self) -> dict:
        """Where the dial stands, and the combination."""
        return {"position": self.position, "combination": self.combination}

    @tool(time_limit_seconds=1.0)
    def turn(self, steps: int) -> str:
        """Turn the dial.

        Args:
            steps: positive to the right.
        """
        self.position += steps
        if self.position != self.combination:
            return "It does not open."
        self.finish(Reward({"opened": 1.0}, success=True))
        return "It opens."

    def end_turn(self):
        if self.num_turns == 10:
            self.finish(Reward({}, success=False))


def read_then_turn(env, rng):
    """The reference: two turns."""

    def play(messages):
        if messages[-1].role == "user":
            call = ToolCall("call_0", "read_dial", {})
        else:
            call = ToolCall("call_1", "turn", {"steps": env.combination - env.position})
        return Message("assistant", "", tool_calls=(call,))

    return play


Safe.policies = {"reference": read_then_turn}

if __name__ == "__main__":
    print(check_env(Safe), "\n")
    # One episode as a model sees it: what it is given, a call with a wrong argument, and the error it reads.
    tokenizer = load_policy("tiny:qwen3-64").tokenizer
    sizes = {"max_turns": 4, "pad_id": tokenizer.pad_token_id, "max_model_len": 4096, "max_output_tokens": 256}
    with TokenObservationWrapper(Safe(), tokenizer, **sizes) as wrapper:
        prompt, _ = wrapper.reset(seed=0)
        print(tokenizer.decode(prompt.tolist()))
        wrong = Message("assistant", "", tool_calls=(ToolCall("call_0", "turn", {"step": 3}),))
        _, reward, terminated, truncated, info = wrapper.step(wrapper.renderer.action_ids(wrong))
        print(info["new_messages"][0].content)
