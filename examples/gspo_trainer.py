"""Train on rows with reward functions, look at it, and keep the model.

Run: python examples/gspo_trainer.py          (a minute on two CPU cores)
"""

import itertools
import sys

from gspo_gym import GSPOTrainer

# Which letter comes first? A tenth of the rows is held out.
ROWS = [{"question": "".join(letters), "answer": letters[0]} for letters in itertools.product("abcde", repeat=3)]


def right(completion, answer):
    return completion.strip() == answer


def is_letter(completions, **_):
    """As for TRL: a list of completions, a list of rewards."""
    return [0.1 * (len(completion) == 1) for completion in completions]


def stop_when_good(report):
    """A callback."""
    if report.metrics.get("evaluation/mean_return", 0) > 1.05:
        report.stop()


if __name__ == "__main__":
    trainer = GSPOTrainer(
        model="tiny:qwen3-64-v2",  # or "smollm2", a folder, a hub id
        train_dataset=ROWS,
        reward_funcs=[right, is_letter],
        args={
            "training.iterations_per_epoch": int(sys.argv[1]) if len(sys.argv) > 1 else 40,
            "optimizer.schedule": "constant",
        },
        callbacks=[stop_when_good],
    )
    trainer.train()
    print("afterwards:", trainer.evaluate("0:50").sentence())
