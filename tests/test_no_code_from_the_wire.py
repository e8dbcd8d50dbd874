"""Nothing in the package executes, or builds objects from, what a peer, a file or shared memory said.

Read from the syntax tree, so that a comment is no offence and a spelling no way around.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("shm", "ipc", "l2", "daemon", "bench")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))

MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "code",
    "codeop",
    "imp",
}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "unsafe_load", "full_load"}


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "multiprocessing":
                names += [f"multiprocessing.{alias.name}" for alias in node.names]
        else:
            names = []
        for name in names:
            if name.partition(".")[0] in MODULES:
                yield node.lineno, f"imports {name}"  # type: ignore[attr-defined]
            if name == "multiprocessing.shared_memory":  # its tracker unlinks segments of others
                yield node.lineno, f"imports {name}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in CALLS:
                yield node.lineno, f"calls {function.id}"
            if isinstance(function, ast.Attribute) and function.attr in CALLS - {"compile"}:
                yield node.lineno, f"calls {function.attr}"
            if isinstance(function, ast.Attribute) and function.attr in ATTRIBUTES:
                yield node.lineno, f"calls {function.attr}"
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("allow_pickle", "shell") and not allowed:
                    yield node.lineno, f"gives {keyword.arg}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_runs_no_code_that_came_as_data(file: Path):
    found = [f"{file.relative_to(ROOT)}:{line} {what}" for line, what in offences(ast.parse(file.read_text()))]
    assert found == []


def test_the_gate_sees_what_it_is_there_for():
    bad = (
        "import pickle",
        "from marshal import loads",
        "eval(x)",
        "builtins.exec(x)",
        "socket.recv_pyobj()",
        "np.load(f, allow_pickle=True)",
        "from multiprocessing import shared_memory",
        "subprocess.run(x, shell=True)",
    )
    for text in bad:
        assert list(offences(ast.parse(text))), text
    for text in ("re.compile(x)", "np.load(f, allow_pickle=False)", "# eval", "os.execv(a, b)", "import codecs"):
        assert not list(offences(ast.parse(text))), text


def test_there_is_something_to_check():
    assert len(FILES) > 10
