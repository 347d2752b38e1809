"""The registry, and the games in it."""

import random
import re

import numpy as np


class Guess:
    """Guess a number that is drawn when the first guess is made."""

    def __init__(self, most=9, max_turns=30, **_):
        self.most, self.max_turns = most, max_turns
        self.reset()

    def reset(self, seed=None):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
        self.turns = 0
        self.game_number = random.randint(1, self.most)
        return f"Guess 1 to {self.most} in \\boxed{{}}.\n", {"prefix": "Ready?", "suffix": "Board: ."}

    def step(self, action):
        self.turns += 1
        found = re.findall(r"\\boxed{(\w+)}", action)
        if not found:
            return "No guess.", -0.1, True, False, {"suffix": "Guess again."}
        guess = int(found[-1])
        if guess == self.game_number:
            return "Right.", 1.0, True, False, {"suffix": "Guess again."}
        hint = random.choice(["No.", "Wrong."])
        if self.turns == self.max_turns:
            return hint, 0.0, True, True, {}
        return hint, 0.0, False, False, {"suffix": f"Board: {guess}"}

    def sample_random_action(self):
        return str(random.randint(1, self.most))  # without a box, as some of the real ones


class Question:
    def reset(self, seed=None):
        random.seed(seed)
        return str(random.random()), {}

    def step(self, action):
        return "<｜TERMINAL_STATE｜>", 1, True, True, {"correct": action == "yes"}


class Odd:
    def reset(self, seed=None):
        return "Hello", {}

    def step(self, action):
        return "three", 0.0, True


def _unmakeable(**kwargs):
    raise LookupError("\n****\n  Resource \x1b[93mwords\x1b[0m not found.\n" + "x" * 1000)


ENV_REGISTRY = {
    "game:GuessTheNumber-v0-easy": Guess,
    "rg:chain_sum": Question,
    "game:Odd-v0": Odd,
    "game:Words-v0": _unmakeable,
}


def make(env_id, **kwargs):
    return ENV_REGISTRY[env_id](**kwargs)
