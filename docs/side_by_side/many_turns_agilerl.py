"""Many turns with AgileRL: find a number from hints."""

import random

from agilerl.algorithms import GSPO
from agilerl.llm_envs import RolloutHarness
from agilerl.training.llm import train_llm_rollout
from transformers import AutoTokenizer


class Guess:
    def reset(self, seed=None, **kwargs):
        self.number, self.left = random.Random(seed).randint(1, 8), 4
        return "Guess my number, 1 to 8."

    def step(self, action):
        guess, self.left = action.strip(), self.left - 1
        if guess == str(self.number):
            return "Yes.", 1.0, True, False, {}
        hint = "A number!" if not guess.isdigit() else "Higher." if int(guess) < self.number else "Lower."
        return hint, 0.0, self.left == 0, False, {}


def make_env():
    return RolloutHarness.local(Guess(), tokenizer, max_turns=4)


tokenizer = AutoTokenizer.from_pretrained("model")
agent = GSPO(tokenizer.pad_token_id, tokenizer.pad_token, model_name="model", use_liger_loss=False, max_output_tokens=8)
train_llm_rollout([agent], max_turns=4, env_factory=make_env, max_steps=1024)
