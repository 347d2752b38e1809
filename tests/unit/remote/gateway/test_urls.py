"""The URL of a rollout, as it is handed out and as programs post to it."""

from __future__ import annotations

from itertools import product
from urllib.parse import quote

import pytest
import served_gateway as gw

from gspo_gym.remote.gateway.app import Target, openai_base_url, read_target, rollout_url

FULL = "/v1/chat/completions"
# What may be handed out, and what three kinds of task-app code post to: path and query. The first repairs the path by
# appending, the second repairs it well, the third appends to the URL as text and so to its query.
POSTED = {
    f"/t/ID{FULL}?cid=ID": [(f"/t/ID{FULL}", "cid=ID"), (f"/t/ID{FULL}", "cid=ID"), (f"/t/ID{FULL}", f"cid=ID{FULL}")],
    "/t/ID/v1?cid=ID": [(f"/t/ID/v1{FULL}", "cid=ID"), (f"/t/ID{FULL}", "cid=ID"), ("/t/ID/v1", f"cid=ID{FULL}")],
    "/t/ID/v1": [(f"/t/ID/v1{FULL}", ""), (f"/t/ID{FULL}", ""), (f"/t/ID{FULL}", "")],
    "/t/ID": [(f"/t/ID{FULL}", ""), (f"/t/ID{FULL}", ""), (f"/t/ID{FULL}", "")],
    "?cid=ID": [(FULL, "cid=ID"), (FULL, "cid=ID"), ("", f"cid=ID{FULL}")],
}
ALL_POSTED = [(handed, *posted) for handed, forms in POSTED.items() for posted in forms]


@pytest.mark.parametrize(("handed", "path", "query"), ALL_POSTED)
def test_every_form_of_the_url_after_every_mangling_is_the_chat_of_its_session(
    handed: str, path: str, query: str
) -> None:
    assert read_target(path, query) == Target("ID", "chat")


def test_every_form_after_every_mangling_is_answered_over_http() -> None:
    async def check() -> None:
        async with gw.served(gw.replying(lambda _: "Yes.")) as served:
            session = served.open()
            for index, (_, path, query) in enumerate(ALL_POSTED):
                url = f"{served.url}{path}?{query}".replace("ID", session.id)
                answer = await served.http.post(url, json={"messages": gw.user(f"question {index}")})
                assert answer.status_code == 200, (path, query, answer.text)
                assert answer.json()["choices"][0]["message"]["content"] == "Yes."
            assert len((await session.freeze()).calls) == len(ALL_POSTED)

    gw.run(check)


def test_the_id_in_the_path_goes_before_the_one_in_the_query() -> None:
    assert read_target(f"/t/RIGHT{FULL}", "cid=WRONG") == Target("RIGHT", "chat")


@pytest.mark.parametrize("name", ["cid", "trace_correlation_id", "trace"])
def test_an_id_in_the_query_is_cut_where_a_path_or_a_query_was_appended(name: str) -> None:
    for behind in ("", FULL, "/", "?x=1", "?cid=OTHER", "&x=1", quote(FULL, safe="")):
        assert read_target(FULL, f"{name}=ID{behind}") == Target("ID", "chat")


def test_cid_goes_before_other_names_and_the_first_before_the_second() -> None:
    assert read_target(FULL, "trace=B&cid=A").session_id == "A"
    assert read_target(FULL, "cid=A&cid=B").session_id == "A"


@pytest.mark.parametrize(
    ("tail", "api"),
    [
        *[(tail + slash, "chat") for tail, slash in product(["", "/v1", FULL, "/chat/completions"], ["", "/"])],
        (f"/v1{FULL}", "chat"),
        (f"{FULL}{FULL}", "chat"),
        ("/chat/completions/chat/completions", "chat"),
        ("/v1/completions", "completions"),
        ("/completions", "completions"),
        ("/v1/responses", "responses"),
        ("/responses/", "responses"),
        ("/v1/models", "models"),
        ("/v2/chat/completions", "unknown"),
        ("/v1/embeddings", "unknown"),
        ("/v1/chat", "unknown"),
        ("/x/v1/chat/completions", "unknown"),
    ],
)
def test_what_stands_behind_the_id_says_which_api_is_asked(tail: str, api: str) -> None:
    assert read_target(f"/t/ID{tail}", "") == Target("ID", api)  # type: ignore[arg-type]  # one of them


@pytest.mark.parametrize(("path", "query"), [(FULL, ""), ("", ""), (FULL, "x=1"), ("/tt/ID/v1", "")])
def test_a_url_without_an_id_names_no_session(path: str, query: str) -> None:
    assert read_target(path, query).session_id is None


def test_what_is_handed_out_is_read_back() -> None:
    url = rollout_url("http://127.0.0.1:8003/", "Xy_1-z")
    assert url == "http://127.0.0.1:8003/t/Xy_1-z/v1/chat/completions?cid=Xy_1-z"
    path, _, query = url.removeprefix("http://127.0.0.1:8003").partition("?")
    assert read_target(path, query) == Target("Xy_1-z", "chat")
    assert openai_base_url("http://h", "Xy_1-z") == "http://h/t/Xy_1-z/v1"


def test_an_id_that_was_changed_on_the_way_is_404() -> None:
    async def check() -> None:
        async with gw.served(gw.saying()) as served:
            session = served.open()
            changed = (session.id.lower() + "x", session.id[:-1], session.id + "%20", "", "ID")
            for wrong in changed:
                for url in (f"{served.url}/t/{wrong}{FULL}?cid={session.id}", f"{served.url}/t/{wrong}"):
                    answer = await served.http.post(url, json={"messages": gw.user("Hi.")})
                    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), url
            answer = await served.http.post(f"{served.url}{FULL}", json={"messages": gw.user("Hi.")})
            assert answer.status_code == 404
            assert session.id not in answer.text
            assert not (await session.freeze()).calls

    gw.run(check)
