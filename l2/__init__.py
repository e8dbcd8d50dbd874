"""Level 2: adapters that keep KV on a medium, the record format at rest, serdes, and the mover that runs them.

adapter.py     what an adapter is             record.py   the header of everything at rest
registry.py    from configuration to adapter  mover.py    the process around one; jobs.py what is said to it
serde.py       what a serde is                serde_codec.py  chains of them, by configuration and by header
"""

from kvkeep.l2.registry import adapter_types, create_adapter

__all__ = ["adapter_types", "create_adapter"]
