"""What an engine gets from kvkeep if its vLLM is not supported: see test_matrix.py."""

from kvkeep.ipc.vllm import compat

compat.SUPPORTED = ("0.1",)
from kvkeep.ipc.vllm.inert import KVKeepConnector  # noqa: E402

__all__ = ["KVKeepConnector"]
