"""A cache that forgets what was not used for longest."""


class LruCache:
    """Holds at most `capacity` values; `get` and `put` both count as use.

    >>> cache = LruCache(1)
    >>> cache.put("a", 1)
    >>> cache.put("b", 2)
    >>> cache.get("a"), cache.get("b")
    (None, 2)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.values: dict[str, int] = {}  # least recently used first

    def get(self, key: str) -> int | None:
        """The value, or None if it is not held."""
        if key not in self.values:
            return None
        value = self.values.pop(key)
        self.values[key] = value
        return value

    def put(self, key: str, value: int) -> None:
        """Hold a value, forgetting the least recently used one if there is no room."""
        if key in self.values:
            self.values.pop(key)
        elif len(self.values) >= self.capacity:
            self.values.pop(next(iter(self.values)))
        self.values[key] = value

    def keys(self) -> list[str]:
        """What is held, least recently used first."""
        return list(self.values)
