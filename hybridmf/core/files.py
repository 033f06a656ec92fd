"""Detect formats of files, open them through gzip, explain their errors, and replace files atomically.

A file that is being written has a temporary name, ``PREFIX HOST-RANDOM.tmp``, and its writer holds an advisory lock on
it. The system releases the lock when the process ends, even if it is killed: a temporary file whose lock can be taken
has no owner, and the next writer in the folder removes it. A lock may be invisible to other machines of a network file
system, so a file of another host, or one that cannot be locked, is removed only after a day without a write.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import functools
import gzip
import hashlib
import io
import logging
import os
import re
import secrets
import socket
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import RatingsError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("hybridmf")

FORMATS = ("auto", "text", "csv", "tsv", "lists", "jsonl", "mtx", "npz", "parquet")
"""Values of ``Ratings.from_file(format=)``."""

_TO_FRAME = "read it into a data frame, and pass that to Ratings.from_frame"
_EXCEL = "read it with pandas.read_excel, and pass the table to Ratings.from_frame"
_FOREIGN: tuple[tuple[bytes, str, str], ...] = (
    (rb"version https://git-lfs", "a Git LFS pointer, not the file itself", "run git lfs pull in its repository"),
    (rb"(?i)\s*<(?:!doctype|html|head|body)", "an HTML page", "download the file that the page offers"),
    (rb"\s*<\?xml", "XML", _TO_FRAME),
    (rb"\s*\[\s*[{\[]", "one JSON array", "write one JSON object a line, or pass pandas.read_json(...) to from_frame"),
    (rb"\x80[\x02-\x05]", "a pickle, which is never loaded", "unpickle it if you trust it, and pass the object"),
    (rb"\x89HDF\r\n", "HDF5", "read it with pandas or h5py, and pass the table or matrix"),
    (rb"\x93NUMPY", "a NumPy array", "pass numpy.load(...) to Ratings.from_matrix or from_coo"),
    (rb"(?s)PK\x03\x04.{26}(?:xl/|\[Content_Types\]|_rels/|docProps/)", "an Excel workbook", _EXCEL),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Office document", _EXCEL),
    (rb"\x1f\x8b", "packed twice by gzip", "unpack it once"),
    (rb"SQLite format 3", "an SQLite database", "query it, and pass the table to Ratings.from_frame"),
    (rb"ARROW1|FEA1", "an Arrow file", "pass pyarrow.feather.read_table(...) to Ratings.from_frame"),
    (rb"Obj\x01|ORC", "an Avro or ORC file", _TO_FRAME),
    (rb"PK\x05\x06", "an empty ZIP archive", "copy or download it again"),
    (rb"BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf|Rar!", "packed with another program than gzip", "unpack it first"),
    (rb"%PDF", "a PDF", "give the file of ratings"),
)
"""How contents begin that are no ratings, what they are, and the way out."""

TEMPORARY = ".hybridmf-"  # first letters of temporary files
ABANDONED = 24 * 3600.0  # seconds without a write after which a temporary file of unknown ownership is an orphan
READ_BYTES = 1 << 17  # bytes read from the system at a time
HEAD_BYTES = 4096  # bytes at the start of a file from which its format and encoding are detected


@contextlib.contextmanager
def reading(path: str, encoding: str = "utf-8") -> Iterator[None]:
    """Turn errors of gzip and of the decoder into messages with a remedy."""
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
    decoder, number = codecs.getincrementaldecoder(encoding)(), 1
    with open_bytes(path) as stream:
        while True:
            block = stream.read(1 << 20)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                number += error.object.count(b"\n", 0, error.start)
                return f", line {number}"
            if not block:
                return ""
            number += block.count(b"\n")


class _Watched(io.FileIO):
    """A file that reports its position after each read."""

    def __init__(self, path: str, on_read: Callable[[int], object]) -> None:
        super().__init__(path)
        self.on_read = on_read

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self.on_read(self.tell())
        return count


def open_bytes(path: str, on_read: Callable[[int], object] | None = None) -> BinaryIO:
    """Open, unpacking what its first two bytes mark as gzip; `on_read` gets the number of bytes read of the file."""
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "expected a file of ratings, got a directory", path)
    stream = io.BufferedReader(io.FileIO(path) if on_read is None else _Watched(path, on_read), READ_BYTES)
    if stream.peek(2)[:2] != b"\x1f\x8b":
        return stream
    unpacked: Any = gzip.GzipFile(fileobj=stream, mode="rb")
    unpacked.myfileobj = stream  # which it closes
    return cast(BinaryIO, unpacked)


def read_head(path: str) -> bytes:
    """First bytes of the unpacked content, at least one; refuses a pipe, which the next reading would continue."""
    if stat.S_ISFIFO(os.stat(path).st_mode):
        raise RatingsError(
            f"{path} is a pipe, and files are read more than once: write it to a file, and give its name"
        )
    with reading(path), open_bytes(path) as stream:
        head = stream.read(HEAD_BYTES)
    if not head:
        raise RatingsError(f"{path} is empty; expected ratings in one of the formats {', '.join(FORMATS[1:])}")
    return head


def sniff_format(path: str, head: bytes) -> str:
    """One of `FORMATS`, by the first bytes, then by the ending of the name."""
    for start, what, way_out in _FOREIGN:
        if re.match(start, head.removeprefix(codecs.BOM_UTF8)):
            raise RatingsError(f"{path} is {what}; {way_out}")
    if head[257:262] == b"ustar":
        raise RatingsError(f"{path} is a tar archive; unpack it, and give the file of ratings in it")
    if re.match(rb'\s*\{\s*"', head.removeprefix(codecs.BOM_UTF8)):
        return "jsonl"
    for magic, format in ((b"PK\x03\x04", "npz"), (b"PAR1", "parquet"), (b"%%MatrixMarket", "mtx")):
        if head.startswith(magic):
            return format
    ending = os.path.splitext(path.lower().removesuffix(".gz"))[1]
    return {".npz": "npz", ".parquet": "parquet", ".pq": "parquet", ".mtx": "mtx"}.get(ending, "text")


def write_atomically(
    path: str | os.PathLike[str],
    content: bytes | Callable[[BinaryIO], Any],
    *,
    prefix: str = TEMPORARY,
    clean: bool = True,
) -> None:
    """Write `path` so that a reader, or a crash, sees the old file or the new one, never a part.

    A new file gets the permissions that the umask gives; those of an old one, which has to be a regular file, stay. A
    callable `content` writes to the binary file it is called with, and leaves it open. `prefix` begins the name of the
    temporary file, which a process that is killed leaves behind; `clean` first removes such files from the folder.
    """
    path = Path(path)
    permissions_of(path)  # before the content is made
    if not path.parent.is_dir():
        why = "is no folder" if os.path.lexists(path.parent) else "does not exist"
        raise FileNotFoundError(f"the folder {str(path.parent)!r} of path {str(path)!r} {why}")
    if clean:
        remove_orphans(path.parent, prefix)
    try:
        _write_and_rename(path, content, prefix)
    except OSError as error:  # a full disk names no file, and the temporary name is unknown to the user
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}
"""Files that a regular file must not replace."""


def permissions_of(path: str | os.PathLike[str]) -> int | None:
    """Permissions of the regular file at a path; None if there is none. Symbolic links are followed."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISREG(mode):
        return stat.S_IMODE(mode)
    kind = KINDS.get(stat.S_IFMT(mode), "special file")
    found = f"path {os.fspath(path)!r} is a {kind}"
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{found}; give the name of a file")
    raise FileExistsError(f"{found}, and only regular files are replaced; give the name of a file")


def _write_and_rename(path: Path, content: bytes | Callable[[BinaryIO], Any], prefix: str) -> None:
    temporary, handle = _new_temporary(path.parent, prefix)
    try:
        with os.fdopen(handle, "wb") as file:
            permissions = permissions_of(path)
            if permissions is not None and permissions != stat.S_IMODE(os.fstat(handle).st_mode):
                os.chmod(temporary, permissions)  # before anything is in it
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
            permissions_of(path)  # it may have become something else in the meantime
            os.replace(temporary, path)  # while the lock is held: an unlocked file counts as abandoned
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _new_temporary(folder: Path, prefix: str) -> tuple[Path, int]:
    """A temporary file in a folder, open for writing and locked where the file system can do so."""
    while True:
        # In the same folder: a rename must not cross file systems. Not named after what it becomes: the longest names
        # have no room.
        path = folder / f"{prefix}{_host()}-{secrets.token_hex(8)}.tmp"
        # not mkstemp: its files are their owner's alone, and to undo that needs the umask, which can be read only by
        # setting it, for all threads
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(BlockingIOError):
            lock(handle)
            if _is_at(handle, path):
                return path, handle
        os.close(handle)  # another process found it unlocked, and removes it as abandoned


def lock(handle: int) -> bool:
    """Lock an open file or folder until it is closed, or its process ends; False where the system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # some network file systems
        logger.debug("no lock: %s", error)
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


@functools.cache
def _host() -> str:
    """Eight characters for this machine since it was started: where locks of its processes are visible."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        machine = socket.gethostname()
    return hashlib.sha256(machine.encode()).hexdigest()[:8]


def remove_orphans(folder: Path, prefix: str = TEMPORARY, *, abandoned: float = ABANDONED) -> None:
    """Remove temporary files of `write_atomically` whose writers were killed; others, and what fails, stay.

    Files of other hosts, and files that cannot be locked, are removed from an age of `abandoned` seconds on.
    """
    name = re.compile(rf"{re.escape(prefix)}(?:([0-9a-f]{{8}})-)?[0-9a-f]{{16}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for found in filter(None, (name.fullmatch(entry.name) for entry in entries)):
            with contextlib.suppress(OSError):  # it is being written, or another user's, or another process was quicker
                _remove_orphan(folder / found[0], found[1] == _host(), abandoned)


def _remove_orphan(path: Path, ours: bool, abandoned: float) -> None:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        return
    unused = time.time() - status.st_mtime >= abandoned
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        locked = lock(handle)  # fails while it is written
        if ((locked and ours) or unused) and _is_at(handle, path):
            path.unlink()
            logger.info("%s: removed the file of a killed process", path)
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power failure, if the file system supports that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network file systems
            raise
    finally:
        os.close(handle)


CRC_POLYNOMIAL = 0xEDB88320  # CRC-32's, bits reversed: bit 31 is the coefficient of x^0


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
