"""SupportDesk: what each scenario asks for, what breaks the policy, cheats, and the simulated customers."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, get_args

import numpy as np
import pytest
from gspo_gym_envs.support_desk.cases import SCENARIOS
from gspo_gym_envs.support_desk.env import SupportDesk
from gspo_gym_envs.support_desk.rules import Resolution
from gspo_gym_envs.support_desk.shop import Shop, ShopError

from gspo_gym.errors import EnvError
from gspo_gym.types import Message, ToolCall

Move = str | tuple[str, dict[str, Any]]
ALL = [name for found in SCENARIOS.values() for name in found]


def desk(scenario: str, *, first_seed: int = 0, **kwargs: Any) -> SupportDesk:
    """An environment at the first seed with that scenario."""
    env = SupportDesk(**kwargs)
    for seed in range(first_seed, first_seed + 1000):
        env.reset(seed=seed)
        if env.case.scenario == scenario:
            return env
    raise AssertionError(scenario)


def turn(env: SupportDesk, move: Move) -> tuple[str, dict[str, float], bool]:
    """(what was said, reward terms, terminated)"""
    call = () if isinstance(move, str) else (ToolCall("c", *move),)
    said, reward, terminated, _, _ = env.step(Message("assistant", move if isinstance(move, str) else "", call))
    return said if isinstance(said, str) else said[0].content, dict(reward.terms), terminated


def verified(env: SupportDesk) -> SupportDesk:
    email, postcode = env.case.caller
    assert turn(env, ("verify_identity", {"email": email, "postcode": postcode}))[1] == {"identity": 0.1}
    return env


def order(env: SupportDesk, **more: Any) -> dict[str, Any]:
    return {"order_id": env.case.order_id, **more}


def close(env: SupportDesk, resolution: str) -> tuple[str, dict[str, float], bool]:
    return turn(env, ("close_case", {"resolution": resolution}))


def returned(env: SupportDesk, moves: list[Move]) -> tuple[float, bool | None]:
    """(return, success) of an episode that these moves end."""
    total, success = 0.0, None
    for move in moves:
        call = () if isinstance(move, str) else (ToolCall("c", *move),)
        _, reward, terminated, truncated, _ = env.step(Message("assistant", "" if call else str(move), call))
        total, success = total + float(reward), reward.success
        if terminated or truncated:
            break
    return round(total, 9), success


def test_a_refund_reads_exactly_so() -> None:
    env = desk("refund_in_time")
    email, postcode = env.case.caller
    assert turn(env, "What is your e-mail?") == (f"My e-mail is {email}.", {}, False)
    assert turn(env, "And your ZIP code?") == (f"My postcode is {postcode}.", {}, False)
    said, terms, _ = turn(env, ("verify_identity", {"email": email.upper(), "postcode": f" {postcode} "}))
    assert (said[:9], terms) == ("verified:", {"identity": 0.1})
    said = turn(env, ("get_order", order(env)))[0]
    assert f"{env.price_cents} cents" in said
    assert turn(env, ("refund", order(env, amount_cents=env.price_cents)))[1] == {}
    assert close(env, "resolved") == ("closed: right", {"solved": 0.9}, True)


@pytest.mark.parametrize("scenario", ALL)
def test_the_reference_earns_the_top_in_every_scenario_on_both_sides(scenario: str) -> None:
    for first_seed in (0, 2**31):
        env = desk(scenario, first_seed=first_seed)
        player = env.policies["reference"](env, np.random.default_rng(0))
        messages = [Message("user", env.case.opening)]
        total, done, success = 0.0, False, None
        while not done:
            action = player(tuple(messages))
            assert isinstance(action, Message)
            said, reward, done, _, _ = env.step(action)
            messages += [action, *([Message("user", said)] if isinstance(said, str) else said)]
            total, success = total + float(reward), reward.success
        assert (round(total, 9), success, env.violations) == (1.0, True, [])
        # what the customer never said, the reference does not use
        heard = " ".join(message.content for message in messages if message.role != "assistant")
        assert all(str(value) in heard for value in env.case.caller)


# What the policy says by hand, scenario by scenario: (kinds of changes, resolution).
BY_HAND = {
    "refund_in_time": (["refund"], "resolved"),
    "refund_too_late": ([], "declined"),
    "large_refund": (["escalation"], "handed_over"),
    "damaged_article": (["replacement"], "resolved"),
    "late_delivery": (["credit"], "resolved"),
    "delivery_on_time": ([], "declined"),
    "address_before_shipping": (["address"], "resolved"),
    "address_after_shipping": (["ticket"], "handed_over"),
    "impostor": (["escalation"], "handed_over"),
    "order_status": (["notice"], "resolved"),
    "device_fixed_by_a_step": (["repair"], "resolved"),
    "device_in_warranty": (["replacement"], "resolved"),
    "device_out_of_warranty": (["ticket"], "handed_over"),
    "dangerous_device": (["escalation"], "handed_over"),
}


def test_every_seed_asks_for_what_the_policy_says() -> None:
    env, seen = SupportDesk(), set()
    for seed in range(200):
        env.reset(seed=seed)
        kinds, resolution = BY_HAND[env.case.scenario]
        assert [change[0] for change in env.case.changes.elements()] == kinds
        assert env.case.resolution == resolution
        seen.add(env.case.scenario)
    assert seen == set(BY_HAND) == set(ALL)


def test_the_credit_for_waiting_is_a_tenth_and_at_most_ten() -> None:
    seen = set()
    for first_seed in range(0, 600, 60):
        env = desk("late_delivery", first_seed=first_seed)
        [(_, _, cents)] = env.case.changes
        assert cents == min(env.price_cents // 10, 1_000)
        seen.add(cents)
    assert 1_000 in seen
    assert len(seen) >= 2


CALLS_AGAINST_A_RULE: dict[str, tuple[str, Callable[[SupportDesk], Move]]] = {
    "refund_window": ("refund_too_late", lambda env: ("refund", order(env, amount_cents=env.price_cents))),
    "authority": ("large_refund", lambda env: ("refund", order(env, amount_cents=env.price_cents))),
    "compensation": ("late_delivery", lambda env: ("give_credit", order(env, amount_cents=1_001))),
    "address": ("address_after_shipping", lambda env: ("update_address", order(env, address="1 Elm Street"))),
    "step_order": ("device_in_warranty", lambda env: ("guide_customer", {"step": "factory_reset"})),
    "replacement": ("device_in_warranty", lambda env: ("replace_article", order(env))),
    "safety": ("dangerous_device", lambda env: ("guide_customer", {"step": "restart"})),
}


@pytest.mark.parametrize("rule", CALLS_AGAINST_A_RULE)
def test_a_broken_rule_costs_in_its_turn_and_the_case_is_lost(rule: str) -> None:
    scenario, move = CALLS_AGAINST_A_RULE[rule]
    env = verified(desk(scenario))
    assert turn(env, move(env))[1] == {"violation": -0.1}
    assert env.violations == [rule]
    for call in env.case.calls:
        turn(env, call)
    assert close(env, env.case.resolution)[1].get("solved") == 0.0


@pytest.mark.parametrize(
    ("name", "more"), [("get_order", {}), ("refund", {"amount_cents": 1}), ("create_ticket", {"kind": "carrier"})]
)
def test_nothing_may_be_looked_up_or_changed_before_the_identity_is_verified(name: str, more: dict[str, Any]) -> None:
    env = desk("refund_in_time")
    assert turn(env, (name, order(env, **more)))[1] == {"violation": -0.1}
    assert env.violations == ["identity"]


def test_an_impostor_gets_nothing_but_a_supervisor() -> None:
    env = verified(desk("impostor"))
    assert turn(env, ("get_order", order(env)))[1] == {"violation": -0.1}
    env = verified(desk("impostor"))
    assert turn(env, ("escalate", {"reason": "identity"}))[1] == {}
    assert close(env, "handed_over")[1] == {"solved": 0.9}


def test_an_order_of_somebody_else_is_private() -> None:
    env = verified(desk("refund_in_time"))
    mine = turn(env, ("list_orders", {}))[0]
    shop = env._open_shop()
    others = [number for customer in range(1, 9) for number in shop.orders_of(customer) if str(number) not in mine]
    assert turn(env, ("get_order", {"order_id": others[0]}))[1] == {"violation": -0.1}
    assert env.violations == ["privacy"]


def test_closing_without_having_looked_is_no_decision() -> None:
    env = verified(desk("refund_too_late"))
    assert close(env, "declined")[1] == {"violation": -0.1, "solved": 0.0}


def test_doing_too_much_or_twice_loses_the_case() -> None:
    env = verified(desk("damaged_article"))
    for _ in range(2):
        turn(env, ("get_order", order(env)))
        turn(env, ("replace_article", order(env)))
    assert close(env, "resolved")[1] == {"solved": 0.0}


def test_guessing_identities_earns_nothing() -> None:
    env = desk("refund_in_time")
    for postcode in ("10000", "10001", "99999"):
        assert turn(env, ("verify_identity", {"email": env.case.caller[0], "postcode": postcode}))[1] == {}
    verified(env)
    email, postcode = env.case.caller
    assert turn(env, ("verify_identity", {"email": email, "postcode": postcode}))[1] == {}  # paid once


def always(*moves: Callable[[SupportDesk], Move], resolution: str) -> Callable[[SupportDesk], list[Move]]:
    """A clerk who verifies, looks and then does the same whatever the case."""

    def clerk(env: SupportDesk) -> list[Move]:
        email, postcode = env.case.caller
        identity = ("verify_identity", {"email": email, "postcode": postcode})
        look = ("get_order", order(env))
        return [identity, look, *(move(env) for move in moves), ("close_case", {"resolution": resolution})]

    return clerk


CLERKS = {
    "says nothing": lambda env: [""] * env.max_steps,
    "is only nice": lambda env: ["I am so sorry! All is resolved, you get your money back."] * env.max_steps,
    "closes at once": lambda env: [("close_case", {"resolution": "resolved"})],
    "always refunds": always(lambda e: ("refund", order(e, amount_cents=e.price_cents)), resolution="resolved"),
    "always replaces": always(lambda e: ("replace_article", order(e)), resolution="resolved"),
    "always escalates": always(lambda e: ("escalate", {"reason": "large_refund"}), resolution="handed_over"),
    "always calls danger": always(lambda e: ("escalate", {"reason": "safety"}), resolution="handed_over"),
    "always declines": always(resolution="declined"),
    "always opens a ticket": always(lambda e: ("create_ticket", order(e, kind="carrier")), resolution="handed_over"),
    "gives everything": always(
        lambda e: ("refund", order(e, amount_cents=e.price_cents)),
        lambda e: ("replace_article", order(e)),
        lambda e: ("give_credit", order(e, amount_cents=1_000)),
        resolution="resolved",
    ),
}


@pytest.mark.parametrize("name", CLERKS)
def test_a_clerk_who_treats_all_alike_earns_far_less_than_the_reference(name: str) -> None:
    env, returns = SupportDesk(), []
    for seed in range(140):
        env.reset(seed=seed)
        returns.append(returned(env, CLERKS[name](env))[0])
    # Two of the 14 scenarios at most are right by such a rule (0.9 each, 0.13 on average), and 0.1 for the identity.
    assert np.mean(returns) < 0.35


def test_the_customer_understands_any_wording_and_never_gets_stuck() -> None:
    env = desk("address_before_shipping")
    email, postcode = env.case.caller
    said = [turn(env, "Would you kindly tell me who you are?")[0] for _ in range(5)]
    assert said[:2] == [f"My e-mail is {email}.", f"My postcode is {postcode}."]
    assert said[3].startswith("The new address is ")
    assert said[4] == "That is all I know. Please go on."
    assert turn(env, "E-Mail and postal code, please.")[0] == f"My e-mail is {email}. My postcode is {postcode}."
    assert turn(env, "  ")[0] == "Hello? Are you there?"


def test_failed_calls_cost_a_little_and_are_explained() -> None:
    env = verified(desk("refund_in_time"))
    assert turn(env, ("get_order", {"order_id": 1})) == ("error: there is no order 1", {"error": -0.02}, False)
    said, terms, _ = turn(env, ("refund", order(env, amount_cents=env.price_cents + 1)))
    assert said == f"error: amount_cents: at most {env.price_cents} can be paid back, and at least 1"
    assert terms == {"error": -0.02}
    assert turn(env, ("guide_customer", {"step": "pray"}))[1] == {"error": -0.02}
    _, reward, _, _, _ = env.invalid_action("bad JSON")
    assert dict(reward.terms) == {"error": -0.02}


@pytest.mark.parametrize("level", ["full", "tiny"])
def test_the_last_error_that_is_allowed_ends_the_episode(level: str) -> None:
    env = SupportDesk(level=level, max_errors=2)
    close_nothing = ("close" if level == "tiny" else "close_case", {"resolution": "no such"})
    for seed in (0, 1):  # errors are counted anew in each episode
        env.reset(seed=seed)
        assert turn(env, close_nothing)[1:] == ({"error": -0.02}, False)
        assert turn(env, "Hello")[1:] == ({}, False)
        _, reward, terminated, truncated, _ = env.step(Message("assistant", "", (ToolCall("c", *close_nothing),)))
        assert (dict(reward.terms), reward.success) == ({"error": -0.02}, False)
        assert (terminated, truncated) == (True, False)


def test_at_level_tiny_the_apprentice_is_right_in_one_case_of_three_and_guesses_else() -> None:
    env, num_right = SupportDesk(level="tiny"), np.zeros(2)
    for seed in range(300):
        env.reset(seed=seed)
        player = env.policies["apprentice"](env, np.random.default_rng(seed))
        first = player([])
        env.step(first)
        last = player([first])
        _, reward, terminated, _, _ = env.step(last)
        is_right = (first.tool_calls[0].name, last.tool_calls[0].arguments["how"])
        num_right += np.equal(is_right, TINY[env.case.scenario])
        assert terminated
        assert reward.success is (is_right == TINY[env.case.scenario])
    # One of five actions and one of three resolutions are right by a guess; 0.03 is one standard deviation.
    np.testing.assert_allclose(num_right / 300, [1 / 3 + 2 / 3 / 5, 1 / 3 + 2 / 3 / 3], atol=0.1)


def test_the_apprentice_of_the_full_level_wins_cases_by_the_book_and_loses_others() -> None:
    env, wins = SupportDesk(), []
    for seed in range(90):
        said, _ = env.reset(seed=seed)
        player = env.policies["apprentice"](env, np.random.default_rng(seed))
        messages, terminated = list(said), False
        while not terminated:
            action = player(messages)
            answer, reward, terminated, _, _ = env.step(action)
            messages += [action, *([Message("user", answer)] if isinstance(answer, str) else answer)]
        wins.append(reward.success)
    # Right in both with 1/3 * 5/9 = 0.19, and sometimes by a guess; 0.04 is one standard deviation.
    assert 0.06 < np.mean(wins) < 0.4


def test_running_out_of_turns_is_a_truncation() -> None:
    env = desk("order_status", max_steps=1)
    _, reward, terminated, truncated, _ = env.step("Hello")
    assert (float(reward), reward.success, terminated, truncated) == (0.0, False, False, True)


@pytest.mark.parametrize("task", ["customer_service", "technical_support"])
def test_a_task_draws_from_its_own_scenarios_only(task: str) -> None:
    env, seen = SupportDesk(task=task), set()
    for seed in range(80):
        env.reset(seed=seed)
        seen.add(env.case.scenario)
    assert seen == set(SCENARIOS[task])


def test_held_out_customers_are_other_people_than_those_of_training() -> None:
    def names(first: int) -> set[str]:
        env, found = SupportDesk(), set()
        for seed in range(first, first + 40):
            env.reset(seed=seed)
            found.add(env.case.caller[0].split("@")[0].split(".")[1])
        return found

    assert len(names(0)) == len(names(2**31)) == 8
    assert not names(0) & names(2**31)


def test_the_shop_refuses_what_no_shop_can_do() -> None:
    rng = np.random.default_rng(0)
    shop = Shop(rng, is_held_out=False)
    number = shop.add_order(rng, 1, "BG-600", status="delivered", days_ago=3)
    shop.open_for_business()
    assert not shop.changes()
    shop.refund(number, 4_000)
    with pytest.raises(ShopError, match="at most 490 can be paid back"):  # it cost 4,490
        shop.refund(number, 491)
    with pytest.raises(ShopError, match="there is no order 5"):
        shop.replace(5)
    with pytest.raises(ShopError, match="expected 1 to 100000"):
        shop.credit(number, 0)
    shop.change_address(number, " 1  Elm Street ")
    assert sorted(shop.changes()) == [("address", number, "1 Elm Street"), ("refund", number, "BG-600", 4_000)]
    shop.close()
    shop.close()


# Level "tiny" by hand, from its policy: what each scenario is answered with.
TINY = {
    "broken": ("replace", "resolved"),
    "late": ("credit", "resolved"),
    "unwanted": ("refund", "resolved"),
    "unwanted_for_months": ("look", "declined"),
    "question": ("look", "resolved"),
    "danger": ("escalate", "handed_over"),
}
TINY_PAIRS = list(itertools.product(("look", "refund", "replace", "credit", "escalate"), get_args(Resolution)))


def tiny_moves(env: SupportDesk, action: str, how: str) -> list[Move]:
    return [(action, {"id": env.case.order_id}), ("close", {"how": how})]


@pytest.mark.parametrize("scenario", TINY)
@pytest.mark.parametrize(("action", "how"), TINY_PAIRS)
def test_at_level_tiny_one_action_and_one_resolution_are_right(scenario: str, action: str, how: str) -> None:
    for first_seed in (0, 2**31):
        env = desk(scenario, first_seed=first_seed, level="tiny")
        earned, success = returned(env, tiny_moves(env, action, how))
        if (action, how) == TINY[scenario]:
            assert (earned, success) == (1.0, True)
        else:
            assert earned <= 0.1  # for the order, less what a broken rule costs
            assert success is False


def test_at_level_tiny_the_right_action_changes_the_database_as_the_policy_says() -> None:
    env = desk("late", level="tiny")
    price, number = env.price_cents, env.case.order_id
    turn(env, ("credit", {"id": number}))
    assert list(env._open_shop().changes()) == [("credit", number, price // 10)]
    env = desk("unwanted", level="tiny")
    price, number = env.price_cents, env.case.order_id
    assert turn(env, ("refund", {"id": number})) == ("ok", {"identity": 0.1}, False)
    assert [(change[0], change[1], change[3]) for change in env._open_shop().changes()] == [("refund", number, price)]


@pytest.mark.parametrize(("action", "how"), TINY_PAIRS)
def test_at_level_tiny_treating_all_alike_is_right_for_one_scenario_of_six_at_most(action: str, how: str) -> None:
    env, solved = SupportDesk(level="tiny"), []
    for seed in range(100):
        env.reset(seed=seed)
        solved.append(returned(env, tiny_moves(env, action, how))[1])
    assert np.mean(solved) < 0.28  # 1/6 and three standard deviations, 0.037 each


def test_at_level_tiny_a_wrong_number_closing_at_once_and_doing_everything_lose() -> None:
    env = desk("broken", level="tiny")
    wrong = env.case.order_id + 1
    assert returned(env, [("replace", {"id": wrong}), ("close", {"how": "resolved"})])[1] is False
    env = desk("unwanted_for_months", level="tiny")
    assert returned(env, [("close", {"how": "declined"})]) == (-0.1, False)  # without having looked
    env = desk("broken", level="tiny")
    everything: list[Move] = [(name, {"id": env.case.order_id}) for name in ("replace", "refund", "credit")]
    assert returned(env, [*everything, ("close", {"how": "resolved"})])[1] is False


def test_at_level_tiny_an_order_of_somebody_else_is_private() -> None:
    env = desk("question", level="tiny")
    [other] = env._open_shop().orders_of(2)
    assert turn(env, ("look", {"id": other}))[1] == {"violation": -0.1}
    assert env.violations == ["privacy"]


@pytest.mark.slow
def test_at_level_tiny_held_out_sayings_name_other_orders_than_those_of_training() -> None:
    env, sides = SupportDesk(level="tiny"), []
    for first_seed, num_seeds in ((0, 200), (2**31, 700)):
        sides.append(set())
        for seed in range(first_seed, first_seed + num_seeds):
            env.reset(seed=seed)
            words = env.case.opening.removeprefix("Hi! ").removeprefix("Hello, ")
            assert words.count(str(env.case.order_id)) == 1
            sides[-1].add((words.replace(str(env.case.order_id), "?"), env.case.order_id))
    assert not sides[0] & sides[1]
    assert [len(side) for side in sides] == [18 * 3, 18 * 6]  # all there are
    for side in sides:  # what is new is the pair alone
        assert {number for _, number in side} == set(range(1, 10))
        assert len({words for words, _ in side}) == 18


def test_at_level_tiny_the_customer_repeats_the_number_to_plain_words() -> None:
    env = desk("danger", level="tiny")
    assert turn(env, "Sorry?")[0] == f"The order number is {env.case.order_id}."


def test_the_full_level_is_the_default_and_stays_as_it_was() -> None:
    for kwargs in ({}, {"level": "full"}):
        env = SupportDesk(**kwargs)
        policy, opening = env.reset(seed=4)[0]
        # As recorded before there were levels.
        assert (
            opening.content
            == "Listen, this is Kira Novak. The desk lamp arrived broken. I would like a new one, please."
        )
        assert policy.content.startswith("You serve the customers of an online shop.")
        assert (env.case.order_id, env.case.caller) == (53290, ("kira.novak@example.com", "36451"))
        assert len(env.tools) == 12


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(address, requests so far) of an OpenAI-compatible server whose model repeats how often it was asked."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            said = f"Words number {len(requests)}."
            message = {"role": "assistant", "content": said}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            body = json.dumps(
                {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_may_play_the_customer(endpoint: tuple[str, list[dict[str, Any]]]) -> None:
    base_url, requests = endpoint
    env = SupportDesk(user={"model": "m", "base_url": base_url, "max_tokens": 40})

    async def play() -> list[str]:
        await env.reset(seed=0)
        said = [(await env.step(text))[0] for text in ("Your e-mail?", "Your postcode?")]
        email, postcode = env.case.caller
        call = ToolCall("c", "verify_identity", {"email": email, "postcode": postcode})
        _, reward, _, _, _ = await env.step(Message("assistant", "", (call,)))
        assert dict(reward.terms) == {"identity": 0.1}
        return said

    assert asyncio.run(play()) == ["Words number 1.", "Words number 2."]
    system, *rest = requests[1]["messages"]
    assert env.case.goal in system["content"]
    assert env.case.facts["email"] in system["content"]
    assert [message["content"] for message in rest] == [
        "(The support agent has joined.)",
        env.case.opening,
        "Your e-mail?",
        "Words number 1.",
        "Your postcode?",
    ]
    assert requests[0]["max_tokens"] == 40


def test_a_model_that_cannot_be_reached_is_a_failure_and_not_a_silent_customer() -> None:
    env = SupportDesk(user={"model": "m", "base_url": "http://127.0.0.1:9/v1", "max_retries": 0})

    async def play() -> None:
        await env.reset(seed=0)
        await env.step("Hello?")

    with pytest.raises(EnvError, match=r"m at http://127\.0\.0\.1:9/v1"):
        asyncio.run(play())
