"""Which vLLM this is, and what to use of it where versions differ.

vLLM changes its connector interface with each minor version.  The rest of this folder is written for the newest one in
`SUPPORTED`; what an older one lacks is in one file for that version, with the same names as compat_0_32.py.
"""

from __future__ import annotations

import importlib
from types import ModuleType

SUPPORTED = ("0.31", "0.32")


def minor(version: str = "") -> str:
    """``0.32`` of ``0.32.1+cpu``; of the vLLM that is installed, if none is given."""
    if not version:
        import vllm

        version = str(vllm.__version__)
    return ".".join(version.split(".")[:2])


def refusal(version: str = "") -> str:
    """Why this version of vLLM is not cached; empty = it is."""
    found = minor(version)
    if found in SUPPORTED:
        return ""
    return f"vLLM {found} is not supported by this kvkeep: use one of {', '.join(SUPPORTED)}, or another kvkeep"


def differences() -> ModuleType:
    """What the installed version needs done its own way.  Raises ImportError with one sentence."""
    refused = refusal()
    if refused:
        raise ImportError(f"kvkeep: {refused}")
    return importlib.import_module(f"kvkeep.ipc.vllm.compat_{minor().replace('.', '_')}")
