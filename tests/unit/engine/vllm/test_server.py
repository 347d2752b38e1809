"""Starting and ending a server: addresses, arguments, failures and process groups, with a stub in place of vLLM."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
import torch

from gspo_gym.cli.main import main
from gspo_gym.cli.models_serve import add_serve_arguments, settings_of
from gspo_gym.engine.vllm.server import VllmServer
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.errors import ConfigError, EngineError, MissingExtraError

SETTINGS = VllmSettings(model="policy", max_model_len=512)
SUPPORT = Path(__file__).parents[3] / "support"


def interpreter(folder: Path, script: str) -> Path:
    """In place of Python with vLLM: a script that gets vLLM's command line. `$PYTHON` and `$STUB` are there for it."""
    path = folder / "python"
    path.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            PYTHON={sys.executable} STUB={SUPPORT / "fake_vllm.py"}
            shift 2  # -m vllm.entrypoints.openai.api_server
            {script}
            """)
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "example.org"])
def test_addresses_that_other_machines_reach_are_refused_with_the_reason(host: str) -> None:
    with pytest.raises(ConfigError, match="other machines could reach it, and no key protects the routes"):
        VllmServer(SETTINGS, host=host)


def test_a_socket_needs_an_absolute_path() -> None:
    with pytest.raises(ConfigError, match="expected an absolute path"):
        VllmServer(SETTINGS, uds="vllm.sock")


def test_the_command_refuses_such_an_address_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "our/policy", "--engine", "vllm", "--host", "0.0.0.0"]) == 2
    assert "ssh -L" in capsys.readouterr().err


def command_of(settings: VllmSettings, folder: Path) -> Sequence[str]:
    """What a server is started with, by a script that writes it down and ends."""
    python = interpreter(folder, f'printf "%s\\n" "$@" > {folder}/arguments; env > {folder}/environment; exit 3')
    with pytest.raises(EngineError, match="ended with status 3 before it answered"):
        VllmServer(settings, python=python, port=0, name="student").start()
    return (folder / "arguments").read_text().splitlines()


def test_the_server_is_told_what_training_needs(tmp_path: Path) -> None:
    settings = VllmSettings(
        model="policy", max_model_len=512, dtype="bfloat16", tensor_parallel_size=4, data_parallel_size=2
    )
    arguments = command_of(settings, tmp_path)
    said = dict(itertools.pairwise(arguments))
    expected = {
        "--host": "127.0.0.1", "--model": "policy", "--served-model-name": "student", "--max-model-len": "512",
        "--dtype": "bfloat16", "--tensor-parallel-size": "4", "--data-parallel-size": "2",
        "--logprobs-mode": "processed_logprobs",
    }  # fmt: skip
    assert said.items() >= expected.items()
    assert {"--enable-scale-out", "--enable-prefix-caching", "--no-enforce-eager"} <= set(arguments)
    assert "--enable-lora" not in arguments
    environment = (tmp_path / "environment").read_text().splitlines()
    assert "VLLM_SERVER_DEV_MODE=1" in environment
    assert not any(line.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING") for line in environment)


def test_a_server_of_several_workers_runs_where_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = VllmSettings(model="policy", max_model_len=512, tensor_parallel_size=2, device_ids=(2, 3))

    def binding() -> list[str]:
        said = (tmp_path / "environment").read_text().splitlines()
        return [line.removeprefix("VLLM_CPU_OMP_THREADS_BIND=") for line in said if line.startswith("VLLM_CPU_OMP_")]

    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    assert dict(itertools.pairwise(command_of(settings, tmp_path)))["--device-ids"] == "2,3"
    assert len(binding()) == (0 if torch.cuda.is_available() else 1)  # only a processor's workers need it
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3|4-7")
    command_of(settings, tmp_path)
    assert binding() == ["0-3|4-7"]
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    command_of(SETTINGS, tmp_path)
    assert binding() == []


def test_a_server_for_adapters_may_load_them_while_it_runs(tmp_path: Path) -> None:
    arguments = command_of(VllmSettings(model="policy", max_model_len=512, max_lora_rank=16, max_loras=3), tmp_path)
    said = dict(itertools.pairwise(arguments))
    assert said.items() >= {"--max-lora-rank": "16", "--max-loras": "3", "--max-cpu-loras": "4"}.items()
    assert "--enable-lora" in arguments
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in (tmp_path / "environment").read_text().splitlines()


def test_a_server_keeps_statistics_and_reads_a_tokenizer_only_where_schemas_are_obeyed(tmp_path: Path) -> None:
    plain = command_of(SETTINGS, tmp_path)
    assert "--skip-tokenizer-init" in plain
    assert "--disable-log-stats" not in plain
    obeying = command_of(dataclasses.replace(SETTINGS, structured_output=True), tmp_path)
    assert "--no-skip-tokenizer-init" in obeying


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--max-model-len 600", "max_model_len", 600),
        ("--dtype bfloat16", "dtype", "bfloat16"),
        ("--max-num-seqs 5", "max_num_seqs", 5),
        ("--tensor-parallel-size 2", "tensor_parallel_size", 2),
        ("--data-parallel-size 3", "data_parallel_size", 3),
        ("--device-ids 5", "device_ids", (5,)),
        ("--gpu-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
        ("--kv-cache-gib 0.25", "kv_cache_gib", 0.25),
        ("--enforce-eager", "enforce_eager", True),
        ("--no-prefix-caching", "enable_prefix_caching", False),
        ("--structured-output", "structured_output", True),
        ("--max-lora-rank 16", "max_lora_rank", 16),
        ("--max-loras 4", "max_loras", 4),
    ],
)
def test_each_option_of_the_command_is_a_setting_of_the_engine(flag: str, field: str, value: object) -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    without, given = (settings_of(parser.parse_args(["policy", *words])) for words in ([], flag.split()))
    assert getattr(given, field) == value != getattr(without, field)
    assert given == dataclasses.replace(without, **{field: value})


def test_a_key_reaches_the_server_by_its_environment_and_not_by_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLICY_KEY", "s3cret")
    python = interpreter(tmp_path, f'echo "$@" > {tmp_path}/arguments; echo $VLLM_API_KEY > {tmp_path}/key; exit 3')
    with pytest.raises(EngineError):
        VllmServer(SETTINGS, python=python, api_key_env="POLICY_KEY").start()
    assert (tmp_path / "key").read_text().strip() == "s3cret"
    assert "s3cret" not in (tmp_path / "arguments").read_text()


def test_a_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    python = interpreter(tmp_path, 'echo "ValueError: no such model" >&2; exit 1')
    with pytest.raises(EngineError, match=r"status 1 before it answered\. Its log:\nValueError: no such model"):
        VllmServer(SETTINGS, python=python).start()


def test_an_interpreter_without_vllm_says_what_to_install(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "echo \"ModuleNotFoundError: No module named 'vllm'\"; exit 1")
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[vllm\]'"):
        VllmServer(SETTINGS, python=python).start()


def test_a_server_that_never_answers_is_ended_with_everything_it_started(tmp_path: Path) -> None:
    python = interpreter(tmp_path, f"echo started; sleep 600 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(EngineError, match=r"no answer within 3 seconds\. Its log:\nstarted"):
        VllmServer(SETTINGS, python=python, start_seconds=3.0).start()
    assert ends(int((tmp_path / "child").read_text()))


def test_a_server_answers_while_the_block_lasts_and_its_whole_group_ends_with_it(tmp_path: Path) -> None:
    # The leader ends at SIGTERM and leaves a worker behind, as one that crashes would.
    python = interpreter(tmp_path, f'sleep 600 & echo $! > {tmp_path}/child; exec "$PYTHON" "$STUB" "$@"')
    with VllmServer(SETTINGS, python=python, start_seconds=60) as server:
        assert httpx.get(f"{server.url}/health", trust_env=False, timeout=60).status_code == 200
        child = int((tmp_path / "child").read_text())
        os.kill(child, 0)  # it runs
    assert ends(child)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", trust_env=False, timeout=60)
    server.stop()  # twice is fine


def test_a_server_listens_on_a_unix_socket_and_removes_it(tmp_path: Path) -> None:
    python, path = interpreter(tmp_path, 'exec "$PYTHON" "$STUB" "$@"'), tmp_path / "vllm.sock"
    with VllmServer(SETTINGS, python=python, uds=str(path), start_seconds=60) as server:
        assert server.url == f"unix:{path}"
        assert path.is_socket()
    assert not path.exists()


def test_a_port_that_somebody_listens_on_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}"):
            VllmServer(SETTINGS, python=interpreter(tmp_path, "exit 3"), port=port).start()


@pytest.mark.slow
def test_the_command_prints_the_url_and_ends_its_server_at_sigterm(tmp_path: Path) -> None:
    python = interpreter(tmp_path, f'echo $$ > {tmp_path}/server; exec "$PYTHON" "$STUB" "$@"')
    code = (
        "import sys; from pathlib import Path; from gspo_gym.cli.main import main; "
        f"sys.executable = {str(python)!r}; sys.exit(main(['serve', 'our/policy', '--port=0', '--enforce-eager']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving our/policy with vLLM at http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert ends(int((tmp_path / "server").read_text()))


def test_the_command_reports_a_server_that_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = interpreter(
        tmp_path,
        f'"$PYTHON" "$STUB" "$@" & until [ -e {tmp_path}/end ]; do sleep 0.05; done; echo out of memory; exit 9',
    )
    monkeypatch.setattr(sys, "executable", str(python))
    (tmp_path / "end").touch()  # so it ends at once, before or after it answered
    status = main(["serve", "our/policy", "--port", "0"])
    assert status in (1, 2)
    assert "out of memory" in capsys.readouterr().err


def ends(pid: int) -> bool:
    """Whether the process has ended or does so soon: being killed takes a moment."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)
