"""`regard chat`: turns in a pseudo-terminal and through a pipe; Ctrl-C; what is kept between turns."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
import torch

import regard
from regard.cli.generating import default_model
from regard.models import Conversation, KeptCache, generate, stream

try:
    MODEL = default_model()
except ValueError:
    pytest.skip("the default model is not installed", allow_module_level=True)
FRANCE, ITALY = "What is the capital of France?", "And of Italy?"
COMMAND = [sys.executable, "-m", "regard", "chat", "--max-tokens", "40"]


@pytest.fixture(scope="module")
def model():
    return regard.load(MODEL)


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *more: str) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:  # pragma: no cover  the other process
            os.environ["TERM"] = "dumb"
            os.execv(sys.executable, [*COMMAND, *more])
        self.text = ""

    def until(self, words: str, seconds: float = 90.0) -> str:
        """What it shows up to these words."""
        end = time.monotonic() + seconds
        while words not in self.text:
            ready, _, _ = select.select([self.file], [], [], max(end - time.monotonic(), 0.0))
            assert ready, f"no {words!r} after {seconds} s, but {self.text!r}"
            try:
                self.text += os.read(self.file, 4096).decode()
            except OSError:
                raise AssertionError(f"it ended without {words!r}: {self.text!r}") from None
        shown, _, self.text = self.text.partition(words)
        return shown

    def say(self, text: str) -> None:
        os.write(self.file, f"{text}\n".encode())
        self.until(f"{text}\r\n")  # the echo

    def ended(self) -> int:
        end = time.monotonic() + 60
        while not (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.05)
        os.close(self.file)
        return os.waitstatus_to_exitcode(found[1])


def test_two_turns_in_a_terminal_and_the_first_is_remembered():
    terminal = Terminal()
    terminal.until("> ")
    terminal.say(FRANCE)
    assert "Paris" in terminal.until("> ")
    terminal.say(ITALY)
    assert "Rome" in terminal.until("> ")
    terminal.say("/reset")
    terminal.until("> ")
    terminal.say("/what")
    assert "expected /exit, /reset or /help" in terminal.until("> ")
    terminal.say("/exit")
    assert terminal.ended() == 0


def test_ctrl_c_stops_an_answer_and_leaves_at_the_prompt():
    terminal = Terminal("--max-tokens", "2000")
    terminal.until("> ")
    terminal.say("Write a very long story about a dragon and a knight.")
    terminal.until(" ")
    os.write(terminal.file, b"\x03")
    assert len(terminal.until("> ", 30.0)) < 2000
    time.sleep(0.5)  # until it waits for a line
    os.write(terminal.file, b"\x03")
    assert terminal.ended() == 0


def test_a_pipe_gives_the_answers_alone():
    done = subprocess.run(COMMAND, input=f"{FRANCE}\n\n{ITALY}\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "Paris" in first and "Rome" in second and done.stderr == ""
    told = [*COMMAND, "--system", "You are a pirate.", "--context", "1k"]
    other = subprocess.run(told, input=f"{FRANCE}\n", capture_output=True, text=True)
    assert other.returncode == 0 and len(other.stdout.splitlines()) == 1


def test_turns_with_one_cache_are_what_the_whole_text_gives(model):
    talk = Conversation(model, system="Be brief.", context=400, max_tokens=12)
    messages = [{"role": "system", "content": "Be brief."}]
    for text in (FRANCE, ITALY, "Thanks!"):
        messages.append({"role": "user", "content": text})
        ids = model.tokenizer.chat_ids(messages)
        ends = (*model.end_ids, *model.tokenizer.turn_end_ids())
        want = generate(model, [ids], max_tokens=12, end_ids=ends)[0].text
        answer = "".join(talk.say(text))
        assert answer == want
        messages.append({"role": "assistant", "content": answer})
        if text is not FRANCE:
            assert talk.statistics.prompt_tokens < len(ids) / 2  # the rest was in the cache
    assert talk.messages == messages


def test_an_answer_left_early_stays_and_a_turn_that_does_not_fit_changes_nothing(model):
    talk = Conversation(model, context=100, max_tokens=30)
    pieces = talk.say("Tell me a story.")
    begun = next(pieces)
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": begun} and len(talk.messages) == 2
    before = list(talk.messages)
    with pytest.raises(regard.errors.CacheFull, match="at most 100 tokens, got"):
        talk.say("word " * 90)
    assert talk.messages == before
    assert isinstance("".join(talk.say("Go on.")), str)
    talk.reset()
    assert talk.messages == []


@pytest.mark.parametrize("name", ["llama", "mamba2", "recurrent_gemma"])
def test_a_kept_cache_gives_what_a_fresh_one_gives(name):
    own = regard.load(f"tests/checkpoints/{name}", dtype=torch.float64)
    kept, texts = KeptCache(own, 40), [[5, 9, 11, 3], [5, 9, 11, 3, 8, 8, 2], [5, 9, 4], [5, 9, 4], [7]]
    for ids in texts:
        with torch.no_grad():
            rest = kept.rest(ids)
            found = own(torch.tensor([rest]), cache=kept.cache, last_only=True)
            kept.ids += rest
            torch.testing.assert_close(found, own(torch.tensor([ids]))[:, -1:], rtol=1e-9, atol=1e-9)


def test_a_kept_cache_is_checked(model):
    with pytest.raises(regard.errors.CacheFull, match="kept: it has room for 4 tokens, and the text may take 9"):
        stream(model, [5, 9, 11], max_tokens=7, kept=KeptCache(model, 4))
    encoder = regard.load("tests/checkpoints/bert")
    with pytest.raises(TypeError, match="model: expected a Decoder"):
        Conversation(encoder)
    with pytest.raises(ValueError, match="template"):
        Conversation(model, template="unheard-of")


@pytest.mark.parametrize("name", ["mamba2", "recurrent_gemma", "llama"])
def test_a_kept_cache_survives_an_interruption_between_two_layers(name):
    own = regard.load(f"tests/checkpoints/{name}", dtype=torch.float64)
    kept = KeptCache(own, 40)
    with torch.no_grad():
        own(torch.tensor([kept.rest([5, 9, 11])]), cache=kept.cache)
        kept.ids += [5, 9, 11]

        def interrupted(*given):
            raise KeyboardInterrupt

        hook = own.layers[-1].register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            own(torch.tensor([[3]]), cache=kept.cache)
        hook.remove()
        ids = [5, 9, 11, 8, 2]
        found = own(torch.tensor([kept.rest(ids)]), cache=kept.cache, last_only=True)
        torch.testing.assert_close(found, own(torch.tensor([ids]))[:, -1:], rtol=1e-9, atol=1e-9)


def test_one_text_at_a_time_and_training_mode_afterwards(model):
    kept = KeptCache(model, 60)
    first = stream(model, "Once upon a time there was", max_tokens=8, kept=kept)
    next(first)
    "".join(stream(model, "The capital of France is", max_tokens=3, kept=kept))
    with pytest.raises(regard.errors.CacheError, match="another text has been read"):
        list(first)
    model.train()
    one, two = (stream(model, "Once upon", max_tokens=n) for n in (3, 6))
    next(one), next(two)
    assert model.training  # between steps the model is as its owner left it
    list(one), list(two)
    assert model.training
    model.eval()
    talk = Conversation(model, context=300, max_tokens=4)
    left = talk.say("One")
    next(left)
    list(talk.say("Two"))
    assert [m["content"] for m in talk.messages if m["role"] == "user"] == ["One", "Two"]


def test_a_conversation_says_what_it_takes_and_an_error_adds_no_turn(model):
    for given, words in (
        ({"foo": 1}, "foo: expected"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 0}, "max"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            Conversation(model, **given)
    for wrong in (None, regard.load("tests/checkpoints/bert")):
        with pytest.raises(TypeError, match="model: expected a Decoder"):
            KeptCache(wrong, 5)
    talk = Conversation(model, context=300, max_tokens=4)

    def fails(*given):
        raise RuntimeError("no")

    hook = model.layers[3].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="no"):
        list(talk.say("One"))
    hook.remove()
    assert talk.messages == []
    list(talk.say("One"))
    assert len(talk.messages) == 2


def test_long_turns_and_odd_bytes_do_not_end_a_chat():
    given = b"Hi\n" + b"word " * 200 + b"\n\xff\xfe\n"
    done = subprocess.run([*COMMAND, "--context", "120"], input=given, capture_output=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) >= 2
    assert b"no room for this turn in --context 120 tokens" in done.stderr
    huge = subprocess.run([*COMMAND, "--context", "1024m"], input=b"Hi\n", capture_output=True)
    assert huge.returncode == 2 and b"--context: there is no memory" in huge.stderr


def test_a_signal_while_it_loads_is_no_traceback():
    process = subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
