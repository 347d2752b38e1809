"""Write your own environment: rounds of mental arithmetic, checked against the whole contract.

Run: python examples/write_environment.py
"""

from gspo_gym import RewardTerms, TaskSource, TextEnv, check_env

# A seed names a task, and no training task is held out too. A file or a list of tasks would do as well.
TASKS = TaskSource(lambda rng: rng.integers(1, 50, size=3).tolist())


# Reward terms take what their parameters name; each is logged apart. They may be async.
def right(action, number):
    return action.strip() == str(2 * number)


def readable(action):
    return action.strip().isdigit()


TERMS = RewardTerms({right: 0.3, readable: 0.03})


class Doubling(TextEnv):
    """Three numbers to double, one a turn."""

    reward_range = (0.0, 0.99)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.numbers = TASKS.task(seed, self.np_random)
        self.num_right = 0
        return f"Double {self.numbers[0]}.", {}

    def step(self, action: str):
        number = self.numbers.pop(0)
        self.num_right += right(action, number)
        is_over = not self.numbers
        success = self.num_right == 3 if is_over else None
        events = ("flawless",) if success else ()  # what step rewards count and a judge is shown
        reward = TERMS.score(action=action, number=number, events=events, success=success)
        return "Done." if is_over else f"Double {self.numbers[0]}.", reward, is_over, False, {}


# Players written by hand: one that earns the top score, and one whose legal but random play a warm-up can imitate.
Doubling.policies = {
    "reference": lambda env, rng: lambda messages: str(2 * env.numbers[0]),
    "random": lambda env, rng: lambda messages: str(rng.integers(2, 100)),
}

if __name__ == "__main__":
    report = check_env(Doubling)
    print(report)
    raise SystemExit(0 if report.passed else 1)
