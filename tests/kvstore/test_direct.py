"""Direct I/O on real files of this machine."""

import ctypes
import logging
import mmap
import os

import pytest

from kvstore.errors import CorruptBlock
from kvstore.payloads.direct import PAGE_BYTES, DirectFile, Run, drop_from_memory, make_directory

DATA = os.urandom(5 * PAGE_BYTES)


def memory(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


@pytest.fixture
def file(tmp_path):
    made = DirectFile(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    yield made
    made.close()
    made.close()


def test_what_is_written_in_pieces_is_read_as_one(file, tmp_path):
    pieces = [Run.of(0, DATA[:PAGE_BYTES]).memory, Run.of(0, DATA[PAGE_BYTES:]).memory]
    file.write(pieces, PAGE_BYTES)
    file.sync()
    out = memory(len(DATA))
    file.read(out, PAGE_BYTES)
    assert out == DATA
    assert (tmp_path / "f").read_bytes() == bytes(PAGE_BYTES) + DATA


@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES, PAGE_BYTES + 512, 2 * PAGE_BYTES - 1])
def test_a_file_that_ends_early_is_corrupt(file, tmp_path, size):
    (tmp_path / "f").write_bytes(bytes(size))
    with pytest.raises(CorruptBlock, match=f"ends at {size}"):
        file.read(memory(2 * PAGE_BYTES), 0)


def test_what_direct_io_refuses_goes_through_the_page_cache_with_a_warning(file, caplog):
    """Here for memory that isn't aligned; some file systems take the flag and refuse each use of it."""
    if not file.direct:
        pytest.skip("the file system of the tests has no O_DIRECT")
    crooked = memory(2 * len(DATA))[1 : 1 + len(DATA)]
    crooked[:] = DATA
    with caplog.at_level(logging.WARNING):
        file.write([crooked], 0)
    crooked[:] = bytes(len(DATA))
    file.read(crooked, 0)
    assert crooked == DATA
    assert caplog.text.count("event=no_direct_io") == 1
    assert not file.direct


def test_a_read_that_direct_io_refuses_goes_through_the_page_cache_too(file, tmp_path, caplog):
    if not file.direct:
        pytest.skip("the file system of the tests has no O_DIRECT")
    (tmp_path / "f").write_bytes(DATA)
    crooked = memory(2 * len(DATA))[1 : 1 + len(DATA)]
    with caplog.at_level(logging.WARNING):
        file.read(crooked, 0)
    assert crooked == DATA
    assert caplog.text.count("event=no_direct_io") == 1
    assert not file.direct


def test_a_file_that_cannot_be_opened_direct_is_opened_without(caplog):
    """Memory of this process, as a file of a real file system without O_DIRECT."""
    target = memory(PAGE_BYTES)
    at = ctypes.addressof(ctypes.c_char.from_buffer(target))
    file = DirectFile("/proc/self/mem", os.O_RDWR)
    assert not file.direct
    assert "event=no_direct_io" in caplog.text
    file.write([Run.of(0, DATA[:PAGE_BYTES]).memory], at)
    assert target == DATA[:PAGE_BYTES]
    out = memory(PAGE_BYTES)
    file.read(out, at)
    assert out == DATA[:PAGE_BYTES]
    file.close()


def test_other_errors_are_raised(tmp_path):
    with pytest.raises(FileNotFoundError):
        DirectFile(tmp_path / "none", os.O_RDWR)
    file = DirectFile(tmp_path / "f", os.O_RDONLY | os.O_CREAT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write([memory(PAGE_BYTES)], 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.allocate(0, PAGE_BYTES)
    file.close()


def test_punched_pages_give_their_blocks_back_and_read_as_zeros(file):
    file.allocate(0, 8 * PAGE_BYTES)
    file.write([Run.of(0, DATA).memory], 0)
    before = os.fstat(file.fd)
    try:
        file.punch(PAGE_BYTES, 2 * PAGE_BYTES)
    except OSError as error:
        pytest.skip(f"the file system of the tests cannot punch holes: {error}")
    after = os.fstat(file.fd)
    assert before.st_blocks - after.st_blocks == 2 * PAGE_BYTES // 512
    assert before.st_size == after.st_size
    out = memory(len(DATA))
    file.read(out, 0)
    assert out == DATA[:PAGE_BYTES] + bytes(2 * PAGE_BYTES) + DATA[3 * PAGE_BYTES :]


@pytest.mark.parametrize("lead", [0, 16, 24])
@pytest.mark.parametrize("length", [1, PAGE_BYTES - 16, PAGE_BYTES, 3 * PAGE_BYTES + 7])
def test_a_run_is_whole_aligned_pages_with_the_payload_behind_its_lead(lead, length):
    run = Run.of(lead, DATA[:length])
    assert run.payload == DATA[:length]
    assert len(run.payload) == length
    assert lead + length <= len(run.used) < lead + length + PAGE_BYTES
    assert len(run.used) % PAGE_BYTES == len(run.memory) % PAGE_BYTES == 0
    assert ctypes.addressof(ctypes.c_char.from_buffer(run.memory)) % PAGE_BYTES == 0


def test_pages_that_were_dropped_are_read_again(tmp_path):
    (tmp_path / "f").write_bytes(DATA)
    with open(tmp_path / "f", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), len(DATA))
        assert mapped[:] == DATA
        at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        drop_from_memory(at + 16, PAGE_BYTES)
        assert mapped[:] == DATA


def test_directories_are_made_with_those_above_them(tmp_path):
    make_directory(tmp_path / "a" / "b" / "c")
    make_directory(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_directory(tmp_path / "file" / "d")
