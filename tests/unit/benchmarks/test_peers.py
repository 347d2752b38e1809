"""TRL's side is not installed here: pairs, medians, the games and refusals are tested without it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.main import main
from benchmarks.peer_games import GAMES, SYMBOLS, Job
from benchmarks.peer_ours import CountedComputer, floor_seconds, make_config
from benchmarks.peers import (
    SPEED,
    Case,
    choose,
    cost,
    game_policy,
    measure,
    parse_answer,
    peer_python,
    run_real,
)
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


def test_a_real_models_learning_stands_beside_its_floor_and_an_adapter_beside_all_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def side(playing: float, learning: float) -> Any:
        def run(job: Job, _: Path, __: int) -> Mapping[str, Any]:
            factor = 0.5 if job.lora_rank else 1.0
            return {"playing": [playing], "learning": [factor * learning], "floor": factor * 8.0}

        return run

    monkeypatch.setattr(
        "benchmarks.peers.all_sides", lambda *, with_peer: {"ours": side(2.0, 10.0), "peer": side(7.0, 25.0)}
    )
    monkeypatch.setattr("benchmarks.peers.load_policy", lambda _: game_policy())
    values = {value.name: value for value in run_real("smollm2", rounds=1, threads=1)}
    assert [name for name, value in values.items() if value.goal is not None] == [
        "sampling, all weights",
        "learning, all weights, beside its floor",
        "sampling, an adapter",
        "learning, an adapter, beside its floor",
        "a step, an adapter beside all weights",
    ]
    assert values["sampling, an adapter"].ratios == (3.5,)  # 7 / 2
    assert values["learning, all weights"].ratios == (2.5,)  # 25 / 10
    assert values["learning, all weights, beside its floor"].ratios == (0.8,)  # 8 / 10
    assert values["learning, an adapter, beside its floor"].ratios == (0.8,)  # 4 / 5
    assert values["a step, an adapter beside all weights"].ratios == (12 / 7,)  # 2 + 10 beside 2 + 5


def test_the_floor_counts_products_of_all_weights_with_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = game_policy()
    num_weights = sum(p.numel() for p in policy.model.parameters())
    monkeypatch.setattr("benchmarks.peer_ours.load_policy", lambda _: policy)
    monkeypatch.setattr("benchmarks.peer_ours.matmul_flops", lambda: 1e9)
    assert floor_seconds("m", num_tokens=100, is_lora=False) == pytest.approx(6 * num_weights * 100 / 1e9)
    assert floor_seconds("m", num_tokens=100, is_lora=True) == pytest.approx(4 * num_weights * 100 / 1e9)


def test_tokens_that_rows_share_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedComputer, "num_tokens", 0)
    computer = CountedComputer(game_policy().model, share_prefixes="auto")
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    actions = mask & (torch.arange(6) >= 4)
    with torch.no_grad():
        computer.compute(ids, mask, actions)
    assert CountedComputer.num_tokens == 0
    computer.compute(ids, mask, actions)
    assert CountedComputer.num_tokens == 6  # 4 that both share, and one more of each: the last predicts nothing


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
    assert main(["gateway", "--keep", "kept.jsonl"]) == 2
    assert "--keep: gateway only prints" in capsys.readouterr().err


def test_halving_finds_every_number_of_guess_and_wrong_words_use_up_the_tries() -> None:
    numbers = set()
    for seed in range(64):
        game, low, high, earned, is_over = GAMES["guess"](Job("guess", 4, 2)), 1, 8, 0.0, False
        assert game.reset(seed) == "?"
        while not is_over:
            middle = (low + high) // 2
            text, earned, is_over = game.step(str(middle))
            low, high = (middle + 1, high) if text == ">" else (low, middle - 1)
        assert earned == 1.0
        numbers.add(middle)
    assert numbers == set(range(1, 9))
    game = GAMES["guess"](Job("guess", 2, 2))
    game.reset(0)
    assert [game.step(said) for said in ("45", "")] == [("!", 0.0, False), ("!", 0.0, True)]


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
    learning = make_config(Job("guess", 4, 2, minibatch=16, goal=0.9, seed=3), "tiny:qwen3-64", tmp_path)
    assert (learning.training.batch_size, learning.run.seed, learning.rollout.min_output_tokens) == (16, 3, 0)
    chosen = (learning.advantages.level, learning.training.update_epochs, learning.loss.entropy_coef)
    assert chosen == ("turn", 3, 0.02)
    assert (config.advantages.level, config.training.update_epochs, config.loss.entropy_coef) == ("trajectory", 1, 0.0)
