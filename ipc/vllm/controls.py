"""What one request may say about its own caching, in ``kv_transfer_params``.

    kvkeep.store     true (what the engine's options say) | false | "prompt" | "all"
    kvkeep.load      true | false
    kvkeep.pin_s     keep the prompt's chunks in L1 for so many seconds; needs the option kvkeep.max_pin_s
    kvkeep.priority  "normal" | "low": its stores may hold half as many of the engine's blocks, and are skipped first

These come from whoever sends requests, so a bad value never fails a request: it behaves as if the key was not there,
and one log line per distinct value says what is allowed, up to a number of lines.  Keys of other connectors are left
alone.  Cost per request: a few look-ups in its dictionary, whatever its size.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvkeep.ipc.extra_config import PREFIX

STORE, LOAD, PIN, PRIORITY = (PREFIX + name for name in ("store", "load", "pin_s", "priority"))
KNOWN = (STORE, LOAD, PIN, PRIORITY)
MAX_LINES = 64  # clients can make up any number of values
MAX_KEYS = 16  # a dictionary with more is not searched for unknown keys
SHOWN_CHARACTERS = 80


class Scope(enum.Enum):
    """Which tokens of a request are stored."""

    NONE = "none"
    PROMPT = "prompt"
    ALL = "all"  # generated ones, too


class Control(NamedTuple):
    store: Scope
    load: bool
    pin_s: float  # 0 = do not pin
    low: bool = False  # priority


_SCOPES = {False: Scope.NONE, "prompt": Scope.PROMPT, "all": Scope.ALL}


class Controls:
    def __init__(self, log: Callable[[str], None], *, store_generated: bool, max_pin_s: float = 0.0) -> None:
        self._log, self._max_pin_s = log, max_pin_s
        self._default = Control(Scope.ALL if store_generated else Scope.PROMPT, True, 0.0)
        self._told: set[str] = set()

    def of(self, params: Any) -> Control:
        """`params` is request.kv_transfer_params.  Never raises."""
        if not params:
            return self._default
        if not isinstance(params, Mapping):
            self._tell(f"kv_transfer_params is {_shown(params)}: it must be a dictionary")
            return self._default
        if len(params) <= MAX_KEYS:
            self._tell_unknown(params)
        if not any(key in params for key in KNOWN):
            return self._default
        return Control(
            self._store(params.get(STORE)),
            self._load(params.get(LOAD)),
            self._pin_s(params.get(PIN)),
            self._low(params.get(PRIORITY)),
        )

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _store(self, value: object) -> Scope:
        if value is None or value is True:
            return self._default.store
        if value is False or (isinstance(value, str) and value in _SCOPES):
            return _SCOPES[value]
        self._tell(f"{STORE} is {_shown(value)}: it may be true, false, 'prompt' or 'all'")
        return self._default.store

    def _load(self, value: object) -> bool:
        if value is None or isinstance(value, bool):
            return value is not False
        self._tell(f"{LOAD} is {_shown(value)}: it may be true or false")
        return True

    def _low(self, value: object) -> bool:
        if value is None or (isinstance(value, str) and value in ("normal", "low")):
            return value == "low"
        self._tell(f"{PRIORITY} is {_shown(value)}: it may be 'normal' or 'low'")
        return False

    def _pin_s(self, value: object) -> float:
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            self._tell(f"{PIN} is {_shown(value)}: it must be a number of seconds, 0 or more")
            return 0.0
        if value > 0 and self._max_pin_s <= 0:
            self._tell(f"{PIN} is not allowed on this engine: set the option kvkeep.max_pin_s to the longest time")
            return 0.0
        return float(min(value, self._max_pin_s))

    def _tell_unknown(self, params: Mapping[Any, Any]) -> None:
        for key in params:
            if isinstance(key, str) and key.startswith(PREFIX) and key not in KNOWN:
                self._tell(f"there is no {_shown(key)}: the keys are {', '.join(KNOWN)}")

    def _tell(self, sentence: str) -> None:
        if sentence in self._told or len(self._told) >= MAX_LINES:
            return
        self._told.add(sentence)
        last = " (further values are not logged)" if len(self._told) == MAX_LINES else ""
        self._log(f"kvkeep: kv_transfer_params: {sentence}; the request behaves as by default{last}")


def _shown(value: object) -> str:
    """One line, and short, whatever a client sent."""
    if isinstance(value, dict | list | tuple | set):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        value = value[: SHOWN_CHARACTERS + 1]
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a very large number"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
