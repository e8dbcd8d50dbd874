"""`kvkeep`: looks at a running daemon, and at the host.

    kvkeep status [--json]                  kvkeep doctor [--json] [settings of kvkeepd]
    kvkeep ls [NAMESPACE] [--diff A B]      kvkeep check
    kvkeep clear [NAMESPACE] [--yes]        kvkeep bench NAME [its arguments]
    kvkeep l2 ls|stat|verify|compact [--adapter JSON]

Exit status: 0 done, 1 the answer is bad news, 2 wrong usage, 3 the daemon cannot be reached or does not let us.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvkeep.daemon import cli_l2, cli_migrate
from kvkeep.daemon import cli_show as show
from kvkeep.daemon.config import ConfigError, check_name, check_run_dir, load, version
from kvkeep.ipc.rundir import find_run_dir, run_dir_of

if TYPE_CHECKING:
    from kvkeep.ipc.client import Client

EXIT_BAD_NEWS = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
PAGE = 1000


class _Failed(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    own, rest = _split_bench(words)
    try:
        args, unknown = _parser().parse_known_args(own)
        if unknown and args.command != "doctor":
            raise _Failed(EXIT_USAGE, f"{unknown[0]!r} is not known to kvkeep {args.command}: see kvkeep --help")
        args.rest = rest if args.command == "bench" else unknown
        return int(args.run(args))
    except _Failed as problem:
        print(f"kvkeep: {problem}", file=sys.stderr)
        return problem.code
    except ConfigError as problem:
        print(f"kvkeep: {problem}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    where = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    where.add_argument("--name", help="name of the instance (default: $KVKEEP_NAME, or 'default')")
    where.add_argument("--run-dir", help="its run directory (default: $KVKEEP_RUN_DIR, or by name)")
    where.add_argument("--json", action="store_true", help="print JSON")
    parser = argparse.ArgumentParser(
        prog="kvkeep", parents=[where], description="Looks at a kvkeep daemon.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, parents=[where], help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    command("status", _status, "health, memory, clients and namespaces of the daemon")
    ls = command("ls", _ls, "the namespaces with their manifests, or one namespace's chunks")
    ls.add_argument("namespace", nargs="?", help="its id, or the beginning of its digest")
    ls.add_argument("--diff", nargs=2, metavar=("A", "B"), help="which fields differ between two namespaces")
    ls.add_argument("--limit", type=int, default=PAGE, help=f"chunks to list at most (default: {PAGE})")
    clear = command("clear", _clear, "drop all chunks that nobody uses, of one namespace or of all, also from L2")
    clear.add_argument("namespace", nargs="?", help="its id, or the beginning of its digest (default: all)")
    clear.add_argument("--l1-only", action="store_true", help="keep what L2 has")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    cli_l2.add_parser(command("l2", _l2, "look into L2, check it, tidy it"), where)
    cli_migrate.add_parser(command("migrate", _migrate, "the command line of kvkeepd for one of lmcache server"))
    command("doctor", _doctor, "check the host and the daemon; takes the settings of kvkeepd too (--l1-size-gb ...)")
    command("check", _check, "run the daemon's integrity check (pauses it: about 0.5 s per million chunks)")
    bench = command("bench", _bench, "run a benchmark: kvkeep bench NAME [its arguments]")
    bench.add_argument("bench", nargs="?", help="which one; without it, lists them")
    return parser


# ---- commands ------------------------------------------------------------------------------------------------------


def _status(args: argparse.Namespace) -> int:
    run_dir = _run_dir(args)
    with _attached(run_dir) as client:
        document = _without_me(_call(client.stats))
    url = _url(run_dir)
    if _json(args):
        print(json.dumps({**document, "run_dir": run_dir, "url": url}))
    else:
        _print(show.status(document, run_dir, url))
    return 0


def _migrate(args: argparse.Namespace) -> int:
    return cli_migrate.run(args, as_json=_json(args))


def _ls(args: argparse.Namespace) -> int:
    with _attached(_run_dir(args)) as client:
        spaces = _call(client.list)["namespaces"]
        if args.diff:
            a, b = (_find(spaces, word) for word in args.diff)
            _print(show.difference(a, b))
            return 0
        if args.namespace is None:
            if _json(args):
                print(json.dumps({"namespaces": spaces}))
            else:
                _print(line for n in spaces for line in show.namespace(n))
                if not spaces:
                    print("no namespaces yet: an engine registers one when it attaches")
            return 0
        found = _find(spaces, args.namespace)
        chunks = _chunks(client, int(found["id"]), max(0, args.limit))
        if _json(args):
            print(json.dumps({**found, "entries_listed": list(chunks)}))
        else:
            _print(show.namespace(found))
            _print(show.entries(list(chunks)))
    return 0


def _chunks(client: Client, namespace: int, limit: int) -> Iterable[dict[str, Any]]:
    cursor = 0
    while limit > 0:
        page = _call(client.list, namespace, cursor, min(limit, PAGE))
        yield from page["entries"]
        limit -= len(page["entries"])
        cursor = page.get("cursor", 0)
        if not cursor:
            return


def _clear(args: argparse.Namespace) -> int:
    with _attached(_run_dir(args)) as client:
        number, what, digest = 0, "all namespaces", b""
        if args.namespace is not None and re.fullmatch("[0-9a-fA-F]{64}", args.namespace):
            digest, what = bytes.fromhex(args.namespace), f"namespace {args.namespace[:12]}"
        elif args.namespace is not None:
            found = _find(_call(client.list)["namespaces"], args.namespace)
            number, what = int(found["id"]), f"namespace {found['id']} ({str(found['digest'])[:12]})"
        if args.l1_only:
            what += " in L1"
        if not args.yes:
            if not sys.stdin.isatty():
                raise _Failed(EXIT_USAGE, f"this would drop what is cached of {what}: say --yes")
            if input(f"Drop what is cached of {what}? [y/N] ").strip().lower() not in ("y", "yes"):
                return EXIT_BAD_NEWS
        dropped = _call(client.clear, number, l1_only=args.l1_only, digest=digest)
    left = [one for one in dropped.l2 if one["state"] != "removed"]
    if _json(args):
        told = {"in_use": dropped.in_use, "l2": dropped.l2, "problem": dropped.problem} if dropped.l2 else {}
        print(json.dumps({"dropped": int(dropped), **told}))
    else:
        _print(show.dropped(int(dropped), dropped.in_use, dropped.l2, dropped.problem))
    return EXIT_BAD_NEWS if left else 0


def _l2(args: argparse.Namespace) -> int:
    try:
        if args.adapter is not None:
            medium = cli_l2.Direct(args.adapter)
            try:
                return cli_l2.run(medium, args, _json(args))
            finally:
                medium.close()
        with _attached(_run_dir(args)) as client:
            return cli_l2.run(_Daemon(client), args, _json(args))
    except cli_l2.Problem as problem:
        raise _Failed(EXIT_USAGE if problem.usage else EXIT_UNREACHABLE, str(problem)) from None


class _Daemon:
    """A cli_l2.Source."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def rows(self) -> list[dict[str, Any]]:
        return list(_call(self._client.stats)["l2"])

    def step(self, name: str, what: str, namespace: bytes, cursor: str, limit: int) -> dict[str, Any]:
        answer: dict[str, Any] = _call(self._client.l2, name, what, namespace=namespace, cursor=cursor, limit=limit)
        return answer

    def namespaces(self) -> list[dict[str, Any]]:
        return list(_call(self._client.list)["namespaces"])


def _check(args: argparse.Namespace) -> int:
    with _attached(_run_dir(args)) as client:
        result = _call(client.check)
    good = bool(result.get("ok"))
    if _json(args):
        print(json.dumps(result))
    else:
        print("the daemon's state is consistent" if good else f"inconsistent: {result.get('problem')}")
    return 0 if good else EXIT_BAD_NEWS


def _doctor(args: argparse.Namespace) -> int:
    from kvkeep.daemon import doctor
    from kvkeep.shm.hostcheck import ERROR

    settings = list(args.rest)
    for flag in ("name", "run_dir"):
        if hasattr(args, flag):
            settings += [f"--{flag.replace('_', '-')}", getattr(args, flag)]
    found = doctor.examine(load(settings, prog="kvkeep doctor"))
    if _json(args):
        print(json.dumps([finding._asdict() for finding in found]))
    else:
        _print(show.findings(found, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return EXIT_BAD_NEWS if any(finding.level == ERROR for finding in found) else 0


def _bench(args: argparse.Namespace) -> int:
    import importlib

    there = _benches()
    if args.bench is None:
        print("\n".join(there) or "no benchmarks are installed")
        return 0
    if args.bench not in there:
        raise _Failed(EXIT_USAGE, f"no benchmark is called {args.bench!r}: there are {', '.join(there) or 'none'}")
    if hasattr(args, "run_dir") or hasattr(args, "name"):
        os.environ["KVKEEP_RUN_DIR"] = _run_dir(args)
    rest = [*args.rest, *(["--json"] if _json(args) and "--json" not in args.rest else [])]
    return int(importlib.import_module(f"kvkeep.bench.{args.bench}").main(rest) or 0)


# ---- helpers -------------------------------------------------------------------------------------------------------


def _split_bench(words: list[str]) -> tuple[list[str], list[str]]:
    """What follows ``bench NAME`` belongs to the benchmark."""
    if "bench" not in words:
        return words, []
    end = words.index("bench") + 2
    return (words[:end], words[end:]) if len(words) >= end and not words[end - 1].startswith("-") else (words, [])


def _benches() -> list[str]:
    """Modules of kvkeep.bench that have a main."""
    import importlib.util

    spec = importlib.util.find_spec("kvkeep.bench")
    found = []
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            name = file.removesuffix(".py")
            if re.fullmatch(r"[a-z][a-z0-9_]*", name) and file.endswith(".py"):
                with open(os.path.join(folder, file), encoding="utf-8") as source:
                    if re.search(r"^def main\(", source.read(), re.MULTILINE):
                        found.append(name)
    return found


def _json(args: argparse.Namespace) -> bool:
    return bool(getattr(args, "json", False))


def _run_dir(args: argparse.Namespace) -> str:
    if hasattr(args, "run_dir"):
        return check_run_dir(os.path.abspath(args.run_dir))
    if hasattr(args, "name"):
        own, system = run_dir_of(check_name(args.name)), f"/run/kvkeep/{args.name}"
        return system if not os.path.exists(own) and os.path.exists(system) else own
    return find_run_dir(None)


def _url(run_dir: str) -> str:
    try:
        with open(os.path.join(run_dir, "http.url"), encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _attached(run_dir: str) -> Client:
    from kvkeep.daemon import reach

    there = reach.look(run_dir)
    if not there.reachable:
        raise _Failed(EXIT_UNREACHABLE, there.message)
    from kvkeep.ipc.client import Client

    client: Client = _call(Client.attach, run_dir, name="kvkeep", arena=False)
    return client


def _without_me(document: dict[str, Any]) -> dict[str, Any]:
    """The one who asks is no client to speak of."""
    others = [c for c in document.get("clients", []) if (c.get("pid"), c.get("name")) != (os.getpid(), "kvkeep")]
    gone = len(document.get("clients", [])) - len(others)
    return {**document, "clients": others, "clients_total": document.get("clients_total", len(others) + gone) - gone}


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call to the daemon, its errors turned into one sentence."""
    from kvkeep.ipc.errors import AttachRefused, Denied, ProtocolError, Unavailable

    try:
        return function(*args, **kwargs)
    except (AttachRefused, Denied, ProtocolError) as problem:
        raise _Failed(EXIT_UNREACHABLE, str(problem)) from None
    except (Unavailable, TimeoutError, OSError) as problem:
        raise _Failed(EXIT_UNREACHABLE, f"kvkeepd does not answer: {problem}") from None


def _find(spaces: Sequence[dict[str, Any]], word: str) -> dict[str, Any]:
    found = [n for n in spaces if str(n["id"]) == word] or [
        n for n in spaces if len(word) >= 4 and str(n["digest"]).startswith(word.lower())
    ]
    if len(found) == 1:
        return found[0]
    ids = ", ".join(f"{n['id']} ({str(n['digest'])[:12]})" for n in spaces[:20])
    if found:
        raise _Failed(EXIT_USAGE, f"several namespaces begin with {word!r}: there are {ids}")
    raise _Failed(EXIT_USAGE, f"there is no namespace {word!r}: " + (f"there are {ids}" if ids else "there are none"))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


if __name__ == "__main__":
    sys.exit(main())
