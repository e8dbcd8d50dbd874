"""The web process: Prometheus metrics, JSON status, a live page, and management for scripts, on loopback.

A child of the daemon that reads the stats page in the meta segment, so a scrape costs the control process nothing and a
hung browser cannot hold up an engine.  For what has to be asked of control it is a client like any other.

    source    the stats page as a document, and how old it is
    metrics   document -> Prometheus text
    server    HTTP
    access    who may see and change what is cached
    calls     what is asked of control
    lmcache   the endpoints of `lmcache server`
    index.html the page: one file, nothing from elsewhere
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

QUOTAS_VARIABLE = "KVKEEP_WEB_QUOTAS"  # a tenant may be a salt, and everybody sees a command line


def main(argv: Sequence[str], beat: Callable[[], None] = lambda: None) -> int:
    from kvkeep.daemon.web.server import serve

    return serve(argv, beat)
