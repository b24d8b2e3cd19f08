"""Checkpoints by their Hugging Face id: the real client against a hub of our own on this machine, and against none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models import hub

pytest.importorskip("huggingface_hub", reason="needs the extra 'hub'")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": json.dumps({"model_type": "breeze"}).encode(),
    "model.safetensors": bytes(range(256)) * 400,
    "audio_tokenizer/config.json": b"{}",
    "transformers-00001-of-00001.safetensors": b"weights",
    "pytorch_model.bin": b"never fetched",
    "run_me.py": b"raise SystemExit('never fetched, never run')",
}


class Hub(BaseHTTPRequestHandler):
    """What of huggingface.co a download of org/voice asks for; org/foreign is a model of another kind, and org/named
    says that its weights have a name of their own."""

    asked: list[str]

    def log_message(self, *_args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        type(self).asked.append(f"{self.command} {path}")
        repository = next((name for name in ("org/foreign", "org/named") if name in path), "org/voice")
        if repository not in path:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith(f"/api/models/{repository}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in FILES.items()
            ]
            self._answer(200, json.dumps(tree).encode())
        elif path.startswith(f"/api/models/{repository}"):
            siblings = [{"rfilename": name} for name in FILES]
            answer = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}
            self._answer(200, json.dumps(answer).encode())
        else:
            content = FILES[path.split(f"/{repository}/resolve/", 1)[1].split("/", 1)[1]]
            if repository == "org/foreign" and path.endswith("config.json"):
                content = b'{"model_type": "llama"}'
            elif repository == "org/named" and path.endswith("/config.json"):
                content = b'{"model_type": "breeze", "transformers_weights": "transformers.safetensors.index.json"}'
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self._answer(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"})

    def _answer(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def address() -> Iterator[str]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


DOWNLOAD = """
import sys
from breeze_rtc.errors import CheckpointError
from breeze_rtc.models import hub
try:
    print(hub.download(sys.argv[1], ("breeze", "breeze_rtc")))
except CheckpointError as error:
    sys.exit(str(error))
"""


def download(repository: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because the client reads its environment once."""
    clean = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-c", DOWNLOAD, repository],
        env=clean
        | {"HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_download_fetches_weights_and_configs_alone(address: str, tmp_path: Path) -> None:
    """With a bar; a second start, the network gone, finds them in the cache."""
    first = download("org/voice", tmp_path, HF_ENDPOINT=address)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {name for name in FILES if name.endswith((".json", ".safetensors"))}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not [asked for asked in Hub.asked if asked.endswith((".bin", ".py"))]
    assert "%" in first.stderr
    again = download("org/voice", tmp_path, HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
    assert again.stdout == first.stdout, again.stderr


def test_other_softwares_copy_of_the_weights_is_not_fetched(address: str, tmp_path: Path) -> None:
    answer = download("org/named", tmp_path, HF_ENDPOINT=address)
    assert answer.returncode == 0, answer.stderr
    assert {path.name for path in Path(answer.stdout.strip()).glob("*.safetensors")} == {
        "transformers-00001-of-00001.safetensors"
    }


def test_a_foreign_model_is_refused_before_its_weights_are_fetched(address: str, tmp_path: Path) -> None:
    answer = download("org/foreign", tmp_path, HF_ENDPOINT=address)
    assert answer.returncode == 1
    assert "org/foreign is of model type 'llama'" in answer.stderr
    assert not [asked for asked in Hub.asked if "safetensors" in asked]


def test_a_repository_that_is_not_there(address: str, tmp_path: Path) -> None:
    answer = download("org/nothing", tmp_path, HF_ENDPOINT=address)
    assert "no folder org/nothing is here, and no model of that name" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}])
def test_without_a_network_the_next_step_is_said(tmp_path: Path, environment: dict[str, str]) -> None:
    answer = download("org/voice", tmp_path, **environment)
    assert answer.returncode == 1
    assert "hf download org/voice --local-dir FOLDER" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "https://nowhere.invalid"])
def test_without_a_network_the_client_is_not_even_asked(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would try again and again, for half a minute."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("the client was asked"))
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="cannot be reached"):
        hub.download("org/voice", ("breeze",))


def test_what_stands_behind_a_proxy_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: str(config))
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy.example:3128"})
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="of model type 'llama'"):
        hub.download("org/voice", ("breeze",))


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the model is in the cache already."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"pip install 'breeze_rtc\[hub\]'"):
        hub.download("org/voice", ("breeze",))
    snapshot = tmp_path / "models--org--voice" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert hub.download("org/voice", ("breeze",)) == snapshot


@pytest.mark.parametrize(
    ("name", "is_one"), [("org/name", True), ("a/b/c", False), ("nano", False), ("./x", False), ("/a/b", False)]
)
def test_what_looks_like_a_repository(name: str, is_one: bool) -> None:
    assert hub.is_repository(name) == is_one


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not hub.is_repository("org/name")
