"""The shape of the project: who may import whom, and what a wheel holds."""

import ast
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxinfer", "pallas_kernels", "experiments")
# Room to the rooms that it must not know. `config`, `errors` and `sampling` are single files.
FORBIDDEN = {
    "pallas_kernels": {"jaxinfer", "experiments"},
    "jaxinfer.errors": {"jax", "jaxinfer"},
    "jaxinfer.quantization": {"jaxinfer.models", "jaxinfer.cache", "jaxinfer.engine", "jaxinfer.checkpoints"},
    "jaxinfer.cache": {"jaxinfer.models", "jaxinfer.engine", "jaxinfer.checkpoints", "jaxinfer.config"},
    "jaxinfer.models": {"jaxinfer.engine", "jaxinfer.steps", "jaxinfer.checkpoints", "jaxinfer.evaluation"},
    "jaxinfer.steps": {"jaxinfer.engine", "jaxinfer.checkpoints", "jaxinfer.evaluation"},
    "jaxinfer.parallel": {"jaxinfer.engine", "jaxinfer.steps", "jaxinfer.checkpoints", "jaxinfer.evaluation"},
    "jaxinfer.checkpoints": {"jaxinfer.engine", "jaxinfer.steps", "jaxinfer.evaluation"},
    "jaxinfer.engine": {"jaxinfer.evaluation", "jaxinfer.planning", "jaxinfer.run", "experiments"},
    "jaxinfer.evaluation": {"jaxinfer.planning", "jaxinfer.run", "experiments"},
    "jaxinfer.planning": {"jaxinfer.run", "experiments"},
}


def sources() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it; what only type checkers read is left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


@pytest.mark.parametrize("room", FORBIDDEN)
def test_imports_go_one_way(room):
    members = {name: path for name, path in sources().items() if within(name, room)}
    assert members, f"{room} has no module"
    for name, path in members.items():
        wrong = {m for m in imports(path) for other in FORBIDDEN[room] if within(m, other) and not within(m, room)}
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_no_two_modules_import_each_other_in_a_circle():
    modules = sources()
    knows = {name: {m for m in imports(path) if m in modules} - {name} for name, path in modules.items()}
    # A package's __init__ gathers its own modules; what they import of it is the package itself.
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        state[name] = 1
        for other in sorted(knows[name]):
            if state.get(other) == 1 and not (within(name, other) or within(other, name)):
                raise AssertionError(" -> ".join((*trail, name, other)))
            if other not in state:
                visit(other, (*trail, name))
        state[name] = 2

    for name in modules:
        if name not in state:
            visit(name, ())


def test_a_wheel_holds_the_packages_and_the_model(tmp_path):
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = {str(path.relative_to(ROOT)) for path in sources().values()}
    assert tracked <= names
    model = {n for n in names if n.startswith("jaxinfer/checkpoints/tiny/")}
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "jaxinfer/checkpoints/tiny").rglob("*") if p.is_file()}
    assert model == files and any("/arrays/" in n for n in model)
    assert not any(n.startswith(("tests/", "experiments/results", "notebooks/")) for n in names)


def test_the_model_that_ships_is_at_most_20_mb():
    assert sum(p.stat().st_size for p in (ROOT / "jaxinfer/checkpoints/tiny").rglob("*") if p.is_file()) <= 20e6


def test_pallas_kernels_and_checkpoints_need_no_optional_package_to_be_imported():
    """Nothing imported at the top of a module is in an extra only."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [line.replace(";", " ").replace(">", " ").replace("[", " ").split()[0] for line in project["dependencies"]]
    installed = {n.lower().replace("-", "_") for n in names} | {"orbax", "jaxlib"}
    for name, path in sources().items():
        top = {m.partition(".")[0] for m in top_level_imports(path)}
        unknown = top - set(sys.stdlib_module_names) - set(PACKAGES) - installed
        assert not unknown, f"{name} imports {sorted(unknown)}, which the default installation lacks"


def top_level_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found
