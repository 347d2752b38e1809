"""Instructions, and what stands between tags."""

import re

SYSTEM_PROMPTS = {"default": "Answer in <answer> tags.", "simple": "Say <answer>...</answer>."}


def extract_answer(completion):
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    return found[-1].strip() if found else None
