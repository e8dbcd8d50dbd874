"""The daemon's own parts: configuration, the control process, supervision of children, the command line tools.

One line per module, from the outside in:

    main        `kvkeepd`: parse, log, preflight, then control
    config      one strict parser for flags, environment, TOML file and defaults
    options     the table of options, the only place where an option is declared
    lmcache     flags of `lmcache server` and what to use here instead
    logs        log lines: for people on a terminal, JSON elsewhere
    sdnotify    readiness and watchdog towards systemd
    supervise   children that are watched, restarted and stopped; `child` is their first module
    cli         `kvkeep`: status, ls, clear, doctor, check, bench
    web/        the child that serves metrics, status and a live page on loopback
"""
