"""Level 2: adapters that keep KV on a medium, the record format at rest, and serdes.

Nothing here is wired into the daemon yet; adapters run in mover processes, which come with the L2 controllers.
"""

from kvkeep.l2.registry import adapter_types, create_adapter

__all__ = ["adapter_types", "create_adapter"]
