"""`kvkeep migrate lmcache`: the command line of `lmcache server` as one of kvkeepd, or as its TOML file.

Read are a command line, a YAML file or text of its settings (`l1_size_gb: 64`), and a manifest of Kubernetes whose
container starts it (`command`, `args`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from kvkeep.daemon import lmcache
from kvkeep.daemon.config import ConfigError, Loaded, load
from kvkeep.daemon.lmcache import FLAGS, Kind, Word
from kvkeep.daemon.options import OPTIONS

# What `lmcache server` does when it is told nothing, and kvkeepd does otherwise: said, so that scripts go on.
_THEIR_DEFAULTS = ("port", "http-port")
_DIFFERENT = {
    "eviction-trigger-watermark": "0.95 instead of 0.8: less memory stands empty",
    "eviction-ratio": "0.05 instead of 0.2, of bytes, not of keys",
}
_MODE = (
    'the engine has to say "lmcache.mp.mp_transfer_mode": "engine_driven" in its kv_connector_extra_config, unless it '
    "runs on a CPU: the default there, lmcache_driven, is refused"
)


def add_parser(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", choices=("lmcache",), help="what you come from")
    sub.add_argument("settings", help="its command line as one word, or YAML with its settings: a path or the text")
    sub.add_argument("--toml", action="store_true", help="print a file for kvkeepd --config instead of a command line")


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
        print(found["toml"] if args.toml else shlex.join(found["command"]) + "\n", end="")
        for note in found["notes"]:
            print(f"# {note}")
        for problem in found["refused"]:
            print(f"{'# ' if args.toml else ''}! {problem}")
    return 1 if found["refused"] else 0


def migrate(text: str) -> dict[str, Any]:
    """``command`` for kvkeepd, the same as ``toml``, ``notes`` on what changes nothing or is different, and
    ``refused``: what cannot be carried over, each with what to use instead.  Raises ValueError for what cannot be
    read."""
    words, taken = lmcache.without_no_ops(_one_arena(_words(text)))
    carried = _Carried()
    for word in _flags(words):
        carried.take(word)
    for name in _THEIR_DEFAULTS:
        if name not in carried.given:
            carried.command += [f"--{name}", FLAGS[name].default]
            carried.notes.append(f"--{name} {FLAGS[name].default} is the default there, here it is off")
    carried.notes += [f"{flag} changes nothing here: {why}" for flag, why in taken]
    carried.notes += [
        f"--{name}: the default is {why}" for name, why in _DIFFERENT.items() if name not in carried.given
    ]
    if "--supported-transfer-mode" not in {flag for flag, _ in taken}:
        carried.notes.append(_MODE)
    loaded = carried.check()
    toml = loaded.as_toml(only_given=True) if loaded is not None else ""
    return {"command": carried.command, "toml": toml, "notes": carried.notes, "refused": carried.refused}


class _Carried:
    """What has become of the flags so far."""

    def __init__(self) -> None:
        self.command, self.notes, self.refused = ["kvkeepd"], list[str](), list[str]()
        self.given: set[str] = set()
        self._ours = {option.name: option for option in OPTIONS}

    def take(self, word: Word) -> None:
        name = word.name
        option = self._ours.get(name) or self._ours.get(name.removeprefix("no-"))
        if option is None:
            hint = lmcache.instead(name) or "neither lmcache server nor kvkeepd has it"
            self.refused.append(f"--{name}: {hint}")
            return
        self.given.add(name)
        try:
            load([f"--{name}", *word.values], {})
        except ConfigError as problem:
            self.refused.append(f"--{name}: {str(problem).removeprefix(f'flag --{name}: ')}")
        else:
            self.command += [f"--{name}", *word.values]

    def check(self) -> Loaded | None:
        """All of it together."""
        try:
            return load(self.command[1:], {})
        except ConfigError as problem:
            self.refused.append(str(problem))
            return None


def _flags(words: Sequence[str]) -> Iterator[Word]:
    """Those that are left, also such as only kvkeepd has.  Raises ValueError for a word that follows no flag."""
    left = list(lmcache.flags(words))
    while left:
        word = left.pop(0)
        if isinstance(word, Word):
            yield word
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            if not equals and left and isinstance(left[0], str) and not left[0].startswith("--"):
                values.append(str(left.pop(0)))
            yield Word(name.replace("_", "-"), tuple(values), (word,))
        else:
            raise ValueError(f"{word!r} follows no flag; give the command line in quotes, as you would type it")


def _one_arena(words: Sequence[str]) -> list[str]:
    """``--l1-manager`` with the one manager that is like ours, as the flags that say the same."""
    managers = [word for word in lmcache.flags(words) if isinstance(word, Word) and word.name == "l1-manager"]
    if len(managers) != 1 or not managers[0].values:
        return list(words)
    try:
        manager = json.loads(managers[0].values[0])
        if str(manager.get("type", "")).upper() != "DRAM" or "size_gb" not in manager:
            return list(words)
        eviction = dict(manager.get("eviction") or {})
    except (ValueError, AttributeError, TypeError):
        return list(words)
    told = {"l1-size-gb": manager["size_gb"], "eviction-policy": eviction.get("eviction_policy")}
    told |= {"eviction-trigger-watermark": eviction.get("trigger_watermark")}
    told |= {"eviction-ratio": eviction.get("eviction_ratio")}
    found: list[str] = []
    for word in lmcache.flags(words):
        if word != managers[0]:
            found += [word] if isinstance(word, str) else word.typed
    return found + [f"--{name}={value}" for name, value in told.items() if value is not None]


# ---- reading -------------------------------------------------------------------------------------------------------


def _words(text: str) -> Sequence[str]:
    if os.path.isfile(text):
        with open(text, encoding="utf-8") as file:
            return _of_yaml(file.read(), text)
    if "--" not in text and ":" in text:
        return _of_yaml(text, "the text")
    return _after_the_program(shlex.split(text))


def _after_the_program(words: Sequence[str]) -> Sequence[str]:
    """Whatever started it: lmcache server, python -m …"""
    start = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    return words[start:]


def _of_yaml(text: str, where: str) -> Sequence[str]:
    try:
        import yaml
    except ImportError:
        raise ValueError("reading YAML needs PyYAML: pip install pyyaml, or give the command line") from None
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {' '.join(str(error).split())}") from None
    for document in documents:
        if (words := _of_container(document)) is not None:
            return _after_the_program(words)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise ValueError(f"{where} holds no mapping of settings")
    return list(_of_settings(documents[0]))


def _of_container(document: Any) -> list[str] | None:
    """``command`` and ``args`` of the first container, at whatever depth, that starts with flags of that server."""
    if isinstance(document, dict):
        words: list[str] = []
        for key in ("command", "args"):
            part = document.get(key)
            words += [str(word) for word in part] if isinstance(part, list) else []
        if len(words) > 2 and os.path.basename(words[0]) in ("sh", "bash") and words[1].startswith("-"):
            words = shlex.split(words[2])
        if any(word.startswith("--") and word[2:].partition("=")[0] in FLAGS for word in words):
            return words
    inside = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return next((found for one in inside if (found := _of_container(one)) is not None), None)


def _of_settings(settings: dict[Any, Any]) -> Iterator[str]:
    for key, value in settings.items():
        name = str(key).replace("_", "-").removeprefix("--")
        theirs = FLAGS.get(name)
        if isinstance(value, list) and theirs is not None and theirs.kind is Kind.VALUES:
            yield from (f"--{name}", *map(str, value))
            continue
        for one in value if isinstance(value, list) else [value]:
            if one is None:
                continue
            if isinstance(one, bool):
                mark = theirs is not None and theirs.kind is Kind.MARK
                yield from () if mark and not one else (f"--{name}" if one else f"--no-{name}",)
            else:
                yield f"--{name}={json.dumps(one) if isinstance(one, dict) else one}"
