"""One turn with AgileRL: add two digits."""

from agilerl.algorithms import GSPO
from agilerl.llm_envs import RolloutHarness
from agilerl.llm_envs.qa_dataset import QADatasetEnv
from agilerl.llm_envs.rubrics import reward_fn_to_rubric
from agilerl.training.llm import train_llm_rollout
from transformers import AutoTokenizer

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def right(completion, answer, question):
    return float(completion.strip() == answer)


def make_env():
    return RolloutHarness.local(QADatasetEnv(ROWS, rubric=reward_fn_to_rubric(right)), tokenizer)


tokenizer = AutoTokenizer.from_pretrained("model")
agent = GSPO(tokenizer.pad_token_id, tokenizer.pad_token, model_name="model", use_liger_loss=False, max_output_tokens=8)
train_llm_rollout([agent], max_turns=1, env_factory=make_env, max_steps=256)
