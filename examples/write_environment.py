"""Three numbers to double, one a turn. Run: python examples/write_environment.py"""

from gspo_gym import Reward, TaskSource, TextEnv, check_env

# Each seed identifies one task; training and held-out tasks never overlap.
TASKS = TaskSource(lambda rng: rng.integers(1, 50, size=3).tolist())


class Doubling(TextEnv):
    reward_range = (0.0, 0.99)
    policies = {  # scripted players: the best one, and a legal random one for a warm-up to imitate
        "reference": lambda env, rng: lambda messages: str(2 * env.numbers[0]),
        "random": lambda env, rng: lambda messages: str(rng.integers(2, 100)),
    }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.numbers = TASKS.task(seed, self.np_random)
        self.num_right = 0
        return f"Double {self.numbers[0]}.", {}

    def step(self, action: str):
        is_right = action.strip() == str(2 * self.numbers.pop(0))
        self.num_right += is_right
        is_over = not self.numbers
        terms = {"right": 0.3 * is_right, "readable": 0.03 * action.strip().isdigit()}  # logged separately
        reward = Reward(terms, success=self.num_right == 3 if is_over else None)
        return "Done." if is_over else f"Double {self.numbers[0]}.", reward, is_over, False, {}


if __name__ == "__main__":
    print(check_env(Doubling))
