"""What the namespaces on a medium are: their manifests, kept on the medium itself.

An entry is an ordinary small object, so no format knows of it: namespace `CATALOGUE`, chunk = the digest of the
namespace that it tells of, payload = the manifest (canonical JSON), always plain, whatever the serde.  The mover has it
written before the first object of a namespace; it is never evicted, goes when its namespace is cleared, and is written
again with the next store.  So a medium says what is on it without any daemon that knew, and whose it is
(`Namespace.tenant`), also after L1 was forgotten.

An adapter that keeps a catalogue spares these keys when it evicts, and calls `keep` from its `describe`.
"""

from __future__ import annotations

from kvkeep.l2.adapter import OK, Adapter, Item, Key, Outcome, Result

CATALOGUE = b"kvkeep: manifests of namespaces\0"
MAX_MANIFEST = 1 << 16
assert len(CATALOGUE) == 32


def entry_key(namespace: bytes) -> Key:
    return Key(CATALOGUE, namespace, 0, 1)


def keep(adapter: Adapter, namespace: bytes, manifest: bytes) -> Result:
    """Write the entry if it is not there.  (Somebody may have cleared it since; looking is cheap.)"""
    key = entry_key(namespace)
    if not manifest or len(manifest) > MAX_MANIFEST or adapter.lookup([key])[0]:
        return OK
    result = adapter.store([Item(key, memoryview(manifest))])[0]
    return OK if result.outcome == Outcome.BUSY else result


def read(adapter: Adapter, namespace: bytes) -> bytes:
    """The manifest, or b"" if there is none that can be read."""
    return bytes(adapter.fetch([(entry_key(namespace), MAX_MANIFEST)])[0].payload)
