"""The import rules of the house, read from the source (imports inside functions count too)."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "breeze_rtc"


def _parts(*names: str) -> set[str]:
    return {f"breeze_rtc.{name}" for name in names}


# part -> what it must never import.
FORBIDDEN: dict[str, set[str]] = {
    "scheduling": {"torch", "numpy", "asyncio", "threading", "time", "random", "multiprocessing", "socket"}
    | _parts("models", "runtime", "transport", "media", "agent", "server", "cli", "options", "testing"),
    "models": _parts("scheduling", "runtime", "transport", "agent", "server", "cli", "options", "testing"),
    "runtime": _parts("transport", "agent", "server", "cli", "options", "testing"),
    "transport": {"torch"} | _parts("models", "scheduling", "runtime", "agent", "server", "cli", "options", "testing"),
    "media": {"torch"}
    | _parts("models", "scheduling", "runtime", "transport", "agent", "server", "cli", "options", "testing"),
    "sip": {"torch", "numpy", "aiortc", "asyncio", "threading", "socket"}
    | _parts("models", "scheduling", "runtime", "media", "transport", "agent", "server", "cli", "options", "testing"),
    "agent": {"torch", "aiortc"}
    | _parts("models", "scheduling", "runtime", "transport", "server", "cli", "options", "testing"),
}
GROUND = ("clock", "errors", "playback", "sentences")


def imports(source: str, package: tuple[str, ...]) -> set[str]:
    """Every module that `source`, a module of `package`, imports at its top or anywhere below, as absolute names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


@cache
def imports_of(path: Path) -> set[str]:
    return imports(path.read_text(), ("breeze_rtc", *path.relative_to(PACKAGE).parts[:-1]))


def under(module: str, roots: set[str]) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_nothing_that_another_keeps_to_itself(path: Path) -> None:
    """A name with an underscore is its module's own."""
    own = {name for name in imports_of(path) if name.startswith("breeze_rtc.")}
    private = {name for name in own if any(part.startswith("_") and part[:2] != "__" for part in name.split("."))}
    assert not private, f"{path.name} imports {sorted(private)}"


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_part_imports_only_downwards(part: str) -> None:
    """No file of a part imports what stands above or beside it."""
    files = sorted((PACKAGE / part).rglob("*.py"))
    assert files
    wrong = {
        str(path.relative_to(PACKAGE)): sorted(module for module in imports_of(path) if under(module, FORBIDDEN[part]))
        for path in files
    }
    assert {path: modules for path, modules in wrong.items() if modules} == {}


@pytest.mark.parametrize("module", GROUND)
def test_the_ground_imports_nothing_of_ours(module: str) -> None:
    """The clock, the errors and the playback seam stand on the standard library alone."""
    assert not any(name.startswith("breeze_rtc") for name in imports_of(PACKAGE / f"{module}.py"))


def test_only_the_clock_reads_the_clock() -> None:
    """Replay needs one reader of the machine's clock."""
    readers = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if under_time(imports_of(path))}
    assert readers == {"clock.py"}


def under_time(modules: set[str]) -> bool:
    return any(under(module, {"time"}) for module in modules)


@pytest.mark.parametrize(
    "line",
    ["from breeze_rtc import transport", "from ..transport import playout", "import breeze_rtc.transport.webrtc"],
)
def test_every_spelling_of_a_wrong_import_is_found(line: str) -> None:
    """Absolute, relative and dotted imports inside a function are all seen."""
    found = imports(f"def f():\n    {line}\n", ("breeze_rtc", "runtime"))
    assert any(under(module, FORBIDDEN["runtime"]) for module in found)
