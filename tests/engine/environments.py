"""Builds one virtual environment per engine and runs that engine's tests in it: ``make test-engines``.

An engine is a folder beside this file with a ``requirements.txt``: its lock, every package with its
version. Its environment holds torch and exactly that. It is kept in the user's cache under a name made
of the engine and a digest of the lock, so that clones share it and another lock means another one.
It never holds kvstore: each run lays a throw-away environment over it, with this clone installed.

Uses the standard library alone, so any Python can start it.

Run:    python3 tests/engine/environments.py [ENGINE ...]
Exits:  0 if every test of every engine passed, 1 if one failed, 2 if an environment cannot be had.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINES = Path(__file__).resolve().parent
LOCK = "requirements.txt"
RECIPE = 1
"""Version of ``build``, in an environment's name."""
NEEDED_BYTES = 5 * 10**9
"""Free disk that one build needs. An engine takes some 3 GB, and pip unpacks beside it."""
STALE_SECONDS = 14 * 86400
"""An environment of another lock is removed once nobody has used it for so long."""
UNFINISHED_SECONDS = 86400
"""Files of an interrupted build are removed after so long; until then it may still run."""
TEST_TOOLS = ("pytest", "hypothesis")
"""Packages that ``tests/conftest.py`` needs besides kvstore's dependencies."""


class BuildError(Exception):
    """An environment cannot be built; the message says how to fix it."""


# ---- names and numbers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Lock:
    """One engine's lock."""

    engine: str
    text: str
    torch: str
    """Version of torch that is installed first."""

    @property
    def name(self) -> str:
        """The name of the engine's environment. Another lock, torch or Python: another name."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        parts = "\0".join([str(RECIPE), python, self.torch, self.text])
        return f"{self.engine}-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"

    @property
    def versions(self) -> dict[str, str]:
        """Version of each package, by its normalised name.

        Raises:
            BuildError: for a line that does not pin one.
        """
        found = {}
        for line in self.text.splitlines():
            requirement = line.split("#")[0].split(";")[0].strip()
            if not requirement:
                continue
            pinned = re.fullmatch(r"([\w.-]+)(?:\[[\w,.\- ]*\])?\s*==\s*([\w.+!-]+)", requirement)
            if pinned is None:
                raise BuildError(
                    f"the lock of {self.engine} has the line {line.strip()!r}, expected name==version"
                )
            found[normalised(pinned[1])] = pinned[2]
        return found


def normalised(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def engines(folder: Path = ENGINES) -> list[str]:
    """Return the engines that have a lock, sorted."""
    return sorted(path.parent.name for path in folder.glob(f"*/{LOCK}"))


def read_lock(engine: str, folder: Path = ENGINES, root: Path = ROOT) -> Lock:
    """Return an engine's lock. Raises ``BuildError`` if there is none."""
    known = engines(folder)
    if engine not in known:
        there = ", ".join(known) or "none"
        raise BuildError(f"no engine {engine!r} has a lock, those that have one: {there}")
    text = (folder / engine / LOCK).read_text(encoding="utf-8")
    return Lock(engine, text, pinned_torch((root / "constraints.txt").read_text(encoding="utf-8")))


def pinned_torch(constraints: str) -> str:
    """Return the version of torch that the project's constraints name."""
    found = re.search(r"^torch==(\S+)$", constraints, re.MULTILINE)
    if found is None:
        raise BuildError("constraints.txt pins no torch, expected a line torch==VERSION")
    return found[1]


def needed(root: Path = ROOT) -> list[str]:
    """Return the packages that every environment must have: for kvstore, and for its tests."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in project["dependencies"]]
    return sorted({normalised(name) for name in (*names, *TEST_TOOLS)} - {"torch"})


def check_lock(lock: Lock, names: Iterable[str]) -> None:
    """Raise ``BuildError`` for a lock that would swap torch, or lacks one of ``names``."""
    versions = lock.versions
    torch = versions.get("torch", lock.torch)
    if torch.split("+")[0] != lock.torch:
        raise BuildError(
            f"the lock of {lock.engine} names torch {torch}, constraints.txt {lock.torch}; "
            "the engine must run with the torch that kvstore is tested with"
        )
    missing = sorted(set(names) - versions.keys())
    if missing:
        raise BuildError(
            f"the lock of {lock.engine} lacks {', '.join(missing)}; add each as name==version to "
            f"tests/engine/{lock.engine}/{LOCK}"
        )


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return where environments are kept."""
    values = os.environ if environ is None else environ
    base = values.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvstore" / "engines"


def environment(engine: str) -> Path:
    """Return where the environment of an engine's present lock is, whether built or not."""
    return cache_folder() / read_lock(engine).name


def check_disk(free: int, builds: int, folder: Path) -> None:
    """Raise ``BuildError`` if ``free`` bytes are too few to build so many environments."""
    wanted = builds * NEEDED_BYTES
    if free < wanted:
        raise BuildError(
            f"{folder} has {free / 1e9:.1f} GB free, expected {wanted / 1e9:.0f} GB to build "
            f"{builds} environments; free some, or set XDG_CACHE_HOME to a folder on another disk"
        )


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that ``folder`` is on, or will be."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free


# ---- building --------------------------------------------------------------------------------------


def ensure(lock: Lock, cache: Path) -> Path:
    """Return the environment of a lock, building it if there is none.

    It is built under another name and gets its own when it is complete, so a build that was
    interrupted is never used. Of two builds at a time the first to end stays.
    """
    place = cache / lock.name
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"building-{lock.name}-", dir=cache))
        try:
            build(lock, scratch)
            with contextlib.suppress(OSError):
                scratch.rename(place)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    os.utime(place)  # says when it was last used
    return place


def build(lock: Lock, place: Path) -> None:
    """Make an environment of torch and a lock. Raises ``BuildError`` if that fails."""
    say(f"{lock.engine}: building an environment, {len(lock.versions)} packages")
    call([sys.executable, "-m", "venv", "--clear", str(place)], f"{lock.engine}: making a venv")
    python = place / "bin" / "python"
    install(python, [f"torch=={lock.torch}"], f"{lock.engine}: installing torch")
    check_torch(python, lock)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / LOCK
        path.write_text(lock.text, encoding="utf-8")
        install(python, ["--no-deps", "-r", str(path)], f"{lock.engine}: installing its lock")
    check_torch(python, lock)


def install(python: Path, what: Sequence[str], doing: str) -> None:
    """Let pip install something into the environment of ``python``."""
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    call([*pip, *what], doing)


def check_torch(python: Path, lock: Lock) -> None:
    """Raise ``BuildError`` unless torch is the pinned version, built for the CPU."""
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.version.hip)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    judge_torch(done.stdout.split() or done.stderr.splitlines()[-1:], lock)


def judge_torch(found: Sequence[str], lock: Lock) -> None:
    """Check torch's version, CUDA version and HIP version."""
    if found[1:] == ["None", "None"] and found[0].split("+")[0] == lock.torch:
        return
    raise BuildError(
        f"{lock.engine}: pip installed torch {' '.join(found)!r}, expected {lock.torch} built for the "
        "CPU ('None' for CUDA and HIP); let pip find such a build (PIP_INDEX_URL or "
        "PIP_EXTRA_INDEX_URL) and run this again"
    )


def call(command: Sequence[str], doing: str) -> None:
    """Run a command and show its output. Raises ``BuildError`` if it fails."""
    status = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    if status != 0:
        raise BuildError(f"{doing} failed with exit status {status}")


def tidy(engine: str, used: str, cache: Path, now: float) -> list[str]:
    """Remove environments of other locks that nobody uses any more; return those that stay.

    Another clone may be running in one of them, so only what has long been idle goes.
    """
    kept = []
    shape = re.compile(rf"{re.escape(engine)}-[0-9a-f]{{16}}")
    unfinished = re.compile(rf"(building|removing)-{re.escape(engine)}-[0-9a-f]{{16}}\b.*")
    for path in sorted(cache.iterdir()) if cache.exists() else []:
        idle = now - path.stat().st_mtime
        if unfinished.fullmatch(path.name) and idle > UNFINISHED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
        if not shape.fullmatch(path.name) or path.name == used:
            continue
        if idle > STALE_SECONDS:
            # First out of the way, so that nobody begins to use it while it goes.
            away = path.rename(cache / f"removing-{path.name}")
            shutil.rmtree(away, ignore_errors=True)
        else:
            kept.append(path.name)
    return kept


# ---- running ---------------------------------------------------------------------------------------


def overlay(place: Path, folder: Path, root: Path = ROOT) -> Path:
    """Make a temporary environment over ``place`` with this clone installed; return its Python."""
    call([sys.executable, "-m", "venv", str(folder)], "making a venv")
    python = folder / "bin" / "python"
    # Before the engine is visible: its setuptools would take the place of the one kvstore asks for.
    install(python, ["--no-deps", "-e", str(root)], "installing kvstore")
    below = next(place.glob("lib/python*/site-packages"))
    above = next(folder.glob("lib/python*/site-packages"))
    # Not just its path: packages there may have .pth files of their own.
    line = f"import site; site.addsitedir({str(below)!r})\n"
    (above / "engine.pth").write_text(line, encoding="utf-8")
    return python


def run_tests(engine: str, place: Path, root: Path = ROOT) -> int:
    """Run an engine's tests in its environment; return pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix=f"kvstore-{engine}-") as folder:
        python = overlay(place, Path(folder), root)
        # An engine's warnings are its own; -W outranks the project's "error".
        command = [str(python), "-m", "pytest", "-W", "default", f"tests/engine/{engine}"]
        environ = {**os.environ, "KVSTORE_REQUIRE_ENGINE": engine}
        environ.setdefault("OMP_NUM_THREADS", "1")
        say(f"{engine}: running its tests")
        return subprocess.run(command, cwd=root, env=environ, check=False).returncode


def say(message: str) -> None:
    """Print a line without buffering, before the output of a subprocess."""
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str], folder: Path = ENGINES, root: Path = ROOT) -> int:
    """Test some engines, or all, each in its own environment."""
    cache = cache_folder()
    try:
        locks = [read_lock(engine, folder, root) for engine in arguments or engines(folder)]
        for lock in locks:
            check_lock(lock, needed(root))
        missing = [lock for lock in locks if not (cache / lock.name).exists()]
        check_disk(free_bytes(cache), len(missing), cache)
        failed = []
        for lock in locks:
            place = ensure(lock, cache)
            for kept in tidy(lock.engine, lock.name, cache, time.time()):
                say(
                    f"{lock.engine}: kept {cache / kept}, of another lock, used in the last two weeks"
                )
            if run_tests(lock.engine, place, root) != 0:
                failed.append(lock.engine)
    except BuildError as fault:
        sys.stderr.write(f"test-engines: {fault}\n")
        return 2
    if failed:
        sys.stderr.write(f"test-engines: failed: {', '.join(failed)}\n")
        return 1
    say(
        f"test-engines: passed: {', '.join(lock.engine for lock in locks) or 'no engine has a lock'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
