"""Environments of engines: names, locks and cleaning, without building a real one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine import environments
from tests.engine.environments import (
    NEEDED_BYTES,
    STALE_SECONDS,
    UNFINISHED_SECONDS,
    BuildError,
    Lock,
    cache_folder,
    check_disk,
    check_lock,
    engines,
    ensure,
    free_bytes,
    judge_torch,
    main,
    needed,
    pinned_torch,
    read_lock,
    tidy,
)

LOCK = Lock(
    "toy",
    "# made by pip freeze\nNumPy==2.0  # why\nml_dtypes[x]==0.5; python_version>'3'\n",
    "2.13.0",
)


def test_a_name_follows_from_the_lock_the_torch_and_the_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert LOCK.name == replace(LOCK).name
    assert LOCK.name.startswith("toy-")
    others = {replace(LOCK, text=LOCK.text + "\n").name, replace(LOCK, torch="2.14.0").name}
    monkeypatch.setattr(environments, "RECIPE", environments.RECIPE + 1)
    others.add(LOCK.name)
    monkeypatch.undo()
    assert len(others | {LOCK.name}) == 4


def test_a_lock_names_versions_and_nothing_else() -> None:
    assert LOCK.versions == {"numpy": "2.0", "ml-dtypes": "0.5"}
    for line in ("numpy>=2", "-e .", "numpy", "numpy==2.*", "x @ file:///wheel"):
        with pytest.raises(BuildError, match="expected name==version"):
            replace(LOCK, text=line).versions  # noqa: B018


def test_a_lock_that_would_swap_torch_or_lacks_a_package_is_refused() -> None:
    check_lock(LOCK, ["numpy", "ml-dtypes"])
    check_lock(replace(LOCK, text=LOCK.text + "torch==2.13.0+cpu"), [])
    with pytest.raises(BuildError, match=r"names torch 2\.11\.0, constraints\.txt 2\.13\.0"):
        check_lock(replace(LOCK, text="torch==2.11.0"), [])
    with pytest.raises(BuildError, match="lacks hypothesis, lmdb; add each"):
        check_lock(LOCK, ["lmdb", "numpy", "hypothesis"])


def test_what_is_needed_comes_from_the_project() -> None:
    names = needed()
    assert {"numpy", "lmdb", "ml-dtypes", "typing-extensions", "pytest", "hypothesis"} <= set(names)
    assert "torch" not in names


@pytest.mark.parametrize("said", [["2.13.0+cpu", "None", "None"], ["2.13.0", "None", "None"]])
def test_torch_for_the_cpu_is_fine(said: list[str]) -> None:
    judge_torch(said, LOCK)


@pytest.mark.parametrize(
    "said",
    [["2.13.0+cu130", "13.0", "None"], ["2.13.0", "None", "7.0"], ["2.14.0", "None", "None"], []],
)
def test_any_other_torch_is_refused_with_what_to_do(said: list[str]) -> None:
    with pytest.raises(BuildError, match="PIP_EXTRA_INDEX_URL"):
        judge_torch(said, LOCK)


def test_torch_is_pinned_in_one_place() -> None:
    assert pinned_torch("# why\ntorch==2.13.0\nx==1\n") == "2.13.0"
    with pytest.raises(BuildError, match="pins no torch"):
        pinned_torch("nottorch==1\n")


def test_environments_are_kept_in_the_users_cache_never_in_a_clone() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/kvstore/engines")
    assert cache_folder({}) == Path.home() / ".cache/kvstore/engines"
    assert cache_folder({"XDG_CACHE_HOME": ""}) == cache_folder({})


def test_too_little_disk_is_said_before_anything_is_built(tmp_path: Path) -> None:
    check_disk(2 * NEEDED_BYTES, 2, tmp_path)
    check_disk(0, 0, tmp_path)
    with pytest.raises(BuildError, match=r"has 9\.9 GB free, expected 10 GB"):
        check_disk(2 * NEEDED_BYTES - 10**8, 2, tmp_path)
    assert free_bytes(tmp_path / "not" / "there" / "yet") > 0


def build_a_file(lock: Lock, place: Path) -> None:
    (place / "built").write_text(lock.engine)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(environments, "build", build_a_file)
    return cache_folder()


def test_an_environment_is_built_once_under_another_name(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[str] = []
    monkeypatch.setattr(environments, "build", lambda lock, place: places.append(place.name))
    place = ensure(LOCK, cache)
    [built] = places
    assert built.startswith(f"building-{LOCK.name}-")
    assert place == cache / LOCK.name
    assert [path.name for path in cache.iterdir()] == [LOCK.name]
    os.utime(place, (0, 0))
    monkeypatch.setattr(environments, "build", None)
    assert ensure(LOCK, cache) == place
    assert time.time() - place.stat().st_mtime < 3600, "a use is not noted"


def test_an_interrupted_build_is_never_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(lock: Lock, place: Path) -> None:
        build_a_file(lock, place)
        raise KeyboardInterrupt

    monkeypatch.setattr(environments, "build", break_off)
    with pytest.raises(KeyboardInterrupt):
        ensure(LOCK, cache)
    assert not list(cache.iterdir())


def test_of_two_builds_at_a_time_the_first_to_end_stays(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(lock: Lock, place: Path) -> None:
        build_a_file(replace(lock, engine="mine"), place)
        other = cache / lock.name
        other.mkdir()
        build_a_file(replace(lock, engine="other"), other)

    monkeypatch.setattr(environments, "build", lose)
    assert (ensure(LOCK, cache) / "built").read_text() == "other"
    assert [path.name for path in cache.iterdir()] == [LOCK.name]


def test_only_what_is_long_idle_and_of_the_same_engine_is_removed(tmp_path: Path) -> None:
    now = time.time()
    recent, stale = now - STALE_SECONDS + 60, now - STALE_SECONDS - 60
    digest, half_done = "0123456789abcdef", now - UNFINISHED_SECONDS - 60
    ages = {
        f"toy-{digest}": stale,
        f"toy-1{digest[1:]}": recent,
        f"toy-2{digest[1:]}": stale,  # in use
        f"toys-{digest}": stale,
        "toy-notes": stale,
        f"building-toy-{digest}-abc": half_done,
        f"building-toy-{digest}-new": now,
        f"building-toys-{digest}-abc": half_done,
        f"removing-toy-{digest}": half_done,
    }
    for name, age in ages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        os.utime(tmp_path / name, (age, age))
    assert tidy("toy", f"toy-2{digest[1:]}", tmp_path, now) == [f"toy-1{digest[1:]}"]
    gone = set(ages) - {path.name for path in tmp_path.iterdir()}
    assert gone == {f"toy-{digest}", f"building-toy-{digest}-abc", f"removing-toy-{digest}"}
    assert not tidy("toy", "x", tmp_path / "nothing", now)


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def make(**locks: str) -> tuple[Path, Path]:
        (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
        (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["numpy>=1"]\n')
        for engine, text in locks.items():
            (tmp_path / "engines" / engine).mkdir(parents=True)
            (tmp_path / "engines" / engine / "requirements.txt").write_text(text)
        return tmp_path / "engines", tmp_path

    return make


FULL = "numpy==2.0\npytest==8.0\nhypothesis==6.0\n"


@pytest.mark.usefixtures("cache")
def test_every_engine_is_tested_and_a_failure_is_told(
    project: Callable[..., tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, root = project(good=FULL, bad=FULL)
    (folder / "no_lock").mkdir()
    assert engines(folder) == ["bad", "good"]
    tested: list[tuple[str, str]] = []

    def pretend(engine: str, place: Path, root: Path) -> int:
        tested.append((engine, (place / "built").read_text()))
        return int(engine == "bad")

    monkeypatch.setattr(environments, "run_tests", pretend)
    assert main([], folder, root) == 1
    assert tested == [("bad", "bad"), ("good", "good")]
    assert capsys.readouterr().err == "test-engines: failed: bad\n"
    assert main(["good"], folder, root) == 0
    assert main([], root / "empty", root) == 0


@pytest.mark.usefixtures("cache")
def test_what_cannot_be_had_is_told_before_anything_is_built(
    project: Callable[..., tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, root = project(good=FULL, lacking="numpy==2.0")
    monkeypatch.setattr(environments, "build", None)
    assert main([], folder, root) == 2
    assert "the lock of lacking lacks hypothesis, pytest" in capsys.readouterr().err
    assert main(["unknown"], folder, root) == 2
    assert "those that have one: good, lacking" in capsys.readouterr().err
    monkeypatch.setattr(environments, "free_bytes", lambda folder: 10**9)
    assert main(["good"], folder, root) == 2
    assert "has 1.0 GB free" in capsys.readouterr().err


def test_every_lock_of_this_project_can_be_built_from() -> None:
    for engine in engines():
        check_lock(read_lock(engine), needed())


def test_it_uses_the_standard_library_alone() -> None:
    import subprocess

    path = environments.ENGINES / "environments.py"
    code = f"import runpy; runpy.run_path({str(path)!r})"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)


def test_kvstore_is_installed_before_the_engine_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's setuptools, once visible, replaces the one that builds kvstore."""
    place, folder = tmp_path / "engine", tmp_path / "overlay"
    for base in (place, folder):
        (base / "lib" / "python3" / "site-packages").mkdir(parents=True)
    line = folder / "lib" / "python3" / "site-packages" / "engine.pth"
    installed: list[tuple[Path, bool]] = []

    def record(python: Path, what: list[str], doing: str) -> None:
        installed.append((Path(what[-1]), line.exists()))

    monkeypatch.setattr(environments, "call", lambda command, doing: None)
    monkeypatch.setattr(environments, "install", record)
    assert environments.overlay(place, folder, tmp_path) == folder / "bin" / "python"
    assert installed == [(tmp_path, False)]
    assert str(place / "lib" / "python3" / "site-packages") in line.read_text()
