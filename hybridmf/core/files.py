"""Files as bytes: told apart, opened through gzip, what is wrong with them put into words; and replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import RatingsError

FORMATS = ("auto", "text", "csv", "tsv", "mtx", "npz", "parquet")
"""What ``Ratings.from_file(format=)`` may say."""

HEAD_BYTES = 4096
"""Start of a file that its format and encoding are told by."""


@contextlib.contextmanager
def reading(path: str, encoding: str = "utf-8") -> Iterator[None]:
    """Errors of gzip and of the decoder in words that say what to do."""
    try:
        yield
    except EOFError as error:
        raise RatingsError(f"{path} is truncated: its gzip stream ends early; copy or download it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise RatingsError(f"{path} is a corrupt gzip file ({error}); copy or download it again") from error
    except UnicodeError as error:
        raise RatingsError(
            f"{path}{_undecodable_line(path, encoding)} is not valid {encoding} ({error}); "
            'pass the right one, such as encoding="latin-1"'
        ) from error


def _undecodable_line(path: str, encoding: str) -> str:
    if encoding.startswith(("utf-16", "utf-32")):  # a line end is more than one byte there
        return ""
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode(encoding)
            except UnicodeError:
                return f", line {number}"
    return ""


def open_bytes(path: str) -> BinaryIO:
    """Open for reading; gzip is told by its first two bytes, whatever the name says."""
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "expected a file of ratings, got a directory", path)
    stream = open(path, "rb")  # noqa: SIM115
    if stream.peek(2)[:2] == b"\x1f\x8b":
        stream.close()
        return cast(BinaryIO, gzip.open(path, "rb"))
    return stream


def read_head(path: str) -> bytes:
    """First bytes of the unpacked content, at least one."""
    with reading(path), open_bytes(path) as stream:
        head = stream.read(HEAD_BYTES)
    if not head:
        raise RatingsError(f"{path} is empty; expected ratings in one of the formats {', '.join(FORMATS[1:])}")
    return head


def sniff_format(path: str, head: bytes) -> str:
    """One of `FORMATS`, by the first bytes, then by the ending of the name."""
    for magic, format in ((b"PK\x03\x04", "npz"), (b"PAR1", "parquet"), (b"%%MatrixMarket", "mtx")):
        if head.startswith(magic):
            return format
    ending = os.path.splitext(path.lower().removesuffix(".gz"))[1]
    return {".npz": "npz", ".parquet": "parquet", ".pq": "parquet", ".mtx": "mtx"}.get(ending, "text")


def write_atomically(
    path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], Any], *, prefix: str = ".hybridmf-"
) -> None:
    """Write `path` so that a reader, or a crash, sees the old file or the new one, never a part.

    Parameters
    ----------
    path : path-like
        The file gets the permissions that the umask gives to new files.
    content : bytes or callable
        A callable writes to the binary file it is called with, and leaves it open.
    prefix : str
        First letters of the temporary file, which a process that is killed leaves behind.

    Raises
    ------
    IsADirectoryError, FileNotFoundError
        `path` is a folder; its folder does not exist.
    OSError
        The system refuses, for example because the disk is full; it names `path`.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"path {str(path)!r} is a folder; give the name of a file")
    if not path.parent.is_dir():
        why = "is no folder" if os.path.lexists(path.parent) else "does not exist"
        raise FileNotFoundError(f"the folder {str(path.parent)!r} of path {str(path)!r} {why}")
    try:
        _write_and_rename(path, content, prefix)
    except OSError as error:  # a full disk names no file, and nobody knows the temporary one
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_and_rename(path: Path, content: bytes | Callable[[BinaryIO], Any], prefix: str) -> None:
    # In the same folder: a rename must not cross file systems. Not named after `path`: the longest names have no room.
    temporary = path.parent / f"{prefix}{secrets.token_hex(8)}.tmp"
    # not mkstemp: its files are their owner's alone, and to undo that needs the umask, which can be read only by
    # setting it, for all threads
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder outlast a power failure, where the file system knows how."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network file systems
            raise
    finally:
        os.close(handle)


CRC_POLYNOMIAL = 0xEDB88320
"""CRC-32's, bits reversed: bit 31 is the coefficient of x^0."""


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two pieces one after the other, from that of each and the length of the second.

    Appending n bytes multiplies what the CRC of the first piece stands for by x^(8 n), modulo the polynomial.
    """
    power, square = 1 << 31, 1 << 23  # x^0, and x^8, which is squared from bit to bit of the exponent
    while second_bytes:
        if second_bytes & 1:
            power = _crc_product(power, square)
        square = _crc_product(square, square)
        second_bytes >>= 1
    return _crc_product(first, power) ^ second


def _crc_product(a: int, b: int) -> int:
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (CRC_POLYNOMIAL if b & 1 else 0)
    return product
