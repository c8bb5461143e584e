"""Mapped memory: its bounds, its words, its life, and what lies beyond the end of a file."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect._core import Mapping

PAGE = 4096
HUGE = 2 << 20
WORD = 2**64


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("test-mapping")
    os.ftruncate(fd, 2 * PAGE)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("asked", "got"), [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (HUGE + 5, HUGE + PAGE)]
)
def test_sizes_are_whole_pages_of_zeros(asked: int, got: int) -> None:
    mapping = Mapping(-1, 0, asked, True)
    assert mapping.nbytes == got
    view = mapping.view(0, got)
    assert view.dtype == np.uint8 and not view.any()
    view[:] = 1
    if got >= HUGE:
        assert view.ctypes.data % HUGE == 0


@given(st.integers(0, WORD - 1) | st.integers(0, PAGE + 9) | st.integers(WORD - 20, WORD - 1))
def test_a_word_outside_or_across_is_an_index_error(offset: int) -> None:
    mapping = Mapping(-1, 0, PAGE, True)
    for call, size in (
        (lambda: mapping.load(offset), 8),
        (lambda: mapping.store(offset, 1), 8),
        (lambda: mapping.add(offset, 1), 8),
        (lambda: mapping.swap_if(offset, 0, 1), 8),
        (lambda: mapping.wait(offset, 12345, 0.0), 4),
        (lambda: mapping.wake(offset), 4),
    ):
        if offset % size == 0 and offset + size <= PAGE:
            call()
        else:
            with pytest.raises(IndexError, match="word: offset is off the mapping"):
                call()


@given(
    st.integers(0, WORD - 1) | st.integers(0, PAGE + 1), st.integers(0, WORD - 1) | st.integers(0, PAGE + 1)
)
def test_a_view_outside_is_an_index_error(offset: int, nbytes: int) -> None:
    mapping = Mapping(-1, 0, PAGE, True)
    if offset + nbytes <= PAGE:
        assert mapping.view(offset, nbytes).shape == (nbytes,)
    else:
        with pytest.raises(IndexError, match="view: reaches past the mapping"):
            mapping.view(offset, nbytes)


@given(st.integers(0, WORD - 1), st.integers(0, WORD - 1))
def test_words_are_64_bits_in_the_machine_order(a: int, b: int) -> None:
    mapping = Mapping(-1, 0, PAGE, True)
    words = mapping.view(0, PAGE).view(np.uint64)
    mapping.store(8, a)
    assert mapping.load(8) == words[1] == a
    assert mapping.add(8, b) == a
    assert mapping.load(8) == (a + b) % WORD
    assert not mapping.swap_if(8, (a + b + 1) % WORD, 5)
    assert mapping.load(8) == (a + b) % WORD
    assert mapping.swap_if(8, (a + b) % WORD, 5)
    assert words[:3].tolist() == [0, 5, 0]


def test_a_view_keeps_the_memory_alive() -> None:
    mapping = Mapping(-1, 0, PAGE, True)
    part = mapping.view(8, 16)[4:8]
    mapping.store(8, 0x0102030405060708)
    del mapping
    gc.collect()
    others = [
        Mapping(-1, 0, PAGE, True) for _ in range(50)
    ]  # they would take the place of what was given back
    assert part.tolist() == [4, 3, 2, 1]
    part[:] = 9
    assert not any(other.load(8) for other in others)


def test_memory_is_given_back(memfd: int) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:test-mapping")

    mapping = Mapping(memfd, 0, PAGE, True)
    view = mapping.view(0, 8)
    del mapping
    assert mapped() == 1
    del view
    assert mapped() == 0


def test_mappings_of_one_descriptor_share_their_bytes(memfd: int) -> None:
    one, two, second_page = (
        Mapping(memfd, 0, 2 * PAGE, True),
        Mapping(memfd, 0, PAGE, False),
        Mapping(memfd, PAGE, 1, True),
    )
    one.store(16, 77)
    second_page.store(0, 5)
    assert two.load(16) == 77 and one.load(PAGE) == 5
    assert os.pread(memfd, 1, 16) == b"\x4d"


def test_a_mapping_for_reading_refuses_to_be_written(memfd: int) -> None:
    mapping = Mapping(memfd, 0, PAGE, False)
    assert not mapping.view(0, 8).flags.writeable
    for call in (
        lambda: mapping.store(0, 1),
        lambda: mapping.add(0, 1),
        lambda: mapping.swap_if(0, 0, 1),
    ):
        with pytest.raises(ValueError, match="word: the mapping is for reading"):
            call()
    assert mapping.load(0) == 0


@pytest.mark.parametrize("n", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
@pytest.mark.parametrize("offset", [0, PAGE, 5 * PAGE])
def test_beyond_the_end_of_a_file_are_zeros(tmp_path: Path, n: int, offset: int) -> None:
    path = tmp_path / "short"
    content = bytes(1 + i % 255 for i in range(n))
    path.write_bytes(content)
    fd = os.open(path, os.O_RDWR)
    try:
        mapping = Mapping(fd, offset, 4 * PAGE, True)
    finally:
        os.close(fd)
    expected = content[offset:].ljust(4 * PAGE, b"\0")
    assert mapping.view(0, 4 * PAGE).tobytes() == expected
    mapping.store(4 * PAGE - 8, 1)  # and they can be written, for ourselves alone
    mapping.sync()
    assert path.read_bytes() == content


def test_what_is_written_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(100))
    with path.open("r+b") as file:
        mapping = Mapping(file.fileno(), 0, 100, True)
    mapping.view(98, 2)[:] = 7
    mapping.sync()
    assert path.read_bytes() == bytes(98) + b"\7\7"


def test_what_the_system_refuses_is_an_os_error(tmp_path: Path, memfd: int) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(PAGE))
    with path.open("rb") as file, pytest.raises(PermissionError):
        Mapping(file.fileno(), 0, PAGE, True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        Mapping(10**6, 0, PAGE, True)
    with pytest.raises(OSError, match="Invalid argument"):
        Mapping(memfd, 8, PAGE, True)
    for nbytes in (1 << 60, WORD - 1):
        with pytest.raises(OSError, match="Cannot allocate memory|Invalid argument"):
            Mapping(-1, 0, nbytes, True)
