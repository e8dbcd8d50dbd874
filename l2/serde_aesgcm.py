"""`aesgcm`: AES-256 in Galois/counter mode.  What is at rest is secret, and cannot be passed off as another object.

    {"type": "aesgcm", "key_file": "/etc/kvkeep/keys"}

The key file has one key a line, "id:hex": an id of up to 16 letters, digits, ".", "_", "-", and 64 hex digits.  Lines
that are empty or begin with "#" are skipped.  The first key encrypts, all of them decrypt: a new key goes to the top,
the old one leaves when nothing of it is at rest any more.  The file is read when the mover starts.  It must belong to
the daemon's user or root, and nobody else may read it.

Authenticated with each payload: namespace, chunk, shard, shards, original bytes, and numbers, lengths and parameters of
all serdes that were applied before.  So an object that was moved under another key, or whose header was rewritten, does
not decode.  (Serdes that are applied afterwards change the ciphertext, and with it the tag.)

Each object has a random nonce of 96 bits, so one key should encrypt at most 2^32 objects: at 1 MiB each, 4 PiB.

Parameters: nonce, 12 bytes, then the id of the key.  Data: ciphertext, then a tag of 16 bytes.  Keys appear in no
message, log or status.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from typing import Any

from kvkeep.l2.adapter import AdapterError
from kvkeep.l2.options import Options
from kvkeep.l2.serde import Context, Encoded, Serde, Undecodable, Unreadable

NONCE_BYTES, TAG_BYTES, KEY_BYTES = 12, 16, 32
MAX_FILE_BYTES = 64 << 10
_LINE = re.compile(rb"([A-Za-z0-9._-]{1,16}):([0-9A-Fa-f]{64})")
_ABOUT = struct.Struct("<16s32s32sIIQQ")


class AesGcm(Serde):
    """See the module."""

    id, name = 3, "aesgcm"

    def __init__(self, options: Options) -> None:
        self._path = options.text("key_file")
        self._ciphers: dict[bytes, Any] = {}
        self._first = b""
        self._invalid: type[Exception] = Exception

    def open(self) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise AdapterError(
                "serde aesgcm needs the package cryptography, which is not installed: pip install 'kvkeep[serde]'"
            ) from None
        keys = read_keys(self._path)
        self._ciphers = {name: AESGCM(key) for name, key in keys.items()}
        self._first, self._invalid = next(iter(keys)), InvalidTag

    def encode(self, data: memoryview, context: Context) -> Encoded:
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._ciphers[self._first].encrypt(nonce, data, _authenticated(context, len(data)))
        return Encoded(sealed, nonce + self._first)

    def decode(self, data: memoryview, params: bytes, into: memoryview, context: Context) -> None:
        nonce, name = params[:NONCE_BYTES], params[NONCE_BYTES:]
        if len(nonce) != NONCE_BYTES or len(data) != len(into) + TAG_BYTES:
            raise Undecodable("another length than aesgcm writes")
        cipher = self._ciphers.get(name)
        if cipher is None:
            raise Unreadable(f"the key {name!r} is not in {self._path}")
        try:
            into[:] = cipher.decrypt(nonce, data, _authenticated(context, len(into)))
        except self._invalid:
            raise Undecodable("the tag does not verify") from None


def _authenticated(context: Context, length: int) -> bytes:
    key = context.key
    about = _ABOUT.pack(
        b"kvkeep aesgcm 1", key.namespace, key.chunk, key.shard, key.shards, context.original_bytes, length
    )
    return about + context.before


def read_keys(path: str) -> dict[bytes, bytes]:
    """id -> key, in the order of the file.  AdapterError never shows what is in it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AdapterError(f"serde aesgcm: key_file {path} cannot be read ({error.strerror})") from None
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_FILE_BYTES:
            raise AdapterError(f"serde aesgcm: key_file {path} is not a file of at most {MAX_FILE_BYTES} bytes")
        if about.st_mode & 0o077 or about.st_uid not in (0, os.geteuid()):
            raise AdapterError(
                f"serde aesgcm: key_file {path} belongs to uid {about.st_uid} with mode {about.st_mode & 0o777:04o}; "
                "it must be the daemon's user's or root's, with 0600 or 0400"
            )
        lines = os.read(fd, MAX_FILE_BYTES).splitlines()
    finally:
        os.close(fd)
    keys: dict[bytes, bytes] = {}
    for number, line in enumerate(map(bytes.strip, lines), 1):
        if not line or line.startswith(b"#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise AdapterError(
                f"serde aesgcm: line {number} of key_file {path} is not 'id:hex' with an id of up to 16 letters, "
                f"digits, '.', '_', '-' and {2 * KEY_BYTES} hex digits"
            )
        if match[1] in keys:
            raise AdapterError(f"serde aesgcm: line {number} of key_file {path} has the id of an earlier line")
        keys[match[1]] = bytes.fromhex(match[2].decode())
    if not keys:
        raise AdapterError(f"serde aesgcm: key_file {path} has no key; give it a line like 'a:' and 64 hex digits")
    return keys
