"""The command line: what it says, and how it ends."""

from __future__ import annotations

import io
import socket
import sys
import wave
from contextlib import closing
from pathlib import Path

import pytest

from breeze_rtc import cli
from breeze_rtc.errors import BadRequest
from breeze_rtc.server import doctor


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*args: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        monkeypatch.setattr(sys, "argv", ["breeze-rtc", *args])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_help_names_the_commands(run) -> None:
    """Without arguments the commands are listed."""
    _, out, err = run("--help")
    assert all(name in out + err for name in ("demo", "serve", "say", "doctor"))


def test_say_writes_a_wav(run, tmp_path: Path) -> None:
    """With the real engine in its own process: a file that can be played, and its figures in one line."""
    path = tmp_path / "hello.wav"
    code, out, err = run("say", "Hi.", "--model", "tiny", "--seed", "1", "-o", str(path))
    assert (code, err.count("Traceback")) == (0, 0), err
    assert all(words in out for words in ("real-time factor", "first sound after", "hello.wav"))
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getframerate()) == (1, 24_000)
        assert file.getnframes() > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("say", ""), "the text is empty"),
        (("say", " \n"), "the text is empty"),
        (("say", "hi", "-o", "/no/such/folder/x.wav"), "there is no folder"),
        (("say", "hi", "-o", "/"), "is a folder"),
        (("say", "hi", "--model", "/no/such/model"), "/no/such/model"),
        (("say", "hi", "--model", "tiny", "--voice", "nobody"), "no voice is called 'nobody'"),
        (("say", "x" * 20_001, "--model", "tiny"), "20000"),
        (("serve", "--llm-model", "small"), "go together"),
        (("demo", "--no-open", "--llm-base-url", "http://x"), "go together"),
        (("serve", "--ice-server", "http://x"), "does not begin with"),
        (("serve", "--ice-server", "turn:x", "--ice-user", "me"), "BREEZE_ICE_CREDENTIAL"),
        (("serve", "--port", "0", "--model", "/no/such/model"), "/no/such/model"),
        (("serve", "--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
    ],
)
def test_what_a_user_can_put_right_is_one_sentence(run, args: tuple[str, ...], words: str) -> None:
    """Exit code 2, the sentence on standard error, never a traceback."""
    code, _, err = run(*args)
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 3


@pytest.mark.parametrize("args", [("serve", "--port", "99999"), ("say",), ("dance",), ("serve", "--threads", "0")])
def test_wrong_usage_is_exit_code_2(run, args: tuple[str, ...]) -> None:
    """What the parser refuses ends the same way."""
    code, _, err = run(*args)
    assert code == 2
    assert "Traceback" not in err


def test_a_port_in_use_is_found_before_anything_is_loaded(run) -> None:
    """The sentence names a port to try, at once."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        code, out, err = run("serve", "--port", str(port))
    assert code == 2
    assert f"port {port} is in use" in err
    assert "Loading" not in out


def test_text_comes_from_standard_input_too(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("  "))
    code, _, err = run("say", "-")
    assert (code, "the text is empty" in err) == (2, True)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/"),
        ("0.0.0.0", "http://localhost:8000/"),
        ("::1", "http://[::1]:8000/"),
        ("example.org", "http://example.org:8000/"),
    ],
)
def test_the_printed_address_can_be_visited(host: str, url: str) -> None:
    """A browser lends no microphone to 0.0.0.0."""
    assert cli._url(host, 8000) == url


def test_doctor_looks_at_every_part() -> None:
    """With a voice that is there all that is needed works; each line that does not says what to do."""
    findings = doctor.look(model="tiny", port=0)
    assert {"Python", "torch", "GPU", "Opus", "voice", "voice activity", "listening", "page", "network"} <= {
        finding.part for finding in findings
    }
    assert [finding for finding in findings if not finding.works and not finding.is_optional] == []
    assert all(finding.fix for finding in findings if not finding.works)


def test_doctor_says_what_is_wrong_and_goes_on(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A voice that is not there and a check that raises are findings; exit code 1."""

    def broken() -> doctor.Finding:
        raise OSError("no libopus")

    monkeypatch.setattr(doctor, "_opus", broken)
    monkeypatch.setattr(doctor, "_listening", lambda: doctor.Finding("listening", True, "yes"))
    code, out, err = run("doctor", "--model", "/no/such/model", "--port", "0")
    assert code == 1
    assert "no libopus" in out
    assert "/no/such/model" in out
    assert "Traceback" not in out + err


def test_every_refusal_is_of_our_tree() -> None:
    """ICE servers are checked before anything starts."""
    with pytest.raises(BadRequest):
        cli._ice_servers(["stuff:x"], None, "X")
    (stun, turn) = cli._ice_servers(["stun:a:1", "turn:b:2"], None, "X")
    assert (stun.urls, turn.username) == (("stun:a:1",), None)
