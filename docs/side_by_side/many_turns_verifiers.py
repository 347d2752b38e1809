"""Many turns with verifiers: find a number from hints."""

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": "Guess my number, 1 to 8.", "answer": str(number)} for number in range(1, 9)]


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        guess = messages[-1]["content"].strip()
        hint = "A number!" if not guess.isdigit() else "Higher." if int(guess) < int(state["answer"]) else "Lower."
        reply = [{"role": "user", "content": "Yes." if guess == state["answer"] else hint}]
        if guess == state["answer"]:
            state["final_env_response"] = reply
        return reply


def found(completion, answer):
    return float(any(said["role"] == "assistant" and said["content"].strip() == answer for said in completion))


model, tokenizer = vf.get_model_and_tokenizer("model", use_liger=False, model_kwargs={"dtype": "float32"})
env = Guess(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[found]), max_turns=4)
args = vf.RLConfig(max_steps=1, batch_size=64, max_tokens=8, use_cpu=True, bf16=False, report_to="none")
vf.RLTrainer(model=model, processing_class=tokenizer, env=env, args=args).train()
