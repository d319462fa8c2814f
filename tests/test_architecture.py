"""What no single module can promise: layers, weight of imports, names, and what never appears."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kvstore

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for path in (ROOT / "kvstore").rglob("*.py"))
LINT = Path(sys.executable).with_name("lint-imports")


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["kvstore", "kvstore.cli.main", "kvstore.admin.inspect", "kvstore.fp4"]
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    assert run_python(f"import {module}, sys; print('torch' in sys.modules)") == "False"


def test_a_store_and_a_read_need_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from tests.stores import *
tokens = tokens_of(3 * BLOCK)
with open_cache(Path({str(tmp_path / "s")!r}), WINDOWED) as cache:
    cache.store(tokens, entries_of(WINDOWED, tokens)); cache.flush()
    with cache.lookup(tokens) as match:
        cache.read(match)
print('torch' in sys.modules)
"""
    assert run_python(code) == "False"


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT, "--no-cache", "--config", "pyproject.toml"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_every_import_points_down(tmp_path: Path) -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("index/plan.py", "import kvstore.tier.ssd.tier", "Data flows one way"),
        ("index/plan.py", "import time", "What decides touches no medium"),
        ("index/prefix_tree.py", "import kvstore.tier.window", "Data flows one way"),
        ("cache/scope.py", "import lmdb", "Only tier.ssd imports lmdb"),
        ("transfer/pool.py", "import torch", "Only devices, codecs and engines import torch"),
        (
            "frame/format.py",
            "import _kvstore_native",
            "Only codec.native, identity.hash and tier.ssd.btree load",
        ),
        ("reference/model.py", "import kvstore.engine", "Data flows one way"),
        ("engine/paged.py", "import kvstore.cache.jobs", "Adapters use public names only"),
        ("surprise.py", "", "Data flows one way"),
    ],
)
def test_a_planted_violation_is_found(
    tmp_path: Path, module: str, line: str, contract: str
) -> None:
    shutil.copytree(ROOT / "kvstore", tmp_path / "kvstore")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for extension in ROOT.glob("_kvstore_native*.so"):
        shutil.copy(extension, tmp_path)
    target = tmp_path / "kvstore" / module
    before = target.read_text() if target.exists() else '"""New."""\n'
    target.write_text(f"{before}\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode != 0
    broken = [text for text in done.stdout.splitlines() if "BROKEN" in text or "surprise" in text]
    assert any(contract in text or "surprise" in text for text in broken), done.stdout


def test_the_public_names_are_exactly_those_listed() -> None:
    assert list(kvstore.__all__) == sorted(kvstore.__all__)
    assert dir(kvstore) == list(kvstore.__all__)
    for name in kvstore.__all__:
        assert getattr(kvstore, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'PrefixCash'"):
        kvstore.PrefixCash  # noqa: B018


@pytest.mark.parametrize("path", MODULES, ids=[str(p.relative_to(ROOT)) for p in MODULES])
def test_a_module_says_what_it_is_and_stays_clear_of_what_is_unsafe(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "no docstring"
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names.isdisjoint({"pickle", "marshal", "shelve", "dill", "cloudpickle", "socket"})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load"}


ENGINES = [path for path in MODULES if "engine" in path.relative_to(ROOT / "kvstore").parts]


@pytest.mark.parametrize("path", ENGINES, ids=[str(p.relative_to(ROOT)) for p in ENGINES])
def test_an_engine_computes_no_hash_of_a_block(path: Path) -> None:
    """The root of a block hash depends on the store's secret: an adapter asks its scope for hashes."""
    assert not hashing(ast.parse(path.read_text()))


def hashing(tree: ast.AST) -> set[str]:
    """Return what a module takes from ``kvstore.identity.hash``, and that module where it takes it whole."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return {name for name in found if name.startswith("kvstore.identity.hash")}


@pytest.mark.parametrize(
    "line",
    [
        "from kvstore.identity.hash import namespace_digest",
        "import kvstore.identity.hash as names",
        "from kvstore.identity import hash",
        "x = kvstore.identity.hash.block_hashes",
    ],
)
def test_a_planted_hash_is_found(line: str) -> None:
    assert hashing(ast.parse(line))


def test_adapters_may_import_no_package_that_is_not_public() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (contract,) = [c for c in contracts if c["name"] == "Adapters use public names only"]
    public = {"engine/", "reference/", "errors.py", "fp4.py"}
    leaves = {
        "checks.py",
        "deprecated.py",
        "distribution.py",
    }  # checks of options, names and versions
    internal = {
        name.removesuffix("/").removesuffix(".py") for name in set(packages()) - public - leaves
    }
    assert {name.removeprefix("kvstore.") for name in contract["forbidden_modules"]} == internal


LARGE_CLASSES = {"kvstore.cache.scope.Scope", "kvstore.tier.ssd.tier.SsdTier"}
"""Exceptions by name: the public methods of a cache, and the SSD tier until its I/O is separate."""


def test_no_class_is_over_400_lines_or_34_functions() -> None:
    large = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                functions = sum(isinstance(item, ast.FunctionDef) for item in node.body)
                if (node.end_lineno or 0) - node.lineno >= 400 or functions > 34:
                    large.add(f"{module_name(path)}.{node.name}")
    assert large == LARGE_CLASSES


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(nodes: Iterable[ast.AST], known: Container[str]) -> Iterator[str]:
    """Yield the modules of this repository that imports name, in functions and for types too."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        yield from imports(ast.iter_child_nodes(node), known)


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names along a circle of a graph, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_in_a_circle() -> None:
    paths = {
        module_name(path): path
        for folder in ("kvstore", "bench", "native", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    graph = {}
    for name, path in paths.items():
        found = imports(ast.parse(path.read_text(encoding="utf-8")).body, paths)
        graph[name] = {each for each in found if each in paths and each != name}
    assert circle(graph) == []
    assert circle({**graph, "kvstore.errors": {"kvstore.cache.scope"}}) != [], "a planted circle"


def test_no_header_of_the_extension_includes_itself_in_a_circle() -> None:
    files = [*(ROOT / "native").rglob("*.h"), *(ROOT / "native").rglob("*.c")]
    graph = {
        path.name: re.findall(
            r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE
        )
        for path in files
        if path.name != "_kvstore_native.c"
    }
    assert "kvstore_native.h" in graph["kernels.h"]
    assert circle(graph) == []


def packages() -> list[str]:
    """Return the names at the top of the package: folders with a slash, modules without."""
    top = [p for p in (ROOT / "kvstore").iterdir() if not p.name.startswith(("_", "py.typed"))]
    return sorted(f"{p.name}/" if p.is_dir() else p.name for p in top)


def test_every_name_at_the_top_has_its_row_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9_/.]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == packages()
    assert len(page.splitlines()) <= 130


def test_the_readme_names_only_commands_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)`?", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
