"""What an engine gets whose vLLM we do not support: a connector that does nothing, and one line that says so.

It uses only what the interface has had for a long time, so that such an engine starts and runs without the cache.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.logger import init_logger

from kvkeep.ipc.vllm import compat

logger = init_logger("vllm.kvkeep")
_HMA: Any = getattr(base, "SupportsHMA", object)  # else vLLM would turn several KV cache groups into one for us


class KVKeepConnector(base.KVConnectorBase_V1, _HMA):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        # newer versions insist on an argument of this name, older ones do not have it
        super().__init__(vllm_config, role, *([kv_cache_config] if kv_cache_config is not None else []))
        if role == base.KVConnectorRole.SCHEDULER:  # one line per engine, not one per half
            logger.warning("kvkeep: cache off for this engine: %s", compat.refusal())

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, *args: Any, **kwargs: Any) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, *args: Any, **kwargs: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, *args: Any, **kwargs: Any) -> None:
        pass

    def build_connector_meta(self, *args: Any, **kwargs: Any) -> Any:
        return base.KVConnectorMetadata()

    def request_finished_all_groups(self, *args: Any, **kwargs: Any) -> tuple[bool, None]:
        return False, None
