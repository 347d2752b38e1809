"""The page docs/explanations/side_by_side.md, from the programs in docs/side_by_side/: `python docs/side_by_side.py`.

`python docs/side_by_side.py run PYTHON TEMPLATE PROGRAM...` runs programs with that interpreter, each in a new folder
with a small model in `model/` whose chat template is the file TEMPLATE (such as TRL's qwen3.jinja), and prints lines of
docs/side_by_side.jsonl. A test fails while the page is not what programs and lines say.
"""

import io
import json
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROGRAMS = HERE / "side_by_side"
LINES = HERE / "side_by_side.jsonl"
PAGE = HERE / "explanations" / "side_by_side.md"
TASKS = {
    "one_turn": "One turn: add two digits",
    "many_turns": "Many turns: find a number from hints",
}
SIDES = ("gspo_gym", "trl", "agilerl", "verifiers")
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

INTRODUCTION = """# Lines until training

The same two tasks, trained with four libraries: from a model in a folder to optimizer steps, on a processor. Each
program has what its library needs and its defaults for everything else, and all are formatted alike. Counted are lines
with code: no blank lines, no comments, not the module's docstring. The docstring of a tool counts: TRL reads it.

"""


CONCLUSION = """
Lines are not everything that differs. TRL's environment talks in calls of tools only, and an episode of it ends when
the model stops calling; here and in AgileRL and verifiers a turn is any text. Ours also checks the chat template,
evaluates on held-out tasks, saves, and writes the run's report.

AgileRL ran with torch 2.13 and its own pins of everything else, without vLLM. Its extra for language models brings
Liger's Triton kernels, which need a GPU, and puts them into each model that Liger knows (`algorithms/core/base.py`,
line 4719); no setting prevents it, and without the package its algorithms cannot be imported (`__init__.py`, line 56).
In Triton's interpreter a kernel of Liger's fails. So the model is a GPT-2, which Liger leaves alone.

verifiers 0.1.9 is the last release that has its trainer: later ones look for the package verifiers-rl, and 0.4.0 names
prime-rl; the package index has neither. The program needs a server beside it, `vf-vllm --model model`, here with vLLM
0.11 and torch 2.8. Before each step but the first (`rl/trainer/trainer.py`, line 336) the weights go there by NCCL from
GPU to GPU (`rl/inference/client.py`, line 123, and `server.py`, line 56), so that a processor gets one step.

The programs are files in `docs/side_by_side/`; `python docs/side_by_side.py run PYTHON TEMPLATE PROGRAM...` runs them.
"""


def num_lines(source: str) -> int:
    """Return the number of lines with code."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in NOT_CODE]
    tokens = tokens[1:] if tokens[0].type == tokenize.STRING else tokens  # the docstring
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)})


def page() -> str:
    """Return the text of the page."""
    kept = [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()]
    ends = {line["program"]: line for line in kept}
    parts = [INTRODUCTION, "| | " + " | ".join(TASKS.values()) + " |\n|---|---|---|\n"]
    for side in SIDES:
        cells = [f"{num_lines(_source(task, side))} lines; {ends[f'{task}_{side}']['end']}" for task in TASKS]
        parts.append(f"| {ends[f'one_turn_{side}']['library']} | {' | '.join(cells)} |\n")
    parts.append(CONCLUSION)
    for task, title in TASKS.items():
        parts.append(f"\n## {title}\n")
        for side in SIDES:
            name, *_ = ends[f"one_turn_{side}"]["library"].split()
            parts.append(f'\n### {name}\n\n``` {{.python}}\n--8<-- "docs/side_by_side/{task}_{side}.py"\n```\n')
    return "".join(parts)


def _source(task: str, side: str) -> str:
    return (PROGRAMS / f"{task}_{side}.py").read_text(encoding="utf-8")


def run(python: str, template: Path, program: Path) -> dict[str, str]:
    """Run a program with that interpreter and return the line to keep; `end` and `library` are for a person to word."""
    from gspo_gym.policy.load import load_policy, save_policy

    with tempfile.TemporaryDirectory() as name:
        policy = load_policy("tiny:qwen3-64-v2")
        policy.tokenizer.chat_template = template.read_text(encoding="utf-8")
        save_policy(policy, Path(name) / "model")
        if program.stem.endswith("_agilerl"):
            _save_gpt2(policy.tokenizer, Path(name) / "model")
        started = time.monotonic()
        done = subprocess.run([python, str(program.resolve())], cwd=name, capture_output=True, text=True, check=False)
    print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
    end = f"ran in {time.monotonic() - started:.0f} s" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
    return {"program": program.stem, "library": program.stem, "end": end, "date": time.strftime("%Y-%m-%d")}


def _save_gpt2(tokenizer: Any, folder: Path) -> None:
    """Put a model with random weights over the one in the folder that Liger has no kernels for: they need a GPU."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        for program in sys.argv[4:]:
            print(json.dumps(run(sys.argv[2], Path(sys.argv[3]), Path(program))))
    else:
        PAGE.write_text(page(), encoding="utf-8")
