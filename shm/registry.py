"""Policies by name: built in, from installed packages, or by the path of a module.

    LRU                  built in
    frugal               an entry point of this name in the registry's group, of any installed package
    my.module:Frugal     a class in a module that can be imported

Only the operator's configuration names a policy.  A module is imported when its policy is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable


def names(group: str, built_in: Iterable[str]) -> list[str]:
    """What there is, installed packages included."""
    import importlib.metadata  # slow to import, and built-in policies need none of it

    installed = {entry.name for entry in importlib.metadata.entry_points(group=group)}
    return [*built_in, *sorted(installed.difference(built_in))]


def load(group: str, name: str, built_in: Iterable[str]) -> object:
    """A policy that is not built in.  ValueError with the rest of a sentence: what is wrong, and what there is."""
    import difflib
    import importlib.metadata

    module, colon, attribute = name.partition(":")
    try:
        if colon:
            return getattr(importlib.import_module(module), attribute)
        for entry in importlib.metadata.entry_points(group=group):
            if entry.name == name:
                return entry.load()
    except Exception as problem:  # whatever a module does when it is imported
        raise ValueError(f"{name!r} does not load: {type(problem).__name__}: {problem}") from problem
    known = names(group, built_in)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise ValueError(
        f"{name!r} is not one of {', '.join(known)}: {hint}A class's path, as my.module:MyPolicy, will do too"
    )
