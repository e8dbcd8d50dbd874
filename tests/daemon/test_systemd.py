"""The unit files: valid, in step with the daemon, and harmless to shared memory."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.daemon.config import load

FOLDER = Path(__file__).parents[2] / "systemd"
UNITS = ("kvkeepd.service", "kvkeepd@.service")


def settings(unit: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(FOLDER / unit)
    return {key: value for section in parser.sections() for key, value in parser.items(section)}


def exec_start(unit: str) -> list[str]:
    return settings(unit)["ExecStart"].replace("%i", "red").split()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_finds_nothing_to_say_about_the_unit(unit, tmp_path):
    text = (FOLDER / unit).read_text().replace("/opt/kvkeep/bin/kvkeepd", sys.executable)
    copy = tmp_path / unit.replace("@", "@red")
    copy.write_text(text)
    command = ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if unit in line or copy.name in line] == []


@pytest.mark.parametrize("unit", UNITS)
def test_the_flags_in_the_unit_are_flags_of_the_daemon(unit):
    argv = exec_start(unit)[1:]
    argv[argv.index("--config") + 1] = str(FOLDER / "kvkeepd.toml")
    config = load(argv, {}).config
    assert config.run_dir == f"/run/{settings(unit)['RuntimeDirectory'].replace('%i', 'red')}"
    assert config.run_dir == f"/run/kvkeep/{config.name}"


def test_the_example_file_is_accepted_and_mostly_says_the_defaults():
    example = load(["--config", str(FOLDER / "kvkeepd.toml")], {})
    default = load([], {})
    changed = {key for key in example.values if example.values[key] != default.values[key]}
    assert changed == {"l1_size_gb", "http_port"}


def test_both_units_are_the_same_but_for_the_name():
    one, many = settings(UNITS[0]), settings(UNITS[1])
    differing = {key for key in one if one[key] != many.get(key)}
    assert differing == {"Description", "ExecStart", "RuntimeDirectory"}
    assert set(one) == set(many)


@pytest.mark.parametrize("unit", UNITS)
def test_no_hardening_takes_shared_memory_or_the_peers_ids_away(unit):
    found = settings(unit)
    assert found["RemoveIPC"] == "no"
    assert found["RuntimeDirectoryPreserve"] == "yes"
    for harmful in ("PrivateIPC", "PrivateUsers", "DynamicUser", "ProcSubset", "MemoryMax", "MemoryDenyWriteExecute"):
        assert harmful not in found
    for path in ("InaccessiblePaths", "TemporaryFileSystem", "ReadOnlyPaths"):
        assert "/dev/shm" not in found.get(path, "")


@pytest.mark.parametrize("unit", UNITS)
def test_a_crash_is_followed_by_a_restart_and_a_wrong_configuration_is_not(unit):
    from kvkeep.daemon import main

    found = settings(unit)
    assert found["Restart"] == "always"
    assert found["RestartPreventExitStatus"].split() == [str(main.EXIT_CONFIG), str(main.EXIT_TAKEN)]


@pytest.mark.skipif(not shutil.which("systemd-sysusers"), reason="systemd is not installed")
def test_the_user_can_be_made(tmp_path):
    command = ["systemd-sysusers", f"--root={tmp_path}", str(FOLDER / "kvkeep.sysusers.conf")]
    (tmp_path / "etc").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "kvkeep:" in (tmp_path / "etc/passwd").read_text()
