"""The connector with faults in every process of an engine: vLLM imports this module in each of its ranks."""

from __future__ import annotations

import os

from kvkeep.ipc.vllm import clients
from kvkeep.ipc.vllm.connector import KVKeepConnector
from tests.vllm.faults import Faults

if "KVKEEP_TEST_REFUSE_WHEN" in os.environ:
    faults = Faults(clients.attach)
    faults.refuse_when = os.environ["KVKEEP_TEST_REFUSE_WHEN"]
    clients.attach = faults.attach  # type: ignore[assignment]


class FaultyConnector(KVKeepConnector):
    pass
