"""`kvkeepd`: parse, log, look at the host, then hand over to the control process.

Nothing heavy is imported before it is needed, so that a wrong flag answers at once and a start is short.  Nothing is
created before the configuration and the host are known to be good.

Exit status: 0 orderly stop · 1 a bug, or the arena was lost · 2 configuration · 3 the host cannot carry the arena ·
4 another daemon has this name.  The unit file does not restart after 2 and 4: waiting does not mend them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvkeep.daemon import lmcache
from kvkeep.daemon.config import GIB, Config, ConfigError, load

if TYPE_CHECKING:
    from kvkeep.shm import hostcheck

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_HOST = 3
EXIT_TAKEN = 4  # what run.run returns when the lock is held

log = logging.getLogger("kvkeep.main")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        loaded = load(sys.argv[1:] if argv is None else argv)
    except ConfigError as problem:
        print(f"kvkeepd: {problem}", file=sys.stderr)
        return EXIT_CONFIG
    if loaded.print_config:
        print(loaded.as_toml(), end="")
        return EXIT_OK

    from kvkeep.daemon import logs

    config = loaded.config
    logs.setup(config.log_level, config.log_format)
    if not preflight(config):
        return EXIT_HOST
    _announce(config)
    _tell_taken(lmcache.without_no_ops(sys.argv[1:] if argv is None else argv)[1], config)
    try:
        from kvkeep.daemon import run

        return run.run(config)
    except KeyboardInterrupt:
        return EXIT_OK
    except Exception:
        log.exception("kvkeepd stopped because of an error that it did not expect")
        return EXIT_FAILED


def preflight(config: Config) -> bool:
    """Log every warning and error about the host; False = do not start."""
    from kvkeep.daemon import reach
    from kvkeep.shm import hostcheck

    hostcheck.raise_file_limit()
    fit = True
    if problem := reach.untrusted(config.run_dir):
        log.error("cannot start: %s", problem)
        fit = False
    for finding in hostcheck.check(need(config)):
        if finding.level == hostcheck.ERROR:
            log.error("cannot start: %s", finding.message)
            fit = False
        elif finding.level == hostcheck.WARN:
            log.warning("%s", finding.message)
    return fit


def need(config: Config) -> hostcheck.Need:
    """What this configuration asks of the host."""
    from kvkeep.shm import hostcheck, layout

    return hostcheck.Need(
        name=config.name,
        data_bytes=config.l1_bytes,
        meta_bytes=layout.meta_bytes(config.entries),
        mlock=config.l1_mlock,
        hugepages=config.l1_use_hugepages,
        max_clients=config.max_clients,
    )


def _announce(config: Config) -> None:
    log.info(
        "%s: %.10g GiB of shared memory for the whole node (all engines and ranks together), up to %d chunks, in %s",
        config.name,
        config.l1_bytes / GIB,
        config.entries,
        config.run_dir,
    )
    if config.port >= 0 and not is_loopback(config.host):
        log.warning(
            "--host %s can be reached from outside this host, and connectors of LMCache are not asked who they are: "
            "use 127.0.0.1 unless a firewall stands before it",
            config.host,
        )
    if config.http_port >= 0 and not is_loopback(config.http_host):
        log.warning(
            "--http-host %s can be reached from outside this host, and the web process asks nobody for a password: "
            "use 127.0.0.1 unless a firewall stands before it",
            config.http_host,
        )


def _tell_taken(taken: Sequence[lmcache.Taken], config: Config) -> None:
    """In one line: which flags of `lmcache server` were given and change nothing."""
    if not taken:
        return
    flags = "; ".join(f"{flag}: {why}" for flag, why in taken)
    port = "; --port is not given and off: LMCache's connectors look for 5555" if config.port < 0 else ""
    log.info("flags of lmcache server that change nothing here: %s%s", flags, port)


def is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main())
