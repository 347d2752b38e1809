"""An agent with a loop of its own, trained as it is: it asks for a digit, and then for a larger one.

Run: python examples/agent.py          (two minutes on a CPU core)
"""

from gspo_gym import GSPOTrainer, agent_app


async def rollout(client, task):
    """Play one task with an OpenAI client, and return its reward."""
    messages, digits = [{"role": "user", "content": "Say a digit."}], []
    for _ in range(2):
        answer = await client.chat.completions.create(**task.policy, messages=messages)
        text = answer.choices[0].message.content or ""
        digits.append(int(text[0]) if text[:1] in set("0123456789") else None)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Now a larger one."}]
    first, second = digits
    return 0.5 * sum(digit is not None for digit in digits) + (None not in digits and second > first)


LIMITS = {"rollout.max_turns": 2, "rollout.max_output_tokens": 2, "rollout.max_model_len": 128}
STEPS = {"rollout.episodes_per_batch": 64, "training.batch_size": 16, "optimizer.schedule": "constant"}

if __name__ == "__main__":
    GSPOTrainer(env=agent_app(rollout), args=LIMITS | STEPS).train()
