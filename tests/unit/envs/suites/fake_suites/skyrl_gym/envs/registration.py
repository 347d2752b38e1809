"""The registry, and the environments in it."""


class Graded:
    def __init__(self, env_config=None, extras=None):
        self.extras, self.env_config = extras, env_config
        assert "reward_spec" in extras, "reward_spec field is required"

    def init(self, prompt):
        return prompt, {"extras": sorted(self.extras)}

    def step(self, action):
        right = action == "#### " + self.extras["reward_spec"]["ground_truth"]
        return {"observations": [], "reward": float(right), "done": True, "metadata": {"said": action}}

    def close(self):
        pass


class Tool(Graded):
    def step(self, action):
        if action == "quiet":
            return {"observations": [], "reward": 0.0, "done": False, "metadata": {}}
        shown = {"role": "user", "content": f"{self.env_config['greeting']} {action}"}
        return {"observations": [shown], "reward": 0.5, "done": False, "metadata": {}, "postprocessed_action": "cut"}


class Wrong(Graded):
    def step(self, action):
        return None


registry = {"gsm8k": Graded, "tool": Tool, "wrong": Wrong}


def register(id, entry_point):
    assert id not in registry, f"An environment with name `{id}` is already registered"
    registry[id] = entry_point


def make(id, **kwargs):
    return registry[id](**kwargs)
