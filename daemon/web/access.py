"""Who asks.  Statistics are for every visitor; what is cached, and changing it, are for some.

A request to manage must come over loopback, name a loopback host (so that a web site cannot reach it under a name of
its own), and its socket must belong to root, to the daemon's user or to one of ``--admin-uids``: whoever may not open
the daemon's sockets may not go round them by HTTP.  Whose socket it is, is in the kernel's table of connections.

A request that changes something must carry ``Content-Type: application/json`` or ``X-Kvkeep``: a browser sends these to
another site only after asking it with OPTIONS, which is not answered here.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from email.message import Message

Address = tuple[str, int]
_ESTABLISHED = "01"  # of any other state the kernel may show uid 0, whoever the socket was


def is_loopback_name(host_header: str) -> bool:
    """Of a Host header, with or without port."""
    host = host_header.strip()
    host = host[1 : host.find("]")] if host.startswith("[") else host.rpartition(":")[0] or host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def why_not_manage(peer: Address, here: Address, host_header: str, admin_uids: frozenset[int]) -> str:
    """Why this peer may not see and change what is cached; "" = it may."""
    if not _ip(peer[0]).is_loopback:
        return f"{peer[0]} is not this host: what is cached is shown and changed over loopback only"
    if not is_loopback_name(host_header):
        return f"the host {host_header!r} is no loopback name: ask 127.0.0.1 or localhost"
    uid = uid_of(peer, here)
    if uid is None:
        return "it cannot be seen whose connection this is: use `kvkeep` on the daemon's host"
    if uid not in {0, os.geteuid(), *admin_uids}:
        return f"uid {uid} may not do this; add it to --admin-uids, or use root or the daemon's uid"
    return ""


def why_not_change(headers: Message) -> str:
    """Why this may be a browser's doing on behalf of some web site; "" = it is not."""
    if headers.get_content_type() == "application/json" and "Content-Type" in headers:
        return ""
    if headers.get("X-Kvkeep") is not None:
        return ""
    return "a request that changes something needs the header 'Content-Type: application/json' (or 'X-Kvkeep: 1')"


def uid_of(peer: Address, here: Address) -> int | None:
    """Whose is the other end of this connection, if it is on this host and open.  None = it is not to be seen."""
    wanted = (_ip(peer[0]), peer[1]), (_ip(here[0]), here[1])
    for _ in range(2):  # the table may miss a row when others change while it is read
        for local, remote, state, uid in _connections():
            if (local, remote) == wanted and state == _ESTABLISHED:
                return uid
    return None


def _connections() -> Iterator[tuple[object, object, str, int]]:
    for path in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(path, encoding="ascii") as table:
                next(table, None)
                for line in table:
                    fields = line.split()
                    yield _end(fields[1]), _end(fields[2]), fields[3], int(fields[7])
        except OSError:
            continue


def _end(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """``0100007F:1F90``: words of four bytes in this machine's order."""
    address, _, port = text.partition(":")
    raw = bytes.fromhex(address)
    return _ip(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))), int(port, 16)


def _ip(address: str | bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    if isinstance(address, str):
        address = address.partition("%")[0]
    found = ipaddress.ip_address(address)
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found
