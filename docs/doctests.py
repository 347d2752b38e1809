"""An extension of griffe: examples at the end of a docstring, which stand without a heading, are a section."""

import inspect
import textwrap
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Puts "Examples:" before the first paragraph of a docstring that begins with ">>>"."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text, prompt, examples = inspect.cleandoc(obj.docstring.value).partition("\n\n>>> ")
            if prompt:
                section = textwrap.indent((prompt + examples).strip("\n"), "    ")
                obj.docstring.value = f"{text}\n\nExamples:\n{section}"
