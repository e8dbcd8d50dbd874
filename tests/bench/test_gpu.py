"""`kvkeep bench gpu` where there is no GPU: every case is there, and says why it was not measured."""

from __future__ import annotations

import json

import pytest

from kvkeep.bench import gpu


def test_without_a_gpu_every_case_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "missing", lambda: "there is no GPU")
    assert gpu.main(["--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = [f"{op}/{mib}MiB{how}" for mib in (1, 8, 32) for how in ("", "/unpinned") for op in ("store", "load")]
    assert [line["case"] for line in lines] == ["pin", *cases]
    assert {line["not_measured"] for line in lines} == {"there is no GPU"}
