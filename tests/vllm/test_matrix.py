from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvkeep.ipc.vllm import compat
from tests.conftest import Daemon
from tests.vllm import matrix
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_same_outputs
from tests.vllm.test_model_families import FAMILIES
from tests.vllm.tiny_model import prompt


def test_the_table_in_the_documentation_is_what_was_recorded() -> None:
    document = matrix.DOCUMENT.read_text()
    assert document.count(matrix.BEGIN) == document.count(matrix.END) == 1
    assert document == matrix.placed(document, matrix.read()), "python -m tests.vllm.matrix write"


def test_every_family_was_recorded_with_the_newest_version_and_passed() -> None:
    kinds = matrix.read()[compat.SUPPORTED[-1]]["kinds"]
    assert [kind for kind, counts in kinds.items() if counts["failed"] or not counts["passed"]] == []
    assert [family for family in FAMILIES if family not in kinds] == []
    known = set(FAMILIES) | {label for label in matrix.FILES.values() if "%s" not in label}
    assert {kind for kind in kinds if not kind.startswith("speculation: ")} <= known  # not of a family that has gone


def test_what_is_recorded_is_what_is_supported_and_the_other_way_round() -> None:
    assert set(matrix.read()) == set(compat.SUPPORTED)
    folder = Path(compat.__file__).parent
    assert {path.stem for path in folder.glob("compat_*.py")} == {
        f"compat_{v.replace('.', '_')}" for v in compat.SUPPORTED
    }


@pytest.mark.parametrize(
    ("test", "kind"),
    [
        ("tests/vllm/test_model_families.py::test_the_engine_uses_the_cache[mla, two ranks]", "mla, two ranks"),
        ("tests/vllm/test_model_families.py::test_x[gemma3, a window-64]", "gemma3, a window"),
        ("tests/vllm/test_speculation.py::test_x[eagle]", "speculation: eagle"),
        ("tests/vllm/test_lora.py::test_x", "LoRA adapters"),
        ("tests/vllm/test_stores.py::test_x", None),
    ],
)
def test_what_a_test_is_a_test_of(test: str, kind: str | None) -> None:
    assert matrix.kind_of(test) == kind


def test_a_failure_is_recorded_and_shown() -> None:
    recorder = matrix.Recorder()
    name = "tests/vllm/test_model_families.py::test_x[mla]"
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("call", "failed"), ("setup", "skipped")):
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=name, when=when, outcome=outcome))
    assert recorder.kinds == {"mla": {"passed": 1, "skipped": 1, "failed": 1}}
    known = {"0.9": {"vllm": "0.9.1", "date": "2026-01-01", "kinds": recorder.kinds}}
    known["0.10"] = {"vllm": "0.10.0", "date": "2026-02-01", "kinds": {}}
    assert matrix.table(known).splitlines()[0] == "| tests passed | vLLM 0.10.0, 2026-02-01 | vLLM 0.9.1, 2026-01-01 |"
    assert matrix.table(known).splitlines()[2] == "| mla | not run | 1 of 2, 1 do not apply |"


@pytest.mark.parametrize(
    ("version", "supported"), [("0.32.0", True), ("0.31.4+cpu", True), ("0.30.0", False), ("1.0", False)]
)
def test_another_version_is_refused_in_one_sentence(version: str, supported: bool) -> None:
    sentence = compat.refusal(version)
    assert (sentence == "") is supported
    if not supported:
        assert "use one of 0.31, 0.32" in sentence
        assert "\n" not in sentence


def test_an_engine_whose_version_is_not_supported_runs_without_the_cache(
    make_engine: Callable[..., Engine], shared_daemon: Daemon, reference: Engine
) -> None:
    alone = {"kv_connector_module_path": "tests.vllm.unsupported_connector"}
    engine = make_engine(daemon=shared_daemon, connector_class=alone).ready()
    prompts = [prompt(1, 300)]
    assert_same_outputs(engine.generate(prompts), reference.generate(prompts))
    said = [line for line in engine.log.read_text().splitlines() if "kvkeep: cache off for this engine" in line]
    assert len(said) == 1
    assert "is not supported by this kvkeep: use one of 0.1" in said[0]
