"""Wordle: marks with repeated letters, the two sides of the list, exact transcripts, and a solver that always wins."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from gspo_gym_envs.wordle.env import Wordle
from gspo_gym_envs.wordle.marks import code, codes, letters_of, marks, possible
from gspo_gym_envs.wordle.policies import best_guess, information
from gspo_gym_envs.wordle.words import bundled_words, word_list

WORDS = ["light", "night", "right", "sight", "these", "those"]


def answers(env: Wordle, word: str, *actions: str) -> list[tuple[str, dict[str, float], bool]]:
    """Each answer to the actions: (text, reward terms, terminated)."""
    env.reset(seed=0, options={"word": word})
    heard = []
    for action in actions:
        text, reward, terminated, truncated, _ = env.step(action)
        assert not truncated
        heard.append((text, dict(reward.terms), terminated))
    return heard


@pytest.mark.parametrize(
    ("guess", "hidden", "expected"),
    [
        ("crane", "crane", "ggggg"),
        ("crane", "moldy", "....."),
        ("speed", "abide", "..y.y"),  # one e in abide: the first e of speed has it, the second does not
        ("speed", "erase", "y.yy."),  # two e's in erase: both e's of speed are elsewhere
        ("speed", "steal", "g.g.."),  # the one e is in place, so the other e is not there again
        ("allee", "lemon", ".y.y."),  # l once, e once
        ("llama", "label", "gyy.."),  # l in place, the other l and one a elsewhere, the second a not there again
        ("eerie", "these", "y...g"),  # the e in place is counted first, one e is left for the first place
        ("geese", "these", "..ggg"),  # both e's are in place, none is left for the first one of the guess
        ("abbey", "babes", "yygg."),
        ("sassy", "brass", "yy.g."),  # the third s: brass has two, one in place and one for the first
    ],
)
def test_repeated_letters_are_marked_as_often_as_the_word_has_them(guess: str, hidden: str, expected: str) -> None:
    assert marks(guess, hidden) == expected


def test_the_array_version_agrees_with_the_plain_one() -> None:
    words = ["".join(letters) for letters in itertools.product("abc", repeat=4)]  # 81 words full of repeated letters
    letters = letters_of(words)
    for guess in words:
        assert [code(marks(guess, hidden)) for hidden in words] == codes(guess, letters).tolist()


def test_a_mark_leaves_the_words_that_would_have_given_it() -> None:
    letters = letters_of(WORDS)
    left = possible(letters, "light", marks("light", "sight"))
    assert [word for word, is_left in zip(WORDS, left, strict=True) if is_left] == ["night", "right", "sight"]


def test_a_won_episode_reads_exactly_so() -> None:
    # Of the six words, light leaves night, right and sight; light again rules nothing out and contradicts its own mark;
    # these tells the three apart as far as sight or not, because only sight has its s.
    share = math.log(6 / 3) / math.log(6)
    assert answers(Wordle(style="terse", words=WORDS), "sight", "light", "LIGHT ", "these", "sight") == [
        ("light .gggg", {"information": pytest.approx(0.2 * share)}, False),
        ("light .gggg", {"information": 0.0, "inconsistent": -0.05}, False),
        ("these yy.y.", {"information": pytest.approx(0.2 * (1 - share)), "inconsistent": -0.05}, False),
        ("found", {"found": 0.8, "information": 0.0}, True),
    ]


def test_a_lost_episode_is_terminated_and_names_the_word() -> None:
    heard = answers(Wordle(style="terse", max_guesses=3), "these", "hello", "sixes", "four")
    assert [text for text, *_ in heard] == ["hello yy...", "not in the list", "lost: these"]
    assert heard[1:] == [("not in the list", {"illegal": -0.05}, False), ("lost: these", {"illegal": -0.05}, True)]


def test_a_verbose_episode_reads_exactly_so() -> None:
    env = Wordle(style="verbose", max_guesses=2)
    assert env.reset(seed=0)[0] == (
        "I am thinking of an English word of 5 letters. You have 2 tries. Answer with a word alone. I say of each of "
        "its letters whether it is in place, elsewhere in my word, or not there (again)."
    )
    assert [text for text, *_ in answers(env, "these", "geese", "those")] == [
        "g not there, e not there, e in place, s in place, e in place. You have 1 try.",
        "You have no tries left. The word was these.",
    ]


@pytest.mark.parametrize(
    "text", ["", "thes", "theses", "the se", "these those", "th3se", "thèse", "ｔｈｅｓｅ", "these." * 900]
)
def test_anything_but_five_letters_is_illegal(text: str) -> None:
    assert answers(Wordle(style="terse"), "these", text) == [("not 5 letters", {"illegal": -0.05}, False)]


def test_any_letters_may_be_guessed_if_that_is_allowed() -> None:
    [(text, terms, _)] = answers(Wordle(style="terse", allowed="any"), "these", "xyzse")
    assert text == "xyzse ...gg"
    assert "illegal" not in terms


def test_the_information_of_a_won_episode_adds_up_to_its_weight() -> None:
    env = Wordle(style="terse", found_reward=0.5, information_reward=0.25)
    heard = answers(env, "wound", "crane", "stand", "bound", "found", "pound", "wound")
    assert heard[-1][0] == "found"
    assert sum(terms.get("information", 0.0) for _, terms, _ in heard) == pytest.approx(0.25)


def test_the_bundled_list_is_clean() -> None:
    words = bundled_words()
    assert len(words.answers) == 937
    assert len(words.allowed) == 937 + 769
    assert set(words.answers) <= words.allowed
    assert all(len(word) == 5 and set(word) <= set("abcdefghijklmnopqrstuvwxyz") for word in words.allowed)


def test_the_sides_share_no_word_and_seeds_go_through_each() -> None:
    env = Wordle(style="terse")

    def hidden(seeds: range) -> list[str]:
        found = []
        for seed in seeds:
            env.reset(seed=seed)
            found.append(str(env._hidden))
        return found

    held_out, train = hidden(range(187)), hidden(range(2**31, 2**31 + 750))
    assert Counter(held_out + train) == Counter(env.words.answers)  # 937 = 187 + 750, each once
    assert hidden(range(187, 190)) == held_out[:3]


def test_a_short_list_has_both_sides_too() -> None:
    words = word_list(["cat", "dog"])
    assert {words.tasks.task(0), words.tasks.task(2**31)} == {"cat", "dog"}


def test_the_solver_finds_every_word_of_the_bundled_list_within_six_guesses() -> None:
    words = bundled_words().answers
    for hidden in words:
        heard: list[tuple[str, str]] = []
        while not heard or heard[-1][0] != hidden:
            guess = best_guess(words, tuple(heard))
            assert all(marks(earlier, guess) == mark for earlier, mark in heard)  # no guess is inconsistent
            heard.append((guess, marks(guess, hidden)))
        assert len(heard) <= 6, hidden


def test_information_is_the_entropy_of_the_marks() -> None:
    # Of the four words in -ight, the guess marks itself as found and the three others alike: shares 1/4 and 3/4.
    expected = 0.25 * math.log2(4) + 0.75 * math.log2(4 / 3)
    assert information("light", letters_of(WORDS[:4])) == pytest.approx(expected)


def test_the_reference_earns_the_top_and_random_guesses_do_not() -> None:
    env = Wordle(style="terse")
    for name, seed in itertools.product(("reference", "random"), range(40)):
        env.reset(seed=seed)
        player = env.policies[name](env, np.random.default_rng((seed, 1)))
        total, terminated = 0.0, False
        while not terminated:
            _, reward, terminated, _, _ = env.step(str(player(())))
            total += reward
        assert total == pytest.approx(1.0) if name == "reference" else env.reward_range[0] <= total < 1.0


def test_the_player_who_keeps_letters_keeps_those_in_place_and_varies_the_others() -> None:
    env = Wordle(
        style="terse", words=["".join(letters) for letters in itertools.product("abc", repeat=3)], max_guesses=20
    )
    after: set[str] = set()
    for seed in range(60):
        env.reset(seed=seed, options={"word": "abc"})
        player = env.policies["kept_letters"](env, np.random.default_rng(seed))
        env.step("acb")  # a is in place
        guess = str(player(()))
        after.add(guess)
        assert guess[0] == "a"
    assert len(after) == 9


def test_an_answer_that_could_not_be_read_costs_a_try() -> None:
    env = Wordle(style="terse", max_guesses=2)
    env.reset(seed=0, options={"word": "these"})
    text, reward, terminated, _, _ = env.invalid_action("unclosed <think>")
    assert (text, dict(reward.terms), terminated) == ("unclosed <think>", {"illegal": -0.05}, False)
    assert env.invalid_action("unclosed <think>")[0] == "lost: these"
