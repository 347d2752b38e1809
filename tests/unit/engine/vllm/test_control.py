"""The control client of a vLLM server: where it speaks, what it sends, and that it tries nothing twice.

Against a stub that has the routes of vLLM 0.32; tests/vllm/test_vllm_server.py says the same of vLLM itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fake_vllm import FakeVllm, Stage, served
from moved_clock import move_clock

from gspo_gym.engine.endpoint.wire import RefusedError
from gspo_gym.engine.vllm.control import VllmControl
from gspo_gym.errors import ConfigError, EngineError

T = TypeVar("T")


@pytest.fixture
def fake() -> FakeVllm:
    return FakeVllm()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with served() as stage:
        yield stage


@pytest.fixture
def url(stage: Stage, fake: FakeVllm) -> str:
    stage.fake = fake
    return stage.url


def controlled(url: str, use: Callable[[VllmControl], Awaitable[T]], **options: Any) -> T:
    """What `use` gives, with a client of its own."""

    async def run() -> T:
        control = VllmControl(url, **options)
        try:
            return await use(control)
        finally:
            await control.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.7:8000",
        "http://0.0.0.0:8000",
        "https://vllm.example.org",
        "http://127.0.0.1.example.org:8000",
        "http://[2001:db8::1]:8000",
        "http://2130706433.example.org",
    ],
)
def test_addresses_of_other_machines_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="control routes have no protection"):
        VllmControl(url)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://127.0.0.1",
        "http://",
        "http://127.0.0.1:8000/v1",
        "http://user:secret@127.0.0.1:8000",
        "http://127.0.0.1:8000?next=http://10.0.0.7",
        "unix:relative.sock",
    ],
)
def test_what_is_not_an_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        VllmControl(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://localhost:8000/", "http://[::1]:8000", "unix:/x.sock"]
)
def test_addresses_of_this_machine_are_taken(url: str) -> None:
    async def make() -> None:
        await VllmControl(url).close()

    asyncio.run(make())


def test_a_whole_model_is_reloaded_by_path_and_then_the_cache_is_dropped(fake: FakeVllm, url: str) -> None:
    async def update(control: VllmControl) -> None:
        await control.pause("keep")
        await control.reload_weights(Path("/staged/policy-v3"), has_our_workers=True)
        await control.set_version("policy-v3")
        await control.resume()

    controlled(url, update)
    assert fake.seen == [
        ("POST", "/pause", {"mode": "keep", "clear_cache": "false"}, None),
        ("GET", "/is_paused", {}, None),
        (
            "POST",
            "/collective_rpc",
            {},
            {"method": "reload_whole_model", "kwargs": {"weights_path": "/staged/policy-v3"}},
        ),
        ("POST", "/reset_prefix_cache", {"reset_running_requests": "true"}, None),
        ("POST", "/update_weight_version", {}, {"new_version": "policy-v3"}),
        ("GET", "/weight_info", {}, None),
        ("POST", "/resume", {}, None),
        ("GET", "/is_paused", {}, None),
    ]


def test_workers_that_are_not_ours_reload_by_themselves(fake: FakeVllm, url: str) -> None:
    controlled(url, lambda control: control.reload_weights(Path("/staged"), has_our_workers=False))
    assert fake.seen[0][3] == {"method": "reload_weights", "kwargs": {"weights_path": "/staged"}}


def test_a_cache_that_keeps_blocks_fails_the_reload(fake: FakeVllm, url: str) -> None:
    fake.resets_cache = False
    with pytest.raises(EngineError, match="kept blocks of its prefix cache"):
        controlled(url, lambda control: control.reload_weights(Path("/staged"), has_our_workers=True))


def test_a_label_that_the_server_does_not_take_is_an_error(fake: FakeVllm, url: str) -> None:
    fake.keeps_label = True
    with pytest.raises(EngineError, match="calls its weights 'default', expected 'policy-v1'"):
        controlled(url, lambda control: control.set_version("policy-v1"))


def test_adapters_are_loaded_under_a_name_and_never_in_place(fake: FakeVllm, url: str) -> None:
    fake.max_lora_rank = 8

    async def twice(control: VllmControl) -> None:
        await control.load_adapter("policy-v1", Path("/staged/v1"))
        await control.load_adapter("policy-v1", Path("/staged/v1"))

    with pytest.raises(EngineError, match="already been loaded"):
        controlled(url, twice)
    body = {"lora_name": "policy-v1", "lora_path": "/staged/v1", "load_inplace": False}
    assert fake.seen[0] == ("POST", "/v1/load_lora_adapter", {}, body)
    controlled(url, lambda control: control.unload_adapter("policy-v1"))
    assert fake.adapters == {}


def test_digests_of_nothing_are_left_out(url: str) -> None:
    digests = controlled(url, lambda control: control.checksums())
    assert list(digests) == ["tp0:embed"]


def test_server_info_says_how_the_server_was_started(fake: FakeVllm, url: str, tmp_path: Path) -> None:
    fake.model_folder = str(tmp_path)
    fake.max_lora_rank = 16
    fake.loads_adapters = False
    fake.logprobs_mode = "raw_logprobs"
    info = controlled(url, lambda control: control.server_info())
    assert (info.dtype, info.logprobs_mode, info.max_lora_rank, info.loads_adapters) == (
        "float32",
        "raw_logprobs",
        16,
        False,
    )
    assert (info.model_folder, info.device, info.has_our_workers, info.reuses_prefixes) == (tmp_path, "cpu", True, True)


@pytest.mark.parametrize(
    ("skip_tokenizer_init", "generation_config", "has_own"),
    [(True, "/empty", False), (False, "/empty", True), (True, "vllm", True), (True, "auto", True)],
)
def test_end_tokens_come_from_a_tokenizer_or_the_models_generation_config(
    fake: FakeVllm, url: str, skip_tokenizer_init: bool, generation_config: str, has_own: bool
) -> None:
    fake.skip_tokenizer_init = skip_tokenizer_init
    fake.generation_config = generation_config
    assert controlled(url, lambda control: control.server_info()).has_own_end_tokens is has_own


def test_a_server_without_development_mode_refuses(fake: FakeVllm, url: str) -> None:
    fake.is_dev = False
    with pytest.raises(RefusedError, match="HTTP 404"):
        controlled(url, lambda control: control.server_info())


@pytest.mark.parametrize("status", [500, 503, 429, 400, 307])
def test_no_step_is_tried_twice_whatever_the_server_answers(fake: FakeVllm, url: str, status: int) -> None:
    fake.fail["/collective_rpc"] = (status, {"error": "no"})
    with pytest.raises(EngineError, match=f"HTTP {status}"):
        controlled(url, lambda control: control.reload_weights(Path("/staged"), has_our_workers=True))
    assert fake.paths() == ["/collective_rpc"]


def test_a_step_that_hangs_ends_at_its_deadline_and_is_not_tried_again(fake: FakeVllm, url: str) -> None:
    fake.hang.add("/pause")

    async def pause(control: VllmControl) -> None:
        pausing = asyncio.create_task(control.pause("wait"))
        while not fake.paths():  # noqa: ASYNC110 the stub is in another thread
            await asyncio.sleep(0)
        move_clock(asyncio.get_running_loop(), 60.0)
        await pausing

    with pytest.raises(EngineError, match="no complete answer within 60 seconds"):
        controlled(url, pause, timeout_seconds=60.0)
    assert fake.paths() == ["/pause"]


def test_an_answer_of_another_kind_is_an_error(fake: FakeVllm, url: str) -> None:
    fake.fail["/is_paused"] = (200, {"is_paused": "perhaps"})
    with pytest.raises(EngineError, match=r"expected is_paused \(bool\)"):
        controlled(url, lambda control: control.is_paused())


def test_the_key_is_sent_and_is_in_no_error(fake: FakeVllm, url: str) -> None:
    fake.fail["/resume"] = (401, {"error": "not s3cret"})
    with pytest.raises(EngineError) as caught:
        controlled(url, lambda control: control.resume(), api_key="s3cret")
    assert fake.headers[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(caught.value)


def test_a_unix_socket_is_spoken_to(tmp_path: Path) -> None:
    import uvicorn

    fake, path = FakeVllm(), str(tmp_path / "vllm.sock")

    async def run() -> bool:
        server = uvicorn.Server(uvicorn.Config(fake, uds=path, log_config=None, lifespan="off"))
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 uvicorn has no event for it
            await asyncio.sleep(0)
        control = VllmControl(f"unix:{path}")
        await control.pause("wait")
        paused = await control.is_paused()
        await control.close()
        server.should_exit = True
        await serving
        return paused

    assert asyncio.run(run())


def test_an_error_names_the_socket_and_not_the_host_that_stands_for_it(tmp_path: Path) -> None:
    url = f"unix:{tmp_path}/nothing.sock"
    with pytest.raises(EngineError, match=rf"^{url}/pause: connection failed \(ConnectError\)$"):
        controlled(url, lambda control: control.pause("wait"))
