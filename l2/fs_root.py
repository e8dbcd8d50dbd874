"""One root directory of the fs adapter: who owns it, where a key's file is, how a file gets its name, what is there.

    <root>/KVKEEP-FS            mark: magic, 32 secret bytes, checksum; then, as text, who uses the directory.  Flocked.
    <root>/objects/ab/ab12...   one file per shard of a chunk; the name is a keyed hash (with the secret) of the key
                                (of the catalogue's entries: all begin alike, so that a scan knows them by their names)
    <root>/tmp/<id>.lock        one per process that has the root open, flocked by it
    <root>/tmp/<id>.<n>         its files that have no name yet, where the file system has no O_TMPFILE

Directories are 0700, files 0600; names tell nothing to those who can list them, not even whether a guessed prompt is
there.  A file gets its name when it is complete, so no partial object is ever visible; without O_TMPFILE what a killed
process leaves behind is recognised by the lock that nobody holds any more.  The owner's flock on the mark is exclusive,
or shared among processes that all say ``"shared": true``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import mmap
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator

import xxhash

from kvkeep.l2.adapter import AdapterError, Key
from kvkeep.l2.catalogue import CATALOGUE
from kvkeep.l2.fs_index import NAME_BYTES, Found
from kvkeep.l2.fs_io import PAGE, FileIO
from kvkeep.l2.fs_tally import GONE, Tally

FOLDERS = [f"{number:02x}" for number in range(256)]
_MARK = "KVKEEP-FS"
_MARK_MAGIC = b"KVKEEPF1"
_MARK_BYTES = 48
_CATALOGUE_BYTES = 8  # of a name
_OWNER_AT, _OWNER_BYTES = 64, 192
_NAME = re.compile(r"[0-9a-f]{40}\Z")
_UNFINISHED_MARK = re.compile(re.escape(_MARK) + r"\.[0-9a-f]{16}\Z")
_TEMP = re.compile(r"([0-9a-f]{16})\.(lock|[0-9]+)\Z")
_TIDIED = 8  # times that a compaction may remove an empty folder just before something comes into it
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW

Identity = tuple[int, int]  # of a file: inode, mtime; inodes are soon used again
Discard = Callable[["Root", bytes, Identity], bool]  # a name, if it is still this file

log = logging.getLogger("kvkeep.l2.fs")


class Root:
    """See the module.  `claim` first, `release` last."""

    def __init__(self, path: str, number: int, io: FileIO, tally: Tally) -> None:
        self.path = path
        self.number = number
        self.direct = False
        self._io = io
        self._count = tally.count
        self._id = secrets.token_hex(8)
        self._temps = itertools.count()
        self._unnamed = True  # O_TMPFILE and link work
        self._secret = self._catalogue = b""
        self._unreadable = 0  # folders, see `take_unreadable`
        self._mark_fd = self._tmp_fd = self._lock_fd = self.fd = -1

    # ---- owning ------------------------------------------------------------------------------------------------------

    def claim(self, shared: bool) -> None:
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            about = os.stat(self.path)
            if about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
                mode = about.st_mode & 0o7777
                raise AdapterError(f"fs: {self.path} may be changed by others (mode {mode:04o}); chmod it to 0700")
            self._claim_mark(shared)
            self.fd = _own_directory(self.path, "objects")
            self._tmp_fd = _own_directory(self.path, "tmp")
            self._lock_temps()
            self.remove_dead_temps()
            if len(os.listdir(self.fd)) < len(FOLDERS):
                for folder in FOLDERS:
                    self._make_folder(folder)
                for path in (os.path.join(self.path, "objects"), self.path, os.path.dirname(self.path)):
                    _sync_directory(path)
        except OSError as error:
            raise AdapterError(
                f"fs: {self.path} cannot be used ({error.strerror}); give a directory that can be written to"
            ) from error

    def _claim_mark(self, shared: bool) -> None:
        path = os.path.join(self.path, _MARK)
        for _ in range(2):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                break
            except FileNotFoundError:
                self._write_mark(path)
        else:
            raise AdapterError(f"fs: {path} appears and vanishes; another process is removing it")
        self._mark_fd = fd
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, _OWNER_BYTES, _OWNER_AT).rstrip(b"\0 ").decode("ascii", "replace")
            owner = "".join(letter for letter in owner if letter.isprintable())
            raise AdapterError(
                f"fs: {self.path} is in use by {owner or 'another process'}; give each daemon a directory of its own, "
                f'or set "shared": true in all of them'
            ) from None
        data = os.pread(fd, _MARK_BYTES, 0)
        if len(data) != _MARK_BYTES or data[:8] != _MARK_MAGIC or data[40:] != _sum(data[:40]):
            if shared:
                raise AdapterError(f"fs: {path} is damaged; open the directory once without shared, or empty it")
            log.warning("%s is damaged: names get a new secret, what was stored before it will be evicted", path)
            data = _new_mark()
            os.pwrite(fd, data, 0)
            os.fsync(fd)
        self._secret = data[8:40]
        self._catalogue = hashlib.blake2b(CATALOGUE, key=self._secret, digest_size=_CATALOGUE_BYTES).digest()
        who = f"pid {os.getpid()} on {socket.gethostname()}{' and others (shared)' if shared else ''}"
        os.pwrite(fd, who.encode("ascii", "replace")[:_OWNER_BYTES].ljust(_OWNER_BYTES), _OWNER_AT)

    def _write_mark(self, path: str) -> None:
        """Complete before it has its name; two processes may do this at once."""
        temp = f"{path}.{self._id}"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, _new_mark())
            os.fsync(fd)
            os.link(temp, path)
        except FileExistsError:
            pass
        finally:
            os.close(fd)
            os.unlink(temp)

    def _lock_temps(self) -> None:
        """Another process that cleans may remove the lock before we have it: then again."""
        while True:
            name = f"{self._id}.lock"
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._tmp_fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                self._lock_fd = fd
                return
            os.close(fd)

    def remove_dead_temps(self) -> None:
        """Of processes that are gone: nobody holds their lock, so we can (files without a lock get one for that)."""
        names = [match for match in map(_TEMP.match, os.listdir(self._tmp_fd)) if match and match[1] != self._id]
        for owner in {match[1] for match in names}:
            lock = f"{owner}.lock"
            try:
                fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._tmp_fd)
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:  # else another process has just done this
                    self._remove_temps([match[0] for match in names if match[1] == owner and match[2] != "lock"])
                    os.unlink(lock, dir_fd=self._tmp_fd)
            except BlockingIOError:
                pass  # alive
            finally:
                os.close(fd)

    def _remove_temps(self, names: list[str]) -> None:
        for name in names:
            try:
                os.unlink(name, dir_fd=self._tmp_fd)
                self._count("stale_temps_removed")
            except FileNotFoundError:
                pass

    def release(self) -> None:
        if self._lock_fd >= 0:
            try:
                os.unlink(f"{self._id}.lock", dir_fd=self._tmp_fd)
            except OSError:
                pass
        for name in ("_lock_fd", "_tmp_fd", "fd", "_mark_fd"):  # the mark last: until then the root is ours
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)

    # ---- naming ------------------------------------------------------------------------------------------------------

    def name(self, key: Key) -> bytes:
        tail = key.shard.to_bytes(4, "little") + key.shards.to_bytes(4, "little")
        name = hashlib.blake2b(key.namespace + key.chunk + tail, key=self._secret, digest_size=NAME_BYTES).digest()
        return name if key.namespace != CATALOGUE else self._catalogue + name[_CATALOGUE_BYTES:]

    def is_catalogue(self, name: bytes) -> bool:
        """The name of an entry of the catalogue, as far as a name can tell."""
        return name.startswith(self._catalogue)

    def create(self, name: bytes, direct: bool) -> Draft:
        flags = os.O_WRONLY | (os.O_DIRECT if direct else 0)
        folder = FOLDERS[name[0]]
        if self._unnamed:
            try:
                return Draft(self, self._open_in(folder, folder, flags | os.O_TMPFILE, self.fd), "", direct)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                    raise
                self._unnamed = False
        temp = f"{self._id}.{next(self._temps)}"
        return Draft(self, self._io.open(temp, flags | os.O_CREAT | os.O_EXCL, dir_fd=self._tmp_fd), temp, direct)

    def set_aside(self, name: bytes) -> str:
        """An object's file becomes a temporary: its name there; "" = it cannot be moved."""
        temp = f"{self._id}.{next(self._temps)}"
        try:
            self._io.rename(_path(name), temp, source_fd=self.fd, target_fd=self._tmp_fd)
        except OSError:
            return ""
        return temp

    def reuse(self, temp: str, size: int, direct: bool) -> Draft | None:
        """A temporary to be written over, all ``size`` bytes of it; None (and it is gone) = it is not fit for that."""
        try:
            fd = self._io.open(temp, os.O_WRONLY | (os.O_DIRECT if direct else 0), dir_fd=self._tmp_fd)
        except OSError:
            self.drop_temp(temp)
            return None
        draft = Draft(self, fd, temp, direct)
        try:
            about = os.fstat(fd)
            # Another link to it may be somebody's backup, which must not change.
            fit = stat.S_ISREG(about.st_mode) and about.st_nlink == 1 and about.st_size == size
        except BaseException:
            draft.close()
            raise
        if not fit:
            draft.close()
            return None
        return draft

    def _open_in(self, folder: str, path: str, flags: int, dir_fd: int) -> int:
        for _ in range(_TIDIED):
            try:
                return self._io.open(path, flags, dir_fd=dir_fd)
            except FileNotFoundError:  # somebody cleaned up
                self._make_folder(folder)
        return self._io.open(path, flags, dir_fd=dir_fd)

    def open(self, name: bytes, direct: bool) -> int:
        return self._io.open(_path(name), os.O_RDONLY | (os.O_DIRECT if direct else 0), dir_fd=self.fd)

    def stat(self, name: bytes) -> os.stat_result:
        return os.stat(_path(name), dir_fd=self.fd, follow_symlinks=False)

    def unlink(self, name: bytes) -> None:
        self._io.unlink(_path(name), dir_fd=self.fd)

    def set_used(self, name: bytes, used_ns: int) -> None:
        """Raises FileNotFoundError if it vanished."""
        os.utime(_path(name), ns=(used_ns, used_ns), dir_fd=self.fd, follow_symlinks=False)

    def sync_folder(self, name: bytes) -> None:
        fd = os.open(FOLDERS[name[0]], _DIRECTORY, dir_fd=self.fd)
        try:
            self._io.sync(fd)
        finally:
            os.close(fd)

    def _make_folder(self, folder: str) -> None:
        try:
            os.mkdir(folder, 0o700, dir_fd=self.fd)
        except FileExistsError:
            pass

    # ---- what is there -----------------------------------------------------------------------------------------------

    def scan(self, folder: str, discard: Discard | None = None) -> list[Found]:
        """The objects of one folder, by name and size; whole files only.  What cannot be one of ours is left alone.

        ``discard`` removes the others, while there are threads that store here."""
        found = []
        try:
            fd = os.open(folder, _DIRECTORY, dir_fd=self.fd)
        except FileNotFoundError:
            return []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if not _NAME.match(entry.name) or entry.name[:2] != folder:
                        self._count("foreign_files")
                        continue
                    try:
                        about = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    name = bytes.fromhex(entry.name)
                    if not stat.S_ISREG(about.st_mode):
                        self._count("foreign_files")
                    elif about.st_size < 2 * PAGE or about.st_size % PAGE:
                        gone = True
                        if discard is None:
                            self.unlink(name)
                        else:
                            gone = discard(self, name, identity_of(about))
                        self._count("truncated_removed", gone)
                    else:
                        found.append(Found(name, self.number, about.st_blocks * 512, about.st_mtime_ns))
        finally:
            os.close(fd)
        return found

    def names_from(self, folder: int, after: bytes) -> Iterator[bytes]:
        """Names in order, from a folder on, above ``after``."""
        for number in range(folder, len(FOLDERS)):
            try:
                fd = os.open(FOLDERS[number], _DIRECTORY, dir_fd=self.fd)
            except FileNotFoundError:
                continue
            except OSError:
                self._unreadable += 1
                continue
            try:
                listed = sorted(name for name in os.listdir(fd) if _NAME.match(name) and name[:2] == FOLDERS[number])
            finally:
                os.close(fd)
            yield from (name for name in map(bytes.fromhex, listed) if name > after)

    def take_unreadable(self) -> int:
        """Folders that `names_from` could not look into since the last call of this."""
        count, self._unreadable = self._unreadable, 0
        return count

    # ---- tidying -----------------------------------------------------------------------------------------------------

    def remove_dead_marks(self) -> int:
        """Of processes that died while they made the directory.  Only while the root is ours alone."""
        removed = 0
        for name in os.listdir(self.path):
            if _UNFINISHED_MARK.match(name):
                try:
                    os.unlink(os.path.join(self.path, name))
                    removed += 1
                except OSError:
                    pass
        return removed

    def remove_folder(self, folder: str) -> bool:
        """If nothing is in it; it is made again when something comes."""
        try:
            os.rmdir(folder, dir_fd=self.fd)
        except OSError:
            return False
        return True

    # ---- the medium --------------------------------------------------------------------------------------------------

    def free_bytes(self) -> tuple[int, int]:
        """(device, bytes that we may still use on it)"""
        about = os.statvfs(self.fd)
        return os.fstat(self.fd).st_dev, about.f_bavail * about.f_frsize

    # ---- proving -----------------------------------------------------------------------------------------------------

    def probe(self, direct: bool) -> None:
        """Write, name, read back and remove a small file, the way objects are.  OSError for what does not work."""
        wrote, read = (memoryview(mmap.mmap(-1, 2 * PAGE)) for _ in range(2))
        wrote[:] = secrets.token_bytes(2 * PAGE)
        draft = self.create(bytes(NAME_BYTES), direct)
        name = draft.temp
        try:
            if self._io.writev(draft.fd, [wrote], 0) != len(wrote):
                raise OSError(errno.EIO, "short write")
            if not name:
                name = f"{self._id}.{next(self._temps)}"
                try:
                    self._io.link(draft.fd, name, dir_fd=self._tmp_fd)
                except OSError as error:  # no /proc, or no links
                    log.info("%s: unnamed files cannot be linked (%s); temporary names instead", self.path, error)
                    self._unnamed, name = False, ""
                    return self.probe(direct)
            fd = self._io.open(name, os.O_RDONLY | (os.O_DIRECT if direct else 0), dir_fd=self._tmp_fd)
            try:
                if self._io.readv(fd, [read], 0) != len(read) or read != wrote:
                    raise OSError(errno.EIO, "what was read is not what was written")
            finally:
                os.close(fd)
        finally:
            draft.close()
            if name:
                self.drop_temp(name)

    def link(self, draft: Draft, name: bytes) -> None:
        """FileExistsError if the name is taken (where the file system has O_TMPFILE; otherwise it is replaced)."""
        for attempt in range(1 + _TIDIED):
            try:
                if draft.temp:
                    self._io.rename(draft.temp, _path(name), source_fd=self._tmp_fd, target_fd=self.fd)
                else:
                    self._io.link(draft.fd, _path(name), dir_fd=self.fd)
                return
            except FileNotFoundError:  # somebody cleaned up the folder
                if attempt == _TIDIED:
                    raise
                self._make_folder(FOLDERS[name[0]])

    def drop_temp(self, temp: str) -> bool:
        """False = it is still there; the next one to open the root removes it."""
        try:
            self._io.unlink(temp, dir_fd=self._tmp_fd)
        except OSError as error:
            return error.errno in GONE
        return True


class Draft:
    """A file without its name: `publish` gives it the name, `close` without it leaves nothing."""

    def __init__(self, root: Root, fd: int, temp: str, direct: bool) -> None:
        self._root, self.fd, self.temp, self.direct = root, fd, temp, direct

    def publish(self, name: bytes) -> None:
        self._root.link(self, name)
        self.temp = ""

    def close(self) -> None:
        os.close(self.fd)
        if self.temp:
            self._root.drop_temp(self.temp)


def identity_of(about: os.stat_result) -> Identity:
    return about.st_ino, about.st_mtime_ns


def _path(name: bytes) -> str:
    text = name.hex()
    return f"{text[:2]}/{text}"


def _new_mark() -> bytes:
    body = _MARK_MAGIC + secrets.token_bytes(32)
    return body + _sum(body)


def _sum(body: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def _own_directory(parent: str, name: str) -> int:
    path = os.path.join(parent, name)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    fd = os.open(path, _DIRECTORY)
    about = os.fstat(fd)
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        os.close(fd)
        raise AdapterError(
            f"fs: {path} belongs to uid {about.st_uid} with mode {about.st_mode & 0o777:04o}; "
            f"it must be ours (uid {os.geteuid()}) with 0700"
        )
    return fd


def _sync_directory(path: str) -> None:
    fd = os.open(path, _DIRECTORY & ~os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
