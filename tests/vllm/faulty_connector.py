"""The connector with faults in every process of an engine: vLLM imports this module in each of its ranks."""

from __future__ import annotations

import os

from kvkeep.ipc.vllm import clients
from kvkeep.ipc.vllm.connector import KVKeepConnector
from tests.vllm.faults import Faults

REFUSE, STRIKE = "KVKEEP_TEST_REFUSE_WHEN", "KVKEEP_TEST_STRIKE_WHEN"  # the attributes of Faults

if {REFUSE, STRIKE} & set(os.environ):
    faults = Faults(clients.attach)
    faults.refuse_when, faults.strike_when = os.environ.get(REFUSE, ""), os.environ.get(STRIKE, "")
    clients.attach = faults.attach  # type: ignore[assignment]


class FaultyConnector(KVKeepConnector):
    pass
