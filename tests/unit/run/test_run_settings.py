"""What a run is told about its policy is in what it records."""

import json

from small_run import small_run

from gspo_gym.base.files import read_lines
from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.rollout.episode_files import read_episodes


def test_a_run_records_who_played_and_what_it_was_told(tmp_path):
    config = RunConfig.from_dict(
        small_run(
            run={"folder": str(tmp_path)},
            model={"label": "told"},
            rollout={
                "policy_name": "guesser-2",
                "policy_config": {"system_prompt": "Play well."},
                "episodes_per_batch": 4,
            },
            training={"iterations_per_epoch": 1, "max_turns": 2, "group_size": 2},
            evaluation={"seeds": "0:2"},
        )
    )
    assert run_training(config)["policy_name"] == "guesser-2"
    folder = config.run_folder
    assert json.loads((folder / "summary.json").read_text())["policy_name"] == "guesser-2"
    for name in ("step_000001", "eval_000001"):
        lines = read_lines(folder / "episodes" / f"{name}.jsonl.gz")
        assert {json.loads(line)["policy_name"] for line in lines} == {"guesser-2"}
    episodes = read_episodes(folder / "episodes" / "step_000001.jsonl.gz")
    assert {episode.messages[0].role for episode in episodes} == {"system"}
    assert all(episode.messages[0].content.startswith("Play well.") for episode in episodes)
    assert max(len(episode.turns) for episode in episodes) <= 2
