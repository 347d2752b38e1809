"""Write your own environment: rounds of mental arithmetic, checked against the whole contract.

Run: python examples/write_environment.py
"""

from gspo_gym import Reward, TextEnv, check_env


class Doubling(TextEnv):
    """Three numbers to double, one a turn; each right answer earns a third."""

    reward_range = (0.0, 1.0)

    def __init__(self, num_rounds: int = 3) -> None:
        self.num_rounds = num_rounds
        self.rounds_left = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # all randomness comes from self.np_random
        self.rounds_left, self.num_right = self.num_rounds, 0
        return self._ask(), {}

    def step(self, action: str):
        is_right = action.strip() == str(2 * self.number)
        self.rounds_left -= 1
        self.num_right += is_right
        is_over = self.rounds_left == 0
        success = self.num_right == self.num_rounds if is_over else None
        reward = Reward({"right": is_right / self.num_rounds}, success=success)
        return "Done." if is_over else self._ask(), reward, is_over, False, {}

    def _ask(self) -> str:
        self.number = int(self.np_random.integers(1, 50))
        return f"Double {self.number}."


# Players written by hand: one that earns the top score, and one whose legal but random play a warm-up can imitate.
Doubling.policies = {
    "reference": lambda env, rng: lambda messages: str(2 * env.number),
    "random": lambda env, rng: lambda messages: str(rng.integers(2, 100)),
}

if __name__ == "__main__":
    report = check_env(Doubling)
    print(report)
    raise SystemExit(0 if report.passed else 1)
