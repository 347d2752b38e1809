"""Files on disks that refuse, and the differences between systems."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from forked import forked
from full_disk import small_disk

from gspo_gym.base import files
from gspo_gym.base.files import (
    PartFile,
    append_line,
    make_folder,
    read_file,
    replace_file,
    require_writable,
    sync,
    sync_tree,
    whole_lines,
    write_output,
)
from gspo_gym.errors import ConfigError, RecordError, StorageError


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.toml", "[run]\nseed = 1\n"), ("a.json", '{"run": {"seed": 1}}'), ("a.yaml", "run:\n  seed: 1\n")],
)
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_file(tmp_path / name) == {"run": {"seed": 1}}


def test_a_disk_without_room_is_our_error_that_names_the_file(tmp_path: Path) -> None:
    """/dev/full takes no byte; a limit on the size of files is met by a file of ours."""
    with pytest.raises(StorageError, match="/dev/full: cannot be written: No space left on device"):
        write_output(Path("/dev/full"), "text")
    with pytest.raises(StorageError, match="/dev/full: cannot be written"):
        append_line(Path("/dev/full"), "line")
    (tmp_path / "whole").write_text("old")
    program = (
        "import pathlib, signal, sys; from gspo_gym.base.files import replace_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "replace_file(pathlib.Path(sys.argv[1]), 'x' * 100_000)"
    )
    result = subprocess.run(
        [sys.executable, "-B", "-c", program, str(tmp_path / "whole")],  # -B: bytecode would be cut off, too
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert f"StorageError: {tmp_path / 'whole'}: cannot be written: File too large" in result.stderr
    assert (tmp_path / "whole").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "whole"]  # no draft, which would keep what room there is


@pytest.mark.parametrize("may_mount", [True, False])
@forked
def test_a_line_that_finds_no_room_leaves_nothing_for_the_next_one_to_be_glued_to(
    tmp_path: Path, may_mount: bool
) -> None:
    """Of 8 lines of 1,000 bytes, a disk of two pages takes the first 192 bytes of the ninth."""
    line = "x" * 999
    with small_disk(tmp_path / "disk", 8192, may_mount=may_mount) as disk:
        path = disk.folder / "events.jsonl"
        for _ in range(8):
            append_line(path, line)
        for _ in range(2):
            with pytest.raises(StorageError, match=r"No space left on device|File too large"):
                append_line(path, line)
            assert whole_lines(path) == [line] * 8
        append_line(path, "short")  # there is room for this one
        disk.grow(2**15)
        append_line(path, line)
        assert path.read_text() == "".join(each + "\n" for each in (*[line] * 8, "short", line))


def test_a_folder_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/runs: cannot be written: Not a directory"):
        make_folder(tmp_path / "file" / "runs")
    with pytest.raises(StorageError, match="Not a directory"):
        replace_file(tmp_path / "file" / "summary.json", "{}")


def test_what_can_be_written_is_known_before_and_nothing_is_changed(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    require_writable(tmp_path / "there")
    require_writable(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
    assert (tmp_path / "there").read_text() == "old"
    for path, reason in ((tmp_path, "it is a folder"), (tmp_path / "no" / "file", "No such file or directory")):
        with pytest.raises(StorageError, match=reason):
            require_writable(path)


def test_folders_are_not_flushed_where_the_system_has_no_handle_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_IS_WINDOWS", True)
    system_open = os.open

    def windows_open(path: Path, flags: int) -> int:
        if os.path.isdir(path) or not flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))  # as the system call there says it
        return system_open(path, flags)

    monkeypatch.setattr(os, "open", windows_open)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("")
    sync_tree(tmp_path)
    sync(tmp_path / "folder" / "file")


def test_a_part_file_names_what_differs_and_cuts_a_torn_line(tmp_path: Path) -> None:
    out, asked = tmp_path / "r.json", {"seeds": "0:3", "config": {"turns": 1}}
    part = PartFile(out, work="evaluation", asked=asked, resumes=False)
    part.append({"seed": 0})
    with part.path.open("a") as file:
        file.write('{"se')
    with pytest.raises(ConfigError, match=r"r.json.part holds 1 .* add --resume, or remove it"):
        PartFile(out, work="evaluation", asked=asked, resumes=False)
    other = asked | {"config": {"turns": 2}}
    with pytest.raises(
        ConfigError, match=r"r.json.part is of another evaluation: config.turns: expected 2, got 1; repeat"
    ):
        PartFile(out, work="evaluation", asked=other, resumes=True)
    with pytest.raises(ConfigError, match=r"r.json.part is not of a command of this kind .collection"):
        PartFile(out, work="collection", asked=asked, resumes=True)
    again = PartFile(out, work="evaluation", asked=asked, resumes=True)
    again.append({"seed": 1})
    assert (again.num_items, again.read(lambda values: values["seed"])) == (2, [0, 1])
    with pytest.raises(RecordError, match=r"r.json.part:2: KeyError"):
        again.read(lambda values: values["turns"])


def test_a_part_file_in_which_nothing_is_goes_away(tmp_path: Path) -> None:
    part = PartFile(tmp_path / "r.json", work="evaluation", asked={}, resumes=False)
    part.remove_if_empty()
    assert not part.path.exists()
    with pytest.raises(ConfigError, match="there is nothing to go on with; leave --resume out"):
        PartFile(tmp_path / "r.json", work="evaluation", asked={}, resumes=True)
