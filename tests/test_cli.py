"""The command line: what it says, and how it ends."""

from __future__ import annotations

import io
import re
import socket
import sys
import wave
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from breeze_rtc import cli
from breeze_rtc.errors import BadRequest
from breeze_rtc.options import Relays
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.scheduling.chunking import LADDER
from breeze_rtc.scheduling.machines import H100_GRAPH_COSTS, H100_SPECS, warmed_up
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.simulator import Utterance, simulate
from breeze_rtc.scheduling.trace import TraceWriter
from breeze_rtc.server import doctor

OUT = ("--to", "+4930123456", "--from", "+15550100", "--phone-url", "https://x.example")


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
    assert all(name in out + err for name in ("demo", "serve", "say", "voice", "trace", "doctor"))


@pytest.mark.parametrize(
    "command", ["demo", "serve", "call", "console", "say", "doctor", "voice add", "voice list", "trace show"]
)
def test_help_says_what_each_option_is(run, command: str) -> None:
    """Every command has its options in its help, each with a word about it, the shared ones under headings."""
    code, out, _ = run(*command.split(), "--help")
    assert code == 0
    options = re.findall(r"^│[ *]+(--\S+)(.*)│$", out, re.MULTILINE)
    assert options
    assert [name for name, about in options if len(about.strip().split("  ")[-1]) < 4] == []
    assert ("The model that speaks" in out) == (command in {"demo", "serve", "call", "console", "say", "voice add"})


def test_say_writes_a_wav(run, tmp_path: Path) -> None:
    """With the real engine in its own process: a file that can be played, and its figures in one line."""
    path = tmp_path / "hello.wav"
    code, out, err = run("say", "Hi.", "--model", "tiny", "--seed", "1", "-o", str(path))
    assert (code, err.count("Traceback")) == (0, 0), err
    assert all(words in out for words in ("real-time factor", "first sound after", "hello.wav"))
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getframerate()) == (1, 24_000)
        assert file.getnframes() > 0


def test_a_voice_is_made_listed_spoken_with_and_deleted(run, tmp_path: Path) -> None:
    """From a recording to speech in its voice, each command in a process of its own kind."""
    samples = np.random.default_rng(1).normal(0, 0.1, 30_000)
    with wave.open(str(tmp_path / "anna.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        file.writeframes((samples * 32_767).astype("<i2").tobytes())
    at = ("--voices", str(tmp_path / "voices"))
    code, _, err = run("voice", "list", *at)
    assert (code, "no cloned voice" in err) == (0, True)
    code, out, err = run(
        "voice", "add", "anna", str(tmp_path / "anna.wav"), "--transcript", "It is me.", "--model", "tiny", *at
    )
    assert (code, "--voice anna" in out) == (0, True), err
    assert run("voice", "list", *at)[1].split() == ["anna"]
    said = {}
    for name in ("default", "anna"):
        path = tmp_path / f"{name}.said.wav"
        how = ("--voice", name, "--instruction", "Slowly.", "--model", "tiny", "--seed", "1", *at)
        code, _, err = run("say", "Hi.", *how, "-o", str(path))
        assert code == 0, err
        said[name] = path.read_bytes()
    assert said["anna"] != said["default"]
    assert run("voice", "remove", "anna", *at)[0] == 0
    code, _, err = run("voice", "remove", "anna", *at)
    assert (code, "no voice is called 'anna'" in err) == (2, True)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("voice", "add", "A!", "x.wav", "--transcript", "x"), "no name for a voice"),
        (("voice", "add", "a", __file__, "--model", "tiny"), "needs the words"),
        (("voice", "add", "a", "/no/such.wav", "--transcript", "x"), "cannot read /no/such.wav"),
        (("voice", "add", "a", __file__, "--transcript", "x", "--model", "tiny"), "cannot be read as sound"),
        (("voice", "add", "a", __file__, "--transcript", "x", "--model", "nano"), "nano cannot clone"),
        (("say", "hi", "--instruction", "Slowly."), "follows no instructions"),
        (("say", ""), "the text is empty"),
        (("say", " \n"), "the text is empty"),
        (("say", "hi", "-o", "/no/such/folder/x.wav"), "there is no folder"),
        (("say", "hi", "-o", "/"), "is a folder"),
        (("say", "hi", "--model", "/no/such/model"), "/no/such/model"),
        (("say", "hi", "--model", "tiny", "--voice", "nobody"), "no voice is called 'nobody'"),
        (("say", "x" * 20_001, "--model", "tiny"), "20000"),
        (("console", "--text", "--model", "tiny", "--voice", "nobody"), "no voice is called 'nobody'"),
        (("serve", "--llm-model", "small"), "go together"),
        (("demo", "--no-open", "--llm-base-url", "http://x"), "go together"),
        (("serve", "--ice-server", "http://x"), "does not begin with"),
        (("serve", "--ice-server", "turn:x", "--ice-user", "me"), "BREEZE_ICE_CREDENTIAL"),
        (("serve", "--port", "0", "--model", "/no/such/model"), "/no/such/model"),
        (("serve", "--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
        (("serve", "--phone-url", "https://x"), "go with --phone"),
        (("serve", "--port", "0", "--phone", "--phone-url", "x.example"), "is no address"),
        (("call", "--carrier", "twilio", "--to", "+49"), "needs --from"),
        (("call", *OUT, "--carrier", "twilio"), "set TWILIO_ACCOUNT_SID and TWILIO_AUTH_TOKEN"),
        (("call", *OUT, "--carrier", "pigeon"), "twilio, telnyx, plivo, vonage"),
        (("serve", "/no/agent.py"), "there is no file /no/agent.py"),
        (("serve", "AGENT", "--voice", "nano"), "chooses its voice"),
        (("serve", "--llm-offline", "--llm-base-url", "http://x", "--llm-model", "y"), "choose one"),
        (("serve", "--sip", "5060x"), "no HOST:PORT"),
        (("serve", "--record", __file__), "cannot keep calls"),
        (("serve", "--sip-account", "sip:me@x"), "goes with --sip"),
        (
            ("serve", "--port", "0", "--model", "tiny", "--no-listen", "--voice", "nobody"),
            "no voice is called 'nobody'",
        ),
    ],
)
def test_what_a_user_can_put_right_is_one_sentence(run, tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    """Exit code 2, the sentence on standard error, never a traceback."""
    agent = tmp_path / "agent.py"
    agent.write_text("from breeze_rtc import Agent\n\nagent = Agent()\n")
    code, _, err = run(*(str(agent) if arg == "AGENT" else arg for arg in args))
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


def test_the_terminal_speaks_with_what_was_asked_for(run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr("breeze_rtc.console.run", lambda callbacks, **how: given.update(how))
    assert run("console", "--text", "--threads", "2", "--weights", "int8", "--codec-device", "cpu")[0] == 0
    engine = given["engine"]
    assert isinstance(engine, Engine)
    assert (engine._threads, engine._weights, engine._codec_device) == (2, "int8", "cpu")


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
        Relays(ice_server=["stuff:x"]).servers()
    (stun, turn) = Relays(ice_server=["stun:a:1", "turn:b:2"]).servers().servers()
    assert (stun.urls, turn.username) == (("stun:a:1",), None)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A short recorded run: one stream of three frames."""
    path = tmp_path / "calls.jsonl"
    with path.open("w") as file:
        scheduler = Scheduler(
            specs=H100_SPECS,
            sample_rate=24_000,
            frame_samples=1_920,
            slots=2,
            kv_pages=100,
            page_tokens=16,
            costs=warmed_up(H100_GRAPH_COSTS, H100_SPECS, LADDER),
            trace=TraceWriter(file.write),
        )
        simulate(scheduler, [Utterance(frames=3)], costs=H100_GRAPH_COSTS, sample_rate=24_000, frame_samples=1_920)
    return path


def test_trace_show_writes_one_page(run, recorded: Path, tmp_path: Path) -> None:
    """The figures in one line; the page asks the network for nothing and has the data in it."""
    page = tmp_path / "page.html"
    code, out, err = run("trace", "show", str(recorded), "-o", str(page))
    assert (code, err) == (0, "")
    assert all(words in out for words in ("page.html", "1 streams", "first packet", "0 missed deadlines"))
    html = page.read_text()
    assert "__TIMELINE__" not in html
    assert '"name":"calls.jsonl"' in html
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", html)


def test_trace_show_takes_a_trace_whose_end_is_cut_off(run, recorded: Path, tmp_path: Path) -> None:
    """An engine that died, or one that is still writing."""
    recorded.write_text(recorded.read_text()[:-5])
    code, _, _ = run("trace", "show", str(recorded), "-o", str(tmp_path / "page.html"))
    assert code == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b'{"version":2,"specs', "cut off in its first line"),
        (b'{"version":1}\n', "version 1"),
        (b'{"name":"x"}\n', "not a scheduler trace"),
        (b"[]\n", "not a scheduler trace"),
        (b'{"version":3}\n', "line 1"),
        (b"\x7fELF\x02\x01\x00\xff\xfe\n", "not text"),
        (b"hello\nworld\n", "line 1 is not JSON"),
        (b"TRACE\n" + b'["next"\n' + b'["next",99999999999999999]\n', "line 2 is not JSON"),
        (b"TRACE\n" + b'["dance",99999999999999999]\n', "'dance'"),
        (b"TRACE\n" + b'["next",-1]\n', "line 2: time does not go back"),
        (b"TRACE\n" + b'["next",1e999]\n', "line 2: its time"),
        (b"TRACE\n" + b'["open",1,"<b>","prefix",9,0,1,true]\n', "'open'"),
        (b"TRACE\n" + b'["done",99999999999999999,7,1,[]]\n', "step 7"),
    ],
)
def test_a_file_that_is_no_trace_is_exit_code_1(
    run, recorded: Path, tmp_path: Path, content: bytes, words: str
) -> None:
    """One sentence that names the file and what is wrong with it, where that is known by line; no page is written."""
    lines = recorded.read_bytes()
    # In place of TRACE, a good first line, so that what follows is the fault.
    recorded.write_bytes(content.replace(b"TRACE\n", lines[: lines.index(b"\n") + 1]))
    code, out, err = run("trace", "show", str(recorded), "-o", str(tmp_path / "page.html"))
    assert (code, out) == (1, "")
    assert "calls.jsonl cannot be replayed" in err
    assert words in err
    assert "Traceback" not in err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("args", [("no/such.jsonl",), (".",), ()])
def test_trace_show_needs_a_file(run, args: tuple[str, ...]) -> None:
    """Wrong usage, as elsewhere."""
    code, _, err = run("trace", "show", *args)
    assert (code, "Traceback" in err) == (2, False)
