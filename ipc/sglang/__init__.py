"""SGLang attaches to kvkeep through the HiCache storage backend in this folder (docs/sglang.md)::

    python -m sglang.launch_server ... --enable-hierarchical-cache --hicache-storage-backend dynamic \\
      --hicache-storage-backend-extra-config '{"backend_name": "kvkeep", "interface_v1": 1,
        "module_path": "kvkeep.ipc.sglang.backend", "class_name": "KVKeepStorage"}'

Nothing is imported here.  Who does what::

    backend.py     what SGLang sees: one method per call of its cache controller, none of which raises
    pools.py       v2: which of the engine's host pools is kept where, and what of a prefix can be restored
    shelf.py       the pages of one host pool in the daemon: exists, read, write, clear
    pages.py       the pages of one host pool in the engine's memory, as runs of bytes
    identity.py    what the bytes depend on, and what is refused
    options.py     the ``kvkeep.*`` keys of the backend's extra config

The interface is that of SGLang 0.5.23, read from its wheel: ``srt/mem_cache/hicache_storage.py`` (the abstract class),
``storage/backend_factory.py`` (a dynamic class is called with the config and a dict, and must be a HiCacheStorage),
``pool_host/`` (pages and their buffers), and ``srt/managers/cache_controller.py`` (who calls what, in which thread).
"""
