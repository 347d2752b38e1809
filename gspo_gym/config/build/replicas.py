"""A process that samples, one of several behind a router: `python -m gspo_gym.config.build.replicas`.

`engines.py` starts it by [topology], with the environment of a rank (`base/ranks.py`). It builds the policy as the
driver did, takes the driver's weights, and serves an engine on them until the driver is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from gspo_gym.base.ranks import Rank
from gspo_gym.config.build.engines import held_tensors
from gspo_gym.config.build.trainer import build_policy
from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.base import Engine
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.replicas.process import serve
from gspo_gym.policy.parallel import copy_into


def main() -> NoReturn:
    """Be a replica, until the driver is gone."""
    serve(Rank(), _build)


async def _build(order: Any, tensors: Iterator[tuple[str, Tensor]]) -> Engine:
    """Return the engine of the driver's order (Any: JSON), with the driver's weights."""
    config = RunConfig.from_dict(order["config"])
    torch.set_num_threads(max(1, torch.get_num_threads() // order["num_replicas"]))
    policy = build_policy(config, order["base"])
    own = dict(held_tensors(policy.model))
    for name, tensor in tensors:
        with torch.no_grad():
            copy_into(own[name], tensor)
    return LocalEngine(
        policy.model,
        takes_tensors=True,
        max_model_len=config.rollout.max_model_len,
        max_batch_size=config.rollout.max_concurrent_rollouts,
    )


if __name__ == "__main__":
    main()
