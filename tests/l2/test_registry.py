"""Configurations are read strictly, and third parties' adapters are found."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from kvkeep.l2 import adapter_types, create_adapter
from kvkeep.l2.adapter import AdapterError
from kvkeep.l2.fs import FsAdapter
from kvkeep.l2.mock import MockAdapter
from kvkeep.l2.options import parse_json


class Theirs(MockAdapter):
    """An adapter that somebody else wrote."""

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__({"type": "mock"})
        self.config = config


def refusal(config: object) -> str:
    with pytest.raises(AdapterError) as caught:
        create_adapter(config)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_type_makes_its_adapter(tmp_path: Path) -> None:
    assert isinstance(create_adapter({"type": "fs", "base_path": str(tmp_path)}), FsAdapter)
    assert isinstance(create_adapter({"type": "mock"}), MockAdapter)
    inner = {"type": "fault_inject", "inner": {"type": "mock"}, "faults": []}
    assert create_adapter(inner).type_name == "fault_inject"
    assert {"fs", "raw_block", "mock", "fault_inject", "plugin"} <= set(adapter_types())


def test_a_mistyped_type_is_answered_with_the_nearest() -> None:
    assert "did you mean 'raw_block'" in refusal({"type": "rawblock"})
    assert "fs" in refusal({"type": "zzz"})
    assert "'type'" in refusal({"base_path": "/x"})
    assert "object" in refusal(["fs"])


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("capacity_bg", 1, "did you mean 'capacity_gb'"),
        ("capacity_gb", 0, "0.0001 or more"),
        ("capacity_gb", 1e-7, "is 1e-07; it must be a number, 0.0001 or more"),  # room for nothing
        ("capacity_gb", 1e305, "at most 1e+09"),
        ("capacity_gb", 10**400, "a number"),
        ("name", 5, "'name' of an L2 adapter is 5; it must be a text"),
        ("name", [1], "is [1]"),
        ("name", "", "is ''"),
        ("name", "a\nb", "is 'a\\nb'"),
        ("capacity_gb", "10", "a number"),
        ("capacity_gb", float("nan"), "a number"),
        ("capacity_gb", float("inf"), "a number"),
        ("fsync", "dta", "did you mean 'data'"),
        ("direct_io", True, "auto, on, off"),
        ("shared", "yes", "true or false"),
        ("io_threads", 0, "from 1 to 256"),
        ("eviction", {"eviction_policy": "LRV"}, "did you mean 'LRU'"),
        ("eviction", {"triger_watermark": 0.9}, "did you mean 'trigger_watermark'"),
        ("eviction", {"trigger_watermark": 1.5}, "at most 1"),
        ("eviction", "LRU", "an object"),
        ("base_path", [], "a directory"),
        ("base_path", 7, "a directory"),
        ("base_path", "kv", "the relative path 'kv'; give it from the root"),
        ("base_path", ["/nvme/kv", "~/kv"], "the relative path '~/kv'"),
        ("base_path", ["/nvme0/kv", "/nvme1/kv", "/nvme0/./kv/"], "leads to /nvme0/kv twice"),
    ],
)
def test_a_wrong_option_is_one_sentence_with_value_and_fix(
    tmp_path: Path, option: str, value: object, says: str
) -> None:
    sentence = refusal({"type": "fs", "base_path": str(tmp_path), option: value})
    assert says in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"type": "raw_block", "path": "/x", "size_gb": 1e305}, "'size_gb' is 1e+305; it must be a number, above 0"),
        ({"type": "raw_block", "path": "kv.raw"}, "the relative path 'kv.raw'"),
        ({"type": "mock", "capacity_gb": 1e305}, "at most 1e+09"),
        ({"type": "mock", "latency_ms": 1e305}, "at most 1e+06"),
        ({"type": "mock", "bandwidth_gb": 1e305}, "at most 1e+06"),
        ({"type": "fault_inject"}, "'inner' is missing; it is the adapter that is to fail"),
        ({"type": "fault_inject", "inner": {}}, "'inner' is {}"),
        ({"type": "fault_inject", "inner": {"type": "mock"}, "faults": [{"seconds": 1e305}]}, "'seconds' is 1e+305"),
    ],
)
def test_values_beyond_all_use_are_one_sentence_too(config: dict[str, object], says: str) -> None:
    sentence = refusal(config)
    assert says in sentence
    assert "\n" not in sentence


def test_a_key_that_is_there_twice_is_refused() -> None:
    assert parse_json('{"type": "mock", "inner": {"type": "mock"}}') == {"type": "mock", "inner": {"type": "mock"}}
    with pytest.raises(ValueError, match="'type' is there twice"):
        parse_json('{"inner": {"type": "fs", "type": "mock"}}')


def test_a_directory_that_a_link_leads_to_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    adapter = create_adapter({"type": "fs", "base_path": [str(tmp_path / "kv"), str(tmp_path / "link")]})
    with pytest.raises(AdapterError, match=f"leads to {tmp_path}/kv twice"):
        adapter.open()


def test_a_missing_path_is_said() -> None:
    assert "'base_path' is missing" in refusal({"type": "fs"})


def test_a_class_of_ones_own_is_loaded_from_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kvk_test_theirs")
    module.Theirs = Theirs  # type: ignore[attr-defined]
    module.Other = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvk_test_theirs", module)
    config = {"type": "plugin", "module_path": "kvk_test_theirs", "class_name": "Theirs", "anything": 1}
    made = create_adapter(config)
    assert isinstance(made, Theirs)
    assert made.config == config
    assert "does not load" in refusal({**config, "class_name": "Nothing"})
    assert "does not load" in refusal({**config, "module_path": "kvk_test_no_such_module"})
    assert "derived from" in refusal({**config, "class_name": "Other"})
    assert "plugin" in refusal({**config, "type": "fs"})


def test_an_installed_package_adds_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("theirs", f"{__name__}:Theirs", "kvkeep.l2_adapters")
    broken = importlib.metadata.EntryPoint("broken", "kvk_test_no_such_module:X", "kvkeep.l2_adapters")
    module = ModuleType(__name__)
    module.Theirs = Theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, __name__, module)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [entry, broken] if group == "kvkeep.l2_adapters" else []
    )
    assert isinstance(create_adapter({"type": "theirs"}), Theirs)
    assert "does not load" in refusal({"type": "broken"})
    assert "theirs" in refusal({"type": "nothing"})
