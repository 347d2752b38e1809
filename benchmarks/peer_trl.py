"""TRL's side of `python -m benchmarks peers`: one job, in the environment .venv-peers, by `GRPOTrainer`.

Arguments: the job as JSON, the model's folder, the threads. Turns are sampled by the trainer's own generation, as in
its loop of tool calls; the rollout function adds the environment's texts between them.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peer_games import GAMES, Goal, Job, report

_GROUP_SIZE = 8


class Rollout:
    """TRL's rollout function of a job; notes when each batch began and how long it was played."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self._job, self._tokenizer, self._goal = job, tokenizer, Goal(job)
        self._seams: dict[str, list[int]] = {}
        self.begun: list[float] = []
        self.played: list[float] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.begun.append(time.perf_counter())
        self._goal.start()
        games = [GAMES[self._job.game](self._job) for _ in prompts]
        asked = [self._render(game.reset(int(seed))) for game, seed in zip(games, prompts, strict=True)]
        answers: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        rewards = [0.0] * len(prompts)
        alive = list(range(len(prompts)))
        while alive:
            histories = [asked[i] + answers[i] for i in alive]
            sampled, _ = trainer._generate_single_turn(histories, None, {}, _GROUP_SIZE)
            still = []
            for i, ids in zip(alive, sampled, strict=True):
                has_ended = ids[-1] == self._tokenizer.eos_token_id
                said = ids[:-1] if has_ended else ids
                text, earned, is_over = games[i].step(self._tokenizer.decode(said, skip_special_tokens=False))
                rewards[i] += earned
                answers[i] += ids
                masks[i] += [1] * len(ids)
                if not is_over:
                    seam = self._seam(text, has_ended=has_ended)
                    answers[i] += seam
                    masks[i] += [0] * len(seam)
                    still.append(i)
            alive = still
        self.played.append(time.perf_counter() - self.begun[-1])
        for reward in rewards:
            self._goal.add(reward)
        return {"prompt_ids": asked, "completion_ids": answers, "logprobs": None, "env_mask": masks, "earned": rewards}

    def _render(self, text: str) -> list[int]:
        return self._ids([{"role": "user", "content": text}])

    def _seam(self, text: str, *, has_ended: bool) -> list[int]:
        """Return the tokens between a turn's answer and the next; the first is the end of that turn."""
        if text not in self._seams:
            user = {"role": "user", "content": "1"}
            answered = [user, {"role": "assistant", "content": "1"}]
            before = len(self._ids([user])) + 1  # "1" is one token
            self._seams[text] = self._ids([*answered, {"role": "user", "content": text}])[before:]
        return self._seams[text][1:] if has_ended else self._seams[text]

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids


def _config(job: Job, folder: str) -> GRPOConfig:
    exactly = {"min_new_tokens": job.num_tokens - 1} if job.game == "talk" else None
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=job.seed,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=job.minibatch,
        steps_per_generation=job.num_episodes // job.minibatch,
        num_generations=_GROUP_SIZE,
        max_completion_length=job.num_tokens,
        generation_kwargs=exactly,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-2,
        epsilon_high=4e-2,
        max_steps=10**6 if job.goal else (job.num_steps + 1) * (job.num_episodes // job.minibatch),
        report_to="none",
        save_strategy="no",
        logging_steps=10**6,
        disable_tqdm=True,
    )


def main() -> None:
    """Run the job and print the seconds of playing and learning of each step."""
    job, folder = Job(**json.loads(sys.argv[1])), sys.argv[2]
    torch.set_num_threads(int(sys.argv[3]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rollout = Rollout(job, tokenizer)
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda earned, **_: earned,
            args=_config(job, output),
            train_dataset=Dataset.from_dict({"prompt": [str(seed) for seed in range(20_000)]}),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        trainer.train()
    begun = [*rollout.begun, time.perf_counter()]
    steps = [after - before for before, after in itertools.pairwise(begun)][1:]  # the first warms up
    playing = rollout.played[1:]
    report({"playing": playing, "learning": [step - play for step, play in zip(steps, playing, strict=True)]})


if __name__ == "__main__":
    main()
