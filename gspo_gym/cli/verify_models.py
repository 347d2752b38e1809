"""The weights before a step, for `verify`: transformers loads them, and nothing of the learner's is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_gym.diagnosis.oracle import Model, StepRecords
from gspo_gym.errors import GymError, RecordError
from gspo_gym.run.records import read_teacher


def uses_reference(config: Mapping[str, Any]) -> bool:
    """Return whether a term of the settings (Any: TOML's values) compares with a reference."""
    return any(config[key] > 0 for key in ("loss.kl_coef", "rewards.kl_coef", "advantages.kl_shaping_coef"))


def read_model(checkpoint: Path, records: StepRecords, dtype: str) -> Model:
    """Return the model before a step, in a precision, with its optimizer's moments, its reference and its teacher.

    Those two are there if the settings ask for them and their weights are here; see `why_no_teacher`.

    Raises:
        RecordError: transformers cannot load a folder.
    """
    import torch
    from transformers import AutoTokenizer

    trained_dtype = torch.float64 if dtype == "float64" else torch.float32  # that of an adapter on 16-bit weights
    tensors = {name: v.to(trained_dtype) for name, v in _learner_tensors(checkpoint / "resume").items()}
    modules = {"policy": _load(checkpoint, dtype, is_adapted=True)}
    own_tensors = {name.removeprefix("reference."): v for name, v in tensors.items() if name.startswith("reference.")}
    is_base = records.config["model.trainer_mode"] != "full"
    if uses_reference(records.config) and (own_tensors or is_base):
        modules["reference"] = _load(checkpoint, dtype, is_adapted=bool(own_tensors))  # none: without the adapter
        for name, parameter in modules["reference"].named_parameters():
            parameter.data = own_tensors.get(name, parameter.data)
    if records.config.get("distillation.teacher", "self") != "self":  # the policy, which is there
        # One that is no longer here is said to be missing: what was learned from it is recomputed from records.
        with contextlib.suppress(RecordError):
            if (teacher := _teacher_of(records.config, checkpoint.parents[1])) is not None:
                modules["teacher"] = _load(teacher, dtype, is_adapted=True)
    if dtype == "float64":
        modules = {name: module.double() for name, module in modules.items()}
    moments = {name: v for name, v in tensors.items() if name.startswith("optimizer.")}
    vocabulary = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False).get_vocab()
    return Model(modules, moments, records, 1 + max(vocabulary.values()))


def why_no_teacher(config: Mapping[str, Any]) -> str:
    """Return why the logprobs of the settings' teacher (Any: TOML's values) are not recomputed, as they are not."""
    name = config["distillation.teacher"]
    if _is_endpoint(name):
        return f"they are of the endpoint {name}, which is not asked again; what follows from them is recomputed"
    return f"{name} is no model in a folder here, or not with the weights that taught"


def _is_endpoint(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _teacher_of(config: Mapping[str, Any], run: Path) -> Path | None:
    """Return what transformers loads as the teacher that a run has recorded; None: its weights are not here.

    An earlier version recorded none: then, what the settings' name means now.
    """
    from gspo_gym.policy.load import for_other_programs  # here: it loads a part of the policies' room
    from gspo_gym.run.models import find_model

    name, facts = config["distillation.teacher"], read_teacher(run) or {}
    bases = [facts["base"]] if "base" in facts else []
    if not _is_endpoint(name):
        with contextlib.suppress(GymError):  # what the name means now, if the teacher's folder was moved
            bases.append(find_model(name, runs=Path(config["run.folder"])).base)
    digest = facts.get("weights_sha256")
    for base in bases:
        with contextlib.suppress(GymError):
            path = Path(for_other_programs(base))
            if path.is_dir() and digest in (None, _digest_of_weights(path)):
                return path
            if not path.is_dir() and digest is None and not path.is_absolute():  # of the hub
                return path
    return None


def _digest_of_weights(folder: Path) -> str | None:
    """Return the SHA-256 of the one file of weights in a folder, or of the sorted list of several with theirs."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))
    digests = [
        (name, hashlib.sha256((folder / name).read_bytes()).hexdigest())
        for name in names
        if not name.startswith("resume/")
    ]
    if len(digests) < 2:
        return digests[0][1] if digests else None
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _learner_tensors(folder: Path) -> dict[str, Any]:  # Any: torch is loaded where it is needed
    """Return the tensors of a learner; of several ranks, each wrote its rows, and says of which is its first."""
    import torch
    from safetensors import safe_open

    pieces: dict[str, list[tuple[int, Any]]] = {}
    for path in folder.glob("learner*.safetensors"):
        with safe_open(path, framework="pt") as file:
            first_rows = json.loads((file.metadata() or {}).get("first_rows", "{}"))
            for name in file.keys():  # noqa: SIM118 - a file of safetensors is no mapping
                pieces.setdefault(name, []).append((first_rows.get(name, 0), file.get_tensor(name)))
    by_name = {name: [rows for _, rows in sorted(parts, key=lambda piece: piece[0])] for name, parts in pieces.items()}
    return {name: rows[0] if len(rows) == 1 else torch.cat(rows) for name, rows in by_name.items()}


def _load(checkpoint: Path, dtype: str, *, is_adapted: bool) -> Any:  # Any: transformers and peft are untyped
    import torch
    from transformers import AutoModelForCausalLM

    adapter, folder = checkpoint / "adapter_config.json", _whole_model(checkpoint)
    load_dtype = torch.float32 if dtype == "float64" else getattr(torch, dtype)  # what float64 holds comes from float32
    try:
        options = {"trust_remote_code": False, **_quantization_options(checkpoint / "quantization.json", load_dtype)}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=load_dtype, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise RecordError(f"{folder}: transformers cannot load it: {error}") from error
    for module in model.modules():  # else bitsandbytes computes in bfloat16 where the processor can
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if not (adapter.exists() and is_adapted):
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, checkpoint, is_trainable=True).eval()


def _whole_model(checkpoint: Path) -> str:
    if not (checkpoint / "adapter_config.json").exists():
        return str(checkpoint)
    if (checkpoint / "base").is_dir():  # of a tiny model, which is nowhere else
        return str(checkpoint / "base")
    from gspo_gym.policy.bases import below_adapter
    from gspo_gym.policy.load import for_other_programs  # of names that only we know: smollm2, GGUF files, revisions

    return for_other_programs(below_adapter(checkpoint))


def _quantization_options(path: Path, dtype: Any) -> dict[str, Any]:  # Any: torch's, and transformers is untyped
    """Return options that quantize weights below an adapter as `path` says; {} without it (QLoRA, arXiv 2305.14314)."""
    if not path.exists():
        return {}
    from transformers import BitsAndBytesConfig

    if json.loads(path.read_text(encoding="utf-8"))["base"] == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)}
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **nf4)}
