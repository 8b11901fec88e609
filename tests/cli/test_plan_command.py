"""`regard plan`: tables, JSON, a picture, and what it says to mistakes."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from regard.analysis import estimate
from regard.analysis.alternatives import HYBRID, OWN
from regard.analysis.plot import lines
from regard.cli import main
from regard.models.presets import PRESETS, preset

NAMES = sorted(PRESETS)


def run(capsys, *arguments):
    code = main(["plan", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("name", NAMES)
def test_the_command_tells_of_every_preset(capsys, name):
    found = estimate(preset(name).build())
    code, out, err = run(capsys, name, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["parameters"]["total"] == found.parameters
    assert answer["cache"]["elements_per_token"] == found.own.per_token
    assert answer["state"]["bytes"] == found.own.state_bytes
    assert answer["published"]["parameters"] == preset(name).parameters
    assert len(answer["alternatives"]) >= 5
    code, out, err = run(capsys, name)
    assert (code, err) == (0, "")
    assert preset(name).release in out
    assert f"{found.parameters:,}" in out
    assert preset(name).note in out


def test_the_command_reads_options_from_a_file(capsys, tmp_path):
    file = tmp_path / "[red]config.json"
    file.write_text(json.dumps({**preset("deepseek-v2").config, "torch_dtype": "bfloat16"}))
    code, out, _ = run(capsys, str(file), "--context", "131072", "--batch", "2", "--cache-bits", "6", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["cache"]["bytes_per_token"] == 25_920
    assert answer["cache"]["bytes"] == 2 * 131072 * 25_920
    code, out, _ = run(capsys, str(file), "--cache-bits", "4.5")
    assert code == 0
    assert str(file) in out.splitlines()[0]
    assert "19,440 bytes" in out


def test_options_of_stored_weights_are_noted_not_refused(capsys, tmp_path):
    """The released DeepSeek-V3 states how its 8-bit weights are stored; a plan reads none of them."""
    file = tmp_path / "config.json"
    stored = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    file.write_text(json.dumps({**preset("deepseek-v3").config, "quantization_config": stored}))
    code, out, _ = run(capsys, str(file))
    assert code == 0
    assert "quantization_config" in out
    code, out, _ = run(capsys, str(file), "--json")
    assert "quantization_config" in json.loads(out)["note"]


def test_bytes_a_token_are_told_exactly(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**preset("llama-2-70b").config, "num_key_value_heads": 64}))
    _, out, _ = run(capsys, str(file))
    assert "2,621,440 bytes" in out
    _, out, _ = run(capsys, str(file), "--cache-bits", "0.01")
    assert "1,638.40 bytes" in out


def test_the_plot_is_one_picture_of_lines(capsys, tmp_path):
    file = tmp_path / "memory.svg"
    code, _, err = run(capsys, "Kimi-Linear-48B-A3B", "--context", "1000000", "--plot", str(file))
    assert (code, err) == (0, "")
    root = ET.fromstring(file.read_text())
    words = {element.text for element in root.iter() if element.text}
    assert {"as it is", "multi-head", OWN, HYBRID, "1M"} <= words


def test_names_in_a_plot_are_text():
    picture = lines({"a < b & c": [(1, 1.0), (2, 10.0)]}, "<x>", "&", tick=lambda y: f"<{y}>")
    assert "a < b & c" in {element.text for element in ET.fromstring(picture).iter()}
    for curves in ({}, {"a": [(0, 1.0)]}, {"a": [(1, 0.0)]}, {"a": [(1, float("nan"))]}):
        with pytest.raises(ValueError, match="curves"):
            lines(curves, "x", "y")


def test_presets_are_listed(capsys):
    code, out, _ = run(capsys, "--list")
    assert code == 0
    assert all(name in out for name in NAMES)
    code, out, _ = run(capsys, "--list", "--json")
    assert sorted(item["preset"] for item in json.loads(out)) == NAMES


@pytest.fixture
def files(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    texts = {
        "text.json": "no json",
        "list.json": "[]",
        "empty.json": "{}",
        "unknown.json": '{"model_type": "gpt9"}',
        "typed.json": '{"model_type": ["llama"]}',
        "option.json": '{"model_type": "llama", "shear": 2}',
        "large.json": '{"model_type": "llama", "num_hidden_layers": 1000000000}',
        "experts.json": '{"model_type": "deepseek_v3", "n_routed_experts": 1000000000}',
        "encoder.json": '{"model_type": "bert"}',
        "heads.json": '{"model_type": "llama", "num_attention_heads": 3}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["MODEL", "deepseek-v2"]),
        (["gpt-5"], ["MODEL", "'gpt-5'", "deepseek-v2", "config.json"]),
        (["folder"], ["MODEL", "is a folder", "deepseek-v2", "folder/config.json"]),
        (["nowhere.json"], ["MODEL", "nowhere.json", "path of a config.json"]),
        (["text.json"], ["MODEL", "text.json", "not a readable JSON file"]),
        (["bytes.json"], ["MODEL", "bytes.json", "not a readable JSON file"]),
        (["list.json"], ["MODEL", "list.json", "one JSON object"]),
        (["empty.json"], ["MODEL", "model_type: expected one of bailing_hybrid", "got None"]),
        (["unknown.json"], ["MODEL", "model_type: expected", "deepseek_v2", "got 'gpt9'"]),
        (["typed.json"], ["MODEL", "model_type"]),
        (["option.json"], ["MODEL", "shear=2"]),
        (["large.json"], ["MODEL", "num_hidden_layers: expected at most 4096", "got 1000000000"]),
        (["experts.json"], ["MODEL", "n_routed_experts: expected at most 4096", "got 1000000000"]),
        (["encoder.json"], ["MODEL", "bert", "a decoder"]),
        (["heads.json"], ["MODEL", "num_attention_heads: expected", "got 3"]),
        (["llama-2-70b", "--context", "-5"], ["--context", "from 1 to"]),
        (["llama-2-70b", "--context", "0"], ["--context", "from 1 to"]),
        (["llama-2-70b", "--context", "many"], ["--context", "integer"]),
        (["llama-2-70b", "--batch", "0"], ["--batch", "from 1 to"]),
        (["llama-2-70b", "--dtype", "int8"], ["--dtype", "bfloat16"]),
        (["llama-2-70b", "--cache-bits", "0"], ["--cache-bits", "from 0.01 to 64"]),
        (["llama-2-70b", "--cache-bits", "-6"], ["--cache-bits", "from 0.01 to 64"]),
        (["llama-2-70b", "--cache-bits", "nan"], ["--cache-bits", "from 0.01 to 64"]),
        (["llama-2-70b", "--cache-bits", "1e-300"], ["--cache-bits", "from 0.01 to 64", "1e-300"]),
        (["llama-2-70b", "--cache-bits", "65"], ["--cache-bits", "from 0.01 to 64"]),
        (["llama-2-70b", "--plot", "memory.png"], ["--plot", ".svg"]),
        (["llama-2-70b", "--plot", "nowhere/memory.svg"], ["nowhere/memory.svg"]),
        (["llama-2-70b", "more"], ["more"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch, files, arguments, words):
    monkeypatch.chdir(files)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("regard: ")
    assert [word for word in words if word not in err] == [], err


def test_help_is_printed_without_torch():
    lines = ["import sys", "from regard.cli import main", "code = main(['plan', '--help'])"]
    program = "\n".join([*lines, "assert 'torch' not in sys.modules", "sys.exit(code)"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("--context", "--batch", "--dtype", "--cache-bits", "--json", "--plot"))
