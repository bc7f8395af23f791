"""Settings: a frozen tree, unknown keys with the nearest match, the command line over the file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tscale.kernels.precision.select import WISHES
from tscale.node.config import PRECISIONS, NodeConfig, load_config, override, parse_config
from tscale.protocol.errors import BadInput


def test_defaults_are_private_and_frozen() -> None:
    config = parse_config(b"", "f")
    assert config == NodeConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.network.port = 1  # type: ignore[misc]


def test_a_file_with_bom_crlf_and_unicode(tmp_path: Path) -> None:
    path = tmp_path / "Jörg 測試.toml"
    text = (
        '\ufeffname = "Jörg"\r\n[network]\r\nport = 4001\r\nannounce = ["/ip4/8.8.4.4/tcp/4001"]\r\nlisten = false\r\n'
    )
    path.write_bytes(text.encode())
    config = load_config(path)
    assert config.name == "Jörg" and config.network.port == 4001 and config.network.listen is False
    assert config.network.announce == ("/ip4/8.8.4.4/tcp/4001",)
    assert config.storage == NodeConfig().storage


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[network]\nprot = 1", 'f: unknown key "prot" in [network]: did you mean "port"?'),
        ("[netwrok]\nport = 1", 'f: unknown key "netwrok" at the top: did you mean "network"?'),
        ("upload_bytes_per_s = 5", 'f: unknown key "upload_bytes_per_s" at the top: it belongs in [network]'),
        (
            "[compute]\nlearning_rate = 1",
            'f: unknown key "learning_rate" in [compute]: known are threads, device, vram_bytes, ram_bytes, spill_dir, '
            "offload_slots",
        ),
        ('[compute]\ndevice = "gpu"', 'f: compute.device is one of auto, cpu, cuda, not "gpu"'),
        (
            "[compute]\noffload_slots = 1",
            "f: compute.offload_slots is 0 or at least 2: a layer's weights and its momentum",
        ),
        ("[compute]\nvram_bytes = -1", "f: compute.vram_bytes is at least 0, not -1"),
        ("network = 5", "f: network is a section, write [network] and its keys below it"),
        ('[network]\nport = "4001"', "f: network.port is a whole number, not '4001'"),
        (
            "[compute]\nram_bytes = 16",
            "f: compute.ram_bytes is in bytes, and 16 is too few: 16 GB is 16000000000; 0 is no limit",
        ),
        (
            "[compute]\nvram_bytes = 12",
            "f: compute.vram_bytes is in bytes, and 12 is too few: 12 GB is 12000000000; 0 is no limit",
        ),
        (
            "[network]\nupload_bytes_per_s = 20",
            "f: network.upload_bytes_per_s is in bytes, and 20 is too few: 20 Mbit/s is 2500000; 0 is no limit",
        ),
        (
            '[compute]\nram_bytes = "16GB"',
            "f: compute.ram_bytes is a whole number of bytes, like 16000000000, not '16GB'",
        ),
        ("[network]\nport = true", "f: network.port is a whole number, not True"),
        ("[network]\nlisten = 1", "f: network.listen is true or false, not 1"),
        ("[network]\nport = 70000", "f: network.port is from 0 to 65535, not 70000"),
        ("[network]\nupload_bytes_per_s = -1", "f: network.upload_bytes_per_s is at least 0, not -1"),
        ("[network]\nannounce = [1]", 'f: network.announce is a list of texts, like ["a", "b"]'),
        (
            '[training]\nprecision = "fp4"',
            'f: training.precision is one of auto, fp32, bf16, fp8, int8, not "fp4"',
        ),
        ("[training]\nprecision = 8", "f: training.precision is a text in quotes, not 8"),
        (f'name = "{"x" * 33}"', "f: name has at most 32 printable characters"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_config(text.encode(), "f")
    assert str(caught.value) == message


def test_a_file_that_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not TOML.*line 1"):
        parse_config(b"name = \n", "f")
    with pytest.raises(BadInput, match="not UTF-8"):
        parse_config(b"name = '\xff'", "f")
    with pytest.raises(BadInput, match="there is no config file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(BadInput, match="can't read"):
        load_config(tmp_path)
    (tmp_path / "big.toml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(BadInput, match="longer than"):
        load_config(tmp_path / "big.toml")


def test_without_a_path_a_missing_default_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_config() == NodeConfig()


def test_the_command_line_wins_and_none_is_not_given() -> None:
    config = parse_config(b'name = "a"\n[network]\nport = 1\nhost = "10.0.0.1"', "f")
    changed = override(config, {"network.port": 2, "network.announce": ("x",), "name": None, "network.host": None})
    assert (changed.name, changed.network.port, changed.network.host) == ("a", 2, "10.0.0.1")
    assert changed.network.announce == ("x",)
    assert config.network.port == 1
    with pytest.raises(BadInput, match="the command line: network.port is from 0"):
        override(config, {"network.port": -1})


def test_the_precisions_are_those_that_the_kernels_know() -> None:
    assert PRECISIONS == WISHES
    for wish in WISHES:
        assert parse_config(f'[training]\nprecision = "{wish}"'.encode(), "f").training.precision == wish
