"""A model's own stops: every id at which its configuration files end an answer ends one here, at every door."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from gspo_gym.chat.renderer import Renderer, RendererCache
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import adapt_policy, load_policy, load_tokenizer, save_policy
from gspo_gym.remote.gateway.capture import ChatCall
from gspo_gym.remote.gateway.model_app import Served, create_model_app
from gspo_gym.remote.gateway.session import Gateway, GatewaySessionSettings
from gspo_gym.remote.serving import LoopServer
from gspo_gym.rollout.actors import EngineActor
from gspo_gym.rollout.episode import EpisodeRequest, run_episode
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.types import Message, Sampling, Task

END_OF_TEXT, START, END, THINK = 256, 257, 258, 260  # of the tiny tokenizers
LETTER_A = 97
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template and tokenizer end turns with <|im_end|>, and whose generation config names two ids."""
    policy = load_policy("tiny:qwen3-64")
    policy.model.generation_config.eos_token_id = [END, END_OF_TEXT]
    policy.model.config.eos_token_id = [LETTER_A]  # as a class's default in another vocabulary, which is no stop
    path = tmp_path_factory.mktemp("stops")
    save_policy(policy, path)
    return path


def test_a_list_of_ids_in_the_generation_config_stops_with_the_model_loaded_or_not(folder: Path) -> None:
    for tokenizer in (load_policy(str(folder)).tokenizer, load_tokenizer(str(folder))):
        assert tokenizer.convert_ids_to_tokens([LETTER_A]) == ["a"]
        assert Renderer(tokenizer).stop_token_ids == (END, END_OF_TEXT)


def test_the_model_below_an_adapter_says_where_it_stops(folder: Path, tmp_path: Path) -> None:
    save_policy(adapt_policy(load_policy(str(folder)), LoraSettings(r=2), seed=0), tmp_path)
    for tokenizer in (load_policy(str(tmp_path)).tokenizer, load_tokenizer(str(tmp_path))):
        assert Renderer(tokenizer).stop_token_ids == (END, END_OF_TEXT)


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        (END_OF_TEXT, None, (END, END_OF_TEXT)),
        (None, [END_OF_TEXT, THINK], (END, END_OF_TEXT, THINK)),
        ([THINK], END_OF_TEXT, (END, THINK, END_OF_TEXT)),
        ("<eos>", [[1]], (END,)),  # not as transformers writes them
        (None, None, (END,)),
        ([10**6], -1, (END,)),
    ],
)
def test_one_id_a_list_and_none_are_read_from_both_files(
    folder: Path, tmp_path: Path, generation: Any, config: Any, stops: tuple[int, ...]
) -> None:
    load_tokenizer(str(folder)).save_pretrained(tmp_path)
    for name, value in (("generation_config", generation), ("config", config)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": value}))
    assert Renderer(load_tokenizer(str(tmp_path))).stop_token_ids == stops


def test_a_folder_without_these_files_or_with_damaged_ones_has_the_tokenizers_eos(folder: Path, tmp_path: Path) -> None:
    load_tokenizer(str(folder)).save_pretrained(tmp_path)
    assert Renderer(load_tokenizer(str(tmp_path))).stop_token_ids == (END,)
    for damaged in ("[" * 200_000, "[1]", ""):
        (tmp_path / "generation_config.json").write_text(damaged)
        assert Renderer(load_tokenizer(str(tmp_path))).stop_token_ids == (END,)


def test_a_name_of_the_hub_is_enough(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As the hub's cache has a model of which no weights were ever loaded.
    revision = "0" * 40
    snapshot = tmp_path / "models--owner--name" / "snapshots" / revision
    load_tokenizer(str(folder)).save_pretrained(snapshot)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(folder / name, snapshot)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert Renderer(load_tokenizer("owner/name")).stop_token_ids == (END, END_OF_TEXT)


class Say:
    """One turn, whose text is the answer's."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "Say yes.", {}

    def step(self, action: str) -> Any:
        return "", float(action == "yes"), True, False, {}


async def _an_episode(engine: ScriptedEngine, tokenizer: Any) -> str:
    trajectory = await run_episode(
        EpisodeRequest("g/0", Task("Say-v0", seed=0), sampling_seed=0),
        make_env=lambda _task: Say(),
        act=EngineActor(engine),
        renderers=RendererCache(tokenizer),
        limits=EpisodeLimits(max_turns=1, max_output_tokens=20, max_model_len=200),
    )
    assert trajectory.reward == 1.0
    return next(message.content for message in trajectory.messages if message.role == "assistant")


async def _the_gateway(engine: ScriptedEngine, tokenizer: Any) -> str:
    settings = GatewaySessionSettings("g/0", sampling_seed=0, max_output_tokens=20, max_model_len=200)
    call = await Gateway(engine, tokenizer).open_session(settings).chat(ChatCall((Message("user", "Say yes."),)))
    assert call.finish_reason == "stop"
    return call.answer.content


async def _models_serve(engine: ScriptedEngine, tokenizer: Any) -> str:
    served = Served(engine, tokenizer, "model", 20, Sampling(), {})
    server = LoopServer(create_model_app(served), host="127.0.0.1", port=0)
    await server.start()
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    messages: Any = [{"role": "user", "content": "Say yes."}]
    try:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", http_client=http) as client:
            answer = await client.chat.completions.create(model="model", messages=messages)
    finally:
        await server.stop()
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("door", [_an_episode, _the_gateway, _models_serve])
def test_an_answer_that_the_models_second_stop_ends_is_that_answer_at_every_door(
    folder: Path, door: Callable[..., Any]
) -> None:
    tokenizer = load_tokenizer(str(folder))
    junk = tokenizer(" and so on", add_special_tokens=False)["input_ids"]
    engine = ScriptedEngine([[*tokenizer("yes", add_special_tokens=False)["input_ids"], END_OF_TEXT, *junk]])
    assert asyncio.run(door(engine, tokenizer)) == "yes"
