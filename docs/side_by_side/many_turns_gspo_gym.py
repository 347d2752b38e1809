"""Many turns with gspo_gym: find a number from hints."""

from gspo_gym import GSPOTrainer, TextEnv


class Guess(TextEnv):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.left = int(self.np_random.integers(1, 9)), 4
        return "Guess my number, 1 to 8.", {}

    def step(self, action):
        guess, self.left = action.strip(), self.left - 1
        if guess == str(self.number):
            return "Yes.", 1.0, True, False, {}
        hint = "A number!" if not guess.isdigit() else "Higher." if int(guess) < self.number else "Lower."
        return hint, 0.0, self.left == 0, False, {}


if __name__ == "__main__":
    GSPOTrainer("model", Guess, args={"training.iterations_per_epoch": 2, "rollout.max_output_tokens": 8}).train()
