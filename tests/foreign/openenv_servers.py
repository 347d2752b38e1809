"""Two servers built with the openenv package: `python openenv_servers.py guess|till MAX_SESSIONS` prints the URL.

A program of its own, so that what the package keeps in memory is not taken for ours. The package is imported inside the
functions, because every interpreter of this folder looks at every file.
"""

from __future__ import annotations

import random
import sys
from typing import Any


def guess_app(max_sessions: int) -> Any:
    """A text environment: a number from 1 to 8 in four guesses; "crash" raises."""
    from openenv.core.env_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from pydantic import create_model

    guess_class = create_model("Guess", __base__=Action, text=(str, ...))
    hint_class = create_model("Hint", __base__=Observation, hint=(str, ""))

    class Guessing(Environment):  # type: ignore[misc,type-arg]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.num_steps, self.number = 0, 0

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
            self.num_steps, self.number = 0, random.Random(seed).randint(1, 8)
            return hint_class(hint="Guess 1-8.")

        def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            self.num_steps += 1
            if action.text == "crash":
                raise RuntimeError("the die is lost")
            if action.text == str(self.number):
                return hint_class(hint="correct", reward=1.0, done=True)
            return hint_class(hint="no", done=self.num_steps >= 4, reward=0.0 if self.num_steps >= 4 else None)

        @property
        def state(self) -> Any:
            return State(step_count=self.num_steps)

    return create_app(Guessing, guess_class, hint_class, max_concurrent_envs=max_sessions)


def till_app(max_sessions: int) -> Any:
    """A tool environment: add prices up to the seed's last digit with `add`, then `pay`."""
    from fastmcp import FastMCP
    from openenv.core.env_server import create_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation, State

    class Till(MCPEnvironment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            mcp = FastMCP("till")
            self.total, self.wanted, self.is_paid = 0, 0, False

            @mcp.tool()
            def add(price: int) -> str:
                """Add a price."""
                self.total += price
                return f"total {self.total}"

            @mcp.tool()
            def pay() -> str:
                """Pay the total."""
                self.is_paid = True
                return "paid"

            super().__init__(mcp)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
            self.total, self.wanted, self.is_paid = 0, (seed or 0) % 10, False
            return Observation(metadata={"message": f"Pay {self.wanted}."})

        async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
            if isinstance(observation, CallToolObservation) and self.is_paid:
                observation.done, observation.reward = True, float(self.total == self.wanted)
            return observation

        def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            raise ValueError("only tools")

        @property
        def state(self) -> Any:
            return State()

    return create_app(Till, CallToolAction, CallToolObservation, max_concurrent_envs=max_sessions)


def main() -> None:
    """Serve until killed."""
    from gspo_gym.remote.serving import bind, server_for, url_of

    app = {"guess": guess_app, "till": till_app}[sys.argv[1]](int(sys.argv[2]))
    bound = bind("127.0.0.1", 0, has_key=False)
    bound.listen()
    print(url_of(bound), flush=True)
    server_for(app).run(sockets=[bound])


if __name__ == "__main__":
    main()
