"""The page's own arithmetic, run where it runs: in a browser, as the modules are served."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

WEB = Path(__file__).parents[2] / "web"


class Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=WEB)) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{files.server_port}"
        files.shutdown()


@pytest.fixture(scope="module")
def page(quiet_browser: Browser, address: str) -> Iterator[Page]:
    page = quiet_browser.new_page()
    page.goto(address)
    yield page
    page.close()


# A Playback in the page, and peers in the same page that send it a tone.
PLAY = """
  const { Playback } = await import("/playback.js");
  window.told = { reports: [], firsts: 0 };
  window.ending = new AbortController();
  window.player = document.getElementById("audio");
  const tone = new AudioContext();
  const oscillator = tone.createOscillator();
  const out = tone.createMediaStreamDestination();
  oscillator.connect(out);
  oscillator.start();
  // The context that a Playback asks for its device, if it ever does: before its first numbers it may, at any time.
  const Plain = AudioContext;
  window.AudioContext = class extends Plain {
    constructor(options) { super(options); window.context = this; }
    get outputLatency() { return 0.030; }
  };
  window.connect = async () => {
    const [from, to] = [new RTCPeerConnection(), new RTCPeerConnection()];
    from.onicecandidate = ({ candidate }) => to.addIceCandidate(candidate);
    to.onicecandidate = ({ candidate }) => from.addIceCandidate(candidate);
    from.addTrack(out.stream.getAudioTracks()[0]);
    await from.setLocalDescription();
    await to.setRemoteDescription(from.localDescription);
    await to.setLocalDescription();
    await from.setRemoteDescription(to.localDescription);
    const [receiver] = to.getReceivers();
    player.srcObject = new MediaStream([receiver.track]);
    await player.play();
    const [sender] = from.getSenders();
    return { receiver, sender, close() { from.close(); to.close(); } };
  };
  window.peers = await connect();
  window.playback = new Playback({
    audio: player,
    receiver: peers.receiver,
    microphone: null,
    isVisible: true,
    onChange: ({ isFirst }) => { if (isFirst) told.firsts += 1; },
    signal: ending.signal,
    send(message) {
      if (message.type === "report") told.reports.push(message);
      if (message.type === "ping") playback.pong({ t_ms: message.t_ms, server_ms: message.t_ms + 5000 });
    },
  });
"""


@pytest.fixture
def playing(quiet_browser: Browser, address: str) -> Iterator[Page]:
    """A page whose `playback` plays a tone and reports to `told`."""
    page = quiet_browser.new_page()
    page.goto(address)
    page.evaluate(f"async () => {{ {PLAY} }}")
    page.wait_for_function("told.reports.at(-1)?.device_delay_source === 'playout'")
    yield page
    page.close()


def in_page(page: Page, script: str) -> Any:
    return page.evaluate(f"async () => {{ const m = await import('/playback.js'); {script} }}")


def test_rtp_timestamps_are_compared_across_the_wrap(page: Page) -> None:
    """Distances are signed and right on both sides of 2^32."""
    assert in_page(
        page,
        """return [m.rtpDistance(960, 0), m.rtpDistance(0, 960), m.rtpDistance(480, 2 ** 32 - 480),
                   m.rtpDistance(2 ** 32 - 480, 480), m.rtpAfter(2 ** 32 - 1, 961), m.rtpAfter(0, 960.4)]""",
    ) == [960, -960, 960, -960, 960, 960]


def test_reports_are_as_frequent_as_the_position_is_uncertain(page: Page) -> None:
    """Once a second in silence, four times while the agent speaks, ten times while the browser stretches time."""
    assert in_page(
        page,
        """return [[false, false], [false, true], [true, false], [true, true]].map(([isSpeaking, isStretching]) =>
                   m.reportPeriodMs({ isSpeaking, isStretching }))""",
    ) == [1000, 1000, 250, 100]


def test_the_clock_offset_comes_from_the_ping_that_bounds_it_best(page: Page) -> None:
    """A ping that was held up does not move the offset; a good one counts until its clocks may have drifted as far."""
    assert in_page(
        page,
        """const clock = new m.ClockOffset();
           const before = clock.isKnown;
           clock.add(1000, 9010, 1020);         // there 10, back 10: the server is 8000 ahead, give or take 10
           clock.add(2000, 10_200, 2210);       // there 200, back 10
           const held = clock.offsetMs;
           clock.add(62_000, 70_030, 62_040);   // there 20, back 20: give or take 20; the first is worth 16 by now
           const still = clock.offsetMs;
           clock.add(122_000, 130_030, 122_040); // the first is worth 22 by now
           return [before, held, still, clock.offsetMs, clock.roundTripMs];""",
    ) == [False, 8000, 8000, 8010, 40]


def test_reports_wait_while_a_ping_is_away_for_long(page: Page) -> None:
    """Half a second longer than the best round trip means that the line is behind; a later answer ends it."""
    assert in_page(
        page,
        """const clock = new m.ClockOffset();
           clock.sent(1000);
           const unknown = clock.isBehind(9000);
           clock.add(1000, 9010, 1020);
           const idle = clock.isBehind(9000);
           clock.sent(9000);
           clock.sent(10_000);
           const states = [9500, 9521, 10_600].map((ms) => clock.isBehind(ms));
           clock.add(9000, 17_900, 10_600);
           const next = [10_510, 10_600].map((ms) => clock.isBehind(ms));
           clock.add(10_000, 18_500, 10_800);
           return [unknown, idle, states, next, clock.isBehind(99_000)];""",
    ) == [False, False, [False, True, True], [False, True], False]


def test_pings_go_on_until_one_was_quick(page: Page) -> None:
    """Six at once; then every five seconds if the clocks are well compared, and faster if they are not."""
    assert in_page(
        page,
        """return [[0, Infinity], [5, 4], [6, 4], [6, 80], [40, 80], [40, 20]].map(([sent, best]) =>
                   m.pingPeriodMs(sent, best))""",
    ) == [120, 120, 5000, 250, 1000, 5000]


def test_the_device_delay_is_a_mean_over_the_last_second(page: Page) -> None:
    """It starts with all there is; old counts leave, and another device's counters start it anew."""
    assert in_page(
        page,
        """const mean = new m.WindowedMean();
           const none = mean.value;
           mean.add(0, 0, 0);
           mean.add(500, 4800 * 3, 4800);
           const first = mean.value;
           mean.add(1500, 4800 * 3 + 48_000 * 5, 52_800);
           const second = mean.value;
           mean.add(1600, 70, 10);
           const third = mean.value;
           mean.clear();
           mean.add(1700, 90, 20);
           const fourth = mean.value;
           mean.add(1800, 110, 30);
           return [none, first, second, third, fourth, mean.value];""",
    ) == [None, 3, 5, 7, None, 2]


def test_a_packets_time_is_told_by_those_of_the_last_quarter_second(page: Page) -> None:
    """Pulls that come early and late in turn give one time; after a stall only those behind it count."""
    assert in_page(
        page,
        """const pulls = new m.PullTimes();
           const none = pulls.newestMs;
           for (let k = 0; k < 40; k += 1) pulls.add(960 * k, 1000 + 20 * k + (k % 2 ? 6 : -6));
           const steady = pulls.newestMs;
           pulls.add(960 * 39, 9999);           // the same packet, seen again
           const again = pulls.newestMs;
           pulls.add(960 * 40, 1000 + 20 * 40 + 300);
           return [none, Math.abs(steady - (1000 + 20 * 39 + 4.5)) < 1, again === steady, pulls.newestMs];""",
    ) == [None, True, True, 2104.5]


def test_axes_end_on_round_numbers(page: Page) -> None:
    """The top of a plot is 1, 2 or 5 times a power of ten, at or above the largest value."""
    assert page.evaluate(
        """async () => { const { niceCeiling } = await import('/plots.js');
                         return [1, 50, 51, 100, 120, 499, 501].map(niceCeiling); }"""
    ) == [1, 50, 100, 100, 200, 500, 1000]


def test_the_words_say_what_each_plot_is(page: Page) -> None:
    """Three plain sentences explain lead, slack and jitter buffer."""
    terms = page.locator("details p b").all_text_contents()
    assert terms == ["Lead", "Slack", "Jitter buffer"]


def test_the_page_asks_nobody_else_for_anything(quiet_browser: Browser, address: str) -> None:
    """Every file comes from the server itself, and each one is there."""
    page = quiet_browser.new_page()
    answers: list[tuple[str, int]] = []
    page.on("response", lambda response: answers.append((response.url, response.status)))
    page.goto(address)
    page.wait_for_load_state("networkidle")
    page.close()
    assert len(answers) >= 6
    assert all(url.startswith(address) or url.startswith("data:") for url, _ in answers)
    # Behind these files there is no server that could say how it is.
    assert all(status == 200 for url, status in answers if not url.endswith("/health"))


def test_the_page_offers_the_servers_voices(quiet_browser: Browser, address: str) -> None:
    """Only where there is a choice; what was chosen goes with the call."""
    page = quiet_browser.new_page()
    offered: list[str] = []
    page.route("**/health", lambda route: route.fulfill(json={"page_voices": offered}))
    for voices, is_offered in ((["nano"], False), (["nano", "hibari"], True)):
        offered[:] = voices
        page.goto(address)
        page.wait_for_load_state("networkidle")
        assert page.locator("#voices").is_visible() == is_offered
    page.select_option("#voice-choice", "hibari")
    with page.expect_websocket() as socket:
        page.click("#start-typing")
    assert socket.value.url.endswith("/call?voice=hibari")
    page.close()


def test_nothing_sticks_out_of_a_narrow_screen(quiet_browser: Browser, address: str) -> None:
    """At 390 pixels, and at 320, the page does not scroll sideways, before a call and in one."""
    for width in (390, 320):
        page = quiet_browser.new_page(viewport={"width": width, "height": 800})
        page.goto(address)
        for view in ("welcome", "call", "ended"):
            page.evaluate("view => { document.body.dataset.view = view }", view)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (width, view)
        page.close()


def test_a_server_that_is_away_is_named(page: Page) -> None:
    """Without a server behind the page, the step that fails is the server, and a button starts again."""
    page.click("#start-typing")
    notice = page.locator(".notice")
    notice.wait_for()
    assert notice.get_attribute("data-step") == "server"
    assert "Start it again" in notice.inner_text()
    assert page.locator('#steps li[data-state="failed"]').inner_text() == "Server"
    assert page.locator("#restart").is_visible()


@pytest.mark.parametrize(("button", "says_so"), [("#start", True), ("#start-typing", False)])
def test_who_wants_to_speak_is_told_where_nobody_understands(
    quiet_browser: Browser, address: str, button: str, says_so: bool
) -> None:
    """The word comes before the microphone is open, or with it; whoever types need not know."""
    page = quiet_browser.new_page()
    hello = {"type": "hello", "listens": False, "listen_fix": "Install ears.", "model": "nano", "ice_servers": []}
    page.route_web_socket("**/call*", lambda socket: socket.send(json.dumps(hello)))
    page.goto(address)
    page.click(button)
    page.locator('#steps li[data-step="network"][data-state="doing"]').wait_for()
    assert (page.locator(".notice", has_text="Install ears.").count() == 1) == says_so
    page.close()


def test_a_call_goes_on_over_another_connection(playing: Page) -> None:
    """Numbers of reports and counters go on; a position comes only from the connection that plays."""
    playing.evaluate("playback.speechBegins(1); peers.sender.replaceTrack(null)")
    playing.wait_for_function("told.reports.at(-1).concealed > 0")
    playing.evaluate(
        """async () => {
          peers.close();
          window.peers = await connect();
          told.before = told.reports.length;
          playback.attach(peers.receiver, null);
        }"""
    )
    playing.wait_for_function("told.firsts > 1")
    playing.wait_for_function("told.reports.at(-1).rtp !== null")
    before, *after = playing.evaluate("told.reports.slice(told.before - 1)")
    played = playing.evaluate("peers.receiver.getSynchronizationSources()[0].rtpTimestamp")
    assert [report["seq"] for report in after] == list(range(before["seq"] + 1, before["seq"] + 1 + len(after)))
    positions = [report["rtp"] for report in after if report["rtp"] is not None]
    assert positions
    assert all(abs(rtp - played) < 48_000 for rtp in positions), "a position of the old connection"
    for name in ("concealed", "inserted", "removed", "lost"):
        counts = [before[name]] + [report[name] for report in after]
        assert counts == sorted(counts)


def test_another_output_device_is_measured_anew(playing: Page) -> None:
    """The old device's delay is not told for the new one, whose own comes within a second."""
    reports = playing.evaluate(
        """async () => {
          await navigator.mediaDevices.getUserMedia({ audio: true }); // or the devices have no names
          const devices = await navigator.mediaDevices.enumerateDevices();
          const { deviceId } = devices.find(({ kind, deviceId }) => kind === "audiooutput" && deviceId !== "default");
          const before = told.reports.length;
          await player.setSinkId(deviceId);
          await new Promise((resolve) => setTimeout(resolve, 1500));
          return told.reports.slice(before);
        }"""
    )
    sources = [report["device_delay_source"] for report in reports]
    assert sources[0] == "none"
    assert sources[-1] == "playout"
    # A device that appears or goes away may be the one that plays.
    playing.evaluate("navigator.mediaDevices.dispatchEvent(new Event('devicechange'))")
    assert playing.evaluate("told.reports.at(-1).device_delay_source") == "none"


def test_a_suspended_audio_context_keeps_no_report(playing: Page) -> None:
    """A browser that does not count its device's delay is asked through a context; its last word holds in its sleep."""
    faults: list[str] = []
    playing.on("pageerror", lambda error: faults.append(str(error)))
    playing.evaluate(
        """() => {
          const { getStats } = RTCRtpReceiver.prototype;
          RTCRtpReceiver.prototype.getStats = async function () {
            return new Map([...await getStats.call(this)].filter(([, { type }]) => type !== "media-playout"));
          };
          navigator.mediaDevices.dispatchEvent(new Event("devicechange"));
          playback.speechBegins(1);
        }"""
    )
    playing.wait_for_function("told.reports.at(-1).device_delay_source === 'context'")
    before = playing.evaluate("told.reports.at(-1).device_delay_ms")
    assert 30 <= before < 60
    asleep = playing.evaluate(
        """async () => {
          await context.suspend();
          const before = told.reports.length;
          await new Promise((resolve) => setTimeout(resolve, 1100));
          return told.reports.slice(before);
        }"""
    )
    assert len(asleep) >= 3
    assert {report["device_delay_ms"] for report in asleep} == {before}
    assert all(report["age_ms"] < 200 for report in asleep)

    # Another device, and a system that lets nothing wake the context: nothing is known, and that is said.
    playing.evaluate(
        """() => {
          context.resume = () => Promise.reject(new DOMException("not now", "NotAllowedError"));
          navigator.mediaDevices.dispatchEvent(new Event("devicechange"));
        }"""
    )
    assert playing.evaluate("told.reports.at(-1).device_delay_source") == "none"
    playing.evaluate("delete context.resume; playback.setVisible(true)")
    playing.wait_for_function("told.reports.at(-1).device_delay_source === 'context'")
    assert faults == []
