"""Which kinds of model work with which version of vLLM: `python -m tests.vllm.matrix record|write`.

``record`` runs the tests in `FILES` against the vLLM that is installed and notes in matrix.json what came out, and
when; further arguments go to pytest, and only the kinds that ran are replaced.  ``write`` puts the table into
docs/compatibility.md.  test_matrix.py says when the two differ.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD, DOCUMENT = HERE / "matrix.json", HERE.parents[1] / "docs" / "compatibility.md"
BEGIN, END = "<!-- matrix: python -m tests.vllm.matrix write -->", "<!-- end of matrix -->"
FILES = {  # kind of model or of use; %s = what the test's fixture is made for
    "test_model_families.py": "%s",
    "test_speculation.py": "speculation: %s",
    "test_lora.py": "LoRA adapters",
    "test_multi_connector.py": "beside another connector",
    "test_leaving.py": "stored when leaving",
}
OUTCOMES = ("passed", "skipped", "failed")

Kinds = dict[str, dict[str, int]]
Record = dict[str, dict[str, Any]]  # by minor version: {"vllm": version, "date": day, "kinds": Kinds}


def kind_of(test: str) -> str | None:
    """``tests/vllm/test_model_families.py::test_x[mla-64]`` -> ``mla``."""
    path, _, name = test.partition("::")
    label = FILES.get(Path(path).name)
    if label is None or "%s" not in label:
        return label
    return label % name.partition("[")[2].rstrip("]").split("-")[0]


class Recorder:
    """A pytest plugin."""

    def __init__(self) -> None:
        self.kinds: Kinds = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        kind = kind_of(report.nodeid)
        if kind is None or (report.when != "call" and report.outcome == "passed"):
            return
        counts = self.kinds.setdefault(kind, dict.fromkeys(OUTCOMES, 0))
        counts[report.outcome] += 1


def read() -> Record:
    record: Record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return record


def record(arguments: list[str]) -> int:
    import pytest
    import vllm

    from kvkeep.ipc.vllm import compat

    recorder = Recorder()
    files = [str(HERE / name) for name in FILES]
    code = int(pytest.main(["-q", "-m", "not soak", *files, *arguments], plugins=[recorder]))
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return code
    known = read()
    before = known.get(compat.minor(), {}).get("kinds", {})
    day = time.strftime("%Y-%m-%d")
    known[compat.minor()] = {"vllm": str(vllm.__version__), "date": day, "kinds": before | recorder.kinds}
    RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return code


def table(known: Record) -> str:
    versions = sorted(known, key=lambda version: tuple(map(int, version.split("."))), reverse=True)
    heads = [f"vLLM {known[version]['vllm']}, {known[version]['date']}" for version in versions]
    kinds = sorted({kind for version in versions for kind in known[version]["kinds"]})
    lines = ["| " + " | ".join(["tests passed", *heads]) + " |", "|--" * (len(heads) + 1) + "|"]
    for kind in kinds:
        cells = [_cell(known[version]["kinds"].get(kind)) for version in versions]
        lines.append("| " + " | ".join([kind, *cells]) + " |")
    return "\n".join(lines)


def _cell(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "not run"
    ran = counts["passed"] + counts["failed"]
    skipped = f", {counts['skipped']} do not apply" if counts["skipped"] else ""
    return f"{counts['passed']} of {ran}{skipped}"


def placed(document: str, known: Record) -> str:
    """The document with the table in its place."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table(known)}\n\n{END}{tail}"


def main() -> int:
    match sys.argv[1:]:
        case ["record", *arguments]:
            return record(arguments)
        case ["write"]:
            DOCUMENT.write_text(placed(DOCUMENT.read_text(), read()))
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
