"""All tests here need vLLM; those that start an engine share one between cases, since a start takes 10 to 20 s."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Daemon, unique_name
from tests.vllm import tiny_model
from tests.vllm.engines import Engine

HAVE_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAVE_VLLM else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def make_engine(model: Path, folder: Path) -> Iterator[Callable[..., Engine]]:
    """make_engine(**settings) -> Engine, which starts in the background: call ready() before the first question."""
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        if "daemon" in settings:
            options = {"kvkeep.run_dir": str(settings.pop("daemon").run_dir)}
            settings["options"] = options | settings.get("options", {})
        engine = Engine(folder / f"engine-{len(engines)}.log", settings.pop("path", model), **settings)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def shared_daemon(folder: Path) -> Iterator[Daemon]:
    """One running daemon for the module."""
    name = unique_name("vllm")
    daemon = Daemon(folder / name, name, l1_mib=256)
    yield daemon.start()
    daemon.remove()


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same model without kvkeep."""
    with Engine(tmp_path_factory.mktemp("reference") / "engine.log", model, connector=False) as engine:
        yield engine
