"""The abstract client."""

from abc import ABC, abstractmethod


class Client(ABC):
    def __init__(self, client_or_config):
        self._client = client_or_config

    @property
    def client(self):
        return self._client

    @abstractmethod
    def setup_client(self, config): ...

    @abstractmethod
    async def to_native_tool(self, tool): ...

    @abstractmethod
    async def to_native_prompt(self, messages): ...

    @abstractmethod
    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs): ...

    @abstractmethod
    async def raise_from_native_response(self, response): ...

    @abstractmethod
    async def from_native_response(self, response): ...

    @abstractmethod
    async def close(self): ...
