"""The real tree, cut short."""


class Error(Exception):
    """Of all."""


class ModelError(Error):
    """The model did not answer."""


class OverlongPromptError(Error):
    """The prompt does not fit."""
