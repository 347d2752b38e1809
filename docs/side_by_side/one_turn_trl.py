"""One turn with TRL: add two digits."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

ROWS = [
    {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a in range(10) for b in range(10)
]


def right(completions, answer, **kwargs):
    return [float(said[0]["content"].strip() == sum_) for said, sum_ in zip(completions, answer, strict=True)]


args = GRPOConfig(max_steps=2, use_cpu=True, bf16=False)
GRPOTrainer("model", reward_funcs=right, args=args, train_dataset=Dataset.from_list(ROWS)).train()
