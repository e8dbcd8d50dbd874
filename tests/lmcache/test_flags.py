"""Every flag of `lmcache server` is one of kvkeepd's, or is taken, or is refused with a sentence of its own."""

from __future__ import annotations

import argparse

import pytest

from kvkeep.daemon.config import ConfigError, load
from kvkeep.daemon.lmcache import FLAGS, VERSION, Kind, Verdict, instead, without_no_ops

# A value that is right and is not the default, for those that are kvkeepd's own.
OWN = {
    "host": "127.0.0.2",
    "port": "6555",
    "chunk-size": "128",
    "l1-size-gb": "2",
    "l1-use-hugepages": "",
    "eviction-policy": "ARC",
    "eviction-trigger-watermark": "0.7",
    "eviction-ratio": "0.1",
    "l2-store-policy": "skip_l1",
    "l2-prefetch-policy": "retain",
    "l2-prefetch-max-in-flight": "9",
    "l2-adapter": '{"type": "fs", "base_path": "/x"}',
    "http-host": "127.0.0.2",
    "http-port": "9000",
}


def typed(name: str, value: str) -> list[str]:
    return [f"--{name}", *([value] if FLAGS[name].kind not in (Kind.MARK, Kind.SWITCH) else [])]


def asking(name: str, value: str) -> list[str]:
    """Words that ask for something: a switch in the other position than its default."""
    off = FLAGS[name].kind is Kind.SWITCH and FLAGS[name].default == "true"
    return [f"--no-{name}"] if off else typed(name, value)


def of(verdict: Verdict) -> list[str]:
    return [name for name, theirs in FLAGS.items() if theirs.verdict is verdict]


def real_parser() -> argparse.ArgumentParser:
    lmcache = pytest.importorskip("lmcache.cli.commands.server", reason="lmcache is not installed here")
    parser = argparse.ArgumentParser(add_help=False)
    lmcache.ServerCommand().add_arguments(parser)
    if not parser._actions:
        pytest.skip("this lmcache has no server")
    return parser


def kind_of(action: argparse.Action) -> Kind:
    if isinstance(action, argparse.BooleanOptionalAction):
        return Kind.SWITCH
    if action.nargs == 0:
        return Kind.MARK
    if action.nargs == "*":
        return Kind.VALUES
    return Kind.REPEATED if isinstance(action, argparse._AppendAction) else Kind.VALUE


def default_of(action: argparse.Action) -> str:
    value = action.default
    if value is None or value == []:
        return ""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def test_the_list_is_that_of_the_real_parser() -> None:
    from importlib.metadata import version

    real = {action.option_strings[0][2:]: action for action in real_parser()._actions}
    assert version("lmcache") == VERSION
    assert set(real) == set(FLAGS)
    for name, action in real.items():
        assert (kind_of(action), default_of(action)) == (FLAGS[name].kind, FLAGS[name].default), name
        assert len(action.option_strings) == 1 + (FLAGS[name].kind is Kind.SWITCH), name


def test_every_flag_of_the_real_parser_is_taken_or_refused_with_its_sentence() -> None:
    for action in real_parser()._actions:
        name = action.option_strings[0][2:]
        fine = FLAGS[name].fine or (FLAGS[name].default,)
        choices = [str(one) for one in action.choices or () if str(one) not in fine]
        line = asking(name, OWN.get(name) or (choices[0] if choices else "7"))
        if FLAGS[name].verdict is Verdict.REFUSED:
            with pytest.raises(
                ConfigError, match=f"^{line[0]} is a flag of lmcache server that kvkeepd does not have: "
            ):
                load(line, {})
        else:
            load(line, {})


@pytest.mark.parametrize("name", of(Verdict.SAME))
def test_a_flag_that_means_the_same_sets_what_is_said(name: str) -> None:
    assert load(typed(name, OWN[name]), {}).origins[name.replace("-", "_")] == f"flag --{name}"


@pytest.mark.parametrize("name", of(Verdict.TAKEN))
def test_a_flag_that_changes_nothing_is_taken_and_said(name: str) -> None:
    plain = load([], {}).config
    line = typed(name, "7")
    assert load(line, {}).config == plain
    assert load(["--port", "5", *line, "--l1-mlock"], {}).config.l1_mlock
    assert without_no_ops(line) == ([], [(f"--{name}", FLAGS[name].why)])


@pytest.mark.parametrize("name", of(Verdict.REFUSED))
def test_a_flag_for_what_is_not_here_is_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError) as problem:
        load(asking(name, "lmcache_driven" if name == "supported-transfer-mode" else "something-else"), {})
    assert "is a flag of lmcache server that kvkeepd does not have: " in str(problem.value)
    assert str(problem.value).endswith(str(instead(name)))
    assert len(str(instead(name))) > 20
    assert "\n" not in str(instead(name))


@pytest.mark.parametrize("name", of(Verdict.REFUSED))
def test_with_a_value_that_asks_for_nothing_it_is_taken(name: str) -> None:
    theirs = FLAGS[name]
    for value in (theirs.default,) if theirs.fine is None else theirs.fine:
        line = typed(name, value)
        if theirs.kind is Kind.VALUES:
            line = [f"--{name}"]
        elif theirs.kind is Kind.SWITCH:
            line = [f"--{name}" if value == "true" else f"--no-{name}"]
        elif theirs.kind is Kind.MARK:
            continue
        assert load(line, {}).config == load([], {}).config
        if theirs.kind is Kind.VALUE:
            assert load([f"--{name}={value}"], {}).config == load([], {}).config


def test_the_mode_that_is_refused_says_what_to_set_in_the_engine() -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config") as problem:
        load(["--supported-transfer-mode", "lmcache_driven"], {})
    assert "lmcache.mp.mp_transfer_mode" in str(problem.value)
    assert "engine_driven" in str(problem.value)
