"""A stand-in for nltk that notes what somebody wants to download."""

asked_for: list[str] = []


def download(name: str) -> bool:
    """Notes it."""
    asked_for.append(name)
    return False
