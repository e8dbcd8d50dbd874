"""From a JSON configuration to an adapter: `create_adapter({"type": "fs", ...})`.

Types come from here, from installed packages (entry point group `kvkeep.l2_adapters`: the name is the type, the object
a class that is called with the configuration), or from the configuration itself:

    {"type": "plugin", "module_path": "my.adapter", "class_name": "MyAdapter", ...}

The operator's configuration is the only thing that can name a module; nothing read from a medium or a peer ever does.
Modules are imported when their type is asked for, so an adapter's libraries cost nothing until then.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping

from kvkeep.l2.adapter import Adapter, AdapterError
from kvkeep.l2.options import nearest

ENTRY_POINTS = "kvkeep.l2_adapters"
PLUGIN = "plugin"
MAX_NAME = 64
BUILT_IN = {
    "fs": ("kvkeep.l2.fs", "FsAdapter"),
    "raw_block": ("kvkeep.l2.raw_block", "RawBlockAdapter"),
    "mock": ("kvkeep.l2.mock", "MockAdapter"),
    "fault_inject": ("kvkeep.l2.fault_inject", "FaultInjectAdapter"),
}


def create_adapter(config: Mapping[str, object]) -> Adapter:
    """Not opened yet.  AdapterError says what is wrong with the configuration."""
    if not isinstance(config, Mapping):
        raise AdapterError(f'an L2 adapter is configured by an object like {{"type": "fs", ...}}, not by {config!r}')
    check_name(config)
    kind = config.get("type")
    if not isinstance(kind, str):
        raise AdapterError(f"an L2 adapter needs a 'type', one of {', '.join(adapter_types())}")
    if kind == PLUGIN or "module_path" in config or "class_name" in config:
        module, name = config.get("module_path"), config.get("class_name")
        if kind != PLUGIN or not isinstance(module, str) or not isinstance(name, str):
            raise AdapterError(
                "an adapter of one's own is \"type\": \"plugin\" with 'module_path' and 'class_name', both texts"
            )
        return _build(kind, _imported(module, name), config)
    if kind in BUILT_IN:
        return _build(kind, _imported(*BUILT_IN[kind]), config)
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if entry.name == kind:
            try:
                return _build(kind, entry.load(), config)
            except (ImportError, AttributeError) as error:
                raise AdapterError(f"L2 adapter '{kind}': its package does not load: {error}") from error
    types = adapter_types()
    raise AdapterError(f"there is no L2 adapter '{kind}'{nearest(kind, types)}; there are {', '.join(types)}")


def check_name(config: Mapping[str, object]) -> None:
    """What people call an adapter is up to them, but a text.  AdapterError otherwise."""
    name = config.get("name", "none is given")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise AdapterError(f"'name' of an L2 adapter is {name!r}; it must be a text of 1 to {MAX_NAME} letters")


def adapter_types() -> list[str]:
    found = {entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    return sorted({*BUILT_IN, PLUGIN, *found})


def _imported(module: str, name: str) -> object:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise AdapterError(f"the L2 adapter {module}.{name} does not load: {error}") from error


def _build(kind: str, cls: object, config: Mapping[str, object]) -> Adapter:
    if not (isinstance(cls, type) and issubclass(cls, Adapter)):
        raise AdapterError(f"L2 adapter '{kind}': {cls!r} is not a class derived from kvkeep.l2.adapter.Adapter")
    build: type = cls
    adapter = build(config)
    assert isinstance(adapter, Adapter)
    return adapter
