"""Pushing to the hub with its own library, to a stand-in of its API: what arrives, and what is said if it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import TOKEN, FakeHub, fake_hub

from gspo_gym.errors import ConfigError, ServiceError, StorageError
from gspo_gym.policy.export import export, push

# Of the library, which hands its own HTTP client a file in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # as the tests' environment says
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # its storage is a service of its own
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between its own attempts
        yield hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export("tiny:qwen3-64@3", folder, describe=lambda _: "---\nlibrary_name: transformers\n---\n# A model\n")
    return folder


def test_what_is_pushed_arrives_byte_for_byte_and_pushing_again_is_no_error(hub: FakeHub, folder: Path) -> None:
    for _ in range(2):
        assert push(folder, "me/tiny", is_private=True, token=TOKEN) == f"{hub.url}/me/tiny"
    assert hub.repos["me/tiny"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.private == {"me/tiny"}
    assert any(line.startswith("PUT /lfs/") for line in hub.asked)  # the weights


@pytest.mark.parametrize(
    ("failures", "token", "message"),
    [
        ([], "hf_wrong", "create me/tiny: the hub answered 401: the token is missing or wrong: set HF_TOKEN"),
        ([("create", 403)], TOKEN, "answered 403: the token may not write there"),
        ([("commit", 409)], TOKEN, "push to me/tiny: the hub answered 409: another commit was made at the same moment"),
        ([("create", 503)] * 3, TOKEN, "create me/tiny: the hub answered 503; the export is whole in its folder"),
        ([("/lfs/", 403)], TOKEN, "answered 403: the token may not write there"),
        ([("commit", 500)] * 9, TOKEN, "push to me/tiny: the hub answered 500; the export is whole in its folder"),
        ([("commit", 401)], TOKEN, "push to me/tiny: the hub answered 401: the token is missing or wrong"),
        ([("batch", 401)], TOKEN, "push to me/tiny: the hub answered 401: the token is missing or wrong"),
        ([("/lfs/", 500)] * 99, TOKEN, "push to me/tiny: the hub answered 500; the export is whole in its folder"),
        ([("create", 0)] * 9, TOKEN, r"create me/tiny: the hub cannot be reached \(.*; the export is whole"),
        ([("/lfs/", 0)] * 99, TOKEN, r"push to me/tiny: the hub cannot be reached \(.*; the export is whole"),
        ([("commit", 0)] * 9, TOKEN, r"push to me/tiny: the hub cannot be reached \(.*; the export is whole"),
    ],
)
def test_a_refusal_is_our_error_with_advice(
    hub: FakeHub, folder: Path, failures: list[tuple[str, int]], token: str, message: str
) -> None:
    hub.failures = list(failures)
    with pytest.raises(ServiceError, match=message):
        push(folder, "me/tiny", token=token, sleep=lambda _: None)
    assert hub.repos.get("me/tiny", {}) == {}  # all or nothing
    hub.failures = []
    push(folder, "me/tiny", token=TOKEN, sleep=lambda _: None)  # and once more, when it is well again
    assert hub.repos["me/tiny"] == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("failures", [(503, 500), (0, 502)], ids=["errors", "cut connection"])
@pytest.mark.parametrize("part", ["create", "preupload", "/lfs/", "batch", "commit"])
def test_a_failure_that_passes_is_passed_over(hub: FakeHub, folder: Path, part: str, failures: tuple[int, int]) -> None:
    hub.failures = [(part, failures[0]), (part, failures[1])]
    push(folder, "me/tiny", token=TOKEN, sleep=lambda _: None)
    assert len(hub.repos["me/tiny"]) == len(list(folder.iterdir()))
    assert hub.failures == []


def test_what_is_not_there_or_not_as_it_was_exported_is_not_pushed(
    hub: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match="SHA256SUMS: is missing"):
        push(tmp_path, "me/tiny", token=TOKEN)
    with pytest.raises(ConfigError, match="OWNER/NAME: "):
        push(folder, "no such name", token=TOKEN)
    assert hub.asked == []
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens on the port that discards
    with pytest.raises(ServiceError, match=r"cannot be reached"):
        push(folder, "me/tiny", token=TOKEN, sleep=lambda _: None)
