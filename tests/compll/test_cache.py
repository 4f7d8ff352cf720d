"""The folder of compiled kernels: missing, full, damaged, read-only, or another user's."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from compll.backends.cpu import jit
from compll.errors import UsageError
from compll.runtime import cache


@pytest.fixture(autouse=True)
def nothing_known():
    """A process looks for its folders once."""
    for known in (cache.usual, cache.folder, cache.spare):
        known.cache_clear()
    yield
    for known in (cache.usual, cache.folder, cache.spare):
        known.cache_clear()


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_stays_when_the_process_goes_elsewhere(root, monkeypatch):
    monkeypatch.chdir(root)
    monkeypatch.setenv("COMPLL_CACHE", "here")
    found = cache.folder("cpu")
    os.mkdir("elsewhere")
    monkeypatch.chdir("elsewhere")
    cache.write(found / "file", "text")
    assert (root / "here" / "cpu" / "file").read_text() == "text"


def test_a_home_is_found_and_may_be_missing(root, monkeypatch):
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.setenv("COMPLL_CACHE", "~/mine")
    assert cache.folder("cpu") == root / "mine" / "cpu"
    monkeypatch.delenv("COMPLL_CACHE")

    def homeless(name):
        raise RuntimeError(f"could not determine the home directory for {name}")

    monkeypatch.setattr(platformdirs, "user_cache_dir", homeless)
    cache.usual.cache_clear()
    cache.folder.cache_clear()
    assert cache.folder("cpu").parent.parent == root


def full(path):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_that_cannot_be_written_is_told(root, caplog):
    """Each process compiled anew, without a word."""
    (root / "cache").write_text("")
    assert cache.folder("cpu").parent.parent == root
    assert f"{root / 'cache' / 'cpu'} cannot be written (File exists): name another" in caplog.text


def test_a_full_disk_is_one_error(root, monkeypatch):
    monkeypatch.setattr(cache, "need_room", full)
    with pytest.raises(UsageError, match=r"no room for compiled kernels.*No space.*COMPLL_CACHE"):
        cache.folder("cpu")


def test_a_failed_write_leaves_no_file(root, monkeypatch):
    def broken(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(OSError, match="No space"):
        cache.write(root / "file", "text")
    assert not list(root.iterdir())


def test_others_may_read_what_was_written(root):
    """In an image with root's folder, other users' processes once compiled everything again."""
    before = os.umask(0o022)
    try:
        cache.write(root / "file", "text")
    finally:
        os.umask(before)
    assert (root / "file").stat().st_mode & 0o777 == 0o644


PROGRAM = "declare void @f()\n"


def test_a_folder_that_was_removed_is_made_again(root):
    shutil.rmtree(cache.folder("cpu"))
    assert jit.stored("removed", PROGRAM, lambda: PROGRAM)
    assert [*cache.folder("cpu").glob("removed_*.o")]


@pytest.mark.parametrize("there", [b"", b"another user's"])
def test_an_object_goes_elsewhere_where_its_folder_takes_no_more(root, there, monkeypatch):
    """A disk that became full, or a file that this user can neither read nor replace."""
    jit.stored("elsewhere", PROGRAM, lambda: PROGRAM)
    (path,) = cache.folder("cpu").glob("elsewhere_*.o")
    path.write_bytes(there)
    write = cache.write
    monkeypatch.setattr(jit, "write", lambda at, what: full(at) if at == path else write(at, what))
    assert jit.stored("elsewhere", PROGRAM, lambda: PROGRAM)
    assert [*cache.spare("cpu").glob("elsewhere_*.o")]
    assert path.read_bytes() == there


def test_a_temporary_folder_ends_with_its_process(root):
    (root / "cache").write_text("no folder")
    code = "from compll.runtime import cache; print(cache.folder('cpu'))"
    env = os.environ | {"TMPDIR": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    made = Path(done.stdout.strip())
    assert made.parent.parent == root
    assert not made.parent.exists()


def test_a_folder_that_others_filled_is_read(root, monkeypatch):
    """Kernels in a read-only folder, as in a container's image, are not compiled again."""
    made = jit.stored("others", PROGRAM, lambda: PROGRAM)
    shared = cache.usual("cpu")
    cache.folder.cache_clear()
    monkeypatch.setattr(cache, "need_room", lambda at: full(at) if at == shared else None)
    assert cache.folder("cpu") != shared
    assert jit.stored("others", PROGRAM, lambda: pytest.fail("compiled")) == made


def writable(path):
    path.chmod(0o777)


def foreign(path):
    """Give a file to another user, which only root can."""
    os.chown(path, 65534, -1)


@pytest.mark.parametrize("what", ["", "cpu", "file"])
@pytest.mark.parametrize(
    "spoil",
    [
        writable,
        pytest.param(foreign, marks=pytest.mark.skipif(os.geteuid() != 0, reason="not root")),
    ],
)
def test_files_that_others_can_write_are_not_run(what, spoil, root, caplog):
    """A cache in a shared folder: kernels are compiled for this process, with one warning."""
    jit.stored("shared", PROGRAM, lambda: PROGRAM)
    path = next(cache.usual("cpu").glob("shared_*.o"))
    planted = b"planted"
    path.write_bytes(hashlib.sha256(planted).digest() + planted)
    spoil(path if what == "file" else root / "cache" / what)
    cache.folder.cache_clear()
    with pytest.raises(OSError):
        cache.read(path)
    for _ in range(2):
        assert jit.stored("shared", PROGRAM, lambda: PROGRAM) != planted
    used = cache.folder("cpu")
    if what == "file":
        assert used == path.parent
        assert planted not in path.read_bytes()
        return
    assert used.parent.parent == root
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert str(root / "cache" / what) in told
    assert "COMPLL_CACHE" in told


def test_others_may_not_write_cached_files_whatever_the_umask(root):
    before = os.umask(0)
    try:
        jit.stored("open", PROGRAM, lambda: PROGRAM)
    finally:
        os.umask(before)
    (path,) = cache.folder("cpu").glob("open_*.o")
    assert cache.read(path)
    assert jit.stored("open", PROGRAM, lambda: pytest.fail("compiled"))


def test_no_one_waits_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LONGEST", 0.1)
    done = []
    with cache.alone(tmp_path / "kernels.o"), cache.alone(tmp_path / "kernels.o"):
        done.append(1)
    with cache.alone(tmp_path / "nowhere" / "kernels.o"):
        done.append(2)
    assert done == [1, 2]


def test_objects_belong_to_the_modules_that_were_imported(root, monkeypatch, caplog):
    """Keys were of the sources at the first compile: after an upgrade beside a running process, its
    objects were those of the new release."""
    assert cache.IMPORTED in jit.version()
    assert cache.sources() == cache.IMPORTED
    text = "define i32 @one() { ret i32 1 }"
    monkeypatch.setattr(jit, "sources", lambda: "those of another release")
    made = jit.stored("own", "program", lambda: text)
    assert made
    assert not [*root.rglob("*.o")]
    assert "changed on disk" in caplog.text
    monkeypatch.undo()
    assert jit.stored("own", "program", lambda: text) == made


def test_bytecode_without_sources_has_a_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "runtime" / "cache.py"))
    (tmp_path / "numerics").mkdir()
    found = set()
    for text in (b"", b"one", b"other"):
        (tmp_path / "numerics" / "numbers.pyc").write_bytes(text)
        found.add(cache.sources())
    assert len(found) == 3
