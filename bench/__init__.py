"""Benchmarks: one module each, with ``main(argv) -> int``; `kvkeep bench NAME` runs it.

Each prints a table, and with ``--json`` one JSON object a line: case, value, unit, reference, reference_name, ratio.
Every figure, the reference too, is measured in that run.
"""
