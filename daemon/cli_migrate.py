"""`kvkeep migrate lmcache`: the command line of `lmcache server`, or a YAML file of its settings, as one of kvkeepd."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from typing import Any

from kvkeep.daemon import lmcache
from kvkeep.daemon.options import OPTIONS

# What `lmcache server` 0.5.6 does when it is told nothing, and kvkeepd does otherwise: said, so that scripts go on.
_THEIR_DEFAULTS = {"port": "5555", "http-port": "8080"}
_DIFFERENT = {
    "eviction-trigger-watermark": "0.95 instead of 0.8: less memory stands empty",
    "eviction-ratio": "0.05 instead of 0.2, of bytes, not of keys",
}


def add_parser(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", choices=("lmcache",), help="what you come from")
    sub.add_argument("settings", help="its command line as one word, or the path of a YAML file with its settings")


def migrate(text: str) -> dict[str, Any]:
    """``command`` for kvkeepd, ``notes`` on what changes nothing or is different, and ``refused``: what cannot be
    carried over, each with what to use instead.  Raises ValueError for what cannot be read."""
    words, notes = lmcache.without_no_ops(_words(text))
    ours = {option.name: option for option in OPTIONS}
    command, refused, given = ["kvkeepd"], [], set()
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--"):
            raise ValueError(f"{word!r} follows no flag; give the command line in quotes, as you would type it")
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        option = ours.get(name) or ours.get(name.removeprefix("no-"))
        takes_next = not equals and at < len(words) and not words[at].startswith("--")
        if takes_next:
            value = words[at]
            at += 1
        if option is None:
            hint = lmcache.instead(name) or "neither lmcache server nor kvkeepd has it"
            refused.append(f"--{name}: {hint}")
            continue
        given.add(name)
        command += [f"--{name}", *([value] if equals or takes_next else [])]
        if option.name == name and (equals or takes_next) and option.kind != "adapters":
            option.parse("127.0.0.1" if value == "localhost" else value)
    for name, value in _THEIR_DEFAULTS.items():
        if name not in given:
            command += [f"--{name}", value]
            notes.append(f"--{name} {value} is the default there, here it is off")
    notes += [f"--{name}: the default is {why}" for name, why in _DIFFERENT.items() if name not in given]
    return {"command": command, "notes": notes, "refused": refused}


def run(args: argparse.Namespace, *, as_json: bool) -> int:
    """Prints it.  1 if something cannot be carried over, 2 for what cannot be read."""
    try:
        found = migrate(args.settings)
    except ValueError as error:
        print(f"kvkeep migrate: {error}")
        return 2
    if as_json:
        print(json.dumps(found))
    else:
        print(shlex.join(found["command"]))
        for note in found["notes"]:
            print(f"# {note}")
        for problem in found["refused"]:
            print(f"! {problem}")
    return 1 if found["refused"] else 0


def _words(text: str) -> Sequence[str]:
    if os.path.isfile(text):
        return _of_yaml(text)
    words = shlex.split(text)
    start = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    return words[start:]  # whatever started it: lmcache server, python -m …


def _of_yaml(path: str) -> Sequence[str]:
    try:
        import yaml
    except ImportError:
        raise ValueError("reading YAML needs PyYAML: pip install pyyaml, or give the command line") from None
    with open(path) as file:
        settings = yaml.safe_load(file)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds no mapping of settings")
    words: list[str] = []
    for key, value in settings.items():
        flag = f"--{str(key).replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            if one is None:
                continue
            if isinstance(one, bool):
                words.append(flag if one else f"--no-{flag[2:]}")
            else:
                words.append(f"{flag}={json.dumps(one) if isinstance(one, dict) else one}")
    return words
