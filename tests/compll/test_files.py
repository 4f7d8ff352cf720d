"""Files that are written whole or not at all."""

import json
import resource
from contextlib import contextmanager

import pytest
import torch

from compll.files import replacing, write_file, write_json


@contextmanager
def room_for(count):
    """A context in which no file gets longer than `count` bytes, as on a disk that is full."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def by_torch(path):
    """Write more than there is room for; torch raises RuntimeError, without the path."""
    with replacing(path) as file:
        torch.save(torch.zeros(10_000), file)


@pytest.mark.parametrize("write", [lambda path: write_file(path, bytes(10_000)), by_torch])
def test_a_file_that_the_disk_refuses_stays_as_it_was(write, tmp_path):
    path = tmp_path / "a.json"
    write_file(path, "before")
    with room_for(1000), pytest.raises(OSError, match=r"too large.*a\.json"):
        write(path)
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_any_other_error_leaves_the_file_and_is_raised_as_it_is(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(bytes([1 // 0]))
    assert not [*tmp_path.iterdir()]


def test_a_device_or_link_is_written_in_place(tmp_path):
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_file(type(tmp_path)("/dev/full"), "text")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_file(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "text"


def test_json_has_a_line_for_each_innermost_list_and_mapping(tmp_path):
    texts = ["two  spaces", "a\nline [ {", "} ]", "\u2028"]
    rows = [{"codec": "topk", "ms": 1.5}, {"codec": "}\n  ]", "ms": None}]
    data = {"rows": rows, "seconds": [0.1, 2e-9], "texts": texts, "deep": [[1, 2], {}, [], [[]]]}
    write_json(tmp_path / "a.json", data)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == data
    assert '  {"codec": "topk", "ms": 1.5},\n' in text
    assert ' "seconds": [0.1, 2e-09],\n' in text
    assert text.startswith('{\n "rows": [\n')
    assert text.endswith("\n}\n")
