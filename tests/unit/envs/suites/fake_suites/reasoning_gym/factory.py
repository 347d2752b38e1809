"""The generators, by name."""

import random
from dataclasses import dataclass
from random import Random


@dataclass
class Config:
    seed: int = 0
    size: int = 500
    most: int = 1000

    def validate(self):
        assert self.most > 0, "most must be positive"


class Sum:
    def __init__(self, config):
        config.validate()
        self.config, self.seed = config, config.seed

    def __getitem__(self, index):
        rng = Random(self.seed + index)
        a, b = rng.randrange(self.config.most), rng.randrange(self.config.most)
        return {"question": f"{a} + {b}?", "answer": str(a + b), "metadata": {}}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.01 if answer else 0.0


class Listed(Sum):
    """Prepares its entries, and scores only those."""

    def __init__(self, config):
        super().__init__(config)
        self.entries = [super(Listed, self).__getitem__(index) for index in range(config.size)]

    def __getitem__(self, index):
        return self.entries[index]

    def score_answer(self, answer, entry):
        assert entry in self.entries
        return super().score_answer(answer, entry)


class Numeric(Sum):
    """Raises on what is no number."""

    def score_answer(self, answer, entry):
        return 1.0 if int(answer) == int(entry["answer"]) else 0.0


class Open(Sum):
    """No answer, but an example of one."""

    def __getitem__(self, index):
        entry = super().__getitem__(index)
        return entry | {"answer": None, "metadata": {"example_answer": entry["answer"]}}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["metadata"]["example_answer"] else 0.0


class Shared(Sum):
    """Draws from the process's generator."""

    def __getitem__(self, index):
        a = random.randrange(10**9)
        return {"question": f"{a} + {index % 2}?", "answer": str(a + index % 2), "metadata": {}}


class Broken(Sum):
    def score_answer(self, answer, entry):
        raise KeyError("no table")


DATASETS = {
    name: (made, Config)
    for name, made in {
        "sum": Sum,
        "listed": Listed,
        "numeric": Numeric,
        "open": Open,
        "shared": Shared,
        "broken": Broken,
    }.items()
}


def create_dataset(name, **settings):
    made, config = DATASETS[name]
    return made(config(**settings))
