"""The web process: Prometheus metrics, JSON status and a live page, on loopback.

A child of the daemon that only reads the stats page in the meta segment, so a scrape costs the control process nothing
and a hung browser cannot hold up an engine.

    source    the stats page as a document, and how old it is
    metrics   document -> Prometheus text
    server    HTTP
    index.html the page: one file, nothing from elsewhere
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def main(argv: Sequence[str], beat: Callable[[], None] = lambda: None) -> int:
    from kvkeep.daemon.web.server import serve

    return serve(argv, beat)
