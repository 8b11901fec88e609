"""The command line, run in this process: what it prints, where, and its exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from regard.cli import main
from regard.cli.expressions import Shape, read_bias, read_mask
from regard.cli.generating import default_model
from regard.masks import Band, Causal, Dilated, Global, KeyLengths, Prefix, RandomBlocks, Segments, Window

ROOT = Path(__file__).parents[2]
SHAPE = Shape(batch=2, heads=4, queries=5, keys=5)


def run(capsys, *arguments):
    code = main(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("name", [None, "explain", "list", "generate", "detect", "classify", "fill"])
def test_help_is_printed_without_torch(name):
    arguments = ["--help"] if name is None else [name, "--help"]
    lines = ["import sys", "from regard.cli import main", f"code = main({arguments})"]
    program = "\n".join([*lines, "assert 'torch' not in sys.modules", "sys.exit(code)"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: regard" in done.stdout


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("causal & window(2)", lambda: Causal() & Window(2)),
        ("~(causal | band(-1, None))", lambda: ~(Causal() | Band(-1, None))),
        ("causal | prefix([3, 1])", lambda: Causal() | Prefix(torch.tensor([3, 1]))),
        ("dilated(2, 3)", lambda: Dilated(2, 3)),
        ("key_lengths(4)", lambda: KeyLengths(4)),
        ("window(2) | global_tokens(0, 3)", lambda: Window(2) | Global([0, 3])),
        ("random_blocks(1, 2)", lambda: RandomBlocks(1, 2, 5, heads=4)),
    ],
)
def test_masks_are_read_as_written(text, same):
    assert torch.equal(read_mask(text, SHAPE).dense(5, 5, batch=2, heads=4), same().dense(5, 5, batch=2, heads=4))


def test_packed_masks_and_biases_are_read():
    packed = read_mask("causal & packed([3, 2])", Shape(1, 4, 5, 5))
    expected = Causal() & Segments.from_lengths([3, 2])
    assert torch.equal(packed.dense(5, 5), expected.dense(5, 5))
    assert read_bias("alibi + t5(16) + dense", SHAPE).dense(5, 5, batch=2, heads=4).shape[-3:] == (4, 5, 5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("causl", "cannot read 'causl'"),
        ("causal &", "cannot read 'causal &'"),
        ("causal + causal", "cannot read 'causal + causal'"),
        ("__import__('os').system('true')", "cannot read"),
        ("window", "window is written window(256)"),
        ("window(1, 2)", "window is written window(256)"),
        ("window('a')", "whole numbers"),
        ("window(1.5)", "whole numbers"),
        ("window(0)", "expected"),
        ("window(w=3)", "cannot read"),
        ("", "cannot read ''"),
    ],
)
def test_a_mask_that_cannot_be_read_is_one_line(capsys, text, words):
    with pytest.raises(ValueError) as caught:
        read_mask(text, SHAPE)
    assert words in str(caught.value)


def test_explain_says_what_the_library_says(capsys):
    code, out, err = run(capsys, "explain", "--heads", "8", "--kv-heads", "2", "--queries", "64", "--mask", "causal")
    q, k = torch.empty(1, 8, 64, 64), torch.empty(1, 2, 64, 64)
    assert (code, err) == (0, "")
    assert out.strip() == str(regard.explain(q, k, k, mask=Causal()))


def test_explain_describes_calls_too_large_to_hold(capsys):
    sizes = ["--batch", "8", "--heads", "128", "--queries", "1000000", "--head-dim", "256"]
    options = ["--mask", "causal & window(4096)", "--bias", "alibi", "--softcap", "30", "--sink", "--grad", "--lse"]
    code, out, _ = run(capsys, "explain", *sizes, *options, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["chosen"] in ("native", "chunked")  # by whether the kernels were built
    assert {row["name"] for row in answer["backends"]} >= {"native", "reference", "chunked", "sdpa", "flex"}
    assert all(row["reason"] for row in answer["backends"] if row["name"] == "sdpa")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing command"),
        (["explian"], "No such command"),
        (["explain", "--hads", "3"], "No such option"),
        (["explain", "--heads", "x"], "--heads"),
        (["explain", "--heads", "-1"], "--heads: expected 0 or more, got -1"),
        (["explain", "--dtype", "int8"], "--dtype"),
        (["explain", "--heads", "8", "--kv-heads", "3"], "Hq=8, Hkv=3"),
        (["explain", "--softcap", "-1"], "softcap"),
        (["explain", "--dropout", "2"], "dropout_p"),
        (["explain", "--mask", "causal windw"], "mask: cannot read"),
        (["explain", "--bias", "alibi & alibi"], "bias: cannot read"),
        (["explain", "--backend", "none"], "backend: expected one of"),
        (["explain", "--device", "nowhere"], "--device nowhere"),
        (["explain", "--batch", "2", "--mask", "packed([1000, 24])"], "batch size 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("regard: ")
    assert words in err


def test_a_bug_is_not_dressed_as_a_mistake(monkeypatch):
    def broken(*_, **__):
        raise AssertionError("a bug")

    monkeypatch.setattr("regard.cli.explaining.explanation", broken)
    with pytest.raises(AssertionError, match="a bug"):
        main(["explain"])


# generate: the checkpoints have no tokenizer, so what continues a text is the default model


@pytest.fixture(scope="module")
def paris():
    """One run of the default model, as `make demo` does it, for all the tests below."""
    command = [
        sys.executable,
        "-m",
        "regard",
        "generate",
        "The capital of France is",
        "--max-tokens",
        "12",
        "--threads",
        "1",
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_generate_continues_the_text_and_tells_what_it_cost(paris):
    assert paris.returncode == 0, paris.stderr
    text, table = paris.stdout, paris.stderr
    assert text.startswith("The capital of France is Paris")
    rows = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    assert set(rows) >= {"model", "backend", "prefill", "decode", "cache", "multi-head"}
    assert re.search(r"\b(native|sdpa|chunked|reference|flex)\b", rows["backend"])
    assert " 5 tokens" in rows["prefill"]
    assert " 11 tokens" in rows["decode"]
    assert "room for 16 tokens" in rows["cache"]
    assert "2.9 times" in rows["multi-head"] or "3.0 times" in rows["multi-head"]


def test_generate_stops_before_a_text_and_draws_the_same_again(capsys):
    options = ["--max-tokens", "8", "--no-report", "--temperature", "1", "--seed", "3", "--top-k", "50"]
    first = run(capsys, "generate", "Once upon a time", *options)
    again = run(capsys, "generate", "Once upon a time", *options)
    assert first == again
    assert first[0] == 0
    greedy = run(capsys, "generate", "The capital of France is", "--no-report", "--stop", "is", "--stop", "aris")
    assert greedy == (0, "The capital of France is P\n", "")


def test_a_chat_model_answers_one_message(capsys):
    options = ["--chat", "--max-tokens", "12", "--no-report", "--min-p", "0.1", "--repetition-penalty", "1.1"]
    code, out, err = run(capsys, "generate", "What is the capital of France?", *options)
    assert (code, err) == (0, "")
    assert out.startswith("The capital of France is Paris")


def test_an_empty_prompt_is_a_mistake(capsys):
    assert run(capsys, "generate", "") == (2, "", "regard: no prompt: expected a text, got an empty one\n")


def test_a_file_goes_in_and_another_comes_out(capsys, tmp_path):
    given, written = tmp_path / "prompt.txt", tmp_path / "answer.txt"
    given.write_text("The capital of France is", encoding="utf-8")
    options = ["--max-tokens", "2", "--no-report"]
    assert run(capsys, "generate", "--file", str(given), "--output", str(written), *options) == (0, "", "")
    assert written.read_text(encoding="utf-8") == "The capital of France is Paris.\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answer.txt", "prompt.txt"]
    code, out, err = run(capsys, "generate", "--file", str(given), "--json", *options)
    facts = json.loads(out)
    assert (code, err, facts["text"], facts["finish"]) == (0, "", " Paris.", "length")
    assert facts["prompt_tokens"] == 5 and facts["new_tokens"] == len(facts["ids"]) == 2
    assert run(capsys, "generate", "--file", str(given), "--output", str(tmp_path / "no" / "where"), *options)[0] == 2
    for more, words in ((["Hello", "--file", str(given)], "got both"), (["Hello", "--system", "x"], "expected --chat")):
        code, _, err = run(capsys, "generate", *more)
        assert code == 2 and words in err


def test_output_writes_through_links_and_specials_and_says_early_what_is_wrong(capsys, tmp_path):
    real, link, pipe = tmp_path / "real.txt", tmp_path / "link.txt", tmp_path / "pipe"
    real.write_text("old", encoding="utf-8")
    real.chmod(0o600)
    link.symlink_to(real)
    os.mkfifo(pipe)
    command = ["generate", "The capital of France is", "--max-tokens", "2", "--no-report", "--output"]
    assert run(capsys, *command, str(link))[0] == 0
    assert link.is_symlink() and real.read_text(encoding="utf-8") == "The capital of France is Paris.\n"
    assert real.stat().st_mode & 0o777 == 0o600
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert run(capsys, *command, str(pipe))[0] == 0
    assert reader.communicate(timeout=30)[0] == "The capital of France is Paris.\n" and pipe.is_fifo()
    for path, words in ((tmp_path, "got the folder"), (tmp_path / "no" / "where.txt", "there is no folder")):
        code, out, err = run(capsys, *command, str(path), "--model", "nowhere")
        assert (code, out) == (2, "") and words in err and "tmp" in err
    odd = tmp_path / "odd.txt"
    odd.write_bytes(b"\xff\xfe")
    code, _, err = run(capsys, "generate", "--file", str(odd))
    assert code == 2 and "odd.txt is no text in UTF-8" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explan"], "Did you mean 'explain'"),
        (["explain", "--mask", "causl"], "did you mean 'causal'?"),
        (["plan", "kimi-linear-48b-a3"], "did you mean 'kimi-linear-48b-a3b'?"),
        (["plan", "kimi-k2", "--context", "12q"], "--context: expected an integer from 1 to"),
        (["explain", "--backend", "natve"], "did you mean 'native'?"),
    ],
)
def test_what_was_probably_meant(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and words in err


def test_version_and_lengths_with_a_unit(capsys):
    assert run(capsys, "--version") == (0, f"regard {regard.__version__}\n", "")
    long = run(capsys, "plan", "llama-2-70b", "--context", "128k", "--json")
    assert long == run(capsys, "plan", "llama-2-70b", "--context", "131072", "--json") and long[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--model", "README.md"], "README.md"),
        (["--model", "tests/checkpoints/bert"], "does not continue"),
        (["--model", "tests/checkpoints/llama"], "tokenizer"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--top-p", "2"], "--top-p"),
        (["--model", "tests/checkpoints/llama", "--backend", "fast"], "backend: expected one of"),
        (["--threads", "0"], "--threads"),
        (["--threads", "100000"], "--threads must lie between 1 and"),
        (["--temperature", "warm"], "--temperature"),
    ],
)
def test_a_mistake_in_generate_is_one_line_and_exit_code_2(capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(ROOT)
    code, out, err = run(capsys, "generate", "Hello", *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert words in err


def test_without_weights_it_says_how_to_get_some():
    with pytest.raises(ValueError, match="give --model FOLDER"):
        default_model("no-such-distribution-of-weights")


def test_list_names_every_mechanism_of_the_catalogue(capsys):
    from regard.catalog import RECORDS

    code, out, _ = run(capsys, "list", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == [record.name for record in RECORDS]
    code, out, _ = run(capsys, "list")
    assert all(record.name in out for record in RECORDS)
