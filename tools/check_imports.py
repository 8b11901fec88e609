"""Check that imports inside `regard` go one way, and that the package needs torch alone.

    python tools/check_imports.py [folder of the package]

Layers, highest first; a module imports from its own layer or a lower one, never a higher:

    8 cli, integrations            5 catalog    2 ops
    7 training, testing, analysis  4 nn         1 backends
    6 models                       3 mixers     0 vocabulary: masks, biases, positions, caches, errors ...

and besides: no mixer imports a mechanism, that is a file of mixers/ with `records` (shared code lives in the others); a
backend (a module of backends/ that defines `reject`) is imported by backends/__init__.py only, but for `reference`,
which is the definition;
nothing below the top layer imports from the package's front page `regard` itself; a package other than torch and the
standard library is imported inside a function or under `if TYPE_CHECKING`, never at import time. No modules import each
other in a circle, inside a layer either, and neither inside functions nor for type checkers.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LAYERS = {
    "backends": 1,
    "ops": 2,
    "mixers": 3,
    "nn": 4,
    "catalog": 5,
    "models": 6,
    "training": 7,
    "testing": 7,
    "analysis": 7,
    "integrations": 8,
    "cli": 8,
    "__main__": 8,
}
TOP = 8
# Modules that are imported inside functions alone: the command line's own, by its `main`, and the templates' sandbox.
ALLOWED_AT_IMPORT = {
    "regard.cli.classifying": {"rich"},
    "regard.cli.commands": {"typer", "rich"},
    "regard.cli.detecting": {"rich"},
    "regard.cli.filling": {"rich"},
    "regard.cli.generating": {"rich"},
    "regard.cli.planning": {"rich"},
    "regard.models.chat_sandbox": {"jinja2"},
}


class Import(NamedTuple):
    """One imported module, as seen from a file."""

    target: str  # "regard.masks", "torch.nn", ...
    line: int
    deferred: bool  # inside a function, or for type checkers only


def imports_of(tree: ast.Module, module: str, is_package: bool, known: set[str]) -> Iterator[Import]:
    """Every import in a file; `from regard import x` counts as regard.x where that is a module, else as regard."""

    def visit(node: ast.AST, deferred: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, deferred)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if inner in known else base, node.lineno, deferred)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, True)
            for child in node.orelse:
                yield from visit(child, deferred)
        else:
            inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside)

    yield from visit(tree, False)


def layer_of(module: str) -> int:
    """The layer of a module of the package; what no layer claims is vocabulary."""
    return LAYERS.get(module.split(".")[1], 0)


def complaint(module: str, item: Import, known: set[str], backends: set[str], mechanisms: set[str]) -> str | None:
    """Why this import is wrong, or None."""
    root = item.target.split(".")[0]
    if root != "regard":
        if item.deferred or root == "torch" or root in sys.stdlib_module_names:
            return None
        if root in ALLOWED_AT_IMPORT.get(module, ()):
            return None
        return f"imports {root} at import time: import it inside the function that needs it"
    if module == "regard":
        return None
    if item.target == "regard":
        return (
            None if layer_of(module) == TOP else "imports from the front page `regard`: name the module that defines it"
        )
    here, there = module.split("."), item.target.split(".")
    if layer_of(item.target) > layer_of(module):
        return f"imports {item.target}, which stands in a higher layer"
    if here[1] == "mixers" and item.target in mechanisms - {module}:
        return f"imports {item.target}: no mixer imports another (shared code lives in files without records, or an op)"
    if ".".join(there[:3]) in backends and module != "regard.backends" and here[1:3] != there[1:3]:
        return f"imports {item.target}: only backends/__init__.py names backends"
    if item.target not in known:
        return f"imports {item.target}, which does not exist"
    return None


def is_backend(module: str, tree: ast.Module) -> bool:
    """Whether a module is a backend that only backends/__init__.py may import."""
    if not module.startswith("regard.backends.") or module == "regard.backends.reference":
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == "reject" for node in tree.body)


def is_mechanism(module: str, tree: ast.Module) -> bool:
    """Whether a module is a mixer with records of the catalogue."""
    assigned = (target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets)
    return module.startswith("regard.mixers.") and any(ast.unparse(target) == "records" for target in assigned)


def named_backend(node: ast.AST, module: str) -> str | None:
    """The backend that a call names outside backends/ (`reference` is the definition, not a choice)."""
    if not isinstance(node, ast.Call) or module.split(".")[1:2] == ["backends"]:
        return None
    for keyword in node.keywords:
        value = keyword.value
        if keyword.arg == "backend" and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value if value.value != "reference" else None
    return None


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach one another, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        open_.append(module)
        for target in sorted(graph[module]):
            if target not in order:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in open_:
                lowest[module] = min(lowest[module], order[target])
        if lowest[module] == order[module]:
            group = open_[open_.index(module) :]
            del open_[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in graph:
        if module not in order:
            visit(module)
    return found


def check(package: Path) -> list[str]:
    """All complaints about the package in this folder, as `file:line: what`."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    trees = {module: ast.parse(path.read_text(encoding="utf-8"), str(path)) for module, path in files.items()}
    backends = {module for module, tree in trees.items() if is_backend(module, tree)}
    mechanisms = {module for module, tree in trees.items() if is_mechanism(module, tree)}
    found = []
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        tree = trees[module]
        items = list(imports_of(tree, module, path.name == "__init__.py", set(files)))
        # the front page imports nothing by itself: it looks names up when they are asked for
        graph[module] = {item.target for item in items if item.target in files} - {module, package.name}
        for item in items:
            if message := complaint(module, item, set(files), backends, mechanisms):
                found.append(f"{path}:{item.line}: {message}")
        for node in ast.walk(tree):
            if name := named_backend(node, module):
                found.append(f"{path}:{node.lineno}: names the backend {name!r}: leave the choice to the dispatcher")
    found += [f"{package}: these modules import each other in a circle: {', '.join(group)}" for group in circles(graph)]
    return found


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "regard"
    problems = check(where)
    print("\n".join(problems) or f"imports of {where.name}: one way, without circles")
    sys.exit(bool(problems))
