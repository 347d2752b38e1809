"""Many turns with TRL: find a number from hints. A turn is a call of a tool; its docstring is what the model reads."""

import random

from trl import GRPOConfig, GRPOTrainer


class Guess:
    def reset(self, **kwargs):
        self.number, self.reward = random.randint(1, 8), 0.0
        return "Guess my number, 1 to 8."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The number, from 1 to 8.
        """
        self.reward = max(self.reward, float(number == self.number))
        return "Yes." if number == self.number else "Higher." if number < self.number else "Lower."

    def get_reward(self):
        return self.reward


args = GRPOConfig(max_steps=2, max_tool_calling_iterations=4, use_cpu=True, bf16=False)
GRPOTrainer("model", args=args, environment_factory=Guess).train()
