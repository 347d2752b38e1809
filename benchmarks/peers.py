"""TRL beside this project on the same model, shapes and task: `python -m benchmarks peers`.

`make peers` installs TRL into .venv-peers. Each side runs in a process with the same number of threads; the sides take
turns, and a round is a pair. Batches are of 8 groups of 8 episodes: "sampling" has 3 turns of 32 sampled tokens, "tiny"
4 turns of 2, "learner" one turn of 128 after a prompt of as many. With `--learn`: seconds of GSPO, 4 updates a batch,
from random weights until a batch earns 0.90 on average; a number of 1..8 in 4 guesses, a letter recalled over 3 turns.
Rate, clips and batches are then those of both sides. Ours learns as the quickstart does, with an advantage per turn,
three passes over a batch and a bonus for entropy, without which one of three run seeds stood still; the peer, which
knows no turns, makes one pass: with three it took longer on two tuning seeds.
With `--model smollm2`: 32 episodes of 3 turns of 16 tokens with that model, all of its weights and an adapter; beside
learning stands its floor, 6 products of all weights with each token that is left after sharing (4 with an adapter) at
the best rate of products that this run measured.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.peer_games import SYMBOLS, Job
from benchmarks.record import Value
from gspo_gym.errors import MissingExtraError, ServiceError, UnknownNameError, nearest_name
from gspo_gym.policy.load import Policy, load_policy, save_policy

PEER = "TRL 1.16.0"
LIMIT_SECONDS = 900.0  # of a process
FLOOR_GOAL = 0.85  # of learning's seconds with a real model
_ROOT = Path(__file__).parent.parent

# Runs a job on a model's folder with a number of threads and returns the side's answer (Any: JSON).
Side = Callable[[Job, Path, int], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """A job for both sides.

    Attributes:
        job: what is done.
        costs: of each value's name, the parts of an answer that are added; each is a number or one a step.
        goals: of the values with one: so many times less than the peer's cost.
        model: for `load_policy`, or "game": a model of the games' few symbols.
        learning: the value that is put beside its floor; "": none.
    """

    job: Job
    costs: Mapping[str, tuple[str, ...]]
    goals: Mapping[str, float]
    model: str = "tiny:qwen3-256"
    learning: str = ""


SPEED = {
    "sampling": Case(
        Job("talk", num_turns=3, num_tokens=32),
        {
            "sampling 64 x 3 turns x 32": ("playing",),
            "learning on these": ("learning",),
        },
        {"sampling 64 x 3 turns x 32": 2.2},
    ),
    "tiny": Case(
        Job("talk", num_turns=4, num_tokens=2, text_length=1),
        {"step of 64 x 4 turns x 2": ("playing", "learning")},
        {"step of 64 x 4 turns x 2": 1 / 0.6},
        model="game",  # what is left is the turn in Python
    ),
    "learner": Case(
        Job("talk", num_turns=1, num_tokens=128, text_length=109),  # the template adds 19 tokens
        {"learning, groups of 8 that share half": ("learning",)},
        {"learning, groups of 8 that share half": 1.6},
    ),
}
LEARN = {
    name: Case(
        Job(name, num_turns=turns, num_tokens=2, minibatch=16, goal=0.9),
        {f"to 0.90 on {words}": ("seconds",)},
        {f"to 0.90 on {words}": 2.5},
        model="game",
    )
    for name, turns, words in (("guess", 4, "guess 1..8"), ("recall", 3, "recall"))
}


LORA_RANK = 16


def real_cases(model: str) -> dict[str, Case]:
    """Return the cases of a real model."""
    job = Job("talk", num_turns=3, num_tokens=16, num_episodes=32, minibatch=16, num_steps=1, text_length=60)
    jobs = {"all weights": job, "an adapter": replace(job, lora_rank=LORA_RANK)}
    parts = {"sampling": ("playing",), "learning": ("learning",), "a step": ("playing", "learning")}
    return {
        trained: Case(
            job,
            {f"{what}, {trained}": names for what, names in parts.items()},
            {f"sampling, {trained}": 3.0},
            model=model,
            learning=f"learning, {trained}",
        )
        for trained, job in jobs.items()
    }


def peer_is_installed(root: Path = _ROOT) -> bool:
    """Return whether the peer's environment is there, complete."""
    return (root / ".venv-peers" / ".installed").exists()


def peer_python(root: Path = _ROOT) -> Path:
    """Return the interpreter of the peer's environment.

    Raises:
        MissingExtraError: it is not installed.
    """
    python = root / ".venv-peers" / "bin" / "python"
    if not peer_is_installed(root):
        raise MissingExtraError(f"{python}: {PEER} is not installed there; `make peers` does it")
    return python


def all_sides(*, with_peer: bool) -> dict[str, Side]:
    """Return this project's side, and the peer's.

    Raises:
        MissingExtraError: the peer is wanted and is not installed.
    """
    sides: dict[str, Side] = {"ours": _process(Path(sys.executable), "benchmarks.peer_ours")}
    if with_peer:
        sides["peer"] = _process(peer_python(), "benchmarks.peer_trl")
    return sides


def _process(python: Path, module: str) -> Side:
    def run(job: Job, model: Path, threads: int) -> Mapping[str, Any]:
        command = [str(python), "-m", module, job.to_json(), str(model), str(threads)]
        quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        # Temporary folders in ours: a side that reaches its goal ends without removing them.
        environment = {**os.environ, **quiet, "OMP_NUM_THREADS": str(threads), "TMPDIR": str(model.parent)}
        try:
            ended = subprocess.run(
                command, cwd=_ROOT, env=environment, timeout=LIMIT_SECONDS, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return {"seconds": LIMIT_SECONDS} if job.goal else _fail(module, f"not done in {LIMIT_SECONDS:g} s")
        return parse_answer(ended.stdout) if ended.returncode == 0 else _fail(module, ended.stderr)

    return run


def _fail(module: str, text: str) -> Mapping[str, Any]:
    raise ServiceError(f"{module}: {text.strip()[-1000:]}")


def parse_answer(printed: str) -> Mapping[str, Any]:
    """Return the JSON of the last line; libraries print what they like before it.

    Raises:
        ServiceError: there is none.
    """
    last = printed.strip().rpartition("\n")[2]
    if not last.startswith("{"):
        raise ServiceError(f"a side of the benchmark: expected a line of JSON at its end, got {last[-200:]!r}")
    answer: Mapping[str, Any] = json.loads(last)
    return answer


def measure(
    cases: Mapping[str, Case],
    sides: Mapping[str, Side],
    *,
    rounds: int,
    threads: int,
    models: Mapping[str, Path],
    peer_name: str = PEER,
) -> list[Value]:
    """Return the costs of all cases; in every other round the peer comes first."""
    values: list[Value] = []
    for case in cases.values():
        answers: dict[str, list[Mapping[str, Any]]] = {name: [] for name in sides}
        for number in range(rounds):
            job = replace(case.job, seed=number)
            for name in sorted(sides, reverse=number % 2 == 1):
                answers[name].append(sides[name](job, models[case.model], threads))
        for name, parts in case.costs.items():
            ours, peer = (tuple(cost(a, parts) for a in answers.get(side, ())) for side in ("ours", "peer"))
            values.append(Value(name, ours, peer, peer_name if peer else "", goal=case.goals.get(name)))
            if name == case.learning:
                floor = tuple(cost(answer, ("floor",)) for answer in answers["ours"])
                values.append(Value(f"{name}, beside its floor", ours, floor, "the floor", goal=FLOOR_GOAL))
    return values


def cost(answer: Mapping[str, Any], parts: Sequence[str]) -> float:
    """Return the sum of these parts of an answer; of parts with a number a step, the median of the steps' sums."""
    columns = [each if isinstance(each, list) else [each] for each in (answer[part] for part in parts)]
    return statistics.median(sum(step) for step in zip(*columns, strict=True))


def choose(names: Sequence[str], *, learn: bool) -> Mapping[str, Case]:
    """Return the cases of these names, of all if there are none; `learn`: those of learning, else of speed.

    Raises:
        UnknownNameError: there is no such case.
    """
    cases = LEARN if learn else SPEED
    for name in names:
        if name not in cases:
            raise UnknownNameError(f"there is no shape {name!r}; {nearest_name(name, cases)}")
    return {name: case for name, case in cases.items() if name in names or not names}


def run_peers(cases: Mapping[str, Case], *, rounds: int, threads: int, with_peer: bool = True) -> list[Value]:
    """Return the costs of both sides.

    Raises:
        MissingExtraError: the peer is wanted and is not installed. ServiceError: a side failed.
    """
    return _measure_all(cases, all_sides(with_peer=with_peer), rounds=rounds, threads=threads)


def run_real(model: str, *, rounds: int, threads: int, with_peer: bool = True) -> list[Value]:
    """Return the costs of both sides with a real model, of learning's floor, and of an adapter beside all weights.

    Raises:
        MissingExtraError: the peer is wanted and is not installed. ServiceError: a side failed.
    """
    values = run_peers(real_cases(model), rounds=rounds, threads=threads, with_peer=with_peer)
    steps = {value.name: value.ours for value in values}
    adapter, whole = steps["a step, an adapter"], steps["a step, all weights"]
    return [*values, Value("a step, an adapter beside all weights", adapter, whole, "all weights", goal=1.0)]


def _measure_all(
    cases: Mapping[str, Case], sides: Mapping[str, Side], *, rounds: int, threads: int, peer_name: str = PEER
) -> list[Value]:
    with tempfile.TemporaryDirectory(prefix="gspo_gym-benchmark-") as name:
        folders: dict[str, Path] = {}
        for model in {case.model for case in cases.values()}:
            folders[model] = Path(name) / model.replace(":", "-")
            save_policy(game_policy() if model == "game" else load_policy(model), folders[model])
        return measure(cases, sides, rounds=rounds, threads=threads, models=folders, peer_name=peer_name)


def game_policy(seed: int = 0) -> Policy:
    """Return a Qwen3 of hidden size 128 and 4 layers with random weights, whose only tokens are the games' symbols."""
    specials = ["<|endoftext|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    vocabulary = {symbol: number for number, symbol in enumerate([*SYMBOLS, " "])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=(
            "{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|im_end|>' }}"
            "{%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
        ),
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    return Policy(model.eval(), tokenizer, "games")
