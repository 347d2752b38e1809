"""A custom reward: wrap any environment and change what its turns are worth.

Run: python examples/custom_reward.py
"""

import gymnasium

import gspo_gym
from gspo_gym import Reward


class PayForSpeed(gymnasium.Wrapper):
    """Adds a small term for every turn not used; the environment's own terms stay, each under its name."""

    def __init__(self, env: gymnasium.Env, bonus: float = 0.1, max_turns: int = 4) -> None:
        super().__init__(env)
        self.bonus, self.max_turns = bonus, max_turns

    def reset(self, *, seed=None, options=None):
        self.num_turns = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.num_turns += 1
        terms = dict(reward.terms)
        if reward.success:
            terms["speed"] = self.bonus * (self.max_turns - self.num_turns)
        return observation, Reward(terms, success=reward.success), terminated, truncated, info


if __name__ == "__main__":
    env = PayForSpeed(gspo_gym.make("GuessNumber"))
    env.reset(options={"number": 6})
    for guess in ("4", "6"):
        observation, reward, terminated, *_ = env.step(guess)
        print(f"{guess} -> {observation!r}, reward {float(reward):+.2f} = {dict(reward.terms)}")
