"""Cloned voices on disk; knows files and no model.

    FOLDER/NAME/voice.json            {"format": 1, "transcript": "..."}
                recording             the recording, as it was given
                prompt.safetensors    what a model has made of both; made anew where it is missing or of another model

A voice is written beside its place and moved there when it is whole, so a full disk or a crash leaves the one before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from breeze_rtc.errors import BadRequest, BadText, CannotKeep, UnknownVoice

FORMAT = 1
DESCRIPTION, RECORDING, PROMPT = "voice.json", "recording", "prompt.safetensors"
MAX_TRANSCRIPT_CHARS = 1_000
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def default_folder() -> Path:
    """Where a user's data are (XDG Base Directory Specification): a relative path there is to be ignored."""
    named = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not named.is_absolute():
        named = Path(os.path.expanduser("~")) / ".local" / "share"
    return named / "breeze_rtc" / "voices"


def names(folder: Path) -> tuple[str, ...]:
    """Of the voices there, sorted; none where there is no folder."""
    try:
        found = [path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return ()
    return tuple(sorted(name for name in found if (folder / name / DESCRIPTION).is_file()))


def has(folder: Path, name: str) -> bool:
    return _NAME.fullmatch(name) is not None and (folder / name / DESCRIPTION).is_file()


def check(name: str, transcript: str, taken: tuple[str, ...] = ()) -> None:
    """Raises BadRequest for a name that no folder should have or the model has, BadText for a transcript too long."""
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{name!r:.80} is no name for a voice: use a-z, 0-9, - and _, 64 at most")
    if name in taken:
        raise BadRequest(f"{name!r} is a voice of the model itself; choose another name")
    if len(transcript) > MAX_TRANSCRIPT_CHARS:
        raise BadText(f"the transcript has {len(transcript)} characters; at most {MAX_TRANSCRIPT_CHARS} are read")


def read(folder: Path, name: str) -> tuple[str, bytes]:
    """Transcript and recording.  Raises UnknownVoice, and BadRequest for a voice whose files are damaged."""
    if not has(folder, name):
        raise UnknownVoice(name, names(folder))
    try:
        document = json.loads((folder / name / DESCRIPTION).read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}")
        return str(document["transcript"]), (folder / name / RECORDING).read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"the voice in {folder / name} cannot be read ({error!r}); add it again") from error


def signature(folder: Path, name: str) -> tuple[int, ...]:
    """Another one after any change of transcript or recording; empty when the voice is gone."""
    found: list[int] = []
    for part in (DESCRIPTION, RECORDING):
        try:
            stat = (folder / name / part).stat()
        except OSError:
            return ()
        found += (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return tuple(found)


def write(folder: Path, name: str, transcript: str, recording: bytes, prompt: bytes) -> None:
    """Put a voice there, in place of one of that name.  Raises CannotKeep, with everything as it was."""
    place = folder / name
    new = old = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = Path(mkdtemp(prefix=".new-", dir=folder))
        description = json.dumps({"format": FORMAT, "transcript": transcript}, ensure_ascii=False)
        (new / DESCRIPTION).write_text(description, encoding="utf-8")
        (new / RECORDING).write_bytes(recording)
        (new / PROMPT).write_bytes(prompt)
        new.chmod(0o755)
        if place.exists():
            old = Path(mkdtemp(prefix=".old-", dir=folder))
            place.rename(old / name)
        new.rename(place)
    except OSError as error:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)
        if old is not None and not place.exists():
            with suppress(OSError):
                (old / name).rename(place)
                old.rmdir()
        raise _cannot_keep(name, folder, error) from error
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def write_prompt(folder: Path, name: str, prompt: bytes) -> None:
    """Replace what a model has made of the voice, whole or not at all.  Raises CannotKeep."""
    path = folder / name / f".{PROMPT}"
    try:
        path.write_bytes(prompt)
        path.replace(folder / name / PROMPT)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _cannot_keep(name, folder, error) from error


def remove(folder: Path, name: str) -> None:
    """Raises UnknownVoice, and CannotKeep when it cannot be deleted."""
    if not has(folder, name):
        raise UnknownVoice(name, names(folder))
    try:
        # Without its description it is no voice any more, whatever happens to the rest.
        (folder / name / DESCRIPTION).unlink()
        shutil.rmtree(folder / name)
    except OSError as error:
        raise CannotKeep(f"the voice {name} in {folder} cannot be deleted: {error.strerror or error}") from error


def _cannot_keep(name: str, folder: Path, error: OSError) -> CannotKeep:
    return CannotKeep(f"the voice {name} cannot be kept in {folder}: {error.strerror or error}")
