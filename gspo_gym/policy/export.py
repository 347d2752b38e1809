"""Write a model for others to use, and push it to the hub or to what speaks its API at HF_ENDPOINT.

    FOLDER/
        config.json, model*.safetensors, ...                 transformers layout, a LoRA merged into its base
        adapter_config.json, adapter_model.safetensors, ...  PEFT layout: the adapter, and base/ where it has no name
        README.md                                            the model card
        SHA256SUMS                                           digest of every other file, for `sha256sum --check`

A folder is verified, and complete or not there.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from gspo_gym.base.files import sync, sync_tree, writing
from gspo_gym.base.leftovers import remove_folder, temporary_folder
from gspo_gym.errors import CheckpointError, ConfigError, ServiceError, StorageError, shortened
from gspo_gym.policy.bases import CARD, SUMS, Layout, adapter_base, layout_of
from gspo_gym.policy.gguf import converted
from gspo_gym.policy.load import Policy, load_policy, save_policy
from gspo_gym.policy.lora import ADAPTER, is_adapter, load_lora, untie
from gspo_gym.policy.manifest import MANIFEST, sha256_of, verify
from gspo_gym.policy.quantization import dequantize, is_quantized, quantization_of
from gspo_gym.policy.staging import write_full

# Largest difference of logits between two ways of computing them, by their size: some hundred roundings of float32, and
# what the rounding of activations in int8 layers, or a compute dtype of 16 bits, adds up to.
_ROUNDING = 1e-4
_QUANTIZED_ROUNDING = 0.1
_OF_THE_RUN = ("resume", MANIFEST)  # of a checkpoint: what only going on with the run needs
Result = TypeVar("Result")
# At making the repository and at the push, whose first and last requests the library does not try again itself.
_ATTEMPTS = 3
_ADVICE = {
    401: "the token is missing or wrong: set HF_TOKEN, or run `hf auth login`",
    403: "the token may not write there: create one with the right to write to this repository",
    404: "there is no such owner, or the token does not show it",
    409: "another commit was made at the same moment, or the name is taken: push again, or choose another name",
    413: "it is larger than the hub takes at once",
}


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights as they were written, for the model card.

    Attributes:
        layout: of the folder.
        dtype: of the tensors; None: as they were in the checkpoint, byte for byte.
        merged_from: None: nothing was merged; else "lora", or the kind of quantized weights under it.
        sha256: digests of the files of weights, by name.
    """

    layout: Layout
    dtype: str | None
    merged_from: str | None
    sha256: Mapping[str, str]


def export(
    base: str,
    target: Path,
    *,
    describe: Callable[[Weights], str],
    is_merged: bool = False,
    dtype: str | None = None,
    load_dtype: str = "float32",
    force: bool = False,
) -> Weights:
    """Write the model that `base` names into the folder `target`, and return what was written.

    Args:
        base: as `load_policy` takes it. A run's checkpoint is compared with its manifest first.
        describe: returns the model card's text.
        is_merged: merge the LoRA. One on quantized weights is merged into those that it was trained on, dequantized:
            merged into the original ones it would be another function.
        dtype: of the written weights; None: as they are, copied byte for byte if `base` is a folder that is not merged.
        load_dtype: in which the run trained; merging adds in float32, and rounds once.
        force: replace what is in `target`.

    Raises:
        CheckpointError: the checkpoint is damaged; names the file.
        ConfigError: nothing to merge, or a dtype for an adapter; or `target` holds something, and `force` is not set.
        StorageError: the disk refuses (full, read-only).
    """
    if not force and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: already holds something; choose another folder, or replace it with --force")
    folder = Path(base).expanduser()
    policy = None  # then the folder is copied
    if is_merged or dtype is not None or not folder.is_dir():
        policy = _load(base, is_merged=is_merged, dtype=dtype, load_dtype=load_dtype)
    elif (folder / MANIFEST).is_file() and (folder / "resume").is_dir():
        verify(folder)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(temporary_folder(f".draft-{target.name}-", target.parent))
    try:
        with writing(target):
            dtype = load_dtype if is_merged and dtype is None else dtype
            merged_from = None
            if policy is None:
                _copy_model(folder, draft)
                _copy_base(draft)
            else:
                merged_from = _write(policy, draft, is_merged, dtype)
            digests = file_digests(draft)
            tensors = {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}
            weights = Weights(layout_of(draft), dtype, merged_from, tensors)
            (draft / CARD).write_text(describe(weights), encoding="utf-8")
            lines = [f"{digest}  {name}\n" for name, digest in file_digests(draft).items()]
            (draft / SUMS).write_text("".join(lines), encoding="utf-8")
            draft.chmod(0o755)  # mkdtemp's folder is its owner's alone
            sync_tree(draft)
            _publish(draft, target)
    finally:
        remove_folder(draft)
    return weights


def file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder, by path in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def require_sums(folder: Path) -> None:
    """Compare an exported folder with its SHA256SUMS.

    Raises:
        StorageError: it has none, or a file is missing, changed or not listed; names one.
    """
    path = folder / SUMS
    if not path.is_file():
        raise StorageError(f"{path}: is missing; export the model into a folder first")
    lines = (line.partition("  ") for line in path.read_text(encoding="utf-8").splitlines())
    listed_digests = {name: digest for digest, _, name in lines}
    digests = {name: digest for name, digest in file_digests(folder).items() if name != SUMS}
    wrong = sorted(
        name for name in listed_digests.keys() | digests.keys() if listed_digests.get(name) != digests.get(name)
    )
    if wrong:
        raise StorageError(f"{folder / wrong[0]}: is missing, changed or not listed in {SUMS}; export the model again")


def _load(base: str, *, is_merged: bool, dtype: str | None, load_dtype: str) -> Policy:
    policy = load_policy(base, dtype=load_dtype)
    if is_merged and not is_adapter(policy.model):
        raise ConfigError(f"{base}: has no adapter to merge; export it as it is")
    if not is_merged and dtype is not None and is_adapter(policy.model):
        raise ConfigError(f"{base}: is an adapter, which stays in float32; a dtype is for merging it")
    return policy


def _write(policy: Policy, draft: Path, is_merged: bool, dtype: str | None) -> str | None:
    """Write a policy into the folder and read it back; return what was merged, as in `Weights.merged_from`.

    The policy must not be used after that.
    """
    kind = None
    token_ids = _probe_of(policy.model)
    if is_merged:
        kind = quantization_of(policy.model) if is_quantized(policy.model) else "lora"
        policy = _merge_adapter(policy, token_ids)
    if dtype is None:
        save_policy(policy, draft)
    else:
        write_full(policy, draft, dtype=getattr(torch, dtype))
    # Rounded as they were written, so that what is read back must agree to float32's precision whatever the dtype.
    for parameter in policy.model.parameters():
        rounded_data = parameter.data if dtype is None else parameter.data.to(getattr(torch, dtype))
        parameter.data = rounded_data.float()
    written_logits, policy_logits = (
        _logits(model, token_ids) for model in (load_policy(str(draft)).model, policy.model)
    )
    _require_same(written_logits, policy_logits, "the model as it was written", _ROUNDING)
    return kind


def _merge_adapter(policy: Policy, token_ids: torch.Tensor) -> Policy:
    """Return the policy with its adapter merged into its weights, in float32; quantized ones are dequantized.

    Raises:
        ConfigError: the adapter's kind cannot be merged, or PEFT merges it into another function.
    """
    model, own_logits, tolerance = policy.model, None, _ROUNDING
    if is_quantized(model):
        own_logits, tolerance = _logits(model, token_ids), _QUANTIZED_ROUNDING
        base = model.unload()
        dequantize(base)
        model = load_lora(base, Path(policy.base), "cpu")  # its layers fit the plain weights
        model.eval()
    # Weights of 16 bits go to float32 before the adapter is added, or the sum would be rounded twice.
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    own_logits = _logits(model, token_ids) if own_logits is None else own_logits
    kind = model.peft_config[ADAPTER].peft_type.value
    untie(model)
    try:
        merged_model = model.merge_and_unload()
    except (NotImplementedError, AttributeError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{policy.base}: PEFT cannot merge this adapter ({kind}): {error}") from error
    _require_same(_logits(merged_model, token_ids), own_logits, f"the merged model (adapter: {kind})", tolerance)
    return Policy(merged_model, policy.tokenizer, policy.base)


def _probe_of(model: Any) -> torch.Tensor:
    """Return token ids [1, T] from the whole vocabulary, and those that the adapter has weights of their own for."""
    spread = torch.linspace(0, model.get_input_embeddings().weight.shape[0] - 1, 64).long().tolist()
    config = model.peft_config[ADAPTER] if is_adapter(model) else None
    special_ids: list[int] = []
    for tokens in (getattr(config, name, None) or () for name in ("trainable_token_indices", "token_indices")):
        for of_layer in tokens.values() if isinstance(tokens, dict) else [tokens]:
            special_ids += of_layer[:64]
    return torch.tensor([[*spread, *special_ids]])


@torch.no_grad()
def _logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits
    return logits.float()


def _require_same(logits: torch.Tensor, expected: torch.Tensor, subject: str, tolerance: float) -> None:
    gap = float((logits - expected).norm() / expected.norm())
    if not gap <= tolerance:  # also where it is NaN
        raise ConfigError(
            f"{subject} is another function than the one that was to be exported: its logits differ by {gap:.2g} of "
            f"their size, expected at most {tolerance:.2g}; nothing was written"
        )


def _copy_model(folder: Path, draft: Path) -> None:
    paths: list[Path] = []
    try:
        paths = sorted(path for path in folder.iterdir() if path.name not in (*_OF_THE_RUN, CARD, SUMS))
        for path in paths:
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, draft / path.name)
    except OSError as error:
        if folder.is_dir() and all(path.exists() for path in paths):
            raise
        # A run that goes on removes the checkpoints that it does not keep.
        raise CheckpointError(f"{folder}: was removed while it was copied; export a newer checkpoint") from error


def _copy_base(draft: Path) -> None:
    """Put the model below an adapter beside it if that is a GGUF file's, whose name other programs do not load."""
    name = adapter_base(draft)
    if name is not None and not (draft / "base").is_dir() and (whole := converted(name)) is not None:
        shutil.copytree(whole, draft / "base")


def _publish(draft: Path, target: Path) -> None:
    """Rename the draft to the target; what is there goes only after the draft has its place."""
    old_folder = draft.with_name(draft.name.replace(".draft-", ".replaced-", 1))
    if target.exists():
        target.rename(old_folder)
    draft.rename(target)
    sync(target.parent)
    if old_folder.is_dir():
        shutil.rmtree(old_folder)
    else:
        old_folder.unlink(missing_ok=True)


def push(
    folder: Path,
    repo: str,
    *,
    is_private: bool = False,
    token: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Push a folder that `export` wrote; return the URL of the repository, which is made if missing.

    One commit holds all files; those that the repository held before and the folder does not stay.

    Args:
        repo: OWNER/NAME.
        token: None: HF_TOKEN, or that of `hf auth login`.
        sleep: waits between attempts, in seconds.

    Raises:
        ConfigError: `repo` is no name that the hub takes.
        StorageError: the folder is not as it was exported.
        ServiceError: the hub refuses or cannot be reached; says what to do.
    """
    import huggingface_hub

    require_sums(folder)
    # Read here and not by the library, which reads it when it is imported.
    api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)

    def create() -> str:
        return str(api.create_repo(repo, private=is_private or None, exist_ok=True))

    def upload() -> None:
        message = f"Upload {folder.name} from gspo-gym"
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)

    url = _trying(create, f"create {repo}", sleep)
    _trying(upload, f"push to {repo}", sleep)
    return url


def _trying(call: Callable[[], Result], doing: str, sleep: Callable[[float], None]) -> Result:
    """Return the call's result; server errors and lost connections are tried again.

    Raises:
        ConfigError, ServiceError: it failed for good.
    """
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    failure: Exception
    for attempt in range(_ATTEMPTS):
        if attempt:
            sleep(2.0 ** (attempt - 1))
        try:
            return call()
        except HFValidationError as error:
            raise ConfigError(f"OWNER/NAME: {error}") from error
        except LocalTokenNotFoundError as error:
            raise ServiceError(f"{doing}: {_ADVICE[401]}") from error
        except (OSError, RuntimeError) as error:  # the library's errors of HTTP are OSErrors, or the cause of another
            failure = error
            status = _status_of(error)
            if status is not None and status < 500:
                explanation = _ADVICE.get(status, shortened(str(error), 300))
                raise ServiceError(f"{doing}: the hub answered {status}: {explanation}") from error
        except Exception as error:
            if not type(error).__module__.startswith("httpx"):  # httpx or httpx2, by the library's version
                raise
            failure = error
    status = _status_of(failure)
    reason = shortened(": ".join(str(error) for error in (failure, failure.__cause__) if error is not None), 300)
    explanation = f"answered {status}" if status else f"cannot be reached ({reason})"
    raise ServiceError(
        f"{doing}: the hub {explanation}; the export is whole in its folder: push it again later"
    ) from failure


def _status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status that an error, or its cause, carries; None without one."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return int(response.status_code)
        error = error.__cause__
    return None
