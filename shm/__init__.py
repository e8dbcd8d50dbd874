"""The arena: two POSIX shared-memory segments that hold the KV cache of a node and outlive the daemon.

Everything here runs in the control process, which is the only writer of the metadata; `layout` and `stats` are also
read by clients and by the web process.  Start with `arena.Arena`.
"""
