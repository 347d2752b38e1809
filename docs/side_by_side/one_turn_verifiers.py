"""One turn with verifiers: add two digits."""

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)


model, tokenizer = vf.get_model_and_tokenizer("model", use_liger=False, model_kwargs={"dtype": "float32"})
env = vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[right]))
args = vf.RLConfig(max_steps=1, batch_size=64, max_tokens=8, use_cpu=True, bf16=False, report_to="none")
vf.RLTrainer(model=model, processing_class=tokenizer, env=env, args=args).train()
