"""What lets users of LMCache 0.5.6 use kvkeep: the wire of `lmcache server` (`gateway`), and a storage plugin for
LMCache's in-process mode (`storage`, the only module that needs LMCache itself)."""
