"""The settings: one parser, four sources, every mistake one clear sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.daemon.config import Config, ConfigError, load
from kvkeep.daemon.options import OPTIONS, Option

SETTINGS = [option for option in OPTIONS if not option.flag_only]


def write(folder: Path, text: str) -> str:
    path = folder / "kvkeep.toml"
    path.write_text(text)
    return str(path)


def refused(argv: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as problem:
        load(argv, environ or {})
    return str(problem.value)


def test_a_flag_wins_over_the_environment_which_wins_over_the_file_which_wins_over_the_default(tmp_path):
    path = write(tmp_path, "chunk_size = 1\neviction_ratio = 0.2\nmax_clients = 7\n")
    environ = {"KVKEEP_CHUNK_SIZE": "2", "KVKEEP_EVICTION_RATIO": "0.3"}
    loaded = load(["--config", path, "--chunk-size", "3"], environ)
    assert loaded.config.chunk_size == 3
    assert loaded.config.eviction_ratio == 0.3
    assert loaded.config.max_clients == 7
    assert loaded.config.eviction_policy == "LRU"
    assert loaded.origins["chunk_size"] == "flag --chunk-size"
    assert loaded.origins["eviction_ratio"] == "environment KVKEEP_EVICTION_RATIO"
    assert loaded.origins["max_clients"] == f"file {path}, max_clients"
    assert loaded.origins["eviction_policy"] == "default"


def test_the_config_file_can_be_named_by_the_environment(tmp_path):
    assert load([], {"KVKEEP_CONFIG": write(tmp_path, "chunk_size = 9")}).config.chunk_size == 9


def test_what_print_config_prints_is_a_config_file_with_the_same_meaning(tmp_path):
    first = load(["--l1-size-gb", "0.25", "--allow-uids", "7,0,7", "--socket-mode", "0666", "--l1-mlock"], {})
    again = load(["--config", write(tmp_path, first.as_toml())], {})
    assert again.config == first.config
    assert again.config.allow_uids == (7, 0)


def test_the_defaults_of_the_struct_and_of_the_table_are_the_same():
    given = load(["--name", "x", "--run-dir", "/r"], {}).config
    assert given == Config(name="x", run_dir="/r", l1_bytes=given.l1_bytes)


@pytest.mark.parametrize("option", SETTINGS, ids=lambda option: option.name)
def test_each_default_passes_its_own_check_as_text_and_as_toml(option: Option, tmp_path: Path):
    text = {"users": "", "groups": "", "adapters": "", "mode": f"{option.default:04o}" if option.kind == "mode" else ""}
    raw = text.get(option.kind, str(option.default))
    assert option.parse(raw) == option.default
    line = next(line for line in load([], {}).as_toml().splitlines() if line.startswith(option.key + " "))
    load(["--config", write(tmp_path, line)], {})


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--l1-sise-gb", "2"], ["--l1-sise-gb", "did you mean --l1-size-gb?"]),
        (["--l1-size-gb", "0"], ["0 GiB", "0.004 to 4096 GiB"]),
        (["--l1-size-gb", "99999"], ["99999 GiB", "above"]),
        (["--l1-size-gb", "nan"], ["nan", "not a number"]),
        (["--l1-size-gb", "inf"], ["inf", "above"]),
        (["--l1-size-gb"], ["expected one argument"]),
        (["--chunk-size", "1.5"], ["'1.5'", "whole number"]),
        (["--eviction-policy", "FIFO"], ["'FIFO'", "LRU, noop"]),
        (["--eviction-trigger-watermark", "1.1"], ["1.1", "0.01 to 1"]),
        (["--l1-mlock", "maybe"], ["'maybe'", "true nor false"]),
        (["--socket-mode", "0400"], ["'0400'", "octal"]),
        (["--allow-uids", "no-such-user-here"], ["no-such-user-here", "users"]),
        (["--socket-group", "no-such-group-here"], ["no-such-group-here", "groups"]),
        (["--name", "Uppercase"], ["'Uppercase'", "a-z"]),
        (["--name", "a" * 64], ["63"]),
        (["--name", "../up"], ["'../up'"]),
        (["--run-dir", "relative"], ["'relative'", "absolute"]),
        (["--run-dir", "/" + "x" * 100], ["113 bytes", "107", "shorter --run-dir"]),
        (["--l1-slab-mb", "512", "--l1-size-gb", "0.1"], ["--l1-slab-mb 512", "leave --l1-slab-mb at 0"]),
        (["stray"], ["'stray'", "flags only"]),
        (["--config", "/no/such/file"], ["/no/such/file", "No such file"]),
    ],
)
def test_a_mistake_is_one_sentence_with_the_value_and_the_way_out(argv, says):
    message = refused(argv)
    assert "\n" not in message
    for part in says:
        assert part in message


def test_an_unknown_variable_of_ours_is_an_error_and_foreign_ones_are_not():
    assert "did you mean KVKEEP_L1_SIZE_GB?" in refused([], {"KVKEEP_L1SIZE_GB": "3"})
    load([], {"LMCACHE_CHUNK_SIZE": "256", "PATH": "/bin"})


def test_an_empty_variable_counts_as_unset():
    assert load([], {"KVKEEP_CHUNK_SIZE": ""}).origins["chunk_size"] == "default"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("l1_sise_gb = 2", "did you mean l1_size_gb?"),
        ('l1_size_gb = "2" \nl1-size-gb = 3', "given twice"),
        ("chunk_size = true", "whole number"),
        ("log_level = 3", "not one of"),
        ("l2_adapter = 1", "not an object"),
        ('l2_adapter = [{type = "fs", basepath = "/x"}]', "base_path"),
        ("forget = true", "'forget' is not a setting"),
        ("= 3", "not valid TOML"),
        ("name = 5", "not text"),
    ],
)
def test_a_mistake_in_the_file_names_the_file(tmp_path, text, says):
    path = write(tmp_path, text)
    message = refused(["--config", path])
    assert path in message
    assert says in message


def test_dashes_work_in_the_file(tmp_path):
    assert load(["--config", write(tmp_path, "chunk-size = 5")], {}).config.chunk_size == 5


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--l1-manager", "--l1-size-gb"),
        ("--otlp-endpoint", "--http-port"),
        ("--supported-transfer-mode=lmcache_driven", "engine_driven"),
        ("--run-script-api-enabled", "never runs code"),
    ],
)
def test_a_flag_of_lmcache_server_that_is_not_ours_says_what_to_use_instead(flag, says):
    message = refused([flag, "1"])
    assert "lmcache server" in message
    assert says in message


def test_flags_of_lmcache_server_that_change_nothing_are_taken():
    line = (
        "--l1-size-gb 1 --shm-name pool --no-l1-use-lazy --supported-transfer-mode engine_driven --max-workers 8 "
        "--worker-reap-timeout-seconds 30 --prometheus-port 1 --enable --engine-type default --port=5555"
    )
    assert load(line.split(), {}).config.port == 5555
    assert load(["--shm-name=pool", "--supported-transfer-mode=auto", "--l1-use-lazy"], {}).config.port == -1
    for mistake in (["--shm-name"], ["--supported-transfer-mode"], ["--supported-transfer-mode", "lmcache_driven"]):
        refused(mistake)


def test_switches_can_be_turned_on_and_off_in_every_way():
    assert load(["--l1-mlock"], {}).config.l1_mlock
    assert load(["--l1-mlock=yes"], {}).config.l1_mlock
    assert load([], {"KVKEEP_L1_MLOCK": "1"}).config.l1_mlock
    assert not load(["--no-l1-mlock"], {"KVKEEP_L1_MLOCK": "1"}).config.l1_mlock


def test_the_entry_table_is_sized_by_the_arena_unless_told():
    assert load(["--l1-size-gb", "64"], {}).config.entries == 64 * 16384
    assert load(["--l1-size-gb", "0.01"], {}).config.entries == 4096
    assert load(["--l1-entries", "10"], {}).config.entries == 10


def kvkeepd(*argv: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVKEEP_")}
    command = [sys.executable, "-m", "kvkeep.daemon.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=False)


def test_kvkeepd_prints_its_configuration_and_where_each_value_came_from():
    done = kvkeepd("--l1-size-gb", "2", "--print-config")
    assert done.returncode == 0
    assert "l1_size_gb = 2.0" in done.stdout
    assert "# flag --l1-size-gb" in done.stdout
    assert "# default" in done.stdout


def test_kvkeepd_with_a_wrong_flag_ends_with_status_2_and_one_line():
    done = kvkeepd("--l2-adapter", "{}")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "an L2 adapter needs a 'type'" in done.stderr


def test_adapters_are_given_one_a_flag_and_kept_in_order(tmp_path):
    one, two = '{"type": "mock"}', '{"type": "fs", "base_path": "/x", "threads": 2}'
    wanted = [{"type": "mock"}, {"type": "fs", "base_path": "/x", "threads": 2}]
    loaded = load(["--l2-adapter", one, f"--l2-adapter={two}"], {})
    assert loaded.config.adapters == wanted
    assert load(["--config", write(tmp_path, loaded.as_toml())], {}).config.adapters == wanted
    assert load([], {"KVKEEP_L2_ADAPTER": f"[{one}, {two}]"}).config.adapters == wanted
    in_toml = 'l2_adapter = [{type = "mock"}, {type = "fs", base_path = "/x", threads = 2}]'
    assert load(["--config", write(tmp_path, in_toml)], {}).config.adapters == wanted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fs", "not JSON"),
        ('"fs"', "not an object"),
        ('{"type": "fss"}', "there is no L2 adapter 'fss'"),
        ('{"type": "fs"}', "base_path"),
        ('{"type": "mock", "threads": 1}', "'threads' is 1: give 2 to 64, one of which is for loads only"),
        ('{"type": "mock", "thread": 3}', "thread"),
        ('{"type": "mock", "type": "fs"}', "the key 'type' is there twice"),
        ('{"type": "plugin", "module_path": "a", "class_name": "B", "name": 5}', "'name' of an L2 adapter is 5"),
    ],
)
def test_a_wrong_adapter_is_one_sentence(text, says):
    message = refused(["--l2-adapter", text])
    assert "flag --l2-adapter" in message
    assert says in message


def test_the_help_names_every_option():
    done = kvkeepd("--help")
    assert done.returncode == 0
    for option in OPTIONS:
        assert option.flag in done.stdout


def test_a_wrong_flag_is_answered_without_loading_anything_heavy():
    code = (
        "import sys\nfrom kvkeep.daemon.main import main\nmain(['--nope'])\n"
        "print([m for m in ('numpy', 'zmq', 'psutil', 'torch', 'posix_ipc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
