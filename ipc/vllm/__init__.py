"""vLLM attaches to kvkeep through the connector in this folder.

vLLM calls `register` in each of its processes (entry point ``vllm.general_plugins``), so nothing heavy is imported
here: the connector itself loads when an engine names it::

    vllm serve MODEL --kv-transfer-config \\
      '{"kv_connector": "KVKeepConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

Who does what::

    connector.py   what vLLM sees: dispatches to one of the two halves, and lets no exception through
    scheduler.py   scheduler half: what is there, what to load, what to store, which blocks are pinned
    worker.py      worker half: hands jobs to the copy threads, reports what is done
    copies.py      the copy threads: deadlines, exactly-once completion
    memory.py      the paged KV memory as opaque bytes, and how an extent is filled
    places.py      where vLLM has put it;  devices.py: which of the two it is
    pages.py       on the CPU: copied with numpy
    cuda/          on a GPU: copied by it
    leaving.py     chunks that are stored only when they are about to leave the engine
    metadata.py    what crosses between the two halves
    stats.py       what is counted, in vLLM's log and for Prometheus
    events.py      what routers are told
    identity.py    what the bytes depend on, and what is refused
    fingerprint.py the digest of a model's weights
    adapters.py    content of LoRA adapters, and what chunks of a request are called
    controls.py    what a request may say about its own caching
    pace.py        whether a hit is worth loading
    underway.py    what is being loaded, so that equal prompts are loaded once
    pins.py        prompts that requests asked to keep
    namespace.py   registers the identity with the daemon, off the engine's thread
    options.py     the ``kvkeep.*`` keys of kv_connector_extra_config
    clients.py     how a half attaches to the daemon
    compat.py      which vLLM this is; compat_0_31.py and so on: where versions differ
    inert.py       what an engine gets whose vLLM is not supported
    logs.py        what the client library has to say, in the engine's log
"""

from __future__ import annotations

CONNECTOR_NAME = "KVKeepConnector"


def register() -> None:
    """Make the name KVKeepConnector known to vLLM.  Safe to call more than once per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvkeep.ipc.vllm import compat

    module = "inert" if compat.refusal() else "connector"
    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, f"kvkeep.ipc.vllm.{module}", CONNECTOR_NAME)
