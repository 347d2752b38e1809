"""An agent that knows nothing of gspo_gym: its own loop around the `openai` package, served as a task app.

It plays a game with retries on, asks a sub-agent that has a tool, compacts its context when that gets long, and has a
title written at the end. The trainer points it at the capturing gateway, and what it samples becomes training data.

Run:  python examples/openai_agent.py 8001
then: python -m gspo_gym.train CONFIG --task-url http://127.0.0.1:8001     (or services.task_url in the config)
"""

import json
import sys

import gymnasium
from json_server import json_server
from openai import OpenAI

GAME = {"id": "gspo_gym_envs:gspo_gym/GuessNumber-v0", "high": 64, "max_guesses": 7, "style": "verbose"}
PLAYER = "You play a guessing game. Answer with a number and nothing else."
ADVISER = "You advise a player of a guessing game. Find the middle of the range with your tool, then name one number."
EDITOR = "Write a title of at most five words."
SAMPLING = ("model", "temperature", "top_p", "max_tokens")  # what the trainer decides
MAX_MESSAGES = 8  # of the player's conversation, before it is compacted
RANGE = {"type": "object", "properties": {"low": {"type": "integer"}, "high": {"type": "integer"}}}
MIDDLE = {"name": "middle", "description": "The middle of a range.", "parameters": RANGE}


class Agent:
    """Plays one episode. `policy` is the model and how to sample, as the trainer says."""

    def __init__(self, client, policy):
        self.client = client
        self.fixed = {key: policy[key] for key in SAMPLING if policy.get(key) is not None}

    def ask(self, messages, **options):
        answer = self.client.chat.completions.create(**self.fixed, messages=messages, **options)
        return answer.choices[0].message

    def play(self, seed):
        """Rewards and guesses, and a title for the episode."""
        env = gymnasium.make(**GAME)
        observation, _ = env.reset(seed=seed)
        advice = self.advise(observation)
        messages = [{"role": "system", "content": PLAYER}, user(f"{observation} My adviser says: {advice}")]
        guesses, rewards, done = [], [], False
        while not done:
            if len(messages) > MAX_MESSAGES:
                messages = compacted(messages)
            said = self.ask(messages)
            observation, reward, terminated, truncated, _ = env.step(said.content or "")
            done = terminated or truncated
            guesses.append(said.content)
            rewards.append(float(reward))
            messages += [said.model_dump(exclude_none=True), user(observation)]
        env.close()
        title = self.ask([{"role": "system", "content": EDITOR}, user(f"Guesses: {', '.join(map(str, guesses))}")])
        return guesses, rewards, title.content

    def advise(self, observation):
        """A conversation of its own, with a tool, that ends with a piece of advice."""
        messages = [{"role": "system", "content": ADVISER}, user(observation)]
        for _ in range(3):
            said = self.ask(messages, tools=[{"type": "function", "function": MIDDLE}])
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                try:
                    asked = json.loads(call.function.arguments)
                    result = str((asked["low"] + asked["high"]) // 2)
                except (KeyError, TypeError, ValueError) as error:
                    result = f"error: {error!r}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return said.content or "nothing"


def user(text):
    return {"role": "user", "content": text}


def compacted(messages):
    """The same conversation in two messages: what was said, and what the game said last."""
    turns = zip(messages[2::2], messages[3::2], strict=True)
    said = [f"{mine['content']} -> {game['content']}" for mine, game in turns]
    return [messages[0], user(f"{messages[1]['content']} So far: {'; '.join(said)}")]


def rollout(request):
    """One episode, as the task-app contract has it: steps with rewards, and what they come to."""
    policy = request["policy"]["config"]
    url = policy["inference_url"]
    with OpenAI(base_url=url.split("/chat/completions")[0], api_key="none", max_retries=5, timeout=120) as client:
        guesses, rewards, title = Agent(client, policy).play(request["env"].get("seed") or 0)
    played = zip(guesses, rewards, strict=True)
    steps = [{"obs": {}, "tool_calls": [], "reward": r, "done": False, "info": {"guess": g}} for g, r in played]
    steps[-1]["done"] = True
    trajectory = {
        "env_id": GAME["id"],
        "policy_id": "agent",
        "steps": steps,
        "length": len(steps),
        "inference_url": url,
    }
    total = sum(rewards)
    metrics = {"episode_returns": [total], "mean_return": total, "num_steps": len(steps), "details": {"title": title}}
    return {"run_id": request["run_id"], "trajectories": [trajectory], "metrics": metrics, "ops_executed": len(steps)}


def checked(request):
    """Raise if something is missing that is read later, or that could not be sent on."""
    seed, policy = request["env"].get("seed"), request["policy"]["config"]
    used = [request["run_id"], policy, policy["inference_url"].split("/")]
    json.dumps(used, ensure_ascii=False, allow_nan=False).encode()
    if not (seed is None or (type(seed) is int and seed >= 0)):
        raise ValueError(f"seed: expected a whole number from 0, got {seed!r:.40}")


def task_info(query):
    """One task for each seed of the query, or what kind of tasks there are."""
    seeds = [int(seed) for seed in query.get("seed", [])]
    infos = [{"task": {"id": "guessing"}, "environment": GAME["id"], "task_metadata": {"seed": s}} for s in seeds]
    return (infos[0] if len(infos) == 1 else infos) if infos else {"taskset": {"id": "guessing"}}


def task_app(port):
    """The server of the four routes that a trainer asks."""
    info = {"service": {"task": {"id": "guessing", "name": "Guessing"}}}
    answers = {"/": {"status": "ok"}, "/health": {"healthy": True}, "/info": info}
    gets = {path: lambda query, answer=answer: answer for path, answer in answers.items()}
    return json_server(port, gets={**gets, "/task_info": task_info}, posts={"/rollout": (checked, rollout)})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(print(__doc__))
    task_app(int(sys.argv[1])).serve_forever()
