"""TRL's side is not installed here: pairs, medians, the games and refusals are tested without it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.main import main
from benchmarks.peer_games import GAMES, SYMBOLS, Job
from benchmarks.peer_ours import make_config
from benchmarks.peers import SPEED, Case, choose, cost, game_policy, measure, parse_answer, peer_python
from gspo_gym.errors import MissingExtraError, ServiceError, UnknownNameError


def test_both_sides_do_the_same_job_in_turns_and_costs_are_medians_of_steps() -> None:
    asked: list[tuple[str, int, int]] = []

    def side(name: str, playing: float) -> Any:
        def run(job: Job, model: Path, threads: int) -> Mapping[str, Any]:
            asked.append((name, job.seed, threads))
            assert model == Path("weights")
            return {"playing": [playing, 9.0, playing], "learning": [1.0, 1.0, 9.0]}

        return run

    case = Case(Job("talk", 3, 32), {"play": ("playing",), "step": ("playing", "learning")}, {"step": 1.6}, model="m")
    sides = {"ours": side("ours", 1.0), "peer": side("peer", 3.0)}
    play, step = measure({"case": case}, sides, rounds=2, threads=7, models={"m": Path("weights")})
    assert asked == [("ours", 0, 7), ("peer", 0, 7), ("peer", 1, 7), ("ours", 1, 7)]
    assert (play.ours, play.peer, play.ratios, play.goal) == ((1.0, 1.0), (3.0, 3.0), (3.0, 3.0), None)
    # ours: 1 + 1, 9 + 1 and 1 + 9; the peer's: 3 + 1, 9 + 1 and 3 + 9
    assert (step.ours, step.peer, step.goal) == ((10.0, 10.0), (10.0, 10.0), 1.6)
    (alone, _) = measure({"case": case}, {"ours": sides["ours"]}, rounds=1, threads=1, models={"m": Path("weights")})
    assert (alone.peer, alone.peer_name, alone.ratios) == ((), "", ())


def test_an_answer_is_the_last_line_whatever_stands_before_it() -> None:
    assert parse_answer('Loading weights\n{"loss": 1}\n{"seconds": 2.5, "episodes": 64}\n') == {
        "seconds": 2.5,
        "episodes": 64,
    }
    assert cost({"seconds": 2.5}, ("seconds",)) == 2.5
    with pytest.raises(ServiceError, match="expected a line of JSON at its end, got 'Killed'"):
        parse_answer("{}\nKilled\n")


def test_a_peer_that_is_not_installed_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / ".venv-peers" / "bin").mkdir(parents=True)  # an installation that did not end
    with pytest.raises(MissingExtraError, match=r"TRL 1.16.0 is not installed there; `make peers` does it"):
        peer_python(tmp_path)
    (tmp_path / ".venv-peers" / ".installed").touch()
    assert peer_python(tmp_path) == tmp_path / ".venv-peers" / "bin" / "python"


def test_shapes_are_chosen_by_name() -> None:
    assert choose((), learn=False) == SPEED
    assert list(choose(("tiny",), learn=False)) == ["tiny"]
    with pytest.raises(UnknownNameError, match=r"there is no shape 'recal'.*recall"):
        choose(("recal",), learn=True)


def test_numbers_that_are_only_printed_cannot_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--keep", "kept.jsonl"]) == 2
    assert "--keep: faults only prints" in capsys.readouterr().err


def test_recall_pays_for_the_first_letter_in_every_turn() -> None:
    game = GAMES["recall"](Job("recall", 3, 2))
    first = game.reset(5)
    turns = [game.step(said) for said in (first, "?", first)]
    assert [earned for _, earned, _ in turns] == [1 / 3, 0.0, 1 / 3]
    assert [is_over for *_, is_over in turns] == [False, False, True]
    assert {first, *(text for text, *_ in turns)} <= set("abcd")


def test_talk_earns_what_depends_on_the_words_and_ends_after_its_turns() -> None:
    game = GAMES["talk"](Job("talk", 2, 2, text_length=5))
    assert len(game.reset(3)) == 5
    (text, earned, is_over), (_, other, is_last) = game.step("x"), game.step("y")
    assert (text, is_over, is_last) == ("bbbbb", False, True)
    assert 0.0 <= earned != other <= 1.0


def test_every_symbol_is_one_token_of_the_games_model_and_a_turn_adds_four() -> None:
    policy = game_policy()
    assert [len(policy.tokenizer(symbol)["input_ids"]) for symbol in SYMBOLS] == [1] * len(SYMBOLS)
    assert policy.tokenizer.decode(policy.tokenizer("3>")["input_ids"]) == "3>"
    user = {"role": "user", "content": "?"}
    ids = policy.tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
    assert policy.tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "?", "<|im_end|>", "<|assistant|>"]
    assert policy.model.config.vocab_size == len(policy.tokenizer) == len(SYMBOLS) + 6


def test_our_sides_configuration_has_the_jobs_numbers(tmp_path: Path) -> None:
    config = make_config(SPEED["sampling"].job, "tiny:qwen3-256", tmp_path)
    assert (config.rollout.max_turns, config.rollout.max_output_tokens, config.rollout.min_output_tokens) == (3, 32, 31)
    assert (config.rollout.episodes_per_batch, config.training.batch_size, config.training.group_size) == (64, 64, 8)
    learning = make_config(Job("recall", 4, 2, minibatch=16, goal=0.9, seed=3), "tiny:qwen3-64", tmp_path)
    assert (learning.training.batch_size, learning.run.seed, learning.rollout.min_output_tokens) == (16, 3, 0)
    chosen = (learning.advantages.level, learning.training.update_epochs, learning.loss.entropy_coef)
    assert chosen == ("turn", 3, 0.02)
    assert (config.advantages.level, config.training.update_epochs, config.loss.entropy_coef) == ("trajectory", 1, 0.0)
