"""Names of Python objects, as users write them in files and on command lines."""

from __future__ import annotations

import pytest

from gspo_gym.base.modules import file_hint, named_object
from gspo_gym.env.registry import resolve
from gspo_gym.errors import UnknownNameError


def test_a_nested_name_is_found() -> None:
    assert named_object("gspo_gym.env.data.rows:Row.__name__", "a name") == "Row"


def test_a_module_without_a_name_is_answered_with_the_form() -> None:
    with pytest.raises(UnknownNameError, match=r"the agent 'json': expected MODULE:NAME$"):
        named_object("json", "the agent")


@pytest.mark.parametrize("name", ["games/mine.py", "games/mine.py:Mine"])
def test_a_file_is_answered_with_the_name_of_its_module(name: str) -> None:
    hint = "a file is named as a module, from a folder where it can be imported: games.mine:NAME"
    for look in (resolve, lambda name: named_object(name, "the agent")):
        with pytest.raises(UnknownNameError) as raised:
            look(name)
        assert str(raised.value).endswith(f"; {hint}")


def test_a_file_elsewhere_is_named_without_its_folder() -> None:
    assert file_hint("/home/me/games/mine.py").endswith(": mine:NAME")
    assert file_hint("mine:Mine") == file_hint("mine.yaml") == ""
