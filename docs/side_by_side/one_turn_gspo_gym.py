"""One turn with gspo_gym: add two digits."""

from gspo_gym import GSPOTrainer

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def right(completion, answer):
    return float(completion.strip() == answer)


if __name__ == "__main__":
    GSPOTrainer("model", train_dataset=ROWS, reward_funcs=right, args={"training.iterations_per_epoch": 2}).train()
